// Tables of other engines: every plan field is said or refused, names are those of the sources, and plans as expected.
#include "planner/base/files.hpp"
#include "planner/base/profile.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/stack/plan_words.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/tools/verbs/command.hpp"
#include "tools/engines/engine_table.hpp"
#include "tools/engines/engine_value.hpp"
#include "tools/engines/settings.hpp"
#include "tools/launch/engine_launch.hpp"
#include "tools/launch/markup.hpp"

#include <doctest/doctest.h>

#include <cstdlib>
#include <set>

using namespace moe;
using Json = nlohmann::ordered_json;

namespace {

const char* const engines[] = {"megatron-core", "torchtitan", "automodel"};

plan::Plan sample(const std::string& model, const std::string& hardware, int gpus) {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model(model));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware(hardware));
    plan.stack = "bridge-26.08";
    plan.seq = 4096;
    plan.gbs = static_cast<std::int64_t>(gpus) * 16;
    plan.gpus = plan.dp = plan.edp = gpus;
    return plan;
}

void set(plan::Plan& plan, std::initializer_list<std::pair<const char*, const char*>> fields) {
    for (const auto& [field, value] : fields) plan::set_field(plan, field, value);
    plan.dp = plan.gpus / (plan.tp * plan.cp * plan.pp);
    plan.edp = plan.gpus / (plan.ep * plan.etp * plan.pp);
}

plan::Plan deepseek() {
    plan::Plan plan = sample("DeepSeek-V3", "gb200-nvl72", 256);
    set(plan, {{"pp", "4"},
               {"vpp", "4"},
               {"schedule", "interleaved"},
               {"ep", "64"},
               {"precision", "mxfp8"},
               {"optimizer", "adamw+bf16_moments"},
               {"gradients", "bf16"},
               {"dispatcher", "hybridep"},
               {"ep_overlap", "on"},
               {"cuda_graph", "attn+moe_router"},
               {"recompute", "mla_up_proj"},
               {"bias_update", "0.001"},
               {"balance", "forced"}});
    return plan;
}

plan::Plan qwen() {
    plan::Plan plan = sample("Qwen3-30B-A3B", "h100", 16);
    set(plan, {{"ep", "8"}, {"fsdp", "on"}, {"recompute", "full"}});
    return plan;
}

plan::Plan llama() {
    plan::Plan plan = sample("Llama3-8B", "h200", 16);
    set(plan, {{"tp", "2"}, {"cp", "2"}, {"pp", "2"}, {"precision", "fp8-tensor"}, {"tp_overlap", "on"}});
    return plan;
}

const tools::Nodes four_of_four{"job", 4, 4}, two_of_eight{"job", 2, 8};

// Held to the committed file, which MOE_PLAN_WRITE_EXPECTED=1 writes anew; `git diff` then shows what has changed.
void hold(const std::string& name, const std::string& text) {
    const std::string path = test::source_folder() + "/tests/tools/engines/expected/" + name;
    if (std::getenv("MOE_PLAN_WRITE_EXPECTED") != nullptr) write_file(path, text);
    CHECK_MESSAGE(read_file(path) == text, name);
}

std::set<std::string> names_of(const std::string& engine) {
    const std::string path = test::source_folder() + "/tests/tools/engines/" + engine + "-names.json";
    return Json::parse(read_file(path))["names"].get<std::set<std::string>>();
}

std::string fault(const plan::Plan& plan, tools::EngineLaunch (*launch)(const plan::Plan&, const tools::Nodes&)) {
    return fault_of([&] { launch(plan, two_of_eight); });
}

} // namespace

TEST_CASE("engines: every plan field has an entry in every table") {
    for (const char* engine : engines) {
        std::set<std::string> said;
        for (const tools::EngineEntry& entry : tools::load_engine_table(engine).entries) said.insert(entry.field);
        for (const std::string& field : plan::field_names())
            CHECK_MESSAGE(said.contains(field), engine << ": " << field);
        for (const char* field : {"seq", "gbs"}) CHECK_MESSAGE(said.contains(field), engine << ": " << field);
    }
}

TEST_CASE("engines: settings of torchtitan and AutoModel are names of their sources, of the same release") {
    for (const char* engine : {"torchtitan", "automodel"}) {
        const std::set<std::string> known = names_of(engine);
        const tools::EngineTable table = tools::load_engine_table(engine);
        for (const tools::EngineEntry& entry : table.entries)
            if (const auto config = entry.parts.find("config"); config != entry.parts.end())
                for (const auto& item : config->second.items())
                    CHECK_MESSAGE(known.contains(item.key()), engine << ": " << item.key());
        const std::string path = test::source_folder() + "/tests/tools/engines/" + engine + "-names.json";
        CHECK(Json::parse(read_file(path))["release"] == table.release);
    }
}

TEST_CASE("engines: three plans as committed, which the engines' own code has read") {
    hold("deepseek-v3-256-gb200.megatron-core.json", tools::megatron_core_launch(deepseek()).said.dump(1) + "\n");
    hold("deepseek-v3-256-gb200.megatron-lm.sh", tools::megatron_lm_launch(deepseek(), {"job", 64, 4}).text);
    hold("deepseek-v3-256-gb200.megatron-bridge.yaml", tools::megatron_bridge_launch(deepseek(), {"job", 64, 4}).text);
    hold("qwen3-30b-16-h100.megatron-lm.sh", tools::megatron_lm_launch(qwen(), two_of_eight).text);
    hold("qwen3-30b-16-h100.torchtitan.toml", tools::torchtitan_launch(qwen(), two_of_eight).text);
    plan::Plan gathered = qwen();
    set(gathered, {{"dispatcher", "deepep"}, {"optimizer", "adamw+bf16_moments"}});
    hold("qwen3-30b-16-h100.automodel.yaml", tools::automodel_launch(gathered, two_of_eight).text);
    hold("llama3-8b-16-h200.megatron-bridge.yaml", tools::megatron_bridge_launch(llama(), four_of_four).text);
    hold("llama3-8b-16-h200.torchtitan.toml", tools::torchtitan_launch(llama(), four_of_four).text);
}

TEST_CASE("engines: what cannot be said is refused by the name of the field") {
    plan::Plan plan = qwen();
    set(plan, {{"schedule", "zero-bubble"}, {"pp", "2"}, {"ep", "1"}});
    CHECK(fault(plan, tools::megatron_lm_launch).starts_with("2: schedule: "));
    plan = deepseek();
    CHECK(fault(plan, tools::torchtitan_launch).starts_with("2: "));
    plan = sample("DeepSeek-V3", "h100", 64);
    set(plan, {{"fsdp", "on"}});
    CHECK(fault(plan, tools::torchtitan_launch).find("1 MTP layers") != std::string::npos);
    CHECK(fault(plan, tools::automodel_launch).find("1 MTP layers") != std::string::npos);
    plan = qwen();
    set(plan, {{"cuda_graph", "full"}});
    CHECK(fault(plan, tools::torchtitan_launch).starts_with("2: cuda_graph full: "));
    set(plan, {{"dispatcher", "allgather"}});
    CHECK(fault(plan, tools::automodel_launch).starts_with("2: cuda_graph full: "));
    plan = qwen();
    set(plan, {{"pp", "2"}});
    CHECK(fault(plan, tools::torchtitan_launch).starts_with("2: pp 2: "));
    plan = qwen();
    set(plan, {{"fsdp", "off"}});
    CHECK(fault(plan, tools::torchtitan_launch).starts_with("2: fsdp off: "));
    plan = sample("Llama4-Scout", "h100", 16);
    CHECK(fault(plan, tools::megatron_lm_launch).find("chunks") != std::string::npos);
    CHECK(fault(plan, tools::torchtitan_launch).find("queries that grow with their position") != std::string::npos);
    CHECK(fault(plan, tools::automodel_launch).starts_with("2: model Llama4-Scout: "));
    plan = sample("DeepSeek-V4-Flash", "h100", 64);
    CHECK(fault(plan, tools::megatron_lm_launch).find("compressed attention") != std::string::npos);
}

TEST_CASE("engines: which of the profiles' models each launch form takes, and why not the others, as committed") {
    struct Form {
        const char* name;
        tools::EngineLaunch (*launch)(const plan::Plan&, const tools::Nodes&);
    };
    const Form forms[] = {{"megatron-core", [](const plan::Plan& plan,
                                               const tools::Nodes&) { return tools::megatron_core_launch(plan); }},
                          {"megatron-lm", tools::megatron_lm_launch},
                          {"megatron-bridge", tools::megatron_bridge_launch},
                          {"torchtitan", tools::torchtitan_launch},
                          {"automodel", tools::automodel_launch}};
    std::string table;
    for (const std::string& name : profile_names("models")) {
        table += name + "\n";
        for (const Form& form : forms) {
            const bool megatron = std::string(form.name).starts_with("megatron");
            plan::Plan plan = sample(name, "h100", 8);
            if (!megatron) set(plan, {{"fsdp", "on"}, {"recompute", "full"}});
            if (plan.indexer.loss > 0.0 && !megatron && stack::plan_word(plan, "model.sparse_attention") == "on")
                set(plan, {{"indexer_loss", "none"}});
            std::string answer = "yes";
            const std::string why = fault_of([&] {
                const std::string recipe = form.launch(plan, {"job", 1, 8}).said.value("recipe", "");
                if (!recipe.empty()) answer += ": " + recipe;
            });
            if (!why.empty()) answer = why;
            answer = answer.substr(0, answer.find("; known are "));
            table += fmt::format("  {}: {}\n", form.name, answer);
        }
    }
    hold("models.txt", table);
}

TEST_CASE("engines: delayed scaling takes the largest of 1,024 steps in every form, scaling of the present none") {
    plan::Plan plan = qwen();
    set(plan, {{"precision", "fp8-tensor"}, {"fp8_scaling", "delayed"}});
    const auto words = [&] { return tools::megatron_lm_launch(plan, two_of_eight).text; };
    CHECK(words().find("--fp8-amax-history-len 1024\n    --fp8-amax-compute-algo max\n") != std::string::npos);
    const Json kwargs = tools::megatron_core_launch(plan).said["kwargs"];
    CHECK(kwargs.value("fp8_amax_history_len", 0) == 1024);
    CHECK(kwargs.value("fp8_amax_compute_algo", "") == "max");
    const std::string bridge = tools::megatron_bridge_launch(plan, two_of_eight).text;
    CHECK(bridge.find("mixed_precision: bf16_with_fp8_delayed_scaling_mixed\n") != std::string::npos);
    set(plan, {{"fp8_scaling", "current"}});
    CHECK(words().find("amax") == std::string::npos);
}

TEST_CASE("engines: documents are masked by the release that can, and refused elsewhere") {
    plan::Plan plan = sample("Qwen3-30B-A3B", "h100", 16);
    plan.stack = "bridge-26.08";
    set(plan, {{"documents", "mask"}});
    const std::string script = tools::megatron_lm_launch(plan, two_of_eight).text;
    for (const char* flag : {"--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss",
                             "--calculate-per-token-loss", "--dataloader-inter-document-masking"})
        CHECK(script.find(flag) != std::string::npos);
    CHECK(tools::megatron_bridge_launch(plan, two_of_eight).text.find("inter_document_masking: true") !=
          std::string::npos);
    set(plan, {{"mbs", "2"}});
    CHECK(fault(plan, tools::megatron_bridge_launch).starts_with("2: documents mask: "));
    plan = qwen();
    set(plan, {{"documents", "mask"}});
    CHECK(fault(plan, tools::torchtitan_launch).find("documents mask: ") != std::string::npos);
    plan.stack = "bridge-26.02";
    CHECK(fault(plan, tools::megatron_lm_launch).find("issue 2357") != std::string::npos);
}

TEST_CASE("engines: a rule of the release refuses the plan, with its source") {
    plan::Plan plan = deepseek();
    set(plan, {{"ep_overlap", "off"}, {"delay_wgrad", "on"}});
    const std::string message = fault(plan, tools::megatron_lm_launch);
    CHECK(message.find("delay_wgrad") != std::string::npos);
    CHECK(message.find("megatron-core 0.19") != std::string::npos);
}

TEST_CASE("engines: words go by the release of the plan's stack, else by the newest") {
    plan::Plan plan = qwen();
    set(plan, {{"fsdp", "off"},
               {"recompute", "none"},
               {"cuda_graph", "full"},
               {"ep", "1"},
               {"expert_capacity", "1"},
               {"pad_to_capacity", "on"}});
    const auto graph = [&](const char* stack) {
        plan.stack = stack;
        const Json kwargs = tools::megatron_core_launch(plan).said["kwargs"];
        return kwargs.value("cuda_graph_impl", std::string(kwargs.contains("enable_cuda_graph") ? "enabled" : ""));
    };
    CHECK(graph("bridge-26.08") == "full_iteration");
    CHECK(graph("bridge-26.04") == "local");
    CHECK(graph("moe-plan") == "full_iteration");
    CHECK(tools::megatron_core_launch(plan).release == "0.20.0"); // of bridge-26.10
}

TEST_CASE("engines: NCCL EP is a flex dispatcher since 0.19, with static shapes on Blackwell where rows are known") {
    plan::Plan plan = deepseek();
    set(plan, {{"dispatcher", "ncclep"}});
    plan.stack = "bridge-26.10.01";
    const auto kwargs = [&] { return Json(tools::megatron_core_launch(plan).said["kwargs"]); };
    CHECK(kwargs()["moe_token_dispatcher_type"] == "flex");
    CHECK(kwargs()["moe_flex_dispatcher_backend"] == "ncclep");
    CHECK_FALSE(kwargs().contains("moe_ncclep_static_shape"));
    set(plan, {{"capacity", "1.5"}});
    CHECK(kwargs()["moe_ncclep_static_shape"] == true);
    const std::string script = tools::megatron_lm_launch(plan, {}).text;
    CHECK(script.find("--moe-flex-dispatcher-backend") != std::string::npos);
    CHECK(script.find("ncclep") != std::string::npos);
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    set(plan, {{"precision", "bf16"}});
    CHECK_FALSE(kwargs().contains("moe_ncclep_static_shape")); // Hopper asks the host for sizes
    plan.stack = "bridge-26.06";                               // Megatron-Core 0.18
    CHECK(fault(plan, tools::megatron_lm_launch).find("dispatcher ncclep") != std::string::npos);
    plan = qwen();
    set(plan, {{"dispatcher", "ncclep"}});
    for (const auto launch : {tools::torchtitan_launch, tools::automodel_launch})
        CHECK(fault(plan, launch).find("dispatcher ncclep") != std::string::npos);
}

TEST_CASE("engines: stages that an engine would cut otherwise are a layout") {
    plan::Plan plan = sample("Qwen3-235B-A22B", "h100", 64);
    set(plan, {{"pp", "4"}});
    CHECK(tools::told(plan).layout == "Et*23|(t*24|)*2t*23L");
    set(plan, {{"pp", "2"}});
    CHECK(tools::told(plan).layout.empty());
    plan.layout = "Et*94L";
    set(plan, {{"pp", "1"}});
    CHECK(tools::told(plan).layout.empty());
}

TEST_CASE("engines: a table's faults name the entry") {
    const test::Folder folder;
    folder.run("mkdir engines models");
    const auto refusal = [&](const std::string& entry) {
        folder.write("engines/bad.json", "{\"fields\": [" + entry + "], \"implied\": []}");
        const std::string before = profiles_folder();
        setenv("MOE_PLAN_PROFILES", folder.path().c_str(), 1);
        std::string message = fault_of([] { tools::load_engine_table("bad"); });
        setenv("MOE_PLAN_PROFILES", before.c_str(), 1);
        return message;
    };
    const auto says = [&](const std::string& entry, const char* words) {
        const std::string message = refusal(entry);
        CHECK_MESSAGE(message.find("fields[0]") != std::string::npos, message);
        CHECK_MESSAGE(message.find(words) != std::string::npos, message);
    };
    says(R"({"field": "tpp"})", "unknown plan field or fact 'tpp'");
    says(R"({"field": "tp", "kwargs": {"a": "$model.heats"}})", "$model.heats: unknown");
    says(R"({"field": "tp", "args": "--tp"})", "\"args\" must be a list");
    says(R"({"field": "tp", "form": "0.1"})", "unknown member \"form\"");
    says(R"({"field": "tp", "from": "new"})", "must be numbers");
    says(R"({"field": "tp", "when": {"tp": ">x"}})", "is no number");
    says(R"("tp")", "must be an object");
}

TEST_CASE("engines: numbers, lists and texts of words; YAML and TOML of awkward values") {
    CHECK(tools::literal("4") == Json(4));
    CHECK(tools::literal("1e-06") == Json(1e-6));
    CHECK(tools::literal("[0,1]") == Json::parse("[0,1]"));
    for (const char* text : {"none", "1f1b", "inf", "-", "e", "0x10"}) CHECK(tools::literal(text) == Json(text));
    const Json settings = tools::nested({{"a.b", 1e-6}, {"a.c", "off"}, {"a.d", nullptr}, {"e", {"x y", "1e5", ""}}});
    CHECK(tools::to_yaml(settings) == "a:\n  b: 1.0e-06\n  c: \"off\"\n  d: null\ne: [\"x y\", \"1e5\", \"\"]\n");
    CHECK(tools::to_toml(settings) == "e = [\"x y\", \"1e5\", \"\"]\n\n[a]\nb = 1.0e-06\nc = \"off\"\n");
}
