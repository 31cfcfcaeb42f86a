// What terminals, launchers and pages do to a log: colours, prefixes, wrapped lines, ranks that print late.
#include "tests/support/folder.hpp"
#include "tests/support/nearly.hpp"
#include "tools/measured/log_reader.hpp"
#include "tools/measured/wrapped.hpp"

#include "planner/base/error.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <fstream>

using namespace moe;
using namespace moe::tools;

namespace {

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    for_each_line(pieces_of(text), [&](std::string_view line) { lines.emplace_back(line); });
    return lines;
}
TrainingLog log_of(const std::string& text) { return read_log(pieces_of(text), load_log_formats(), "my.log"); }
std::string titan(int step, double loss) {
    return fmt::format(
        "step: {:2}  loss:  {:.5f}  grad_norm:  1.0000  memory: 40.00GiB(50.00%)  tps: {}  tflops: 100.00\n", step,
        loss, 1000 + step);
}
std::vector<LogFormat> wrapping() {
    return {parse_log_format(R"({"name": "mine", "engine": "Mine", "iterations": {"step": {"has": ["step", "time"],
        "from": ["step", "of"], "until": ["end", "size"], "numbers": {"iteration": {"after": "step"}, "seconds": {"after": "time"},
        "batch": {"after": "batch size"}}}}})",
                             "mine.json")};
}
std::vector<std::string> records_of(const std::vector<std::string>& lines) {
    const std::vector<LogFormat> formats = wrapping();
    std::vector<std::string> records;
    Unwrapper unwrapper(formats, [&](const LogRecord& record) {
        records.push_back(std::string(record.glued) + (record.wrapped() ? "~" + std::string(record.spaced) : ""));
    });
    for (const std::string& line : lines) unwrapper.line(line);
    unwrapper.finish();
    return records;
}

} // namespace

TEST_CASE("log lines: colours are removed, also where their ESC was lost or is written out") {
    for (const char* coloured :
         {"\x1b[32mloss: 4\x1b[0m", "[32mloss: 4[0m", "[1;32mloss: 4[0m", "[38;5;208mloss: 4[39m", "^[[32mloss: 4^[[0m",
          "\\x1b[32mloss: 4\\033[0m", "\\u001b[101mloss: 4\\u001b[m"}) {
        const std::vector<std::string> lines = lines_of(std::string(coloured) + "\n");
        REQUIRE(lines.size() == 1);
        CHECK_MESSAGE(lines[0].starts_with("loss: 4"), coloured);
    }
    // No colours: times, lists, units.
    for (const char* plain : {"[12:30:01] loss: 4", "[3/5] 7m", "a[0] = 3", "[50m] deep", "[", "[3", "^", "\\x1b"})
        CHECK(lines_of(std::string(plain) + "\n") == std::vector<std::string>{plain});
}

TEST_CASE("log lines: what stands in front of a line says which rank printed it") {
    for (const auto& [line, source] :
         {std::pair("[rank3]:step: 1", "[rank3]:"),
          std::pair("[default0]: x", "[default0]:"),
          std::pair("12: x", "12: "),
          std::pair(" 3: x", "3: "),
          std::pair("[1,3]<stdout>: x", "[1,3]<std"),
          std::pair("[node017:3]: x", "[node017:3]:"),
          std::pair("[3]: x", "[3]:"),
          std::pair("10.0.0.1: x", "10.0.0.1: "),
          std::pair("12.5: x", ""),
          std::pair("node-017.cluster: x", "node-017.cluster: "),
          std::pair("(RayWorker pid=77, ip=10.0.0.1) x", "(RayWorker pid=77, ip=10.0.0.1)"),
          std::pair("train_role/3 x", "train_role/3 "),
          std::pair("[20260824 09:00:00][rank-7/8][INFO ] x", "[rank-7/8"),
          std::pair("[2026-08-24 09:00:00] x", ""),
          std::pair("[titan] 2026 x", ""),
          std::pair("09:00:01 x", ""),
          std::pair("step: 3", ""),
          std::pair("[INFO:swift] x", ""),
          std::pair("", ""),
          std::pair("[", ""),
          std::pair("(pid=", ""),
          std::pair("iteration 3/5 x", "")})
        CHECK_MESSAGE(log_source(line) == source, line);
}

TEST_CASE("log lines: a rank that prints late makes no second run, a job that is started again does") {
    const std::string mixed =
        titan(1, 9) + titan(1, 9) + titan(2, 8) + titan(3, 7) + titan(2, 8) + titan(3, 7) + titan(4, 6);
    CHECK(log_of(mixed).runs == 1);
    CHECK(log_of(mixed).steps.size() == 4);
    const std::string again = titan(1, 9) + titan(2, 8) + titan(3, 7) + titan(2, 8.1) + titan(3, 7.1) + titan(4, 6);
    CHECK(log_of(again).runs == 2);
    // Of the same seed: the first step's loss is the same.
    const std::string seed = titan(1, 9) + titan(2, 8) + titan(1, 9) + titan(2, 8.1) + titan(3, 7);
    CHECK(log_of(seed).runs == 2);
    CHECK(log_of(seed).steps.size() == 3);
}

TEST_CASE("log lines: a wrapped record is joined in two readings, what never ends is not") {
    using Lines = std::vector<std::string>;
    CHECK(records_of({"step 3 of 5 time 1", "2.5 batch", "size 64 end", "next"}) ==
          Lines{"step 3 of 5 time 12.5 batchsize 64 end~step 3 of 5 time 1 2.5 batch size 64 end", "next"});
    CHECK(records_of({"step 3 of 5 time 1 end", "x"}) == Lines{"step 3 of 5 time 1 end", "x"});
    CHECK(records_of({"step 3 of 5 time 1 e", "nd"}).size() == 1);
    // None has the end: what a line tells by itself stays a line, else another text of `until` ends the record.
    CHECK(records_of({"step 3 of 5", "time 1", "size 64", "next", "step 4 of 5 end"}) ==
          Lines{"step 3 of 5time 1size 64~step 3 of 5 time 1 size 64", "next", "step 4 of 5 end"});
    CHECK(records_of({"step 3 of 5 time 1", "size 64", "step 4 of 5 end"}) ==
          Lines{"step 3 of 5 time 1", "size 64", "step 4 of 5 end"});
    // The number of the step is missing: no record begins.
    CHECK(records_of({"step of 5", "time 1 end"}) == Lines{"step of 5", "time 1 end"});
    // Another record begins, or too many lines follow: lines as they stood.
    CHECK(records_of({"step 3 of 5", "a", "step 4 of 5 end"}) == Lines{"step 3 of 5", "a", "step 4 of 5 end"});
    Lines many = {"step 3 of 5"};
    for (int i = 0; i < 14; ++i) many.push_back("x" + std::to_string(i));
    many.push_back("end");
    CHECK(records_of(many) == many);
    CHECK(records_of({"step 3 of 5"}) == Lines{"step 3 of 5"});

    const TrainingLog log =
        read_log(pieces_of("step 3 of 5 time 1\n2.5 batch\nsize 64 end\nstep 4 of 5 time 13 batch size 64 end\n"),
                 wrapping(), "my.log");
    REQUIRE(log.steps.size() == 2);
    CHECK(value_of(log.steps[0], LogField::iteration) == 3.0);
    CHECK(value_of(log.steps[0], LogField::seconds) == 12.5); // The break is within the number.
    CHECK(value_of(log.steps[0], LogField::batch) == 64.0);   // The break is between two words.
}

TEST_CASE("log lines: Megatron's lines and peaks of memory as a terminal of 86 columns wraps them") {
    const std::string text = "[Rank 0] (after 10 iterations) memory (MB) | allocated: 11908.05029296875 | max alloca\n"
                             "ted: 12800.0 | reserved: 12954.0 | max reserved: 13312.0\n"
                             " [2026-08-24 09:00:07] iteration       10/      50 | consumed samples:         5120 |\n"
                             "elapsed time per iteration (ms): 13212.7 | learning rate: 3.000000E-04 | global batch\n"
                             "size:   512 | lm loss: 4.474437E+00 | loss scale: 1.0 | grad norm: 0.704 | number of s\n"
                             "kipped iterations:   0 | number of nan iterations:   0 |\n";
    const TrainingLog log = log_of(text + text);
    REQUIRE(log.steps.size() == 1);
    CHECK(value_of(log.steps[0], LogField::iteration) == 10.0);
    CHECK(value_of(log.steps[0], LogField::seconds) == nearly(13.2127));
    CHECK(value_of(log.steps[0], LogField::batch) == 512.0);
    CHECK(value_of(log.steps[0], LogField::skipped) == 0.0);
    CHECK(log.allocated_gib == nearly(12.5));
    CHECK(log.reserved_gib == nearly(13.0));
}

TEST_CASE("log lines: files that are no text are told by their first bytes") {
    const Folder folder;
    for (const auto& [bytes, words] :
         {std::pair(std::string("\x28\xb5\x2f\xfd\x00", 5), "compressed by zstd"),
          std::pair(std::string("\xfd"
                                "7zXZ"),
                    "compressed by xz"),
          std::pair(std::string("BZh9"), "compressed by bzip2"), std::pair(std::string("PK\x03\x04"), "a zip archive"),
          std::pair(std::string("\xff\xfes\x00", 4), "UTF-16"),
          std::pair(std::string("SQLite format 3"), "with --profile"),
          std::pair(std::string("\x18\x00\x00\x00\x00\x00\x00\x00xxxx\x09xbrain.Event:2", 27), "TensorBoard")}) {
        std::ofstream(folder / "no.log", std::ios::binary) << bytes;
        CHECK_THROWS_WITH_AS(read_log_file(folder / "no.log"), doctest::Contains(words), Error);
    }
}

TEST_CASE("log lines: differences of times since the start, over enough seconds to be more than rounding") {
    const auto steps = [](const std::vector<std::pair<double, double>>& lines) {
        std::vector<LogValues> all;
        for (const auto& [iteration, elapsed] : lines) {
            all.emplace_back();
            value_of(all.back(), LogField::iteration) = iteration;
            value_of(all.back(), LogField::elapsed) = elapsed;
        }
        return all;
    };
    const auto seconds = [](const std::vector<LogValues>& all) {
        std::vector<double> found;
        for (const LogValues& step : all) found.push_back(value_of(step, LogField::seconds).value_or(-1.0));
        return found;
    };
    std::vector<LogValues> all = steps({{1, 40}, {2, 47}, {3, 54}, {4, 61}, {14, 131}, {15, 138}});
    CHECK(add_differences(all));
    CHECK(seconds(all) == std::vector<double>{-1, -1, -1, 7, 7, 7});
    all = steps({{1, 40}, {2, 41}, {3, 42}});
    CHECK_FALSE(add_differences(all));
    all = steps({{1, 40}, {1, 70}, {0, 100}});
    CHECK_FALSE(add_differences(all));
    all = steps({{1, 40}, {2, 80}});
    value_of(all[0], LogField::seconds) = 5.0; // The log tells times.
    CHECK_FALSE(add_differences(all));
    CHECK(value_of(all[0], LogField::seconds) == 5.0);
}
