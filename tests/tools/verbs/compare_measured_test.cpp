// compare --log and compare --profile through the command: tables, documents, and bad input in one line.
#include "tests/support/nearly.hpp"
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using moe::test::Outcome;
using Json = nlohmann::ordered_json;

namespace {

const std::string logs = moe::test::source_folder() + "/tests/tools/measured/logs/";

void write_gpu_plan(const Folder& folder) {
    REQUIRE(folder.run("moe-plan " + moe::test::gpu_search + " --fix pp=2 --out plan.json").status == 0);
}

// Steps of 1 ms each with a product, an all-gather beside nothing, and a kernel that nobody knows.
std::string small_trace(const std::string& more = "") {
    Json events = Json::array();
    for (int step = 0; step < 2; ++step) {
        const int from = 1000 * (step + 1);
        events.push_back({{"ph", "X"},
                          {"cat", "user_annotation"},
                          {"name", "ProfilerStep#" + std::to_string(step)},
                          {"ts", from},
                          {"dur", 1000}});
        const auto add = [&](const char* name, int start, int stream) {
            events.push_back({{"ph", "X"},
                              {"cat", "kernel"},
                              {"name", name},
                              {"ts", from + start},
                              {"dur", 200},
                              {"args", {{"device", 0}, {"stream", stream}}}});
        };
        add("nvjet_tst_128", 0, 7);
        add("ncclDevKernel_AllGather_RING_LL", 300, 20);
        add("nobody_knows", 600, 7);
    }
    return "{" + more + "\"traceEvents\": " + events.dump() + "}";
}

} // namespace

TEST_CASE("compare --log: every engine's log against one plan") {
    const Folder folder;
    write_gpu_plan(folder);
    for (const auto& [name, engine, seconds] :
         {std::tuple("megatron-lm", "Megatron-LM", 4.0019), std::tuple("megatron-bridge", "Megatron-Bridge", 2.9506),
          std::tuple("torchtitan", "torchtitan", 3.0004), std::tuple("automodel", "NeMo AutoModel", 2.98),
          std::tuple("automodel-benchmark", "NeMo AutoModel", 2.87096)}) {
        const Json c = document(folder.run("moe-plan compare plan.json --json --log " + logs + name + ".log"));
        CHECK(c["engine"] == engine);
        CHECK(c["format"] == name);
        CHECK(c["measured_step_seconds"].get<double>() == nearly(seconds).epsilon(0.001));
        CHECK(c["measured_tflops_per_gpu"].get<double>() * c["measured_step_seconds"].get<double>() ==
              nearly(c["predicted_tflops_per_gpu"].get<double>() * c["predicted_step_seconds"].get<double>()));
        CHECK(c["error"].get<double>() ==
              nearly(c["predicted_tflops_per_gpu"].get<double>() / c["measured_tflops_per_gpu"].get<double>() - 1.0));
        CHECK(c["spread"]["low_seconds"] <= c["measured_step_seconds"]);
        CHECK(c["spread"]["high_seconds"] >= c["measured_step_seconds"]);
        CHECK(c["measured_memory_gib"].get<double>() > 40.0);
    }
    const Outcome text = folder.run("moe-plan compare plan.json --log " + logs + "megatron-lm.log");
    CHECK(text.status == 0);
    for (const char* words :
         {"17 of 20 logged iterations", "2 at the front (warm-up), 1 as outliers", "iteration 11 took 7.813 s",
          "holds 2 runs", "no end and was left out", "times the FLOPs of the plan"})
        CHECK_MESSAGE((text.out + text.err).find(words) != std::string::npos, words);
    REQUIRE(folder.run("gzip -c " + logs + "torchtitan.log > t.log.gz").status == 0);
    CHECK(folder.run("moe-plan compare plan.json --log t.log.gz --quiet").status == 0);
}

TEST_CASE("compare --log: what the job has other than the plan, steps left out, and where the seconds are from") {
    const Folder folder;
    write_gpu_plan(folder);
    const Outcome text = folder.run("moe-plan compare plan.json --log " + logs + "megatron-deepspeed.log");
    CHECK(text.status == 0);
    for (const char* words : {"the job is another than the plan's: GPUs 32 (plan: 16)", "2 with skipped steps"})
        CHECK_MESSAGE((text.out + text.err).find(words) != std::string::npos, words);
    for (const auto& [name, from, seconds] :
         {std::tuple("deepspeed", "samples per second", 3.01),
          std::tuple("primus-torchtitan", "tokens per second", 3.01), std::tuple("ms-swift", "elapsed time", 30.0),
          std::tuple("nemo", "time", 3.01)}) {
        const Json c = document(folder.run("moe-plan compare plan.json --json --log " + logs + name + ".log"));
        CHECK(c["step_seconds_from"] == from);
        CHECK(c["measured_step_seconds"].get<double>() == nearly(seconds).epsilon(0.001));
    }
    const Json c = document(folder.run("moe-plan compare plan.json --json --log " + logs + "megatron-deepspeed.log"));
    CHECK(c["skipped"] == 2);
    REQUIRE(c["warnings"].size() == 1);
    CHECK(c["warnings"][0].get<std::string>().find("GPUs 32 (plan: 16)") != std::string::npos);
    folder.write("grpo.log", "step:1 - critic/score/mean:0.8 - timing_s/gen:60.1 - timing_s/step:120.3\n");
    check_line(folder.run("moe-plan compare plan.json --log grpo.log"), 2, "grpo.log: a log of reinforcement learning");
}

TEST_CASE("compare --log: what is refused") {
    const Folder folder;
    write_gpu_plan(folder);
    const auto refused = [&](const std::string& words, const std::string& message) {
        check_line(folder.run("moe-plan compare " + words), 2, message);
    };
    folder.write("empty.log", "");
    folder.write("other.log", "epoch 1 of 3\n");
    refused("plan.json --log nowhere.log", "cannot read nowhere.log: No such file");
    refused("plan.json --log .", "is a directory");
    refused("plan.json --log empty.log", "empty.log: no line of the 0");
    refused("plan.json --log other.log", "tells of a training step in a known way");
    refused("plan.json nowhere --log other.log", "needs one plan, 2 files are named");
    refused("nowhere.json --log " + logs + "torchtitan.log", "nowhere.json");
    refused("plan.json --log a.log --profile b.json", "leave one of them out");
    refused("plan.json --log a.log --steps 2", "are for --profile");
    REQUIRE(folder.run("head -c 1500 " + logs + "torchtitan.log | gzip | head -c 200 > cut.gz").status == 0);
    refused("plan.json --log cut.gz", "cut.gz: damaged or cut short");
    // A plan of another batch.
    REQUIRE(
        folder
            .run("moe-plan search --model Qwen3-30B-A3B --hardware h100 --gpus 16 --gbs 32 --seq 4096 --out other.json")
            .status == 0);
    refused("other.json --log " + logs + "megatron-lm.log", "a global batch of 64 sequences, the plan has 32");
    refused("other.json --log " + logs + "torchtitan.log", "262144 tokens a step, the plan has 32 x 4096 = 131072");
}

TEST_CASE("compare --profile: a trace against the rank class that it is of") {
    const Folder folder;
    write_gpu_plan(folder);
    folder.write("trace.json", small_trace(R"("distributedInfo": {"rank": 9, "world_size": 16},)"));
    const Json c = document(folder.run("moe-plan compare plan.json --json --profile trace.json"));
    CHECK(c["rank"] == 9);
    CHECK(c["rank_known"] == true);
    CHECK(c["pipeline_rank"] == 1);
    CHECK(c["represents"] == 8);
    CHECK(c["kernel_table"] == "megatron");
    CHECK(c["steps"].size() == 2);
    CHECK(c["measured_step_seconds"].get<double>() == nearly(900e-6)); // 1000 us, and 800 to the last kernel's end
    CHECK(c["measured_exposed_communication_seconds"].get<double>() == nearly(200e-6));
    CHECK(c["predicted_exposed_communication_seconds"].get<double>() > 0.0);
    CHECK(c["unmatched"][0]["name"] == "nobody_knows");
    CHECK(c["unmatched_share"].get<double>() == nearly(1.0 / 3));
    double predicted = 0.0;
    bool attention = false;
    for (const Json& row : c["by_kind"]) {
        predicted += row["predicted_seconds"].get<double>();
        for (const Json& kind : row["kinds"]) attention = attention || kind == "attention";
    }
    CHECK(attention);
    CHECK(predicted > 0.3 * c["predicted_step_seconds"].get<double>());

    const Outcome text = folder.run("moe-plan compare plan.json --profile trace.json --rank 2 --steps 4");
    CHECK(text.status == 0);
    for (const char* words :
         {"4 steps (as said) of 1 device, 2 streams", "Rank 2, pipeline rank 0, one of 8 equal ranks", "nobody_knows",
          "bare communication", "all_gather"})
        CHECK_MESSAGE(text.out.find(words) != std::string::npos, words);
    moe::test::check_width(folder.run("moe-plan compare plan.json --profile trace.json --quiet").out, 80);
}

// tests/tools/measured/pytorch holds what tools/gpu/profile_trace.py left on an H100: a trace of PyTorch 2.11's
// profiler and the model of transformers 5.17 that trained. Figures below are sums over the trace that a script of its
// own took.
TEST_CASE("compare --profile: a trace of PyTorch's profiler on an H100 beside the plan of the same model") {
    const Folder folder;
    const std::string measured = moe::test::source_folder() + "/tests/tools/measured/pytorch/";
    const Json run = document(folder.run("cat " + measured + "run.json"));
    std::string request = run["request"];
    request.replace(request.find("config.json"), 11, measured + "config.json");
    request.replace(request.find("MACHINE"), 7, "h100-measured");
    REQUIRE(folder.run(request).status == 0);
    const Json c = document(folder.run("moe-plan compare plan.json --json --profile " + measured + "trace.json.gz"));
    CHECK(c["gpu"] == run["device"]);
    CHECK(c["kernel_table"] == "pytorch");
    REQUIRE(c["steps"].size() == 2);
    CHECK(c["steps"][0]["step"] == 4);
    CHECK(c["steps"][0]["seconds"].get<double>() == nearly(39.732572e-3));
    CHECK(c["steps"][1]["seconds"].get<double>() == nearly(38.573487e-3));
    CHECK(c["kernel_seconds"].get<double>() == nearly(42.284288e-3 / 2));
    CHECK(c["kernels_outside"] == 2); // of the step before
    CHECK(c["unmatched_share"].get<double>() < 0.01);
    CHECK(c["measured_exposed_communication_seconds"] == 0.0);
    // The profiler slows the host, which this step waits for anyway.
    CHECK(c["measured_step_seconds"] > run["step_seconds"]);
    const auto row = [&](const std::string& kind) -> const Json& {
        for (const Json& one : c["by_kind"])
            if (one["kind"] == kind) return one;
        FAIL("no row " << kind);
        return c["by_kind"][0];
    };
    CHECK(row("gemm")["measured_seconds"].get<double>() == nearly((5.127222e-3 + 0.028672e-3) / 2).epsilon(0.003));
    CHECK(row("grouped_gemm")["measured_seconds"].get<double>() ==
          nearly((3.245757e-3 + 0.0482e-3) / 2).epsilon(0.003));
    CHECK(row("attention")["measured_seconds"].get<double>() == nearly(0.731912e-3 / 2));
    CHECK(row("attention_grad")["measured_seconds"] > 1.818035e-3 / 2);
    CHECK(row("adamw")["measured_seconds"] > 1.934678e-3 / 2);
    // What both sides do alike takes about as long; what transformers leaves unfused takes far longer.
    for (const char* kind : {"gemm", "grouped_gemm", "attention", "attention_grad", "adamw"}) {
        const double ratio = row(kind)["predicted_seconds"].get<double>() / row(kind)["measured_seconds"].get<double>();
        CHECK_MESSAGE((ratio > 0.75 && ratio < 1.33), kind);
    }
    CHECK(row("element by element")["measured_seconds"] >
          5.0 * row("element by element")["predicted_seconds"].get<double>());
}

// tests/tools/measured/pytorch-two-gpus is of the same program under FSDP2 on two H100s of one host: rank 0, with the
// kernels of NCCL. Figures below are sums over the trace that a script of its own took.
TEST_CASE("compare --profile: a trace with the collectives of two GPUs") {
    const Folder folder;
    const std::string measured = moe::test::source_folder() + "/tests/tools/measured/pytorch-two-gpus/";
    const Json run = document(folder.run("cat " + measured + "run.json"));
    CHECK(run["gpus"] == 2);
    std::string request = run["request"];
    request.replace(request.find("config.json"), 11, measured + "config.json");
    request.replace(request.find("MACHINE"), 7, "h100");
    REQUIRE(folder.run(request + " --stack automodel --fix fsdp=on").status == 0);
    const std::string asked = "moe-plan compare plan.json --profile " + measured + "trace.json.gz";
    const Json c = document(folder.run(asked + " --json"));
    CHECK(c["kernel_table"] == "pytorch");
    CHECK(c["rank"] == 0);
    CHECK(c["rank_known"] == true);
    CHECK(c["represents"] == 2);
    const auto row = [&](const std::string& kind) -> const Json& {
        for (const Json& one : c["by_kind"])
            if (one["kind"] == kind) return one;
        FAIL("no row " << kind);
        return c["by_kind"][0];
    };
    // Sums of two steps: five all-gathers, three reduce-scatters and the all-reduce of the norm in each.
    double communication = 0.0;
    const auto collective = [&](const std::string& kind, double kernels, double seconds) {
        CAPTURE(kind);
        CHECK(row(kind)["communication"] == true);
        CHECK(row(kind)["kernels"] == kernels);
        CHECK(row(kind)["measured_seconds"].get<double>() == nearly(seconds / 2).epsilon(1e-4)); // stamps of 1 ns
        CHECK(row(kind)["count"] > 0);
        CHECK(row(kind)["predicted_seconds"] > 0.0);
        communication += row(kind)["measured_seconds"].get<double>();
    };
    collective("all_gather", 5, 2.029703e-3);
    collective("reduce_scatter", 3, 2.754549e-3);
    collective("all_reduce", 1, 11.425e-6);
    double on_streams = 0.0;
    for (const Json& stream : c["streams"]) on_streams += stream["communication_seconds"].get<double>();
    CHECK(on_streams == nearly(communication));

    // What no kernel hides: the union of all intervals less that of the computing ones.
    const double exposed = c["measured_exposed_communication_seconds"];
    CHECK(exposed == nearly(2.664408e-3 / 2));
    CHECK(exposed < communication);
    CHECK(c["predicted_exposed_communication_seconds"] > 0.0);

    // FSDP2's copies into and out of its collectives are neither communication nor the optimizer's.
    CHECK(row("shards packed and unpacked")["measured_seconds"].get<double>() ==
          nearly((0.950002e-3 + 0.677037e-3 + 0.561163e-3 + 0.441930e-3) / 2).epsilon(0.01));
    CHECK(row("adamw")["measured_seconds"].get<double>() ==
          nearly((2.146925e-3 - 0.222468e-3 + 0.432585e-3 + 3.2e-6) / 2).epsilon(0.01)); // less what ran before step 4
    CHECK(c["unmatched_share"] < 0.01);

    // Under the table of another engine some kernels have no rule: they are named, and their share is told.
    const Json other = document(folder.run(asked + " --json --kernels megatron"));
    CHECK(other["unmatched_share"] > 0.0);
    CHECK(other["unmatched_share"] < 0.05);
    bool packed = false;
    for (const Json& one : other["unmatched"])
        packed = packed || one["name"].get<std::string>().find("chunk_cat") != std::string::npos;
    CHECK(packed);
    CHECK(other["measured_exposed_communication_seconds"].get<double>() == nearly(exposed));
}

TEST_CASE("compare --profile: what is refused") {
    const Folder folder;
    write_gpu_plan(folder);
    folder.write("trace.json", small_trace());
    folder.write("far.json", small_trace(R"("distributedInfo": {"rank": 1, "world_size": 8},)"));
    const auto refused = [&](const std::string& words, const std::string& message) {
        check_line(folder.run("moe-plan compare " + words), 2, message);
    };
    refused("plan.json --profile nowhere.json", "cannot read nowhere.json");
    refused("plan.json --profile plan.json", "plan.json: no traceEvents");
    refused("plan.json --profile trace.json --rank 16", "the plan has ranks 0 to 15");
    refused("plan.json --profile far.json", "of a job of 8 ranks, the plan has 16");
    refused("plan.json --profile trace.json --steps -1", "--steps -1");
    refused("plan.json --profile trace.json --kernels nosuch", "unknown kernel table 'nosuch'");
    refused("plan.json trace.json --profile trace.json", "needs one plan");
    refused("plan.json trace.json --rank 1", "--rank is for --profile");
    folder.write("empty.json", "");
    refused("plan.json --profile empty.json", "it is empty");
    REQUIRE(folder.run("printf 'SQLite format 3\\0junkjunkjunk' > bad.sqlite").status == 0);
    refused("plan.json --profile bad.sqlite", "bad.sqlite: not a database");
}
