// Numbers behind words, and formats of logs as files: what they refuse, and that those of profiles/logs are sound.
#include "planner/base/error.hpp"
#include "tests/tools/measured/refused.hpp"
#include "tools/measured/log_format.hpp"

#include <doctest/doctest.h>

using namespace moe;
using namespace moe::tools;

namespace {

double after(std::string_view line, std::string_view text) {
    const auto found = number_after(line, text);
    return found ? found->value : -1e9;
}
void check_format_refused(const std::string& json, const std::string& words) {
    check_refused([&] { parse_log_format(json, "mine.json"); }, words);
}

} // namespace

TEST_CASE("log format: the number right behind a text") {
    CHECK(after("loss: 1.25 |", "loss:") == 1.25);
    CHECK(after("lm loss: 8.090000E+00 |", "lm loss:") == 8.09);
    CHECK(after("tps: 5,310  tflops: 1,113.11", "tps:") == 5310.0);
    CHECK(after("tps: 5,310  tflops: 1,113.11", "tflops:") == 1113.11);
    CHECK(after("7 tokens", "") == -1e9); // No text means no number.
    CHECK(after("n 1,234,567 tokens", "n") == 1234567.0);
    CHECK(after("ranks 1,2,3", "ranks") == 1.0); // The commas part a list, not thousands.
    CHECK(after("n: 1,2345", "n:") == 1.0);
    CHECK(after("time: -3.5e-2s", "time:") == -0.035);
    CHECK(after("5.23s GPU utilization: 700.1MODEL_TFLOP/s/GPU", "utilization:") == 700.1);
    // Another word that ends alike, and a text that no number follows at first.
    CHECK(after("sub_loss: 4 loss: 5", "loss:") == 5.0);
    CHECK(after("iteration (ms): 3 iteration 7", "iteration") == 7.0);
    for (const char* none : {"loss:", "loss: nan", "loss: - 3", "loss: .", "loss: e5", "loss: 1e999", ""})
        CHECK_MESSAGE(!number_after(none, "loss:"), none);
}

TEST_CASE("log format: lines that fit, fields that are missing, peaks of two ranks on one line") {
    const LogFormat format = parse_log_format(R"({"name": "mine", "engine": "Mine",
        "iterations": {"step": {"has": ["it", "ms"], "lacks": "eval", "numbers": {
            "iteration": {"after": "it"}, "seconds": {"after": ["took", "time"], "scale": 0.001}, "loss": {"after": "loss"}}}},
        "memory": {"peak": {"has": ["peak"], "numbers": {"allocated_gib": {"after": "peak"}}}}})",
                                              "mine.json");
    const LogLine& step = format.iterations.front();
    CHECK(step.matches("it 3 time 250 ms"));
    CHECK_FALSE(step.matches("it 3 eval ms"));
    CHECK_FALSE(step.matches("it 3"));
    const LogValues values = step.read("it 3 time 250 ms");
    CHECK(value_of(values, LogField::iteration) == 3.0);
    CHECK(value_of(values, LogField::seconds) == 0.25);
    CHECK_FALSE(value_of(values, LogField::loss));
    CHECK(value_of(format.memory.front().read("peak 3 GiB peak 5 GiB peak 4 GiB", true), LogField::allocated_gib) ==
          5.0);
    CHECK(value_of(format.memory.front().read("peak 3 GiB peak 5 GiB"), LogField::allocated_gib) == 3.0);
}

TEST_CASE("log format: what is wrong in a file is named") {
    check_format_refused("{", "not valid JSON");
    check_format_refused(R"({"name": "x", "engine": "x"})", "iterations is empty");
    check_format_refused(R"({"name": "x", "engine": "x", "iteration": {}})", "did you mean iterations");
    check_format_refused(R"({"name": "x", "engine": "x", "iterations": {"a": {"has": [], "numbers": {}}}})",
                         "has is empty");
    check_format_refused(R"({"name": "x", "engine": "x", "iterations": {"a": {"has": [""], "numbers": {}}}})", "has");
    check_format_refused(
        R"({"name": "x", "engine": "x", "iterations": {"a": {"has": "b", "numbers": {"second": {"after": "t"}}}}})",
        "unknown field 'second': did you mean seconds");
    check_format_refused(R"({"name": "x", "engine": "x", "iterations": {"a": {"has": "b", "numbers": {"loss": {}}}}})",
                         "after");
    check_format_refused(
        R"({"name": "x", "engine": "x", "iterations": {"a": {"has": "b", "numbers": {"loss": {"after": "t", "scale": 0}}}}})",
        "scale");
}

TEST_CASE("log format: those of profiles/logs") {
    std::vector<std::string> names;
    for (const LogFormat& format : load_log_formats()) names.push_back(format.name);
    CHECK(names ==
          std::vector<std::string>{"automodel", "automodel-benchmark", "megatron-bridge", "megatron-lm", "torchtitan"});
}
