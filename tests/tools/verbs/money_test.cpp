// Money and goodput through the command: figures of search, what it assumes, deadlines, and options that say nothing
// alone.
#include "tests/support/draws.hpp"
#include "tests/support/nearly.hpp"
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <string>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using Json = nlohmann::ordered_json;

namespace {

const std::string request =
    "moe-plan search --model Qwen3-30B-A3B --hardware h100 --gbs 128 --seq 4096 --fix tp=1 --fix "
    "cp=1 --fix pp=1 --fix etp=1 --fix mbs=1 --fix ep=8 ";
const std::string sixteen = request + "--gpus 16 ";

bool holds(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

} // namespace

TEST_CASE("search: each of price, failures, tokens and deadline alone and together") {
    const Folder folder;
    const Json bare = document(folder.run(sixteen + "--json"));
    CHECK_FALSE(bare.contains("assumptions"));
    CHECK_FALSE(bare["plans"][0].contains("dollars"));

    const Json priced = document(folder.run(sixteen + "--price 2 --json"));
    const Json& plan = priced["plans"][0];
    const double hours = 1e12 / (16.0 * plan["tokens_per_second_per_gpu"].get<double>() * 3600.0);
    CHECK(plan["hours"].get<double>() == nearly(hours));
    CHECK(plan["dollars"].get<double>() == nearly(2.0 * 16.0 * hours));
    CHECK(plan["dollars"].get<double>() == nearly(plan["dollars_per_trillion_tokens"].get<double>()));
    CHECK(plan["goodput"] == 1.0);
    CHECK(plan["checkpoint"].is_null());
    CHECK(priced["assumptions"]["tokens"] == 1e12);
    CHECK(priced["assumptions"]["mtbf_hours"].is_null());
    CHECK(plan["step_seconds"] == bare["plans"][0]["step_seconds"]);

    const Json failing = document(folder.run(sixteen + "--mtbf 50000 --json"))["plans"][0];
    CHECK(failing["goodput"] < 1.0);
    CHECK(failing["dollars"].is_null());
    CHECK(failing["hours"].get<double>() == nearly(hours / failing["goodput"].get<double>()));
    CHECK(failing["checkpoint"]["job_mtbf_hours"].get<double>() == nearly(50000.0 / 16.0));

    const Json counted = document(folder.run(sixteen + "--tokens 15T --json"));
    CHECK(counted["plans"][0]["hours"].get<double>() == nearly(15.0 * hours));
    CHECK(document(folder.run(sixteen + "--tokens 15e12 --json"))["plans"][0]["hours"] == counted["plans"][0]["hours"]);

    const std::string all = "--price 2 --mtbf 50000 --tokens 1T --deadline 100000 --storage-bandwidth 1 --restart 5 "
                            "--checkpoint-interval 30 ";
    const Json whole = document(folder.run(sixteen + all + "--json --out plan.json"));
    CHECK(whole["assumptions"]["storage_bytes_per_second"] == 1e9);
    CHECK(whole["assumptions"]["restart_seconds"] == 300.0);
    CHECK(whole["assumptions"]["checkpoint_interval"] == "given");
    CHECK(whole["plans"][0]["checkpoint"]["interval_seconds"].get<double>() == nearly(1800.0).epsilon(0.002));
    const std::string text = folder.run(sixteen + all).out;
    for (const char* line :
         {"Tokens: 1T\n", "Price: 2 dollars a GPU-hour", "Failures: at random, every 50,000 h of a GPU",
          "Checkpoints: every ", "as asked for", "Restart: 5 min", "Deadline: 100,000 h; plan 1 ends"})
        CHECK_MESSAGE(holds(text, line), line);
    const std::string usual = folder.run(sixteen + "--mtbf 50000").out;
    for (const char* line : {"Tokens: 1T (no --tokens)", "Daly 2006", "(Llama 3: 2 TB/s for 16,384)", "(MegaScale: "})
        CHECK_MESSAGE(holds(usual, line), line);
    CHECK(holds(folder.run(sixteen + "--price 2").out, "Failures and checkpoints: left out (no --mtbf)"));
}

TEST_CASE("search: several numbers of GPUs in one ranking") {
    const Folder folder;
    const Json found = document(folder.run(request + "--gpus 2,16,32 --price 2 --out plan.json --json"));
    REQUIRE(found["counts"].size() == 3);
    CHECK(holds(found["counts"][0]["no_plan"].get<std::string>(), "no plan for 2 GPUs"));
    CHECK(found["counts"][0]["hours"].is_null());
    CHECK(found["counts"][1]["no_plan"].is_null());
    const Json& plans = found["plans"];
    for (std::size_t i = 1; i < plans.size(); ++i) {
        CHECK(plans[i]["dollars"] >= plans[i - 1]["dollars"]);
        if (!plans[i]["first_is_faster"].is_null()) CHECK(plans[i]["first_is_faster"] >= 0.5);
    }
    CHECK(found["gpus"] == plans[0]["plan"]["mesh"]["gpus"]);
    CHECK(Json::parse(folder.read("plan.json"))["mesh"]["gpus"] == found["gpus"]);
    const std::string text = folder.run(request + "--gpus 2,16,32").out;
    CHECK(holds(text, "on 2|16|32 x h100"));
    CHECK(holds(text, "GPU-hours"));
    CHECK(holds(text, "2 GPUs: no plan for 2 GPUs"));
}

TEST_CASE("search: a deadline that no plan meets ends with status 3 and what would do" * doctest::skip(sanitized())) {
    const Folder folder;
    check_line(folder.run(sixteen + "--tokens 1T --deadline 100"), 3,
               "--deadline 100: no plan trains 1T tokens by then");
    const Json found = document(folder.run(request + "--gpus auto --tokens 1T --deadline 1000 --json"));
    CHECK(found["plans"][0]["hours"] <= 1000.0);
    CHECK(found["gpus"] > 16);
    check_line(folder.run(request + "--gpus auto --tokens 1T --deadline 1"), 3, "--deadline 1: ");
}

TEST_CASE("search: money options that are out of range or say nothing alone") {
    const Folder folder;
    const auto refused = [&](const std::string& options, const char* words) {
        check_line(folder.run(sixteen + options), 2, words);
    };
    refused("--price 0", "--price 0: must be dollars per GPU-hour above 0");
    refused("--price nan", "--price");
    refused("--price -1", "--price -1: must be");
    refused("--mtbf 0", "--mtbf 0: must be hours above 0");
    refused("--mtbf inf", "--mtbf");
    refused("--tokens 0", "--tokens 0: must be a number of tokens");
    refused("--tokens 15X", "--tokens 15X: must be a number of tokens, such as 15e12 or 15T");
    refused("--tokens TT", "--tokens TT");
    refused("--tokens 1e400", "--tokens 1e400");
    refused("--deadline 100", "--deadline 100: of how many tokens is not said: add --tokens");
    refused("--tokens 1T --deadline 0", "--deadline 0: must be hours above 0");
    refused("--restart 5", "--restart 5: counts with failures alone, which are left out: add --mtbf");
    refused("--storage-bandwidth 1", "--storage-bandwidth 1: counts with failures alone");
    refused("--checkpoint-interval 30 --price 2", "--checkpoint-interval 30: counts with failures alone");
    refused("--mtbf 50000 --restart 0", "--restart 0: must be minutes above 0");
    check_line(folder.run(request + "--gpus 16,x"), 2, "--gpus 16,x: must be a whole number of 1 or more, or auto");
    check_line(folder.run(request + "--gpus 16,"), 2, "--gpus 16,: must be a whole number");
    check_line(folder.run(request + "--gpus 16,auto"), 2, "--gpus 16,auto: must be a whole number");
    check_line(folder.run(request + "--gpus 16,99999999999"), 2, "--gpus");
    check_line(folder.run("moe-plan explain " + request.substr(16) + "--gpus 16,32"), 2,
               "explain: --gpus 16,32: must be one number, or auto");
}
