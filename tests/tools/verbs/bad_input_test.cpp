// Every bad input gets one line on stderr and its exit status, and leaves nothing under the final name.
#include "tests/support/draws.hpp"
#include "tests/tools/verbs/command.hpp"

#include "planner/base/files.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <functional>
#include <iterator>
#include <string>

using moe::test::check_line;
using moe::test::Folder;
using moe::test::small_search;
using Json = nlohmann::ordered_json;

namespace {

std::string tiny_config() { return moe::read_file(moe::profiles_folder() + "/models/tiny-qwen3-moe.json"); }

std::string search_with(const std::string& model) {
    return "moe-plan search --model " + model + " --hardware cpu-local --gpus 8 --gbs 8 --seq 64 --out plan.json";
}

// A folder with a sound plan.json of the small MoE, and text.bin/.idx of 20,000 tokens.
struct Prepared : Folder {
    Prepared() {
        REQUIRE(run("moe-plan " + small_search + " --fix pp=2 --fix schedule=1f1b --out plan.json").status == 0);
        std::string text;
        for (int i = 0; i < 2000; ++i) text += "lorem ips\n";
        write("text.txt", text);
        REQUIRE(run("moe-plan tokenize text.txt --out text").status == 0);
    }
    void edit(const std::function<void(Json&)>& change) const {
        Json plan = Json::parse(read("plan.json"));
        change(plan);
        write("edited.json", plan.dump());
    }
};

} // namespace

TEST_CASE("search leaves as much memory free as it is told to" * doctest::skip(sanitized())) {
    const Folder folder;
    const std::string request =
        "moe-plan search --model Qwen3-30B-A3B --hardware h100 --gpus 16 --gbs 256 --seq 4096 --top 1 ";
    const auto memory_of = [&](const std::string& options) {
        return Json::parse(folder.run(request + options + "--json --out plan.json").out)["plans"][0]["memory_gib"]
            .get<double>();
    };
    const double whole =
        Json::parse(moe::read_file(moe::profiles_folder() + "/hardware/h100.json"))["memory_bytes"].get<double>();
    const double all = memory_of(""), less = memory_of("--memory-headroom 0.4 ");
    CHECK(all > 0.6 * whole / 0x1p30); // else this tells nothing
    CHECK(less <= 0.6 * whole / 0x1p30);
    CHECK(Json::parse(folder.read("plan.json"))["hardware"]["memory_bytes"] ==
          whole); // the plan is for the GPU as it is
    // --gpus auto takes as few as have a plan.
    const std::string fewest = "moe-plan search --model Mixtral-8x7B --hardware h100 --gbs 64 --seq 4096 --top 1 ";
    const Json found = Json::parse(folder.run(fewest + "--gpus auto --json").out);
    CHECK(found["gpus"] == 8);
    CHECK(found["plans"][0]["plan"]["mesh"]["gpus"] == 8);
    check_line(folder.run(fewest + "--gpus 4"), 3, "use 8 GPUs");
    check_line(folder.run(fewest + "--gpus some"), 2, "--gpus some: must be a whole number of 1 or more, or auto");
    // explain keeps the headroom as well, of a request and of a plan.
    REQUIRE(folder.run(request + "--memory-headroom 0.4 --out less.json").status == 0);
    const auto limit_of = [&](const std::string& options) {
        return Json::parse(
                   folder.run("moe-plan explain less.json --json " + options).out)["walls"]["memory"]["limit_gib"]
            .get<double>();
    };
    CHECK(limit_of("--memory-headroom 0.4") == nearly(0.6 * limit_of("")));
    check_line(folder.run("moe-plan explain less.json --memory-headroom 1"), 2, "--memory-headroom 1: must be a share");
    check_line(folder.run(request + "--memory-headroom 1"), 2, "--memory-headroom 1: must be a share of the memory");
    check_line(folder.run(request + "--memory-headroom -0.1"), 2, "--memory-headroom -0.1: must be");
    check_line(folder.run(request + "--memory-headroom nan"), 2, "--memory-headroom");
    check_line(folder.run(request + "--memory-headroom 0.999"), 2, "and the context alone takes");
}

TEST_CASE("command line: what does not parse") {
    const Folder folder;
    check_line(folder.run("moe-plan"), 2, "a verb is needed: search, ");
    check_line(folder.run("moe-plan --jsn"), 2, "--jsn");
    check_line(folder.run("moe-plan search plan.json " + small_search.substr(7)), 2, "unexpected argument 'plan.json'");
    check_line(folder.run("moe-plan " + small_search + " --verbose --quiet"), 2, "leave one of them out");
    check_line(folder.run("moe-plan serach"), 2, "did you mean search?");
    check_line(folder.run("moe-plan search"), 2, "--model is required");
    check_line(folder.run("moe-plan " + small_search + " --presicion fp32"), 2, "did you mean --precision?");
    check_line(folder.run("moe-plan search --modle tiny-qwen3-moe"), 2, "did you mean --model?");
    check_line(folder.run("moe-plan " + small_search + " --top many"), 2, "--top many: must be a plain number");
    check_line(folder.run("moe-plan search --seq 1.5"), 2, "--seq 1.5: must be a whole number within 64 bits");
    check_line(folder.run("moe-plan search --seq 4k"), 2, "--seq 4k: must be a plain number, without a unit");
    check_line(folder.run("moe-plan " + small_search + " --seq 8"), 2, "--seq: was given 2 times and takes one value");
    check_line(folder.run("moe-plan " + small_search + " --fix"), 2, "--fix: its value FIELD=VALUE is missing");
    check_line(folder.run("moe-plan replay"), 2, "PLAN");
    CHECK(folder.run("moe-plan --help").status == 0);
    CHECK(folder.run("moe-plan --version").out.rfind("moe-plan ", 0) == 0);
    for (const std::string verb :
         {"search", "replay", "explain", "execute", "evaluate", "generate", "compare", "calibrate", "validate",
          "tokenize", "export", "launch", "show", "completion", "man"}) {
        const moe::test::Outcome help = folder.run("moe-plan " + verb + " --help");
        CHECK(help.status == 0);
        CHECK(help.out.find("Example:\n  moe-plan " + verb) != std::string::npos);
        for (const char* option : {"--json", "--verbose", "--quiet"})
            CHECK_MESSAGE(help.out.find(option) != std::string::npos, verb, option);
    }
    check_line(folder.run("moe-plan deploy"), 2, "unknown verb 'deploy'");
}

TEST_CASE("model configs: truncated, not JSON, unknown") {
    const Folder folder;
    const std::string config = tiny_config();
    folder.write("cut.json", config.substr(0, config.size() / 2));
    check_line(folder.run(search_with("cut.json")), 2, "cut.json: not valid JSON");
    folder.write("text.json", "hidden_size: 128\n");
    check_line(folder.run(search_with("text.json")), 2, "text.json: not valid JSON");
    folder.write("empty.json", "");
    check_line(folder.run(search_with("empty.json")), 2, "empty.json");
    folder.write("list.json", "[1, 2]");
    check_line(folder.run(search_with("list.json")), 2, "list.json");
    Json unknown = Json::parse(config);
    unknown["architectures"] = {"GigaChatForCausalLM"};
    folder.write("unknown.json", unknown.dump());
    check_line(folder.run(search_with("unknown.json")), 2, "GigaChatForCausalLM");
    Json negative = Json::parse(config);
    negative["hidden_size"] = -128;
    folder.write("negative.json", negative.dump());
    check_line(folder.run(search_with("negative.json")), 2, "hidden_size");
    check_line(folder.run(search_with("DeepSeek-V33")), 2, "did you mean DeepSeek-V3?");
    check_line(folder.run(search_with("missing.json")), 2, "missing.json");
    CHECK(!folder.holds("plan.json"));
}

TEST_CASE("JSON nested 200,000 deep is refused by every reader that takes a file") {
    const Folder folder;
    folder.write("deep.json", std::string(200'000, '['));
    folder.write("tokenizer.json", R"({"model": )" + std::string(200'000, '['));
    folder.write("line.txt", "text\n");
    const std::string deep = "deep.json: not valid JSON: nested more than 100 deep at line 1, column 101";
    check_line(folder.run(search_with("deep.json")), 2, deep);
    check_line(folder.run("moe-plan replay deep.json"), 2, deep);
    check_line(folder.run("moe-plan show hardware deep.json"), 2, deep);
    check_line(folder.run("moe-plan " + small_search + " --fix routing=deep.json"), 2, deep);
    check_line(folder.run("moe-plan " + small_search + " --stack deep.json"), 2, deep);
    check_line(folder.run("moe-plan tokenize line.txt --vocab tokenizer.json --out text"), 2,
               "tokenizer.json: not valid JSON: nested more than 100 deep");
}

TEST_CASE("requests whose work has no bound are refused with the number that makes it") {
    const Folder folder;
    const std::string asked = "moe-plan search --model tiny-qwen3-moe --hardware cpu-local --seq 64 --precision fp32 ";
    check_line(folder.run(asked + "--gpus 1 --gbs 4000000 --fix mbs=1"), 3, "gbs = 4000000: makes");
    CHECK(folder.run(asked + "--gpus 1 --gbs 4096").status == 0);
}

TEST_CASE("search: requests that no plan satisfies, and options that say nothing sound") {
    const Folder folder;
    const std::string base = "moe-plan search --model tiny-qwen3-moe --hardware cpu-local --seq 64 --out plan.json ";
    check_line(folder.run(base + "--gpus 7 --gbs 10"), 3, "7");
    check_line(folder.run(base + "--gpus 8 --gbs 8 --fix ep=3"), 3, "ep = 3 is fixed, which does not divide 8");
    check_line(folder.run(base + "--gpus 0 --gbs 8"), 2, "--gpus 0");
    check_line(folder.run(base + "--gpus -8 --gbs 8"), 2, "--gpus -8");
    check_line(folder.run(base + "--gpus 8 --gbs 0"), 2, "--gbs 0");
    check_line(folder.run(base + "--gpus 8 --gbs 8 --top 0"), 2, "--top 0");
    check_line(folder.run(base + "--gpus 8 --gbs 8 --fix tp"), 2, "FIELD=VALUE");
    check_line(folder.run(base + "--gpus 8 --gbs 8 --fix tq=2"), 2, "tq");
    check_line(folder.run(base + "--gpus 8 --gbs 8 --fix tp=two"), 2, "tp");
    check_line(folder.run(base + "--gpus 8 --gbs 8 --fix tp=1 --fix ep=2 --fix tp=2"), 2, "--fix tp=1 --fix tp=2");
    check_line(folder.run(base + "--gpus 8 --gbs 8 --precision bf16 --fix precision=fp32"), 2, "--precision bf16");
    check_line(folder.run(base + "--gpus 8 --gbs 8 --precision fp7"), 2, "fp7");
    check_line(folder.run(base + "--gpus 8 --gbs 8 --stack nonesuch"), 2, "nonesuch");
    check_line(folder.run("moe-plan search --model tiny-qwen3-moe --hardware h1000 --gpus 8 --gbs 8 --seq 64"), 2,
               "h1000");
    CHECK(folder.entries() == 0);
}

TEST_CASE("search: machines that the software does not run on") {
    const Prepared folder;
    const std::string asked = "moe-plan search --model Qwen3-30B-A3B --gpus 8 --gbs 64 --seq 4096 --hardware ";
    for (const char* machine : {"a100-sxm", "gb300-nvl72"})
        check_line(folder.run(asked + machine + " --stack moe-plan"), 2, "compute capability 9.0");
    check_line(folder.run(asked + "mi300x"), 2, "accelerator of AMD");
    check_line(folder.run(asked + "tpu-v5p"), 2, "accelerator of Google");
    check_line(folder.run(asked + "a100-sxm --fix dispatcher=hybridep --fix ep=8"), 3, "compute capability 9.0");
}

TEST_CASE("plans edited by hand") {
    const Prepared folder;
    const auto replay_edited = [&] { return folder.run("moe-plan replay edited.json --trace trace.json"); };
    folder.edit([](Json& plan) { plan["mesh"]["tp"] = 3; });
    check_line(replay_edited(), 2, "edited.json");
    folder.edit([](Json& plan) { plan["mesh"]["tp"] = "two"; });
    check_line(replay_edited(), 2, "tp");
    folder.edit([](Json& plan) { plan["mesh"]["dpp"] = 3; });
    check_line(replay_edited(), 2, "dpp");
    folder.edit([](Json& plan) { plan["schema_version"] = 99; });
    check_line(replay_edited(), 2, "schema_version");
    folder.edit([](Json& plan) { plan.erase("model"); });
    check_line(replay_edited(), 2, "model");
    folder.edit([](Json& plan) { plan["workload"]["gbs"] = -8; });
    check_line(replay_edited(), 2, "gbs");
    folder.edit([](Json& plan) { plan["workload"]["seq"] = 1e300; });
    check_line(replay_edited(), 2, "seq");
    const std::string plan = folder.read("plan.json");
    folder.write("edited.json", plan.substr(0, plan.size() / 3));
    check_line(replay_edited(), 2, "edited.json: not valid JSON");
    check_line(folder.run("moe-plan replay nowhere.json"), 2, "nowhere.json");
    check_line(folder.run("moe-plan replay ."), 2, "cannot read .");
    check_line(folder.run("moe-plan replay /dev/zero"), 2, "cannot read /dev/zero: it has no end");
    CHECK(!folder.holds("trace.json"));
}

TEST_CASE("no verb writes over what it reads, nor one output over the other") {
    const Prepared folder;
    const std::string plan = folder.read("plan.json");
    check_line(folder.run("moe-plan replay plan.json --trace plan.json"), 2,
               "--trace plan.json: would write over plan.json");
    check_line(folder.run("moe-plan replay plan.json --report ./plan.json"), 2, "--report ./plan.json");
    check_line(folder.run("moe-plan replay plan.json --trace same --report same"), 2, "--report same");
    check_line(folder.run("moe-plan execute plan.json --data text --steps 1 --trace plan.json"), 2,
               "--trace plan.json");
    folder.write("config.json", tiny_config());
    check_line(
        folder.run(
            "moe-plan search --model config.json --hardware cpu-local --gpus 1 --gbs 1 --seq 64 --out config.json"),
        2, "--out config.json");
    CHECK(folder.read("plan.json") == plan);
    CHECK(folder.read("config.json") == tiny_config());
    CHECK(!folder.holds("same"));
    CHECK(folder.run("moe-plan replay plan.json --trace /dev/null --report /dev/null").status == 0);
}

TEST_CASE("files to write: a folder, and one in no folder, are refused before any work") {
    const Prepared folder;
    std::filesystem::create_directory(folder.file("there"));
    const int before = folder.entries();
    for (const std::string& command :
         {small_search + " --out ", std::string("replay plan.json --trace "), std::string("replay plan.json --report "),
          std::string("launch plan.json --slurm --data text --out "), std::string("calibrate --out "),
          std::string("import run.sh --hardware h100 --out "), std::string("compare run --report ")}) {
        CAPTURE(command);
        const std::string option = command.substr(command.rfind("--"));
        check_line(folder.run("moe-plan " + command + "there"), 2, option + "there: is a folder: name a file");
        check_line(folder.run("moe-plan " + command + "no/x.json"), 2, option + "no/x.json: there is no folder no");
    }
    CHECK(folder.entries() == before);
}

TEST_CASE("execute: data and options") {
    const Prepared folder;
    const std::string execute = "moe-plan execute plan.json --steps 1 --run-dir run ";
    check_line(folder.run(execute + "--data nowhere"), 2, "nowhere");
    folder.write("short.txt", "too short");
    REQUIRE(folder.run("moe-plan tokenize short.txt --out short").status == 0);
    check_line(folder.run(execute + "--data short"), 2, "short");
    const std::string data = folder.read("text.bin"), index = folder.read("text.idx");
    folder.write("cut.bin", data.substr(0, data.size() / 2));
    folder.write("cut.idx", index);
    check_line(folder.run(execute + "--data cut"), 2, "cut.bin");
    folder.write("cut.bin", data);
    folder.write("cut.idx", index.substr(0, index.size() - 5));
    check_line(folder.run(execute + "--data cut"), 2, "cut.idx");
    folder.write("cut.idx", "MMIDIDY" + index.substr(7));
    check_line(folder.run(execute + "--data cut"), 2, "cut.idx");
    check_line(folder.run(execute + "--data text --backend cuda"), 2, "--backend cuda");
    check_line(folder.run(execute + "--data text --backend tpu"), 2, "--backend tpu");
    check_line(folder.run(execute + "--data text --betas 0.9"), 2, "--betas");
    check_line(folder.run(execute + "--data text --lr nan"), 2, "--lr");
    check_line(folder.run(execute + "--data text --aux-loss -1"), 2, "aux_loss");
    check_line(folder.run(execute + "--data text --balance even"), 2, "balance");
    check_line(folder.run(execute + "--data text --optimizer lion"), 2, "optimizer 'lion' is unknown");
    check_line(folder.run(execute + "--data text --lora-alpha 4"), 2, "--lora-alpha: needs --lora RANK");
    check_line(folder.run(execute + "--data text --lora 4 --lora-alpha x"), 2, "--lora-alpha x: not a number");
    check_line(folder.run(execute + "--data text --lora 4 --lora-targets attention,mlp"), 2,
               "lora target 'mlp' is unknown");
    check_line(folder.run(execute + "--data text --rampup-batch-size 8"), 2,
               "--rampup-batch-size 8: must be START,INCREMENT,SAMPLES");
    check_line(folder.run(execute + "--data text --qk-clip -1"), 2, "--qk-clip -1: must be above 0");
    check_line(folder.run(execute + "--data text --qk-clip 100 --qk-clip-alpha 2"), 2, "--qk-clip-alpha 2: must be");
    check_line(folder.run(execute + "--data text --qk-clip-alpha 0.4"), 2, "--qk-clip");
    check_line(folder.run(execute + "--data text --qk-clip 100"), 2, "normalizes its queries and keys");
    check_line(folder.run(execute + "--data text --steps 0"), 2, "--steps");
    check_line(folder.run(execute + "--data text --log-interval 0"), 2, "--log-interval 0");
    check_line(folder.run(execute + "--data text --shuffle maybe"), 2, "--shuffle");
    check_line(folder.run(execute + "--data text --spike-norm 3"), 2, "--spike-norm: needs --skip-bad-steps");
    check_line(folder.run(execute + "--data text --skip-bad-steps --spike-norm 0.5"), 2, "--spike-norm 0.5: must be");
    check_line(folder.run(execute + "--data text --skip-bad-steps --back-after 2"), 2,
               "--back-after: needs --checkpoint");
    check_line(folder.run(execute + "--data text --lr-schedule square"), 2,
               "--lr-schedule square: must be one of constant, cosine, linear");
    check_line(folder.run(execute + "--data text --lr 1e-3 --min-lr 1e-2"), 2,
               "--min-lr 0.01: must be between 0 and --lr");
    check_line(folder.run(execute + "--data text --min-lr 1e-4"), 2, "--lr-schedule constant does not fall");
    check_line(folder.run(execute + "--data text --lr-decay-steps 5"), 2, "--lr-schedule constant has none, wsd has");
    check_line(folder.run(execute + "--data -1 text"), 2, "");
    CHECK(!folder.holds("run"));
}

TEST_CASE("execute: plans that the engine cannot run are refused by field") {
    const Folder folder;
    folder.write("text.txt", "some text");
    REQUIRE(folder.run("moe-plan tokenize text.txt --out text").status == 0);
    REQUIRE(folder
                .run("moe-plan search --model Qwen3-30B-A3B --hardware gb200-nvl72 --gpus 8 --gbs 512 --seq 4096 "
                     "--precision mxfp8 --top 1 --out gpu.json")
                .status == 0);
    check_line(folder.run("moe-plan execute gpu.json --data text"), 2, "execute cannot run it");
}

TEST_CASE("compare: files that do not belong together") {
    const Prepared folder;
    REQUIRE(folder.run("moe-plan replay plan.json --trace predicted.json").status == 0);
    check_line(folder.run("moe-plan compare nowhere"), 2, "nowhere");
    check_line(folder.run("moe-plan compare predicted.json"), 2, "not a run directory");
    check_line(folder.run("moe-plan compare predicted.json predicted.json"), 2, "predicted");
    check_line(folder.run("moe-plan compare plan.json predicted.json"), 2, "plan.json");
    const std::string trace = folder.read("predicted.json");
    folder.write("cut.json", trace.substr(0, trace.size() / 2));
    check_line(folder.run("moe-plan compare cut.json predicted.json"), 2, "cut.json");
}

TEST_CASE("tokenize and calibrate: what they cannot take") {
    const Folder folder;
    folder.write("empty.txt", "");
    folder.write("text.txt", "text");
    check_line(folder.run("moe-plan tokenize missing.txt --out out"), 2, "missing.txt");
    check_line(folder.run("moe-plan tokenize text.txt empty.txt --out out"), 2, "empty.txt");
    check_line(folder.run("moe-plan tokenize text.txt --out out --vocab gpt2"), 2, "--vocab gpt2");
    check_line(folder.run("moe-plan tokenize text.txt --out out --chat"), 2, "--chat: a vocabulary of bytes");
    check_line(folder.run("moe-plan tokenize text.txt --out nowhere/out"), 1, "nowhere/out");
    check_line(folder.run("moe-plan export --checkpoint nowhere --out hf"), 2, "--checkpoint nowhere");
    check_line(folder.run("moe-plan export --checkpoint nowhere --out hf --dtype fp8"), 2, "--dtype fp8");
    check_line(folder.run("moe-plan calibrate --backend cuda --out h.json"), 2, "--backend cuda");
    check_line(folder.run("moe-plan calibrate --gpus 2 --out h.json"), 2, "--gpus is for GPUs");
    check_line(folder.run("moe-plan calibrate --from h200 --out h.json"), 2, "--from is for GPUs");
    CHECK(folder.entries() == 2);
}

TEST_CASE("a full disk: one line, status 1, nothing left") {
    const Prepared folder;
    const int before = folder.entries();
    check_line(folder.run("moe-plan replay plan.json --trace /dev/full"), 1, "/dev/full");
    check_line(folder.run("moe-plan replay plan.json --report /dev/full"), 1, "/dev/full");
    check_line(folder.run("moe-plan " + small_search + " --out /dev/full"), 1, "/dev/full");
    check_line(folder.run("moe-plan replay plan.json --json > /dev/full"), 1, "stdout");
    // A file size limit of 16 blocks meets a real file half-way, as a full disk does.
    check_line(folder.run("ulimit -f 16; moe-plan replay plan.json --trace trace.json"), 1, "trace.json");
    check_line(folder.run("ulimit -f 16; moe-plan tokenize text.txt --out again"), 1, "again.bin");
    CHECK(folder.entries() == before);
    const moe::test::Outcome saved =
        folder.run("ulimit -f 64; moe-plan execute plan.json --data text --steps 1 --checkpoint c");
    CHECK(saved.status == 1);
    CHECK(saved.err.find("moe-plan: cannot write c/step-00000001.partial") != std::string::npos);
    const std::filesystem::directory_iterator left(folder.file("c")); // the lock, which nobody holds
    CHECK(std::distance(begin(left), end(left)) == 1);
    CHECK(std::filesystem::file_size(folder.file("c/lock")) == 0);
}

TEST_CASE("bad input: a stack that is not known is named with its file and field") {
    const Folder folder;
    REQUIRE(folder
                .run("moe-plan search --model tiny-qwen3-moe --hardware cpu-local --gpus 1 --gbs 2 --seq 32 "
                     "--precision fp32 "
                     "--out plan.json")
                .status == 0);
    Json plan = Json::parse(folder.read("plan.json"));
    plan["stack"] = "bridge-99";
    folder.write("plan.json", plan.dump());
    for (const char* verb : {"replay plan.json", "explain plan.json", "launch plan.json --mpi", "show plan plan.json"})
        check_line(folder.run(std::string("moe-plan ") + verb), 2, "plan.json: stack: unknown stack 'bridge-99'");
    Json hardware = Json::parse(moe::read_file(moe::test::source_folder() + "/profiles/hardware/h100.json"));
    hardware["default_stack"] = "bridge-99";
    folder.write("hardware.json", hardware.dump());
    check_line(folder.run("moe-plan search --model tiny-qwen3-moe --hardware hardware.json --gpus 1 --gbs 2 --seq 32"),
               2, "hardware.json: default_stack: unknown stack 'bridge-99'");
}

TEST_CASE("bad input: a variable that names no folder of profiles is bad input") {
    const Folder folder;
    folder.write("file", "");
    for (const char* chosen : {"/nowhere", "file", "."})
        check_line(folder.run(std::string("MOE_PLAN_PROFILES=") + chosen + " moe-plan show models"), 2,
                   std::string("MOE_PLAN_PROFILES = ") + chosen + ": holds no folder \"models\"");
}
