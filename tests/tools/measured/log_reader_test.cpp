// Logs of the four engines: which run is taken, which numbers, and what mixed, cut and coloured lines do.
//
// The logs in tests/tools/measured/logs are ours: lines as these sources print them, with numbers that we made up.
//   megatron-lm.log          Megatron-LM d98e8a64dd (2026-08-22): training_log in megatron/training/training.py and
//                            report_memory in megatron/training/utils/common_utils.py; under srun -l
//   megatron-bridge.log      Megatron-Bridge 067f987df0 (2026-08-22): training_log and report_memory in
//                            src/megatron/bridge/training/utils/train_utils.py; under torchrun --tee
//   torchtitan.log           torchtitan b5bcd76c66 (2026-08-21): MetricsProcessor.log in
//   torchtitan/components/metrics.py automodel.log            NeMo AutoModel 36044ad3d1 (2026-08-22):
//   nemo_automodel/recipes/llm/train_ft.py automodel-benchmark.log  the same, nemo_automodel/recipes/llm/benchmark.py
#include "tests/support/nearly.hpp"
#include "tests/tools/verbs/command.hpp"
#include "tools/measured/log_reader.hpp"

#include "planner/base/error.hpp"

#include <doctest/doctest.h>

using namespace moe;
using namespace moe::tools;

namespace {

TrainingLog sample(const std::string& name) {
    return read_log_file(moe::test::source_folder() + "/tests/tools/measured/logs/" + name);
}
TrainingLog log_of(const std::string& text, std::size_t piece = 1 << 16) {
    return read_log(pieces_of(text, piece), load_log_formats(), "my.log");
}
std::string titan(int step, double tps) {
    return fmt::format(
        "step: {:2}  loss:  7.00000  grad_norm:  1.0000  memory: 40.00GiB(50.00%)  tps: {}  tflops: 100.00  "
        "mfu: 10.00%\n",
        step, tps);
}
std::vector<double> column(const TrainingLog& log, LogField field) {
    std::vector<double> values;
    for (const LogValues& step : log.steps) values.push_back(value_of(step, field).value_or(-1.0));
    return values;
}

} // namespace

TEST_CASE("log: Megatron-LM, the second of two runs, memory of two ranks on one line, the last line cut") {
    const TrainingLog log = sample("megatron-lm.log");
    CHECK(log.engine == "Megatron-LM");
    CHECK(log.runs == 2);
    CHECK(log.cut);
    REQUIRE(log.steps.size() == 20);
    CHECK(value_of(log.steps[0], LogField::seconds) == nearly(41.2345));
    CHECK(value_of(log.steps[19], LogField::iteration) == 20.0);
    CHECK(value_of(log.steps[19], LogField::seconds) == nearly(4.0020));
    CHECK(value_of(log.steps[19], LogField::tflops) == nearly(494.8));
    CHECK(value_of(log.steps[19], LogField::batch) == 64.0);
    CHECK(value_of(log.steps[19], LogField::loss) == nearly(8.2 - 0.11 * 20));
    CHECK(log.allocated_gib == nearly(51.0)); // Rank 0 held 52,224 of 2^20 bytes after two steps.
    CHECK(log.reserved_gib == nearly(62.0));
}

TEST_CASE("log: Megatron-Bridge, whose ranks tell of a step on two lines") {
    const TrainingLog log = sample("megatron-bridge.log");
    CHECK(log.engine == "Megatron-Bridge");
    CHECK(log.runs == 1);
    CHECK_FALSE(log.cut);
    REQUIRE(log.steps.size() == 12);
    CHECK(value_of(log.steps[11], LogField::seconds) == nearly(2.951));
    CHECK(value_of(log.steps[11], LogField::tflops) == nearly(491.4)); // The number is on rank 0's line.
    CHECK(value_of(log.steps[11], LogField::loss) == nearly(6.9));
    CHECK(log.allocated_gib == nearly(55.834e9 / 1073741824.0));
    CHECK(log.reserved_gib == nearly(62.277e9 / 1073741824.0));
}

TEST_CASE("log: Megatron-Bridge, the file of rank 0 alone, where iterations have no numbers") {
    std::string text;
    for (int i = 0; i < 5; ++i)
        text += fmt::format("Step Time : {:.2f}s GPU utilization: 400.5MODEL_TFLOP/s/GPU\n", 3.0 + i);
    const TrainingLog log = log_of(text);
    CHECK(log.engine == "Megatron-Bridge");
    CHECK(column(log, LogField::seconds) == std::vector<double>{3.0, 4.0, 5.0, 6.0, 7.0});
    CHECK(column(log, LogField::iteration) == std::vector<double>{1.0, 2.0, 3.0, 4.0, 5.0});
}

TEST_CASE("log: torchtitan in colours, lines of two ranks mixed, validation between") {
    const TrainingLog log = sample("torchtitan.log");
    CHECK(log.engine == "torchtitan");
    CHECK(log.runs == 1);
    REQUIRE(log.steps.size() == 11);
    CHECK(value_of(log.facts, LogField::tokens) == 262144.0);
    CHECK(column(log, LogField::iteration) == std::vector<double>{1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100});
    CHECK(value_of(log.steps[10], LogField::tokens_per_second_per_gpu) == 5461.0);
    CHECK(value_of(log.steps[10], LogField::loss) == nearly(7.2));
    CHECK(log.reserved_gib == nearly(58.86)); // The number is the other rank's.
    CHECK_FALSE(log.allocated_gib);
}

TEST_CASE("log: NeMo AutoModel, its recipe and its benchmark") {
    const TrainingLog log = sample("automodel.log");
    CHECK(log.engine == "NeMo AutoModel");
    CHECK(log.format == "automodel");
    REQUIRE(log.steps.size() == 14);
    CHECK(value_of(log.steps[0], LogField::tokens_per_second) == 3100.0);
    CHECK(value_of(log.steps[7], LogField::tokens_per_second) == 41000.0);
    CHECK(log.allocated_gib == nearly(53.8));

    const TrainingLog benchmark = sample("automodel-benchmark.log");
    CHECK(benchmark.format == "automodel-benchmark");
    REQUIRE(benchmark.steps.size() == 8);
    CHECK(value_of(benchmark.facts, LogField::batch) == 64.0);
    CHECK(value_of(benchmark.steps[7], LogField::seconds) == nearly(2.871901)); // The number is on a line of its own.
    CHECK(value_of(benchmark.steps[7], LogField::loss) == nearly(11.9));
    CHECK(benchmark.allocated_gib == nearly(61.25));
}

TEST_CASE("log: any pieces give the same steps") {
    std::string text;
    for (int i = 1; i < 30; ++i) text += "\x1b[31m" + titan(i, 1000.0 + i) + "\r" + std::string(50, '#') + "\r";
    const std::vector<double> whole = column(log_of(text), LogField::tokens_per_second_per_gpu);
    CHECK(whole.size() == 29);
    for (const std::size_t piece : {1, 2, 7, 64}) {
        const TrainingLog log = log_of(text, piece);
        CHECK(column(log, LogField::tokens_per_second_per_gpu) == whole);
    }
}

TEST_CASE("log: runs one after another, the last long one counts; a repeated line counts once") {
    std::string text;
    for (int i = 1; i <= 6; ++i) text += titan(i, 100.0) + titan(i, 101.0);
    for (int i = 1; i <= 5; ++i) text += titan(i, 200.0);
    text += titan(1, 300.0) + titan(2, 300.0); // The run is too short to count.
    const TrainingLog log = log_of(text);
    CHECK(log.runs == 3);
    CHECK(column(log, LogField::tokens_per_second_per_gpu) == std::vector<double>(5, 200.0));
    CHECK(column(log_of("Training starts at step 1\n" + titan(1, 9.0) + titan(2, 9.0) + "Training starts at step 3\n" +
                        titan(3, 8.0) + titan(4, 8.0)),
                 LogField::iteration) == std::vector<double>{3.0, 4.0});
}

TEST_CASE("log: every launcher's prefix keeps ranks apart, a time of day is none") {
    using Prefixes = std::pair<std::string, std::string>;
    for (const Prefixes& ranks :
         {Prefixes("[rank0]:", "[rank1]:"), Prefixes("[default0]:", "[default1]:"), Prefixes("0: ", "1: "),
          Prefixes("[1,0]<stdout>:", "[1,1]<stdout>:"), Prefixes("  0: ", "  1: ")}) {
        std::string text; // log whose rank 1 is written out late
        for (int i = 1; i <= 4; ++i) text += ranks.first + titan(i, 100.0);
        for (int i = 1; i <= 4; ++i) text += ranks.second + titan(i, 200.0);
        CHECK_MESSAGE(log_of(text).runs == 1, ranks.first);
    }
    CHECK(log_of("12:30:01 " + titan(1, 1.0) + "12:30:02 " + titan(2, 1.0)).steps.size() == 2);
}

TEST_CASE("log: nothing that is known, and lines without end") {
    for (const std::string& text : {std::string(), std::string("hello\nworld\n"), std::string(300000, 'x'),
                                    std::string("validate step: 1  loss: 7.0  memory: 1.0GiB(1%)  tps: 5\n"),
                                    std::string("\x1b[\x1b"), std::string("[Rank 0] memory (MB) | max allocated: 5\n")})
        try {
            log_of(text);
            FAIL("accepted: " << text.substr(0, 50));
        } catch (const Error& error) {
            CHECK(error.fault() == Fault::bad_input);
            CHECK(std::string(error.what()).find("my.log: no line of the") == 0);
            CHECK(std::string(error.what()).find("torchtitan") != std::string::npos);
        }
    CHECK(log_of(titan(-1, 5.0)).steps.size() == 1);
    // A line is cut after 64 KiB: what stands behind is not read.
    const TrainingLog log = log_of(titan(1, 5.0) + std::string(100000, ' ') + titan(2, 5.0));
    CHECK(log.steps.size() == 1);
    CHECK(log_of(titan(1, 5.0) + titan(2, 123456.0).substr(0, 90)).cut);
}
