// Rules of engines: their grammar, what is refused in their files, and the verdicts of the package that they stand for.
#include "planner/base/files.hpp"
#include "planner/base/profile.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/stack/rules.hpp"
#include "planner/stack/stack.hpp"
#include "tests/planner/base/fault_of.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <set>

namespace {

using Json = nlohmann::json;

moe::plan::Plan sample() {
    moe::plan::Plan plan;
    plan.model = std::make_shared<const moe::model::Model>(moe::families::load_model("DeepSeek-V3"));
    plan.hardware = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware("gb200-nvl72"));
    plan.stack = "bridge-26.08";
    plan.seq = 4096, plan.gbs = 1024, plan.dp = 64, plan.gpus = 64, plan.edp = 64;
    return plan;
}

bool holds(const moe::plan::Plan& plan, const char* text) {
    return moe::stack::Condition(Json::parse(text), "test").holds(plan);
}

// The models that the committed verdicts name, as this project reads them. Rules read facts that these share with the
// facts that the verdicts were made from: layers, kinds of attention, experts, biases, activations.
struct Edited {
    const char* file;
    std::function<void(moe::model::Model&)> edit;
};

void layers(moe::model::Model& m, int count) { m.layers.assign(static_cast<std::size_t>(count), m.layers.back()); }

const std::map<std::string, Edited>& models() {
    static const std::map<std::string, Edited> all{
        {"dense", {"Llama3-70B", [](moe::model::Model& m) { layers(m, 64); }}},
        {"mixtral", {"Mixtral-8x22B", [](moe::model::Model& m) { layers(m, 64); }}},
        {"qwen3",
         {"Qwen3-235B-A22B",
          [](moe::model::Model& m) {
              layers(m, 96);
              for (moe::model::LayerKind& kind : m.kinds) kind.attention.kv_heads = 8;
          }}},
        {"deepseek",
         {"DeepSeek-V3",
          [](moe::model::Model& m) { m.layers.insert(m.layers.end(), 64 - m.layers.size(), m.layers.back()); }}},
        {"deepseek-2-mtp",
         {"DeepSeek-V3",
          [](moe::model::Model& m) {
              m.layers.insert(m.layers.end(), 64 - m.layers.size(), m.layers.back());
              m.mtp.push_back(m.mtp.back());
          }}},
        {"sparse",
         {"DeepSeek-V3",
          [](moe::model::Model& m) {
              m.layers.insert(m.layers.end(), 64 - m.layers.size(), m.layers.back());
              for (moe::model::LayerKind& kind : m.kinds) kind.attention.indexer_top_k = 2048;
          }}},
        {"gpt-oss", {"GPT-OSS-120B", [](moe::model::Model& m) { layers(m, 32); }}},
        {"gated-delta",
         {"Qwen3-Next-80B-A3B",
          [](moe::model::Model& m) {
              while (m.layers.size() < 64) m.layers.push_back(m.layers[m.layers.size() - 4]);
              m.mtp.clear();
          }}},
    };
    return all;
}

moe::plan::Plan plan_of(const Json& verdict) {
    static std::map<std::string, std::shared_ptr<const moe::model::Model>> read;
    const std::string name = verdict["model"];
    auto& model = read[name];
    if (!model) {
        moe::model::Model edited = moe::families::load_model(models().at(name).file);
        models().at(name).edit(edited);
        model = std::make_shared<const moe::model::Model>(std::move(edited));
    }
    moe::plan::Plan plan = sample();
    plan.model = model;
    plan.gbs = 4096;
    for (const auto& word : verdict["differs"].items()) {
        const std::string value = word.value();
        if (word.key() == "hardware")
            plan.hardware = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware(value));
        else if (word.key() != "hardware.generation" && word.key() != "bf16_layers")
            moe::plan::set_field(plan, word.key(), value);
    }
    // Some name more layers than a model has, which set_field() refuses and a rule speaks of.
    if (verdict["differs"].contains("bf16_layers")) {
        const std::string both = verdict["differs"]["bf16_layers"];
        plan.bf16_first = std::stoi(both);
        plan.bf16_last = std::stoi(both.substr(both.find('+') + 1));
    }
    return plan;
}

} // namespace

TEST_CASE("conditions: words, numbers, sets, lists, and facts of model and machine") {
    moe::plan::Plan plan = sample();
    CHECK(holds(plan, "{}"));
    CHECK(holds(plan, R"({"ep": "1", "pp": "<2", "capacity": "none", "layout": "none"})"));
    CHECK(holds(plan, R"({"capacity": "!=1.5"})"));
    CHECK_FALSE(holds(plan, R"({"capacity": "<2"})")); // none is no number
    plan.capacity = 1.5, plan.ep = 64, plan.pp = 4;
    CHECK(holds(plan, R"({"capacity": {"all": ["!none", ">=1.5", "<=1.5"]}})"));
    CHECK(holds(plan, R"({"ep": ["32", ">63"], "pp": "!1"})"));
    plan.cuda_graph = moe::plan::CudaGraph::partial;
    CHECK(holds(plan, R"({"cuda_graph": {"all": ["+attn", "+moe_router", "-full", "partial", "!none"]}})"));
    plan.cuda_graph = moe::plan::CudaGraph::full;
    CHECK(holds(plan, R"({"cuda_graph": "-attn"})"));
    plan.recompute = moe::plan::recompute::moe_act | moe::plan::recompute::layernorm;
    CHECK(holds(plan, R"({"recompute": "layernorm+moe_act"})"));
    CHECK_FALSE(holds(plan, R"({"recompute": "+full"})"));
    CHECK(holds(plan, R"({"model.experts": "256", "model.dense_layers": "3", "model.mla": "on", "model.mtp": "1"})"));
    CHECK(holds(plan, R"({"model.router_score": "sigmoid", "model.shared_experts": "on", "model.hybrid": "off"})"));
    CHECK(holds(plan, R"({"hardware": "gb200-nvl72", "hardware.generation": "blackwell", "micro_batches": "16"})"));
    CHECK(holds(plan, R"({"derived.expert_ranks": "64", "derived.dispatcher": "alltoall"})"));
    CHECK(moe::stack::plan_word(plan, "capacity") == "1.5");
    CHECK(moe::stack::plan_word(plan, "memory_efficient_permutation") == "on");
    CHECK(moe::stack::plan_word(plan, "model.activation") == "silu");
}

TEST_CASE("conditions that a field cannot take are refused by place, field and word") {
    const auto fault = [](const char* text) {
        return fault_of([text] { moe::stack::Condition(Json::parse(text), "rules.json"); });
    };
    CHECK(fault(R"({"epp": "1"})").find("2: rules.json: unknown plan field or fact 'epp'") == 0);
    CHECK(fault(R"({"ep": ">two"})").find("ep: 'two' is no number") != std::string::npos);
    CHECK(fault(R"({"recompute": "+moo"})").find("moo") != std::string::npos);
    CHECK(fault(R"({"ep": 1})").find("must be a word") != std::string::npos);
    CHECK(fault(R"({"ep": {"any": ["1"]}})").find("must be a word") != std::string::npos);
    CHECK(fault(R"({"schedule": ""})").find("empty") != std::string::npos);
    CHECK(fault(R"(["ep"])").find("must be an object") != std::string::npos);
}

TEST_CASE("versions compare number by number") {
    CHECK(moe::stack::compare_versions("0.9.0", "0.15.99") < 0);
    CHECK(moe::stack::compare_versions("0.16.0", "0.15.99") > 0);
    CHECK(moe::stack::compare_versions("0.16", "0.16") == 0);
    CHECK(fault_of([] { moe::stack::compare_versions("0.x", "1"); }).find("0.x") != std::string::npos);
}

TEST_CASE("every stack of Megatron names a release and has rules; others have those of their table of settings") {
    int megatron = 0;
    for (const std::string& name : moe::stack::stack_names()) {
        CAPTURE(name);
        const moe::stack::Stack stack = moe::stack::load_stack(name, moe::machine::load_hardware("h100"));
        const std::vector<moe::stack::Rule> rules = moe::stack::load_rules(stack.engine);
        if (stack.engine.name != "megatron-core") {
            const std::string table = moe::profiles_folder() + "/engines/" + stack.engine.name + ".json";
            CHECK(rules.empty() != std::filesystem::is_regular_file(table));
            for (const moe::stack::Rule& rule : rules) CHECK(rule.asserted_by == "translation");
            continue;
        }
        ++megatron;
        CHECK(moe::stack::compare_versions(stack.engine.release, "0.8") >= 0);
        CHECK_FALSE(stack.engine.transformer_engine.empty());
        CHECK(rules.size() > 20);
        for (const moe::stack::Rule& rule : rules) {
            CHECK(rule.message.size() > 20);
            CHECK(rule.source.size() > 10);
        }
    }
    CHECK(megatron >= 13);
}

// The verdicts were made by tests/megatron/agree.py with the package installed; see its README.
TEST_CASE("rules break exactly the plans that Megatron-Core's classes refused, release by release") {
    const std::filesystem::path folder =
        std::filesystem::path(moe::profiles_folder()).parent_path() / "tests/megatron/verdicts";
    int releases = 0;
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
        const Json verdicts = Json::parse(moe::read_file(file.path().string()));
        const std::string release = verdicts["release"];
        CAPTURE(release);
        const std::vector<moe::stack::Rule> rules = moe::stack::load_rules({"megatron-core", release, "", ""});
        const moe::stack::RuleList list(rules);
        int refused = 0, different = 0;
        for (const Json& verdict : verdicts["plans"]) {
            const moe::plan::Plan plan = plan_of(verdict);
            std::set<std::string> broken;
            std::vector<std::string> in_order, listed;
            for (const moe::stack::Rule& rule : rules) {
                if (!rule.broken_by(plan)) continue;
                if (rule.asserted_by == "class") broken.insert(rule.name);
                in_order.push_back(rule.name);
            }
            for (const moe::stack::Rule* rule : list.broken_by(plan)) listed.push_back(rule->name);
            CHECK(listed == in_order);
            const moe::stack::Rule* const first = list.first_broken(plan);
            CHECK((first == nullptr ? in_order.empty() : first->name == in_order.front()));
            const moe::stack::OpenRules open(list, plan, [](const std::string& word) { return word.find('t') < 4; });
            CHECK(open.first_broken(plan) == first);
            const std::set<std::string> expected(verdict["rules"].begin(), verdict["rules"].end());
            refused += verdict["refused"].get<bool>() ? 1 : 0;
            if (broken == expected && broken.empty() != verdict["refused"].get<bool>()) continue;
            if (++different <= 5) {
                INFO(verdict.dump());
                CHECK(broken == expected);
            }
        }
        CHECK(different == 0);
        CHECK(verdicts["plans"].size() >= 300);
        CHECK(refused >= 50);
        ++releases;
    }
    CHECK(releases >= 6);
}
