// Numbers behind words, and formats of logs as files: what they refuse, and that those of profiles/logs are sound.
#include "planner/base/error.hpp"
#include "tests/support/nearly.hpp"
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

TEST_CASE("log format: blanks, quotes and filling dots before a number, and what is no filling") {
    CHECK(after("  seq_length ................. 4096", "seq_length") == 4096.0);
    CHECK(after("  seq_length ....... None", "seq_length") == -1e9);
    CHECK(after("{'memory(GiB)': '14.3', 'x': 1}", "'memory(GiB)':") == 14.3);
    CHECK(after(R"({"iteration": "12/94"})", "\"iteration\":") == 12.0);
    CHECK(after("loss: .5", "loss:") == 0.5);
}

TEST_CASE("log format: letters, texts behind the number, ways to say it, durations") {
    const LogFormat format = parse_log_format(R"({"name": "mine", "engine": "Mine", "iterations": {"step": {"has": "it",
        "numbers": {"iteration": {"after": "it"},
            "tokens_per_second": {"after": "tps", "not_before": "/gpu"},
            "tokens_per_second_per_gpu": [{"after": "tps", "before": "/gpu"}, {"after": "each", "letters": true}],
            "tflops": [{"after": "rate", "before": "TFLOPS"}, {"after": "rate", "before": "PFLOPS", "scale": 1000}],
            "elapsed": {"after": "up"}}}}})",
                                              "mine.json");
    const auto read = [&](const char* line, LogField field) {
        return value_of(format.iterations.front().read(line), field).value_or(-1.0);
    };
    CHECK(read("it 1 tps 800/gpu", LogField::tokens_per_second) == -1.0);
    CHECK(read("it 1 tps 800/gpu", LogField::tokens_per_second_per_gpu) == 800.0);
    CHECK(read("it 1 tps 800 |", LogField::tokens_per_second) == 800.0);
    CHECK(read("it 1 tps 800 |", LogField::tokens_per_second_per_gpu) == -1.0);
    for (const auto& [text, value] :
         {std::pair("it 1 each 5.44K |", 5440.0), std::pair("it 1 each 1.5M", 1.5e6), std::pair("it 1 each 2G ", 2e9),
          std::pair("it 1 each 2B", 2e9), std::pair("it 1 each 3T", 3e12), std::pair("it 1 each 7 |", 7.0),
          std::pair("it 1 each 7KiB", 7.0)})
        CHECK_MESSAGE(read(text, LogField::tokens_per_second_per_gpu) == nearly(value), text);
    CHECK(read("it 1 rate 112.9TFLOPS", LogField::tflops) == 112.9);
    CHECK(read("it 1 rate 1.2 PFLOPS", LogField::tflops) == nearly(1200.0));
    CHECK(read("it 1 rate 900GFLOPS", LogField::tflops) == -1.0);
    for (const auto& [text, value] :
         {std::pair("it 1 up 1:02:03<4:00", 3723.0), std::pair("it 1 up 02:03", 123.0),
          std::pair("it 1 up '3m 12s',", 192.0), std::pair("it 1 up 1d 2h 3m 4s", 93784.0),
          std::pair("it 1 up 8s", 8.0), std::pair("it 1 up 2h", 7200.0), std::pair("it 1 up 5", -1.0),
          std::pair("it 1 up -1:00", -1.0), std::pair("it 1 up", -1.0)})
        CHECK_MESSAGE(read(text, LogField::elapsed) == value, text);
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
    const LogFormat either = parse_log_format(
        R"({"name": "x", "engine": "x", "iterations": {"a": {"has": "it", "has_one": ["ms", "s/it"], "numbers": {}}}})",
        "mine.json");
    for (const auto& [line, fits] :
         {std::pair("it 3 ms", true), std::pair("it s/it", true), std::pair("it 3", false), std::pair("ms", false)})
        CHECK_MESSAGE(either.iterations.front().matches(line) == fits, line);
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
    CHECK(names == std::vector<std::string>{"automodel", "automodel-benchmark", "deepspeed", "gpt-neox", "maxtext",
                                            "megatron-bridge", "megatron-deepspeed", "megatron-lm", "ms-swift",
                                            "nanotron", "nemo", "prime-rl-sft", "primus", "reinforcement-learning",
                                            "torchtitan", "torchtune", "verl-sft"});
}
