// What launch writes, import reads as the same plan: random plans of each engine, from the file alone.
//
// MOE_PLAN_ROUND_TRIPS is how many plans each engine is asked for (40 by default, 1000 for a long run).
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/stack/stack.hpp"
#include "tests/support/draws.hpp"
#include "tests/tools/verbs/command.hpp"
#include "tools/engines/settings.hpp"
#include "tools/import/import_plan.hpp"
#include "tools/launch/engine_launch.hpp"

#include <doctest/doctest.h>

#include <map>
#include <random>

using namespace moe;

namespace {

struct Engine {
    const char *name, *file;
    tools::EngineLaunch (*launch)(const plan::Plan&, const tools::Nodes&);
    std::vector<const char*> models;
    bool names_model; // the file says which model it is
};

const std::vector<Engine>& engines() {
    static const std::vector<Engine> list{
        {"megatron-lm",
         "train.sh",
         tools::megatron_lm_launch,
         {"DeepSeek-V3", "Qwen3-235B-A22B", "Qwen3-30B-A3B", "Mixtral-8x22B", "Llama3-70B", "Kimi-K2", "DeepSeek-V3.2",
          "GLM-4.7-Flash", "GLM-5", "GLM-5.2", "GPT-OSS-120B", "Hy3", "K-EXAONE-236B-A23B", "Ling-1T",
          "Moonlight-16B-A3B", "Nemotron-3-Super", "Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B", "Solar-Open-100B"},
         true},
        {"megatron-bridge",
         "run.yaml",
         tools::megatron_bridge_launch,
         {"DeepSeek-V3", "Qwen3-235B-A22B", "Qwen3-30B-A3B", "Mixtral-8x22B", "Llama3-70B", "Kimi-K2", "GLM-5.2",
          "GPT-OSS-120B", "Hy3", "K-EXAONE-236B-A23B", "Ling-1T", "Moonlight-16B-A3B", "Nemotron-3-Super",
          "OLMoE-1B-7B", "Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B", "Solar-Open-100B"},
         false},
        {"torchtitan",
         "job.toml",
         tools::torchtitan_launch,
         {"Qwen3-30B-A3B", "Qwen3-235B-A22B", "Llama3-8B", "Llama3-70B"},
         true},
        {"automodel",
         "job.yaml",
         tools::automodel_launch,
         {"Qwen3-30B-A3B", "Qwen3-235B-A22B", "Llama3-8B", "ERNIE-4.5-21B-A3B", "GPT-OSS-20B", "Kimi-K2", "Ling-1T",
          "Ling-mini-2.0", "MiMo-V2-Flash", "MiniMax-M2", "Nemotron-3-Super", "Qwen3.5-35B-A3B"},
         true},
    };
    return list;
}

class Plans {
public:
    Plans(const Engine& engine, std::uint64_t seed) : engine_(engine), random_(seed) {}

    plan::Plan next() {
        plan::Plan plan;
        plan.model = model(engine_.models[below(engine_.models.size())]);
        plan.hardware = hardware(pick({"h100", "b200", "gb200-nvl72"}));
        plan.stack = pick({"bridge-26.08", "bridge-26.08", "bridge-26.06", "bridge-26.04", "bridge-26.02"});
        plan.seq = 4096;
        mesh(plan);
        choices(plan);
        const bool titan = std::string(engine_.name) == "torchtitan" || std::string(engine_.name) == "automodel";
        if (titan) plan.fsdp = plan.pp == 1 || chance(0.5);
        if (titan && chance(0.8)) plan.recompute = chance(0.5) ? plan::recompute::from_string("full") : 0;
        return plan;
    }
    std::size_t below(std::size_t limit) { return random_() % limit; }

private:
    bool chance(double share) { return static_cast<double>(below(1000)) < share * 1000; }
    const char* pick(std::initializer_list<const char*> list) { return *(list.begin() + below(list.size())); }
    int power(int most) {
        int value = 1;
        while (value < most && chance(0.5)) value *= 2;
        return value;
    }
    static std::shared_ptr<const model::Model> model(const std::string& name) {
        static std::map<std::string, std::shared_ptr<const model::Model>> kept;
        auto& found = kept[name];
        if (!found) found = std::make_shared<const model::Model>(families::load_model(name));
        return found;
    }
    static std::shared_ptr<const machine::Hardware> hardware(const std::string& name) {
        static std::map<std::string, std::shared_ptr<const machine::Hardware>> kept;
        auto& found = kept[name];
        if (!found) found = std::make_shared<const machine::Hardware>(machine::load_hardware(name));
        return found;
    }

    void mesh(plan::Plan& plan) {
        plan.tp = power(8);
        plan.pp = power(8);
        plan.cp = chance(0.2) ? 2 : 1;
        plan.dp = 4 * power(16);
        plan.gpus = plan.tp * plan.pp * plan.cp * plan.dp;
        const bool experts = plan::field_text(plan, "ep") == "1" && !plan.model->kinds.empty() &&
                             std::any_of(plan.model->kinds.begin(), plan.model->kinds.end(),
                                         [](const model::LayerKind& kind) { return kind.moe.has_value(); });
        if (experts) plan.ep = 2 * power(32);
        if (experts && chance(0.2)) plan.etp = plan.tp;
        plan.edp = std::max(1, plan.gpus / (plan.ep * plan.etp * plan.pp));
        if (plan.pp > 1 && chance(0.5)) plan.vpp = 2 * power(2);
        plan.schedule = plan.vpp > 1 ? plan::ScheduleKind::interleaved : plan::ScheduleKind::one_f_one_b;
        plan.mbs = chance(0.3) ? 2 : 1;
        plan.gbs = plan.mbs * plan.dp * plan.pp * 4;
        if (chance(0.1)) plan.rank_order = "tp-cp-ep-pp-dp";
    }

    void set(plan::Plan& plan, double share, const char* field, std::initializer_list<const char*> values) {
        if (chance(share)) plan::set_field(plan, field, pick(values));
    }

    void choices(plan::Plan& plan) {
        set(plan, 0.6, "precision", {"fp8-tensor", "fp8-blockwise", "mxfp8", "nvfp4"});
        if (plan.precision == machine::Precision::fp8_tensor) set(plan, 0.4, "fp8_scaling", {"delayed"});
        if (plan.precision != machine::Precision::bf16) set(plan, 0.2, "bf16_layers", {"1+1", "2+0", "0+3"});
        set(plan, 0.3, "gradients", {"bf16"});
        set(plan, 0.5, "optimizer", {"adamw+bf16_moments", "adamw+bf16_moments", "adamw+fp8_exp_avg"});
        set(plan, 0.5, "recompute",
            {"full", "layernorm", "core_attn", "moe_act+layernorm", "mla_up_proj", "moe", "mlp"});
        set(plan, 0.1, "offload", {"optimizer", "core_attn+attn_proj", "expert_fc1+moe_act"});
        set(plan, 0.1, "fsdp", {"on"});
        if (plan.ep * plan.etp > 1) set(plan, 0.6, "dispatcher", {"deepep", "hybridep", "allgather"});
        if (plan.cp > 1) set(plan, 0.4, "cp_comm", {"alltoall"});
        set(plan, 0.1, "tp_overlap", {"on"});
        if (plan.vpp > 1 || plan.pp == 1) set(plan, 0.3, "ep_overlap", {"on"});
        if (plan.ep_overlap) set(plan, 0.5, "delay_wgrad", {"on"});
        set(plan, 0.3, "cuda_graph", {"attn", "partial", "attn+moe_router", "full", "moe_router+moe_preprocess"});
        if (plan.cuda_graph == plan::CudaGraph::full) set(plan, 0.7, "capacity", {"1.5"});
        if (plan.capacity > 0.0) set(plan, 0.7, "paged_stash", {"on"});
        set(plan, 0.1, "documents", {"mask"});
        if (plan.ep > 1) router(plan);
        const auto sparse = [](const model::LayerKind& kind) { return kind.attention.sparse(); };
        if (std::none_of(plan.model->kinds.begin(), plan.model->kinds.end(), sparse)) return;
        set(plan, 0.7, "indexer_loss", {"none", "0.001", "0.01"});
        if (plan.indexer.loss > 0.0) set(plan, 0.5, "indexer_stage", {"dense_loss"});
    }

    void router(plan::Plan& plan) {
        set(plan, 0.3, "balance", {"forced"});
        set(plan, 0.3, "aux_loss", {"0.01", "0.001", "1e-05"});
        if (plan.router.aux_loss > 0.0) set(plan, 0.4, "load_balancing", {"aux_loss", "global_aux_loss"});
        if (plan.router.aux_loss == 0.0 && !plan.router.forced) set(plan, 0.2, "load_balancing", {"sinkhorn"});
        set(plan, 0.1, "z_loss", {"0.001"});
        set(plan, 0.1, "input_jitter", {"0.01"});
        set(plan, 0.3, "bias_update", {"0.001", "0.01"});
        set(plan, 0.1, "expert_capacity", {"1.5"});
        if (plan.router.expert_capacity > 0.0) set(plan, 0.5, "drop_policy", {"position"});
    }

    const Engine& engine_;
    std::mt19937_64 random_;
};

// Fields that differ, but for graphs of modules that the engine's words do not tell apart: these are read as `partial`.
std::string difference(const plan::Plan& from, const plan::Plan& to) {
    std::string text;
    for (const plan::FieldChange& change : plan::differences(from, to)) {
        const bool graph = change.field == "cuda_graph" && change.from != "none" && change.to != "none" &&
                           change.from != "full" && change.to != "full" && change.from != "partial";
        if (!graph) text += fmt::format("{} {} -> {}; ", change.field, change.from, change.to);
    }
    return text;
}

// Writes a plan and reads it again: no field differs, nothing is left unknown, and written again it is the same file.
// False where the engine refuses the plan by name.
bool goes_round(const Engine& engine, const plan::Plan& plan, const std::string& which) {
    const int per_node = 4;
    tools::EngineLaunch launch;
    try {
        if (plan::check_plan(plan)) return false;
        launch = engine.launch(plan, {"job", plan.gpus / per_node, per_node});
    } catch (const Error&) {
        return false;
    }
    const test::Folder folder;
    folder.write(engine.file, launch.text);
    tools::ImportRequest request;
    request.files = {folder.file(engine.file)};
    request.from = engine.name;
    if (!engine.names_model) request.model = plan.model->name;
    request.hardware = plan.hardware->name;
    request.stack = plan.stack;
    request.gpus = plan.gpus;
    const tools::Import import = tools::import_plan(request);
    const std::string differs = difference(tools::told(plan), tools::told(import.plan));
    CHECK_MESSAGE(differs.empty(), std::string(engine.name) << ", " << which << ": " << differs);
    CHECK_MESSAGE(import.unknown.empty(), std::string(engine.name)
                                              << ": " << (import.unknown.empty() ? "" : import.unknown[0].setting));
    const bool same = engine.launch(import.plan, {"job", plan.gpus / per_node, per_node}).text == launch.text;
    CHECK_MESSAGE((same || !differs.empty()), std::string(engine.name) << ", " << which << ": written otherwise");
    return true;
}

} // namespace

TEST_CASE("import: what launch writes of a plan is read as that plan") {
    const std::uint64_t seed = environment("MOE_PLAN_SEED", 1), asked = environment("MOE_PLAN_ROUND_TRIPS", draws(40));
    for (const Engine& engine : engines()) {
        Plans plans(engine, seed);
        std::uint64_t written = 0;
        for (std::uint64_t tries = 0; written < asked && tries < asked * 400; ++tries) {
            const plan::Plan plan = plans.next();
            written += goes_round(engine, plan,
                                  fmt::format("MOE_PLAN_SEED={}, try {}, {} with pp {} and vpp {}", seed, tries,
                                              plan.model->name, plan.pp, plan.vpp));
        }
        CHECK_MESSAGE(written == asked, std::string(engine.name) << ": " << written << " plans of " << asked);
    }
}

TEST_CASE("import: choices that random plans do not reach go round as well") {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model("DeepSeek-V3"));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    plan.stack = "bridge-26.04";
    plan.seq = 65536;
    plan.gpus = 256, plan.cp = 16, plan.dp = 2, plan.pp = 8, plan.ep = 32;
    plan.layout = "Et*8|(t*8|)*6t*5mL";
    plan.gbs = 64;
    plan.cp_comm = plan::ContextComm::hierarchical;
    REQUIRE(plan::check_plan(plan).message == "");
    for (const Engine& engine : engines()) {
        const bool megatron = std::string(engine.name).rfind("megatron", 0) == 0;
        CHECK_MESSAGE(goes_round(engine, plan, "cp_comm") == megatron, engine.name);
    }
    plan::Plan hybrid;
    hybrid.model = std::make_shared<const model::Model>(families::load_model("Nemotron-3-Nano"));
    hybrid.hardware = plan.hardware;
    hybrid.stack = "bridge-26.08";
    hybrid.seq = 8192;
    hybrid.gpus = 16, hybrid.pp = 2, hybrid.dp = hybrid.ep = 8;
    hybrid.gbs = 512;
    for (const char* layout : {"Et*28|t*24L", "Etttt|(tttt|)*12L"}) {
        hybrid.layout = layout;
        hybrid.vpp = plan::layout_stage_count(hybrid) / hybrid.pp;
        if (hybrid.vpp > 1) hybrid.schedule = plan::ScheduleKind::interleaved;
        REQUIRE(plan::check_plan(hybrid).message == "");
        CHECK(goes_round(engines()[0], hybrid, layout));
        CHECK(goes_round(engines()[1], hybrid, layout));
    }
    plan::Plan titan;
    titan.model = std::make_shared<const model::Model>(families::load_model("Llama3-8B"));
    titan.hardware = plan.hardware;
    titan.stack = "torchtitan";
    titan.seq = 8192;
    titan.gpus = titan.dp = titan.edp = 8;
    titan.gbs = 16;
    titan.fsdp = true;
    titan.recompute = plan::recompute::operators;
    REQUIRE(plan::check_plan(titan).message == "");
    CHECK(goes_round(engines()[2], titan, "operators"));
    CHECK_FALSE(goes_round(engines()[3], titan, "operators"));
}
