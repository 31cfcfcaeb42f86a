// Stacks: every shipped one on every machine, files that state only what differs from their base, and published rows of
// each.
#include "planner/base/files.hpp"
#include "planner/machine/coefficients.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/plan.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/published/run_plan.hpp"
#include "simulator/published/runs.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/folder.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;

// A profiles folder of its own: the shipped stacks, to which a test adds.
class Profiles {
public:
    Profiles() {
        const char* before = std::getenv("MOE_PLAN_PROFILES");
        before_ = before == nullptr ? "" : before;
        const std::string shipped = moe::profiles_folder();
        fs::create_directories(folder_.path / "models");
        fs::copy(shipped + "/stacks", folder_.path / "stacks", fs::copy_options::recursive);
        fs::copy(shipped + "/coefficients.json", folder_.path / "coefficients.json");
        ::setenv("MOE_PLAN_PROFILES", folder_.path.c_str(), 1);
    }
    ~Profiles() {
        if (before_.empty())
            ::unsetenv("MOE_PLAN_PROFILES");
        else
            ::setenv("MOE_PLAN_PROFILES", before_.c_str(), 1);
    }
    Profiles(const Profiles&) = delete;
    Profiles& operator=(const Profiles&) = delete;
    // fields: what follows the name, e.g. R"("base": "bridge-26.08")".
    void stack(const std::string& name, const std::string& fields) const {
        std::ofstream(folder_.path / "stacks" / (name + ".json")) << "{\"name\": \"" << name << "\", " << fields << "}";
    }

private:
    Folder folder_;
    std::string before_;
};

std::string fault(const std::string& name, const moe::machine::Hardware& hardware) {
    return fault_of([&] { moe::stack::load_stack(name, hardware); });
}

} // namespace

TEST_CASE("every shipped stack loads on every GPU, with an efficiency for each precision that it offers") {
    for (const char* machine : {"h100", "h100-hbm2e", "h200", "h800", "b200", "b300", "gb200-nvl72", "gb300-nvl72"}) {
        const moe::machine::Hardware hardware = moe::machine::load_hardware(machine);
        for (const std::string& name : moe::stack::stack_names()) {
            CAPTURE(name);
            CAPTURE(machine);
            if (name == "moe-plan" && hardware.compute_capability > 10.0) continue; // refused there
            const moe::stack::Stack stack = moe::stack::load_stack(name, hardware);
            CHECK(stack.name == name);
            CHECK(stack.source.size() > 20);
            moe::plan::Plan plan;
            plan.stack = name;
            for (const moe::machine::Precision precision : stack.precisions) { // some are emulated in another
                const auto in = static_cast<std::size_t>(plan.computed_in(precision));
                CHECK(stack.costs.gemm[in] > 0.0);
                CHECK(stack.costs.grouped_gemm[in] > 0.0);
            }
            for (const moe::plan::Dispatcher dispatcher : stack.dispatchers) {
                CAPTURE(moe::plan::to_string(dispatcher));
                CHECK(stack.costs.dispatcher.count(moe::plan::to_string(dispatcher)) == 1);
            }
        }
    }
}

TEST_CASE("a stack with a base states only what differs") {
    const Profiles profiles;
    moe::machine::Hardware h100;
    h100.name = "h100";
    profiles.stack("mine",
                   R"("base": "bridge-26.08", "source": "a test", "cuda_graphs": ["none"], "usual_cuda_graph": "none",
        "costs": {"memory": 0.25}, "cost_sources": {"memory": "a test"},
        "on": [{"hardware": ["h100"], "set": {"dispatchers": ["deepep"]}}])");
    const moe::stack::Stack base = moe::stack::load_stack("bridge-26.08", h100),
                            mine = moe::stack::load_stack("mine", h100);
    CHECK(mine.name == "mine");
    CHECK(mine.source == "a test");
    CHECK(mine.release == base.release);
    CHECK(mine.costs.memory == nearly(0.25));
    CHECK(mine.costs.permute == base.costs.permute);
    CHECK(mine.costs.gemm == base.costs.gemm);
    CHECK(mine.precisions == base.precisions); // of the base on this machine
    CHECK(mine.dispatchers == std::vector<moe::plan::Dispatcher>{moe::plan::Dispatcher::deepep});
    CHECK_FALSE(base.published.empty());
    CHECK(mine.published.empty()); // what the base stands for is not inherited
}

TEST_CASE("bad bases are refused") {
    const Profiles profiles;
    const moe::machine::Hardware any;
    profiles.stack("a", R"("base": "b")");
    profiles.stack("b", R"("base": "a")");
    CHECK(fault("a", any).find("is it a cycle?") != std::string::npos);
    profiles.stack("lost", R"("base": "nowhere")");
    CHECK(fault("lost", any).find("unknown stack 'nowhere'") != std::string::npos);
    profiles.stack("typed", R"("base": 3)");
    CHECK(fault("typed", any).find("\"base\" must be a string") != std::string::npos);
    profiles.stack("silent", R"("base": "bridge-26.08", "costs": {"memory": 0.2})");
    CHECK(fault("silent", any).find("costs.memory has no entry in \"cost_sources\"") != std::string::npos);
    profiles.stack("word", R"("base": "bridge-26.08", "published": [{"source": "x"}])");
    CHECK(fault("word", any).find("\"releases\" is missing") != std::string::npos);
    profiles.stack("typo", R"("base": "bridge-26.08", "memroy": 1)");
    CHECK(fault("typo", any).find("unknown field \"memroy\"") != std::string::npos);
    CHECK(fault("../hardware/h100", any).find("unknown stack") != std::string::npos);
}

TEST_CASE("costs name coefficients, alone or multiplied, and unknown ones are refused") {
    const Profiles profiles;
    const moe::machine::Hardware any; // of no name: no machine's figures
    const moe::machine::Coefficients all{{"x", {0.5, 0.5, 0.1, 0.0, "", ""}}, {"y", {0.4, 0.4, 0.0, 0.0, "", ""}}};
    const std::string plain = R"("base": "moe-plan", "costs": {"memory": )";
    profiles.stack("alone", plain + R"("@x"}, "cost_sources": {})");
    CHECK(moe::stack::load_stack("alone", any, all).costs.memory == nearly(0.5));
    profiles.stack("product", plain + R"(["@x", "@y", 1.5]}, "cost_sources": {"memory": "the factor is a test's"})");
    CHECK(moe::stack::load_stack("product", any, all).costs.memory == nearly(0.3));
    profiles.stack("bare", plain + R"(["@x", 1.5]}, "cost_sources": {})");
    CHECK(fault("bare", any).find("costs.memory has no entry in \"cost_sources\"") != std::string::npos);
    profiles.stack("lost", plain + R"("@z"}, "cost_sources": {})");
    CHECK(fault("lost", any).find("coefficients.json has no \"z\"") != std::string::npos);
    profiles.stack("word", plain + R"("x"}, "cost_sources": {})");
    CHECK(fault("word", any).find("must be a number") != std::string::npos);
}

TEST_CASE("features are dropped and added behind a stack's name, at their cost") {
    const moe::machine::Hardware gb200 = moe::machine::load_hardware("gb200-nvl72");
    const moe::stack::Stack whole = moe::stack::load_stack("bridge-26.04", gb200);
    const moe::stack::Stack bare = moe::stack::load_stack("bridge-26.04,no-fused_router,no-programmatic_launch", gb200);
    CHECK(bare.name == "bridge-26.04,no-fused_router,no-programmatic_launch");
    CHECK(whole.costs.router_launches == 1.0);
    CHECK(bare.costs.router_launches == nearly(72.0 / 31.0).epsilon(0.01));
    CHECK(bare.costs.kernel_seconds > 1.2 * whole.costs.kernel_seconds);
    CHECK(bare.costs.launch_seconds == whole.costs.launch_seconds);
    CHECK(moe::stack::load_stack("bridge-26.04,no-fused_router,fused_router", gb200).costs.router_launches == 1.0);
    CHECK(fault("bridge-26.04,no-wings", gb200).find("unknown feature \"wings\"") != std::string::npos);
    CHECK(fault("moe-plan,no-fused_router", gb200).find("names no features") != std::string::npos);
}

TEST_CASE("each stack that stands for published runs is the one of some shipped row") {
    const moe::machine::Hardware h100 = moe::machine::load_hardware("h100");
    const moe::machine::Coefficients coefficients = moe::machine::load_coefficients();
    std::vector<std::pair<std::string, moe::stack::Publication>> published;
    std::set<std::string> idle, used;
    for (const std::string& name : moe::stack::stack_names())
        for (const moe::stack::Publication& p : moe::stack::load_stack(name, h100, coefficients).published) {
            published.emplace_back(name, p);
            idle.insert(name);
        }
    const std::string folder = moe::profiles_folder() + "/runs";
    for (const std::string& path : {folder, folder + "/held-out"})
        for (const moe::published::Run& run : moe::published::load_runs(path))
            used.insert(moe::published::stack_of(published, run.source, run.release));
    for (const std::string& name : used) idle.erase(name);
    for (const std::string& name : idle) {
        CAPTURE(name);
        CHECK(false);
    }
    CHECK(used.count("bridge-26.04-library") == 1);
}
