// The verb show: what models, machines, stacks and plans were read as.
#include "tests/support/nearly.hpp"
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

using moe::test::check_line;
using moe::test::check_width;
using moe::test::document;
using moe::test::Folder;
using moe::test::Outcome;
using moe::test::small_search;
using Json = nlohmann::ordered_json;

namespace {

bool holds(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

// The entry of a list with that name.
Json named(const Json& list, const std::string& name) {
    for (const Json& entry : list)
        if (entry["name"] == name) return entry;
    return nullptr;
}

} // namespace

TEST_CASE("show model: counts, FLOPs and layers of published models") {
    const Folder folder;
    const Json v3 = document(folder.run("moe-plan show model DeepSeek-V3 --json"));
    CHECK(v3.begin().key() == "schema");
    CHECK(v3["schema"] == "moe-plan/show-model/1");
    CHECK(v3["parameters"] == 682636487424);
    CHECK(v3["parameters_without_mtp"] == 671026419200);
    CHECK(v3["active_parameters"] == 37552297472);
    CHECK(v3["gflop_per_token"].get<double>() == nearly(259.99).epsilon(1e-4));
    CHECK(v3["layers"] == 61);
    CHECK(v3["mtp_layers"] == 1);
    CHECK(v3["executable"] == true);
    CHECK(v3["why_not"] == Json::array());
    CHECK(v3["left_out"] == Json::array());
    REQUIRE(v3["kinds"].size() == 2);
    CHECK(v3["kinds"][0]["layers"] == Json({0, 1, 2}));
    CHECK(v3["kinds"][0]["moe"] == nullptr);
    CHECK(v3["kinds"][1]["moe"]["experts"] == 256);
    CHECK(v3["kinds"][1]["attention"]["kind"] == "latent");
    // Longer sequences have more attention.
    const Json longer = document(folder.run("moe-plan show model DeepSeek-V3 --seq 8192 --json"));
    CHECK(longer["gflop_per_token"] > v3["gflop_per_token"]);

    const Outcome text = folder.run("moe-plan show model DeepSeek-V3");
    REQUIRE(text.status == 0);
    for (const char* words :
         {"259.99 G", "37.55 B without MTP", "3-60", "latent (MLA)", "256 experts of 2048", "129,280"})
        CHECK_MESSAGE(holds(text.out, words), words);
    check_width(text.out, 80);
}

TEST_CASE("show model: what execute cannot train, and what a config has beside its language model") {
    const Folder folder;
    const Json v4 = document(folder.run("moe-plan show model DeepSeek-V4-Flash --json"));
    CHECK(v4["executable"] == false);
    REQUIRE(v4["why_not"].size() == 1);
    CHECK(holds(folder.run("moe-plan show model DeepSeek-V4-Flash").out, "no: "));
    folder.write("config.json", R"({"architectures": ["SomeVisionForConditionalGeneration"], "text_config": {
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "moe_intermediate_size": 32, "intermediate_size": 96, "num_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 256}, "vision_config": {"hidden_size": 1408}})");
    const Json seen = document(folder.run("moe-plan show model config.json --json"));
    CHECK(seen["left_out"] == Json({"vision_config"}));
    CHECK(seen["executable"] == true);
    CHECK(holds(folder.run("moe-plan show model config.json").out, "vision_config"));
}

TEST_CASE("show: lists of models, machines and stacks") {
    const Folder folder;
    const Json models = document(folder.run("moe-plan show models --json"));
    CHECK(models["schema"] == "moe-plan/show-models/1");
    const Json listed = named(models["models"], "Qwen3-30B-A3B");
    REQUIRE(!listed.is_null());
    const Json alone = document(folder.run("moe-plan show model Qwen3-30B-A3B --json"));
    CHECK(listed["parameters"] == alone["parameters"]);
    CHECK(listed["active_parameters"] == alone["active_parameters"]);
    const Json machines = document(folder.run("moe-plan show hardware --json"));
    CHECK(named(machines["hardware"], "cpu-local")["default_stack"] == "moe-plan");
    CHECK(named(machines["hardware"], "h200-measured")["measured"] == true);
    const Json stacks = document(folder.run("moe-plan show stacks --json"));
    CHECK(named(stacks["stacks"], "moe-plan")["executable"] == true);
    CHECK(named(stacks["stacks"], "bridge-26.08")["executable"] == false);
    for (const std::string topic : {"models", "hardware", "stacks"}) {
        check_width(folder.run("moe-plan show " + topic).out, 80);
        // Names alone, one a line: what shells complete.
        const Outcome names = folder.run("moe-plan show " + topic + " --quiet | grep -c '^[^ ]*$'");
        const Json list = document(folder.run("moe-plan show " + topic + " --json"));
        CHECK(std::stoul(names.out) == list[topic].size());
    }
}

TEST_CASE("show hardware and show stack: the figures of the profiles") {
    const Folder folder;
    const Json gb200 = document(folder.run("moe-plan show hardware gb200-nvl72 --json"));
    CHECK(gb200["schema"] == "moe-plan/show-hardware/1");
    CHECK(gb200["peak_flops"]["bf16"] == 2450e12);
    CHECK(gb200["nvlink_domain_used"] == 64);
    CHECK(gb200["measured"] == Json::object());
    CHECK(gb200["gpus_per_node"] == 4);
    CHECK(gb200["links"]["pcie"]["bytes_per_second"] == 0.0);
    CHECK(holds(folder.run("moe-plan show hardware gb200-nvl72").out, "72 GPUs, jobs use 64"));
    const Json l40s = document(folder.run("moe-plan show hardware l40s --json"));
    CHECK(l40s["compute_capability"] == 8.9);
    CHECK(l40s["vendor"] == "NVIDIA");
    CHECK(l40s["links"]["pcie"]["bytes_per_second"] == 24e9);
    CHECK(holds(folder.run("moe-plan show hardware l40s").out, "PCIe in a node"));
    // A stack offers what it offers on a machine: the same one has MXFP8 on Blackwell alone.
    const Json blackwell = document(folder.run("moe-plan show stack bridge-26.08 --hardware b200 --json"));
    const Json hopper = document(folder.run("moe-plan show stack bridge-26.08 --hardware h100 --json"));
    CHECK(blackwell["schema"] == "moe-plan/show-stack/1");
    CHECK(holds(blackwell["precisions"].dump(), "mxfp8"));
    CHECK(!holds(hopper["precisions"].dump(), "mxfp8"));
    CHECK(document(folder.run("moe-plan show stack moe-plan --json"))["executable"] == true);
    for (const char* one : {"hardware h200-measured", "stack moe-plan", "stack bridge-26.08"})
        check_width(folder.run(std::string("moe-plan show ") + one).out, 80);
}

TEST_CASE("show plan: its fields, and which of them were chosen") {
    const Folder folder;
    REQUIRE(folder.run("moe-plan " + small_search + " --fix tp=2 --fix ep=4 --out plan.json").status == 0);
    const Json plan = document(folder.run("moe-plan show plan plan.json --json"));
    CHECK(plan["schema"] == "moe-plan/show-plan/1");
    CHECK(plan["fields"]["tp"] == "2");
    CHECK(plan["fields"]["ep"] == "4");
    CHECK(plan["executable"] == true);
    CHECK(plan["fault"] == nullptr);
    CHECK(plan["tokens_per_step"] == 8 * 64);
    CHECK(holds(plan["changed"].dump(), "\"tp\""));
    CHECK(!holds(plan["changed"].dump(), "\"cuda_graph\""));
    const Outcome text = folder.run("moe-plan show plan plan.json");
    CHECK(holds(text.out, "TP 2 x CP 1"));
    check_width(text.out, 80);
    CHECK(!holds(text.out, "cuda_graph"));
    CHECK(holds(folder.run("moe-plan show plan plan.json --verbose").out, "cuda_graph"));
}

TEST_CASE("show: what it cannot show") {
    const Folder folder;
    check_line(folder.run("moe-plan show"), 2, "WHAT");
    check_line(folder.run("moe-plan show modles"), 2, "did you mean models?");
    check_line(folder.run("moe-plan show model"), 2, "moe-plan show models lists the names");
    check_line(folder.run("moe-plan show models DeepSeek-V3"), 2, "for one say show model DeepSeek-V3");
    check_line(folder.run("moe-plan show model DeepSeek-V33"), 2, "did you mean DeepSeek-V3?");
    check_line(folder.run("moe-plan show model DeepSeek-V3 --seq 0"), 2, "--seq 0");
    check_line(folder.run("moe-plan show stack nonesuch"), 2, "nonesuch");
    check_line(folder.run("moe-plan show plan missing.json"), 2, "missing.json");
}
