// Validation while training, and the verbs that use weights as they are: evaluate and generate.
#include "tests/support/nearly.hpp"
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <sstream>
#include <string>
#include <vector>

using moe::test::check_line;
using moe::test::check_width;
using moe::test::document;
using moe::test::Folder;
using moe::test::Outcome;
using Json = nlohmann::ordered_json;

namespace {

// Two datasets, a plan of four ranks and one of two stages.
void set_up(const Folder& folder) {
    moe::test::write_dataset(folder, "Sphinx of black quartz, judge my vow. ");
    folder.write("other.txt", "Pack my box with five dozen liquor jugs. How vexingly quick daft zebras jump! " +
                                  std::string(1200, 'q') + "The five boxing wizards jump quickly.");
    REQUIRE(folder.run("moe-plan tokenize other.txt --out other").status == 0);
    moe::test::write_plan(folder, "--fix ep=2 --fix tp=2", "plan.json");
    moe::test::write_plan(folder, "--fix pp=2", "stages.json");
}

std::string execute(const std::string& plan, int steps, const std::string& more) {
    return "moe-plan execute " + plan + " --data text --lr 0.01 --steps " + std::to_string(steps) + " " + more;
}

Json losses(const Json& run) {
    Json list = Json::array();
    for (const Json& step : run["steps"]) list.push_back({step["loss"], step["grad_norm"]});
    return list;
}

} // namespace

TEST_CASE("validation while training: in the log, the record and the history, and the training is the same") {
    const Folder folder;
    set_up(folder);
    const std::string valid = "--valid-data other --eval-interval 2 --eval-batches 1 ";
    const Json plain = document(folder.run(execute("plan.json", 5, "--json"))),
               run = document(folder.run(execute("plan.json", 5, "--json " + valid)));
    CHECK(losses(run) == losses(plain));
    CHECK(!plain.contains("evaluations"));
    REQUIRE(run["evaluations"].size() == 3);
    for (const auto& [i, step] : {std::pair<std::size_t, int>{0, 2}, {1, 4}, {2, 5}}) {
        CHECK(run["evaluations"][i]["step"] == step);
        CHECK(run["evaluations"][i]["tokens"] == 8 * 64);
    }
    // Killed behind step 3 and gone on with under another plan, the history is that of one run.
    const std::string kept = valid + "--metrics h --checkpoint c ";
    const Outcome first = folder.run(execute("plan.json", 3, kept));
    REQUIRE(first.status == 0);
    std::istringstream log(first.out);
    for (std::string line; std::getline(log, line);)
        if (line.rfind("step ", 0) == 0) check_width(line, 80);
    CHECK(first.out.find("step 2/3 | valid loss ") != std::string::npos);
    document(folder.run(execute("stages.json", 5, "--json --resume " + kept)));
    std::istringstream lines(folder.read("h/metrics.jsonl"));
    std::vector<Json> evaluated;
    for (std::string line; std::getline(lines, line);)
        if (const Json step = Json::parse(line); step.contains("valid_loss")) evaluated.push_back(step);
    REQUIRE(evaluated.size() == 4); // behind steps 2, 3 as the last one then, 4 and 5
    CHECK(evaluated[0]["valid_loss"] == run["evaluations"][0]["loss"]);
    CHECK(evaluated[2]["step"] == 4);
    CHECK(evaluated[2]["valid_loss"].get<double>() ==
          nearly(run["evaluations"][1]["loss"].get<double>()).epsilon(1e-4));
    CHECK(evaluated[3]["valid_loss"].get<double>() ==
          nearly(run["evaluations"][2]["loss"].get<double>()).epsilon(1e-4));
}

TEST_CASE("router replay: what one plan recorded another replays; what does not fit is refused before the run") {
    const Folder folder;
    set_up(folder);
    const Json recorded = document(folder.run(execute("plan.json", 3, "--json --record-routing routes"))),
               replayed = document(folder.run(execute("stages.json", 3, "--json --replay-routing routes")));
    for (std::size_t i = 0; i < 3; ++i) {
        for (const char* field : {"loss", "grad_norm"})
            CHECK(replayed["steps"][i][field].get<double>() ==
                  nearly(recorded["steps"][i][field].get<double>()).epsilon(1e-4));
        for (std::size_t layer = 0; layer < recorded["steps"][i]["routers"].size(); ++layer)
            CHECK(replayed["steps"][i]["routers"][layer]["load_entropy"] ==
                  recorded["steps"][i]["routers"][layer]["load_entropy"]);
    }
    const std::string kept = " --replay-routing routes --run-dir run --metrics h --checkpoint c";
    check_line(folder.run(execute("stages.json", 4, kept)), 2,
               "routes/step-00000004.safetensors: is missing: --replay-routing needs a file for each step");
    CHECK(!folder.holds("run"));
    CHECK(!folder.holds("h"));
    check_line(folder.run(execute("stages.json", 3, "--replay-routing routes --record-routing routes")), 2,
               "--record-routing routes: is the folder of --replay-routing");
    check_line(folder.run(execute("stages.json", 3, "--replay-routing routes --balance forced")), 2,
               "--replay-routing routes: balance = forced chooses the experts itself");
    check_line(folder.run(execute("stages.json", 3,
                                  "--replay-routing routes --skip-bad-steps --checkpoint c --save-interval 1 "
                                  "--back-after 2")),
               2, "--back-after: goes on with other data than --replay-routing routes was recorded with");
    const Outcome other = folder.run("moe-plan execute stages.json --data other --steps 3 --replay-routing routes");
    CHECK(other.status == 2);
    CHECK(other.err.find("routes/step-00000001.safetensors: tokens_crc32c: ") != std::string::npos);
}

TEST_CASE("bad steps are skipped, told and counted; an export takes the tokenizer along") {
    const Folder folder;
    set_up(folder);
    // Every norm is a spike to a factor that close to 1 once the median is known, or falls below it.
    const Json run = document(folder.run(
        execute("plan.json", 14, "--json --skip-bad-steps --spike-norm 1.0000001 --metrics m --checkpoint c")));
    int skipped = 0;
    for (const Json& step : run["steps"]) {
        if (!step.contains("skipped")) continue;
        ++skipped;
        CHECK(step["step"].get<int>() > 8);
        CHECK(step["skipped"] == true);
    }
    CHECK(skipped > 0);
    CHECK(folder.read("m/metrics.jsonl").find("\"skipped\":true") != std::string::npos);
    const Json index = Json::parse(folder.read("c/step-00000014/index.json"));
    CHECK(index["checkpoint"]["bad_steps"]["skipped"] == skipped);
    CHECK(index["checkpoint"]["bad_steps"]["norms"].size() == 14 - static_cast<std::size_t>(skipped));

    CHECK(folder.run("moe-plan export --checkpoint c --out e --tokenizer m").status == 2);
    CHECK_FALSE(folder.holds("e"));
    folder.write("tokenizer.json", "{}");
    folder.write("tokenizer.model", "pieces");
    folder.write("chat_template.jinja", "x");
    folder.write("generation_config.json", R"({"eos_token_id": 7})");
    REQUIRE(folder.run("moe-plan export --checkpoint c --out e --tokenizer .").status == 0);
    CHECK(folder.read("e/tokenizer.json") == "{}");
    CHECK(folder.read("e/tokenizer.model") == "pieces");
    CHECK(folder.read("e/chat_template.jinja") == "x");
    CHECK(folder.read("e/generation_config.json") == R"({"eos_token_id": 7})");
}

TEST_CASE("a checkpoint and its export have one loss, on one rank and by any plan, and go on with one text") {
    const Folder folder;
    set_up(folder);
    const Json run =
        document(folder.run(execute("plan.json", 12, "--json --valid-data other --eval-batches 1 --checkpoint c")));
    REQUIRE(folder.run("moe-plan export --checkpoint c --out e").status == 0);
    const std::string data = " --data other --seq 64 --json";
    const Json stored = document(folder.run("moe-plan evaluate --checkpoint c" + data)),
               exported = document(folder.run("moe-plan evaluate --model e" + data)),
               planned = document(folder.run("moe-plan evaluate --model e --plan stages.json" + data)),
               some = document(folder.run("moe-plan evaluate --model e --batch 8 --batches 1" + data));
    CHECK(stored["loss"] == exported["loss"]);
    CHECK(stored["tokens"].get<int>() > 1200);
    CHECK(planned["tokens"] == stored["tokens"]);
    CHECK(planned["loss"].get<double>() == nearly(stored["loss"].get<double>()).epsilon(1e-5));
    CHECK(some["loss"].get<double>() == nearly(run["evaluations"][0]["loss"].get<double>()).epsilon(1e-5));
    CHECK(stored["perplexity"].get<double>() == nearly(std::exp(stored["loss"].get<double>())));
    const std::string prompt = " --prompt 'Sphinx of bl' --tokens 20";
    const Json greedy = document(folder.run("moe-plan generate --model e" + prompt + " --json")),
               from_checkpoint = document(folder.run("moe-plan generate --checkpoint c" + prompt + " --json"));
    CHECK(greedy["tokens"].size() == 20);
    CHECK(greedy["prompt_tokens"] == 12);
    CHECK(from_checkpoint["tokens"] == greedy["tokens"]);
    const auto drawn = [&](const std::string& options) {
        return document(folder.run("moe-plan generate --model e --json" + prompt + options))["tokens"];
    };
    CHECK(drawn(" --temperature 2 --seed 4") == drawn(" --temperature 2 --seed 4"));
    CHECK(drawn(" --temperature 2 --seed 4") != drawn(" --temperature 2 --seed 5"));
    CHECK(drawn(" --temperature 2 --top-k 1") == greedy["tokens"]);
    const Outcome text = folder.run("moe-plan generate --model e" + prompt);
    CHECK(text.out.rfind("Sphinx of bl" + greedy["text"].get<std::string>(), 0) == 0);
}

TEST_CASE("what evaluate, generate and validation cannot take") {
    const Folder folder;
    set_up(folder);
    REQUIRE(folder.run(execute("plan.json", 1, "--checkpoint c")).status == 0);
    const auto refused = [&](const std::string& command, const std::string& words) {
        check_line(folder.run("moe-plan " + command), 2, words);
    };
    refused("evaluate --data text", "give one of --model DIR and --checkpoint DIR");
    refused("evaluate --data text --model e --checkpoint c", "not both");
    refused("evaluate --data text --model missing", "missing/config.json");
    refused("evaluate --data missing --checkpoint c", "missing.idx");
    refused("evaluate --data text --checkpoint text", "text");
    refused("evaluate --data text --checkpoint c --backend tpu", "tpu");
    refused("evaluate --data text --checkpoint c --precision fp4", "--precision fp4: must be fp32 or bf16");
    refused("evaluate --data text --checkpoint c --batch 0", "--batch 0");
    refused("evaluate --data text --checkpoint c --seq -1", "--seq -1");
    refused("generate --checkpoint c --prompt ''", "holds no token");
    refused("generate --checkpoint c --prompt a --tokens 0", "--tokens 0");
    refused("generate --checkpoint c --prompt a --tokens 100000", "the model takes");
    refused("generate --checkpoint c --prompt a --temperature -1", "--temperature -1");
    refused("generate --checkpoint c --prompt a --top-p 1.5", "--top-p 1.5");
    refused("generate --checkpoint c --prompt a --tokenizer none.json", "none.json");
    refused("execute plan.json --data text --eval-interval 2", "--eval-interval: needs --valid-data PREFIX");
    refused("execute plan.json --data text --valid-data text --eval-batches -1", "--eval-batches -1");
    refused("execute plan.json --data text --valid-data missing", "missing.idx");
    refused("execute plan.json --data text --bias-update 0.1", "has no selection bias");
    Json plan = Json::parse(folder.read("plan.json"));
    plan["model"]["router_aux_loss_coef"] = "much";
    folder.write("odd.json", plan.dump());
    refused("execute odd.json --data text", "odd.json: model: router_aux_loss_coef = \"much\": must be a number");
}

TEST_CASE("a plan without balance is trained with the model's own, which the log and the kept plan tell") {
    const Folder folder;
    set_up(folder);
    const Outcome own = folder.run(execute("plan.json", 2, "--run-dir r"));
    REQUIRE(own.status == 0);
    CHECK(own.out.find("Balance: router_aux_loss_coef 0.02 as in transformers") != std::string::npos);
    CHECK(Json::parse(folder.read("r/plan.json"))["router"]["aux_loss"].get<double>() == nearly(0.01));
    CHECK(!Json::parse(folder.read("plan.json")).contains("router"));
    CHECK(Json::parse(folder.read("r/run.json"))["steps"][0]["routers"][0]["aux_loss"].get<double>() > 0.0);
    const Outcome none = folder.run(execute("plan.json", 2, "--run-dir n --aux-loss none"));
    CHECK(none.out.find("Balance") == std::string::npos);
    CHECK(Json::parse(folder.read("n/run.json"))["steps"][0]["routers"][0]["aux_loss"] == 0.0);
    CHECK(folder.holds("n/routing.csv"));
}
