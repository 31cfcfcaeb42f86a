// A command line that runs in this process: what a listener hears, and what is thrown.
#include "tools/cli/run.hpp"

#include "tools/print/listener.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace moe;
using namespace moe::tools;

struct Heard : Listener {
    std::string text;
    std::vector<std::string> notes;
    std::atomic<int> lines = 0;
    bool stops = false;
    void printed(std::string_view part) override { text += part; }
    void noted(std::string_view line) override { notes.emplace_back(line); }
    void progress(std::string_view line) override {
        CHECK(line.find("evaluated") != std::string_view::npos);
        ++lines;
        if (stops) throw std::runtime_error("enough");
    }
};

std::vector<std::string> small_search(const std::string& form) {
    return {"search", "--model", "Qwen3-30B-A3B", "--hardware",  "h100", "--gpus", "16",    "--gbs",
            "64",     "--seq",   "4096",          "--precision", "bf16", "--fix",  "mbs=1", "--fix",
            "tp=2",   "--fix",   "pp=1",          "--fix",       "ep=8", form};
}

} // namespace

TEST_CASE("a listener gets the document, the progress and nothing beside them") {
    Heard heard;
    {
        const Listening listening(heard);
        run_command(small_search("--json"));
    }
    CHECK(listener() == nullptr);
    CHECK(nlohmann::json::parse(heard.text).at("schema") == "moe-plan/search/1");
    CHECK(heard.notes.empty());
    CHECK(heard.lines > 0);
}

TEST_CASE("a listener gets the words of a verb without --json, and threads have their own") {
    Heard here, there;
    const Listening listening(here);
    std::thread other([&there] {
        CHECK(listener() == nullptr);
        const Listening also(there);
        run_command({"show", "stacks", "--quiet"});
    });
    run_command({"show", "models", "--quiet"});
    other.join();
    CHECK(here.text.find("DeepSeek-V3\n") != std::string::npos);
    CHECK(there.text.find("moe-plan\n") != std::string::npos);
    CHECK(there.text.find("DeepSeek-V3") == std::string::npos);
}

TEST_CASE("what the progress line throws ends the search") {
    Heard heard;
    heard.stops = true;
    const Listening listening(heard);
    CHECK_THROWS_WITH_AS(run_command(small_search("--json")), "enough", std::runtime_error);
    CHECK(heard.text.empty());
}

TEST_CASE("a command line that does not parse is a usage error, what a verb refuses is not") {
    CHECK_THROWS_WITH_AS(run_command({"serch"}),
                         "moe-plan: unknown verb 'serch': did you mean search?; see moe-plan --help", UsageError);
    CHECK_THROWS_WITH_AS(run_command({"show", "models", "--sq", "3"}),
                         "moe-plan show: unknown option --sq: did you mean --seq?; see moe-plan show --help",
                         UsageError);
    try {
        run_command({"show", "model", "no-such-model"});
        FAIL("show took a model that there is not");
    } catch (const UsageError&) {
        FAIL("a usage error");
    } catch (const Error& error) {
        CHECK(error.fault() == Fault::bad_input);
    }
}
