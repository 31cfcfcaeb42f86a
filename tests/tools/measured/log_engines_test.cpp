// Logs of engines beside Megatron-LM, Megatron-Bridge, torchtitan and AutoModel: which numbers are read, in which
// units.
//
// The logs in tests/tools/measured/logs are ours: lines as the sources named in profiles/logs print them, with numbers
// that we made up. Each is of 16 GPUs and 64 sequences of 4,096 tokens; steps take 3.01 s behind two slow ones, and the
// eleventh takes 9 s.
#include "tests/support/nearly.hpp"
#include "tests/tools/verbs/command.hpp"
#include "tools/measured/log_reader.hpp"
#include "tools/measured/settled.hpp"

#include "planner/base/error.hpp"

#include <doctest/doctest.h>

using namespace moe;
using namespace moe::tools;

namespace {

TrainingLog sample(const std::string& name) {
    return read_log_file(moe::test::source_folder() + "/tests/tools/measured/logs/" + name + ".log");
}
std::vector<double> column(const TrainingLog& log, LogField field) {
    std::vector<double> values;
    for (const LogValues& step : log.steps)
        if (const auto& value = value_of(step, field)) values.push_back(*value);
    return values;
}
std::optional<double> last(const TrainingLog& log, LogField field) { return value_of(log.steps.back(), field); }

} // namespace

TEST_CASE("log engines: whose log it is, and the seconds of its steps") {
    for (const auto& [name, engine, format] :
         {std::tuple("nemo", "NeMo", "nemo"), std::tuple("nemo-bar", "NeMo", "nemo"),
          std::tuple("megatron-deepspeed", "Megatron-DeepSpeed", "megatron-deepspeed"),
          std::tuple("gpt-neox", "GPT-NeoX", "gpt-neox"), std::tuple("primus", "Primus", "primus"),
          std::tuple("nanotron", "nanotron", "nanotron"), std::tuple("maxtext", "MaxText", "maxtext"),
          std::tuple("verl-sft", "verl", "verl-sft"), std::tuple("prime-rl-sft", "prime-rl", "prime-rl-sft")}) {
        CAPTURE(name);
        const TrainingLog log = sample(name);
        CHECK(log.engine == engine);
        CHECK(log.format == format);
        CHECK(log.runs == 1);
        const std::vector<double> seconds = column(log, LogField::seconds);
        REQUIRE(seconds.size() == 14);
        CHECK(seconds.front() == nearly(41.0));
        const Settled settled = settle(seconds);
        CHECK(settled.median == nearly(3.01));
        CHECK(settled.warm_up == 2);
        CHECK(settled.outliers == std::vector<std::size_t>{10});
    }
}

TEST_CASE("log engines: rates, batch, loss and memory in the units of their fields") {
    const TrainingLog nemo = sample("nemo");
    CHECK(last(nemo, LogField::iteration) == 13.0);
    CHECK(last(nemo, LogField::tflops) == nearly(498.3));
    CHECK(last(nemo, LogField::batch) == 64.0);
    CHECK(last(nemo, LogField::loss) == nearly(7.7));
    CHECK(nemo.allocated_gib == nearly(50.0)); // The log says bytes.
    CHECK(nemo.reserved_gib == nearly(60.0));

    // The bar counts steps; its global_step is rounded to 2e+3.
    CHECK(last(sample("nemo-bar"), LogField::iteration) == 14.0);

    const TrainingLog megatron = sample("megatron-deepspeed");
    CHECK(last(megatron, LogField::samples_per_second) == nearly(21.262));
    CHECK(value_of(megatron.steps[2], LogField::skipped) == 3.0);
    for (const auto& [field, told] :
         {std::pair(LogField::gpus, 32.0), std::pair(LogField::seq, 4096.0), std::pair(LogField::micro_batch, 1.0),
          std::pair(LogField::pipeline_parallel, 2.0), std::pair(LogField::layers, 48.0),
          std::pair(LogField::hidden, 2048.0)})
        CHECK(value_of(megatron.facts, field) == told);

    const TrainingLog neox = sample("gpt-neox");
    CHECK(value_of(neox.steps[0], LogField::tflops) == 1200.0); // The log says 1.2PFLOPS.
    CHECK(last(neox, LogField::tflops) == nearly(299.0));

    const TrainingLog deepspeed = sample("deepspeed");
    CHECK(deepspeed.engine == "DeepSpeed");
    REQUIRE(deepspeed.steps.size() == 14);
    CHECK(last(deepspeed, LogField::samples_per_second) == nearly(64.0 / 3.01));
    CHECK(deepspeed.allocated_gib == nearly(50.25));

    const TrainingLog primus = sample("primus");
    CHECK(value_of(primus.steps[0], LogField::seconds) == 41.0); // What stands behind the stroke is an average.
    CHECK(last(primus, LogField::tokens_per_second_per_gpu) == nearly(5443.2));
    CHECK_FALSE(primus.allocated_gib);

    const TrainingLog nanotron = sample("nanotron");
    CHECK(last(nanotron, LogField::tokens_per_second_per_gpu) == 5440.0); // The log says 5.44K.
    CHECK(nanotron.allocated_gib == nearly(40973.0 / 1024.0));
    CHECK(nanotron.reserved_gib == nearly(50.0));
}

TEST_CASE("log engines: Primus with torchtitan, whose elapsed time is that of ten steps") {
    const TrainingLog log = sample("primus-torchtitan");
    CHECK(log.engine == "Primus");
    REQUIRE(log.steps.size() == 14);
    CHECK(column(log, LogField::seconds).empty());
    CHECK(last(log, LogField::tokens_per_second_per_gpu) == nearly(64.0 * 4096.0 / 16.0 / 3.01).epsilon(1e-4));
    CHECK(last(log, LogField::reserved_percent) == 75.0);
    CHECK(log.reserved_gib == 60.0);
}

TEST_CASE("log engines: Primus, whose first lines may have another layout than the rest") {
    std::string text;
    for (int i = 1; i <= 6; ++i)
        text += i <= 2
                    ? fmt::format("iteration {}/10 | elapsed time per iteration (ms): 9000.0 | throughput per GPU "
                                  "(TFLOP/s/GPU): 100.0 | tokens per GPU (tokens/s/GPU): 1000.0 |\n",
                                  i)
                    : fmt::format("iteration {}/10 | elapsed time per iteration (ms): 2000.0/3000.0 | compute per GPU "
                                  "(TFLOP/s/GPU): 615.5 (avg 600.5) | tokens/s/GPU inst/harmonic mean: 11941.8/9.0 |\n",
                                  i);
    const TrainingLog log = read_log(pieces_of(text), load_log_formats(), "my.log");
    CHECK(log.engine == "Primus");
    CHECK(column(log, LogField::seconds) == std::vector<double>{9.0, 9.0, 2.0, 2.0, 2.0, 2.0});
    CHECK(last(log, LogField::tflops) == 615.5);
    CHECK(last(log, LogField::tokens_per_second_per_gpu) == 11941.8);
}

TEST_CASE("log engines: torchtune, by its tokens per second of a GPU") {
    const TrainingLog log = sample("torchtune");
    CHECK(log.engine == "torchtune");
    REQUIRE(log.steps.size() == 14);
    CHECK(last(log, LogField::tokens_per_second_per_gpu) == nearly(64.0 * 4096.0 / 16.0 / 3.01));
    CHECK(log.allocated_gib == 41.5);
    CHECK(log.reserved_gib == 50.0);
}

TEST_CASE("log engines: dialects of a line, by what stands around the number") {
    struct Dialect {
        const char *line, *format;
        LogField field;
        double value;
    };
    for (const Dialect& d : {
             // AutoModel has printed tokens per second of the job and of a GPU under the same name.
             Dialect{
                 "step 9 | epoch 0 | loss 0.7 | lr 1e-05 | mem 24.90 GiB | tps 800.50(100.06/gpu) | num_label_tokens 5",
                 "automodel", LogField::tokens_per_second, 800.5},
             Dialect{
                 "step 9 | epoch 0 | loss 0.7 | lr 1e-05 | mem 24.90 GiB | tps 800.50(100.06/gpu) | num_label_tokens 5",
                 "automodel", LogField::tokens_per_second_per_gpu, 100.06},
             Dialect{"step 9 | epoch 0 | loss 0.7 | lr 1e-05 | mem 24.90 GiB | tps 210.68/gpu  | num_label_tokens 4707",
                     "automodel", LogField::tokens_per_second_per_gpu, 210.68},
             Dialect{"step    0 | loss 1.84 | grad_norm 12.1 | lr 1.0e-6 | mem 41 GiB | tps/gpu 380", "automodel",
                     LogField::tokens_per_second_per_gpu, 380.0},
             Dialect{"INFO:root:step 4 | epoch 0 | loss 1.5 | grad_norm 2.0 | mem: 11.66 GiB | tps 6924.50",
                     "automodel", LogField::tokens_per_second_per_gpu, 6924.5},
             Dialect{R"({"step": 4, "epoch": 0, "loss": 1.5, "mem": 11.6, "tps": 900.5, "tps_per_gpu": 112.5})",
                     "automodel", LogField::tokens_per_second, 900.5},
             Dialect{"iteration=       3/  90 | consumed_samples= 768 | elapsed_time_per_iteration_ms=99000.5 | lm "
                     "loss=11.1",
                     "megatron-deepspeed", LogField::seconds, 99.0005},
             Dialect{"Step 2 | loss:1.5 lr:1e-06 time_per_step_s:21.6 tokens_per_second_per_gpu:91", "torchtune",
                     LogField::seconds, 21.6},
             Dialect{"completed step: 15107, seconds: 2.167, TFLOP/s: 36.722, loss: 2.191", "maxtext", LogField::tflops,
                     36.722},
             Dialect{"step: 10  loss:  9.88  memory: 38.11GiB(40.10%)  wps: 5,391  mfu: 26.23%", "torchtitan",
                     LogField::tokens_per_second_per_gpu, 5391.0},
             Dialect{"0/17, RunningAvgSamplesPerSec=158.3, CurrSamplesPerSec=159.6, MemAllocated=1.75GB, "
                     "MaxMemAllocated=2.6GB",
                     "deepspeed", LogField::iteration, 17.0},
             Dialect{"0/40, SamplesPerSec=83.486, MemAllocated=0.26GB, MaxMemAllocated=9.02GB", "deepspeed",
                     LogField::samples_per_second, 83.486},
         }) {
        CAPTURE(d.line);
        const TrainingLog log = read_log(pieces_of(std::string(d.line) + "\n"), load_log_formats(), "my.log");
        CHECK(log.format == d.format);
        REQUIRE(log.steps.size() == 1);
        CHECK(last(log, d.field) == nearly(d.value));
    }
    const TrainingLog per_gpu =
        read_log(pieces_of(std::string("step 1 | epoch 0 | loss 0.7 | lr 1e-05 | mem 2.0 GiB | tps 210.68/gpu  | x\n")),
                 load_log_formats(), "my.log");
    CHECK_FALSE(last(per_gpu, LogField::tokens_per_second));
}

TEST_CASE("log engines: ms-swift, whose speed is an average since the start") {
    const TrainingLog log = sample("ms-swift");
    CHECK(log.engine == "ms-swift");
    CHECK(log.from_elapsed);
    REQUIRE(log.steps.size() == 10);
    const std::vector<double> seconds = column(log, LogField::seconds);
    REQUIRE(seconds.size() == 9);
    for (const double one : seconds) CHECK(one == nearly(30.0).epsilon(1e-4)); // The average of the last line is 34 s.
    CHECK(log.reserved_gib == nearly(55.9));
}

TEST_CASE("log engines: reinforcement learning is refused, as its steps are no plan's") {
    const std::string verl = "(TaskRunner pid=7) step:1 - actor/pg_loss:0.01 - critic/score/mean:0.8 - "
                             "timing_s/gen:60.1 - timing_s/step:120.3\n";
    CHECK_THROWS_WITH_AS(read_log(pieces_of(verl), load_log_formats(), "my.log"),
                         doctest::Contains("my.log: a log of reinforcement learning"), Error);
    // A trainer of GRPO on Megatron prints the lines of Megatron-LM, with rewards.
    const std::string line = "iteration 5/ 20 | consumed samples: 320 | elapsed time per iteration (ms): 215000.0 | "
                             "global batch size: 64 | loss: 1.0 | reward: 0.7 | number of nan iterations: 0 |\n";
    const std::string plain = "iteration 5/ 20 | consumed samples: 320 | elapsed time per iteration (ms): 215000.0 | "
                              "global batch size: 64 | loss: 1.0 | number of nan iterations: 0 |\n";
    CHECK_THROWS_WITH_AS(read_log(pieces_of(line), load_log_formats(), "my.log"),
                         doctest::Contains("my.log: a log of reinforcement learning"), Error);
    CHECK(read_log(pieces_of(plain), load_log_formats(), "my.log").engine == "Megatron-LM");
}
