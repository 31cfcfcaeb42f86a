// Search keeps its word, on random requests: what is pinned to what was found, more memory and more choices are never
// slower.
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/search/refined_search.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "tests/simulator/pricing/random_plans.hpp"
#include "tests/support/draws.hpp"

#include <doctest/doctest.h>

#include <optional>
#include <random>

using namespace moe;

namespace {

// Steps that differ by less are equally fast: what the refinement asks of a variant before it replaces a plan, and what
// closed forms and plays of two equal plans may differ by.
constexpr double equally_fast = 0.003;

class Drawn {
public:
    explicit Drawn(std::uint64_t seed) : random_(seed) {
        const auto of = [&](const auto& list) { return list[random_() % std::size(list)]; };
        constexpr const char* models[] = {"Qwen3-30B-A3B", "DeepSeek-V2-Lite",  "Mixtral-8x7B",   "GPT-OSS-20B",
                                          "Llama3-8B",     "Moonlight-16B-A3B", "Qwen2-57B-A14B", "GLM-4.5-Air"};
        constexpr const char* machines[] = {"h100", "h200", "b200", "gb200-nvl72"};
        constexpr const char* stacks[] = {"", "", "bridge-26.04", "moe-plan"};
        constexpr int gpus[] = {4, 8, 8, 16, 24, 32};
        constexpr std::int64_t sequences[] = {2048, 4096, 8192}, per_gpu[] = {2, 4, 8, 12};
        plan::Plan& base = request.base;
        base.model = std::make_shared<const model::Model>(families::load_model(of(models)));
        hardware_ = std::make_shared<const machine::Hardware>(machine::load_hardware(of(machines)));
        stack_ = stack::load_stack(of(stacks), *hardware_);
        base.hardware = hardware_;
        base.stack = stack_.name;
        base.gpus = of(gpus);
        base.seq = of(sequences);
        base.gbs = base.gpus * of(per_gpu);
        request.precisions = {of(std::vector(stack_.precisions))};
        if (request.precisions.front() == machine::Precision::fp32) request.precisions = {machine::Precision::bf16};
        request.top = 1;
        request.threads = 2;
        estimator_ = std::make_unique<pricing::FastEstimator>(hardware_, stack_);
    }

    std::string text() const {
        const plan::Plan& p = request.base;
        return fmt::format("--model {} --hardware {} --stack {} --gpus {} --gbs {} --seq {} --precision {}",
                           p.model->name, hardware_->name, stack_.name, p.gpus, p.gbs, p.seq,
                           machine::to_string(request.precisions.front()));
    }

    // Nothing where no plan fits.
    std::optional<search::SearchResult> found(const search::SearchRequest& asked) {
        try {
            return search::refined_search(asked, stack_, *estimator_);
        } catch (const Error& error) {
            if (error.fault() == Fault::failure) throw;
            return std::nullopt;
        }
    }
    search::SearchRequest with_memory(double share) const {
        search::SearchRequest asked = request;
        auto hardware = std::make_shared<machine::Hardware>(*hardware_);
        hardware->memory_bytes *= share;
        asked.base.hardware = std::move(hardware);
        return asked;
    }
    search::SearchRequest pinned(const std::string& field, const std::string& value) const {
        search::SearchRequest asked = request;
        if (field == "precision") asked.precisions.clear();
        asked.fixed.emplace_back(field, value);
        return asked;
    }
    std::uint64_t next() { return random_(); }

    search::SearchRequest request;

private:
    std::mt19937_64 random_;
    std::shared_ptr<const machine::Hardware> hardware_;
    stack::Stack stack_;
    std::unique_ptr<pricing::FastEstimator> estimator_;
};

constexpr const char* searched_fields[] = {
    "tp",   "cp",         "pp",       "vpp",        "dp",         "ep",          "etp",
    "mbs",  "layout",     "schedule", "precision",  "recompute",  "offload",     "optimizer",
    "fsdp", "dispatcher", "cp_comm",  "tp_overlap", "ep_overlap", "delay_wgrad", "cuda_graph"};

// Another value of a field, of those that plans often have.
std::string other_value(const std::string& field, const plan::Plan& plan, std::uint64_t draw) {
    const std::string now = plan::field_text(plan, field);
    const auto of = [&](std::vector<std::string> values) {
        std::erase(values, now);
        return values[draw % values.size()];
    };
    if (field == "recompute") return of({"none", "layernorm", "moe_act", "layernorm+moe_act", "full", "core_attn"});
    if (field == "offload") return of({"none", "optimizer", "moe_act", "core_attn", "expert_fc1+moe_act"});
    if (field == "optimizer") return of({"adamw", "adamw+bf16_moments"});
    if (field == "dispatcher") return of({"alltoall", "allgather", "deepep", "hybridep"});
    if (field == "cuda_graph") return of({"none", "partial", "full"});
    if (field == "cp_comm") return of({"ring", "alltoall"});
    if (field == "schedule") return of({"1f1b", "interleaved"});
    if (now == "on" || now == "off") return of({"on", "off"});
    return of({"1", "2", "4", "8"});
}

} // namespace

TEST_CASE("searches: pinned to what was found, more memory and more choices are never slower") {
    const std::uint64_t seed = seed_of_run(), requests = environment("MOE_PLAN_REQUESTS", draws(8)),
                        fields = environment("MOE_PLAN_FIELDS", 3);
    for (std::uint64_t i = 0; i < requests; ++i) {
        Drawn drawn(seed * 1000 + i);
        const std::optional<search::SearchResult> open = drawn.found(drawn.request);
        if (!open) continue;
        const auto& [plan, estimate] = open->plans.front();
        const double seconds = estimate.step_seconds;
        CAPTURE(drawn.text());
        const auto time_of = [&](const search::SearchRequest& asked) {
            const std::optional<search::SearchResult> result = drawn.found(asked);
            return result ? result->plans.front().second.step_seconds : std::numeric_limits<double>::infinity();
        };
        for (const double share : {0.9, 0.8}) {
            CAPTURE(share);
            CHECK(time_of(drawn.with_memory(share)) > (1.0 - equally_fast) * seconds);
        }
        for (std::uint64_t f = 0; f < fields; ++f) {
            const std::string field = searched_fields[drawn.next() % std::size(searched_fields)];
            const std::string same = plan::field_text(plan, field), other = other_value(field, plan, drawn.next());
            CAPTURE(field);
            CAPTURE(same);
            CAPTURE(other);
            CHECK(time_of(drawn.pinned(field, same)) < (1.0 + equally_fast) * seconds);
            if (field != "precision") CHECK(time_of(drawn.pinned(field, other)) > (1.0 - equally_fast) * seconds);
        }
    }
}
