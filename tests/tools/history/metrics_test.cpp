// metrics.jsonl: a line per step, and one history through kills and resumptions.
#include "tests/tools/verbs/command.hpp"
#include "tools/history/metrics.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <vector>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;

using Json = nlohmann::ordered_json;

namespace {

std::vector<Json> lines_of(const std::string& text) {
    std::vector<Json> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(Json::parse(line));
    return lines;
}

std::string execute(int steps, const std::string& more) {
    return "moe-plan execute plan.json --data text --json --metrics m --checkpoint c --steps " + std::to_string(steps) +
           " " + more;
}

} // namespace

TEST_CASE("a line of metrics is the step of run.json, with null for what is no number") {
    moe::tools::StepRecord step;
    step.step = 3;
    step.loss = std::numeric_limits<double>::quiet_NaN();
    step.tflops_per_gpu = 2.0;
    step.routers = {{1, 0.25, 0.0, 3.0, 0.5}};
    step.indexers = {{0, 0.75}, {2, 0.5}};
    Json line = Json::parse(moe::tools::metrics_line(step, {1.0, 3.0}));
    CHECK(line["loss"].is_null());
    CHECK(line["indexers"].dump() == R"([{"layer":0,"loss":0.75},{"layer":2,"loss":0.5}])");
    CHECK(line["memory_gib"] == 3.0);
    CHECK(line["time"] == 1.0);
    line.erase("memory_gib");
    line.erase("time");
    CHECK(line.dump() == moe::tools::step_json(step).dump());
}

TEST_CASE("the loss of indexers: its mean in a step's line, each layer's in the history, alike under TP") {
    const Folder folder;
    moe::test::write_dataset(folder, "Sphinx of black quartz, judge my vow. ");
    folder.write("sparse.json", R"({"architectures": ["GlmMoeDsaForCausalLM"], "hidden_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "intermediate_size": 32,
        "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8, "num_nextn_predict_layers": 0, "vocab_size": 259})");
    std::map<int, std::vector<double>> losses; // by TP, of the first step
    for (const int tp : {1, 2}) {
        REQUIRE(folder
                    .run(fmt::format("moe-plan search --model sparse.json --hardware cpu-local --gbs 4 --seq 32 "
                                     "--precision fp32 --out plan.json --gpus {0} --fix tp={0}",
                                     tp))
                    .status == 0);
        const moe::test::Outcome run = folder.run(
            fmt::format("moe-plan execute plan.json --data text --steps 1 --run-dir r{0} --metrics m{0}", tp));
        REQUIRE(run.status == 0);
        const Json line = lines_of(folder.read(fmt::format("m{}/metrics.jsonl", tp))).at(0),
                   step = Json::parse(folder.read(fmt::format("r{}/run.json", tp)))["steps"][0];
        CHECK(line["indexers"] == step["indexers"]);
        REQUIRE(line["indexers"].size() == 2);
        for (std::size_t layer = 0; layer < 2; ++layer) {
            CHECK(line["indexers"][layer]["layer"] == layer);
            losses[tp].push_back(line["indexers"][layer]["loss"].get<double>());
        }
        CHECK(run.out.find(fmt::format(" | indexer loss {:.3g}", (losses[tp][0] + losses[tp][1]) / 2.0)) !=
              std::string::npos);
        std::string events;
        for (const auto& file : std::filesystem::directory_iterator(folder.file(fmt::format("m{}", tp))))
            if (file.path().filename().string().rfind("events", 0) == 0)
                events = folder.read(fmt::format("m{}/{}", tp, file.path().filename().string()));
        for (const char* name : {"train/indexer_loss", "indexer/loss/layer_0", "indexer/loss/layer_1"})
            CHECK(events.find(name) != std::string::npos);
    }
    for (std::size_t layer = 0; layer < 2; ++layer) // fresh weights see all keys alike but for rounding
        CHECK(std::abs(losses[2][layer] - losses[1][layer]) < 2e-7);
}

TEST_CASE("one history through a kill and a resumption") {
    const Folder folder;
    moe::test::write_dataset(folder, "Sphinx of black quartz, judge my vow. ");
    moe::test::write_plan(folder, "--fix tp=2 --fix schedule=1f1b", "plan.json");
    const Json first = document(folder.run(execute(4, "--save-interval 2")));
    // What a kill leaves behind: a step beyond the checkpoint, and half a line.
    {
        std::ofstream out(folder.file("m/metrics.jsonl"), std::ios::app);
        out << "{\"step\":5,\"loss\":7.0}\n{\"step\":6,\"lo";
    }
    const Json rest = document(folder.run(execute(6, "--resume")));
    const std::vector<Json> lines = lines_of(folder.read("m/metrics.jsonl"));
    REQUIRE(lines.size() == 6);
    for (std::size_t i = 0; i < lines.size(); ++i) {
        CAPTURE(i);
        const Json& step = i < 4 ? first["steps"][i] : rest["steps"][i - 4];
        for (const char* name : {"step", "loss", "grad_norm", "seconds", "tokens", "tflops_per_gpu"})
            CHECK(lines[i][name] == step[name]);
        CHECK(lines[i]["routers"].size() == step["routers"].size());
    }
    CHECK(lines_of(folder.read("m/metrics.replaced.jsonl")).front()["loss"] == 7.0);
}

TEST_CASE("a history of another run, or none at all, is refused and stays") {
    const Folder folder;
    moe::test::write_dataset(folder, "Sphinx of black quartz, judge my vow. ");
    moe::test::write_plan(folder, "--fix tp=2 --fix schedule=1f1b", "plan.json");
    const std::string fresh = "moe-plan execute plan.json --data text --json --steps 1 --metrics m";
    document(folder.run(fresh));
    const std::string before = folder.read("m/metrics.jsonl");
    check_line(folder.run(fresh), 2, "holds the history of a run: add --resume");
    CHECK(folder.read("m/metrics.jsonl") == before);
    folder.write("m/metrics.jsonl", "a list of mine\n");
    check_line(folder.run(fresh), 2, "m/metrics.jsonl: line 1 is no step of a training");
    CHECK(folder.read("m/metrics.jsonl") == "a list of mine\n");
    folder.write("file", "");
    check_line(folder.run("moe-plan execute plan.json --data text --json --steps 1 --metrics file/m"), 1,
               "cannot make the folder file/m");
}
