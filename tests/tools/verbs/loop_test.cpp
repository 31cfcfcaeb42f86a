// The main job end to end through the command: search, replay, tokenize, execute, compare, with the promised JSON
// fields.
#include "tests/support/nearly.hpp"
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <map>
#include <string>
#include <utility>

using moe::test::document;
using moe::test::Folder;
using moe::test::page_data;
using moe::test::small_search;
using Json = nlohmann::ordered_json;

namespace {

void check_numbers(const Json& json, std::initializer_list<const char*> fields) {
    for (const char* field : fields) {
        CAPTURE(field);
        REQUIRE(json.contains(field));
        REQUIRE(json[field].is_number());
        CHECK(std::isfinite(json[field].get<double>()));
        CHECK(json[field].get<double>() >= 0.0);
    }
}

void check_estimate(const Json& json) {
    check_numbers(json, {"tflops_per_gpu", "tokens_per_second_per_gpu", "step_seconds", "memory_gib"});
    double sum = 0.0;
    for (const auto& part : json["breakdown"]) sum += part.get<double>();
    CHECK(sum == nearly(json["step_seconds"].get<double>()).epsilon(1e-6));
}

// The rules of the Chrome trace event format that viewers depend on: known phases, complete events with time and
// duration, rows of one thread that do not overlap, names for every process and thread. Returns the complete events.
std::size_t check_trace(const Json& trace) {
    REQUIRE(trace["traceEvents"].is_array());
    std::map<std::pair<int, int>, double> busy_until;
    std::map<std::pair<int, int>, bool> named;
    std::size_t complete = 0;
    bool ordered = true, sound = true;
    for (const Json& event : trace["traceEvents"]) {
        const std::string phase = event["ph"];
        if (phase == "M") {
            if (event["name"] == "thread_name") named[{event["pid"], event["tid"]}] = true;
            continue;
        }
        REQUIRE(phase == "X");
        const std::pair<int, int> thread{event["pid"], event["tid"]};
        const double start = event["ts"], duration = event["dur"];
        // A tenth of a nanosecond: the sum of two decimal fractions is not exact in binary.
        ordered = ordered && start >= busy_until[thread] - 1e-4;
        sound = sound && duration >= 0.0 && named.count(thread) == 1 && event["name"].is_string();
        busy_until[thread] = start + duration;
        ++complete;
    }
    CHECK(ordered);
    CHECK(sound);
    return complete;
}

} // namespace

TEST_CASE("search: our own stack on one GPU and on the GPUs of an NVLink domain") {
    const Folder folder;
    for (const std::string gpus : {"1", "8"}) {
        const auto outcome = folder.run("moe-plan search --model tiny-qwen3-moe --hardware h200 --gpus " + gpus +
                                        " --gbs 64 --seq 1024 --precision bf16 --stack moe-plan --out plan.json");
        CHECK_MESSAGE(outcome.status == 0, outcome.err);
        CHECK(folder.run("moe-plan replay plan.json").status == 0);
    }
}

TEST_CASE("search: a vision-language model is planned as its language model, and that is said") {
    const Folder folder;
    folder.write("config.json", R"({"architectures": ["SomeVisionForConditionalGeneration"], "text_config": {
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "moe_intermediate_size": 32, "intermediate_size": 96, "num_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 256}, "vision_config": {"hidden_size": 1408}, "audio_config": {}})");
    const std::string request = " --model config.json --hardware cpu-local --gpus 2 --gbs 4 --seq 64";
    for (const char* verb : {"search", "explain"}) {
        const auto outcome = folder.run("moe-plan " + std::string(verb) + request + " --json");
        document(outcome);
        CHECK(outcome.err.find("language model alone; left out: vision_config, audio_config\n") != std::string::npos);
    }
}

TEST_CASE("search and replay: JSON, trace and report") {
    const Folder folder;
    const Json found = document(folder.run("moe-plan " + small_search + " --top 3 --out plan.json --json"));
    check_numbers(found, {"evaluated", "seconds"});
    CHECK(found["evaluated"].get<int>() > 0);
    REQUIRE(found["plans"].size() == 3);
    double last = 1e300;
    for (const Json& entry : found["plans"]) {
        check_estimate(entry);
        CHECK(entry["plan"]["schema_version"] == 1);
        CHECK(entry["tflops_per_gpu"].get<double>() <= last);
        last = entry["tflops_per_gpu"];
    }
    // Every exclusion has its reason, and the file is the best plan.
    for (const auto& [reason, count] : found["pruned"].items()) CHECK_MESSAGE(count.get<int>() > 0, reason);
    CHECK(Json::parse(folder.read("plan.json")) == found["plans"][0]["plan"]);

    const Json replayed = document(folder.run("moe-plan replay plan.json --trace t.json --report r.html --json"));
    check_estimate(replayed);
    CHECK(replayed["ranks"] == 8);
    const Json trace = Json::parse(folder.read("t.json"));
    CHECK(check_trace(trace) == replayed["ops"].get<std::size_t>());
    const std::string report = folder.read("r.html");
    CHECK(report.rfind("<!doctype html>", 0) == 0);
    CHECK(report.find("</html>") != std::string::npos);
    CHECK(page_data(report)["explain"]["plan"] == found["plans"][0]["plan"]);
    // The text form says the same and leaves stdout free of anything else.
    CHECK(folder.run("moe-plan replay plan.json").out.find("TFLOPS/GPU") != std::string::npos);
}

TEST_CASE("--fix pins fields, and precision lists are explored") {
    const Folder folder;
    const Json found =
        document(folder.run("moe-plan search --model tiny-qwen3-moe --hardware cpu-local --gpus 8 --gbs 8 "
                            "--seq 64 --precision fp32,bf16 --fix tp=2 --fix ep=4 --fix pp=1 --json"));
    REQUIRE(!found["plans"].empty());
    for (const Json& entry : found["plans"]) {
        CHECK(entry["plan"]["mesh"]["tp"] == 2);
        CHECK(entry["plan"]["mesh"]["ep"] == 4);
        CHECK(entry["plan"]["mesh"]["pp"] == 1);
    }
}

TEST_CASE("a GPU plan: representatives stand for all ranks") {
    const Folder folder;
    REQUIRE(folder
                .run("moe-plan search --model Qwen3-30B-A3B --hardware h100 --gpus 16 --gbs 64 --seq 4096 "
                     "--fix pp=2 --out plan.json")
                .status == 0);
    const Json replayed = document(folder.run("moe-plan replay plan.json --trace t.json --json"));
    check_estimate(replayed);
    CHECK(replayed["ranks"] == 16);
    const Json& memory = replayed["memory"];
    double sum = 0.0, saved = 0.0;
    for (const char* part : {"weights", "gradients", "optimizer", "saved", "workspace", "inputs", "outside"})
        sum += memory[part]["gib"].get<double>();
    for (const auto& module : memory["saved"]["by_module_gib"]) saved += module.get<double>();
    CHECK(sum == nearly(replayed["memory_gib"].get<double>()).epsilon(1e-9));
    CHECK(saved == nearly(memory["saved"]["gib"].get<double>()).epsilon(1e-9));
    CHECK(check_trace(Json::parse(folder.read("t.json"))) == replayed["ops"].get<std::size_t>());
}

TEST_CASE("tokenize, execute and compare") {
    const Folder folder;
    std::string text;
    for (int i = 0; i < 600; ++i) text += "The quick brown fox jumps over the lazy dog. ";
    folder.write("a.txt", text);
    folder.write("b.txt", text.substr(0, 1000));
    const Json tokens = document(folder.run("moe-plan tokenize a.txt b.txt --out text --json"));
    CHECK(tokens["documents"] == 2);
    CHECK(tokens["tokens"] == text.size() + 1000);
    CHECK(folder.read("text.bin").size() == 2 * (text.size() + 1000));

    REQUIRE(folder.run("moe-plan " + small_search + " --fix tp=2 --fix ep=4 --fix pp=2 --out plan.json").status == 0);
    const moe::test::Outcome executed =
        folder.run("moe-plan execute plan.json --data text --steps 12 --lr 0.01 --shuffle "
                   "off --run-dir run --trace measured.json --json");
    const Json run = document(executed);
    CHECK(executed.err.find("unigram entropy") != std::string::npos);
    CHECK(executed.err.find("step 12/12 | loss ") != std::string::npos);
    CHECK(executed.err.find('\r') == std::string::npos); // no progress line where no terminal is
    CHECK(run["backend"] == "cpu");
    CHECK(run["ranks"] == 8);
    check_numbers(run, {"peak_memory_gib", "unigram_entropy"});
    REQUIRE(run["steps"].size() == 12);
    int number = 0;
    for (const Json& step : run["steps"]) {
        CHECK(step["step"] == ++number);
        CHECK(step["tokens"] == 8 * 64);
        check_numbers(step, {"loss", "grad_norm", "lr", "seconds", "tflops_per_gpu"});
    }
    // Starts near ln 256 and learns.
    CHECK(run["steps"][0]["loss"].get<double>() == nearly(std::log(256.0)).epsilon(0.05));
    CHECK(run["steps"][11]["loss"].get<double>() < run["steps"][0]["loss"].get<double>() - 1.0);

    CHECK(Json::parse(folder.read("run/run.json"))["steps"] == run["steps"]);
    // The plan of the run says the balance that the model's config has, beside what was asked for.
    Json planned = Json::parse(folder.read("plan.json")), ran = Json::parse(folder.read("run/plan.json"));
    CHECK(ran["router"]["aux_loss"] > 0.0);
    ran.erase("router"), planned.erase("router");
    CHECK(ran == planned);
    const Json measured = Json::parse(folder.read("run/measured.json"));
    CHECK(check_trace(measured) > 0);
    CHECK(folder.read("measured.json") == folder.read("run/measured.json"));

    // The loads of the experts are a workload that can be planned for.
    REQUIRE(
        folder.run("moe-plan " + small_search + " --fix ep=4 --fix routing=run/routing.csv --out skewed.json").status ==
        0);
    const Json skewed = document(folder.run("moe-plan replay skewed.json --json"));
    CHECK(skewed["skew"]["load"]["mean"].get<double>() > 1.0);
    CHECK(skewed["skew"]["load"]["mean"].get<double>() <= 4.0); // one of four ranks cannot hold more than all

    const Json compared = document(folder.run("moe-plan compare run --json"));
    check_numbers(compared, {"predicted_tflops_per_gpu", "measured_tflops_per_gpu", "predicted_memory_gib",
                             "measured_memory_gib"});
    const double predicted = compared["predicted_tflops_per_gpu"], real = compared["measured_tflops_per_gpu"];
    CHECK(compared["error"].get<double>() == nearly(predicted / real - 1));
    // Planned memory is what runs.
    CHECK(compared["predicted_memory_gib"].get<double>() ==
          nearly(compared["measured_memory_gib"].get<double>()).epsilon(0.01));
    std::size_t ops = 0;
    for (const Json& kind : compared["by_kind"]) {
        check_numbers(kind, {"count", "predicted_seconds", "measured_seconds"});
        ops += kind["count"].get<std::size_t>();
    }
    // Both readers play the same Program: every op of one has its partner in the other.
    CHECK(compared["matched_ops"].get<std::size_t>() == ops);
    CHECK(ops == check_trace(Json::parse(folder.read("run/predicted.json"))));
    CHECK(ops == check_trace(measured));
    // Two traces give the same, as a table.
    const moe::test::Outcome table = folder.run("moe-plan compare run/predicted.json measured.json");
    CHECK(table.status == 0);
    CHECK(table.out.find("grouped_gemm") != std::string::npos);
}

TEST_CASE("the same seed gives the same losses, blends are drawn by weight") {
    const Folder folder;
    std::string text;
    for (int i = 0; i < 2000; ++i) text += "abcdefghij";
    folder.write("a.txt", text);
    REQUIRE(folder.run("moe-plan tokenize a.txt --out a").status == 0);
    REQUIRE(folder.run("moe-plan " + small_search + " --fix dp=8 --out plan.json").status == 0);
    const std::string execute = "moe-plan execute plan.json --steps 2 --seed 3 --json ";
    const Json once = document(folder.run(execute + "--data a")), twice = document(folder.run(execute + "--data a"));
    for (int i = 0; i < 2; ++i) CHECK(once["steps"][i]["loss"] == twice["steps"][i]["loss"]);
    CHECK(folder.run(execute + "--data 0.25 a --data 0.75 a").status == 0);
    const Json other = document(folder.run("moe-plan execute plan.json --steps 2 --seed 4 --json --data a"));
    CHECK(other["steps"][0]["loss"] != once["steps"][0]["loss"]);
}
