// Plans that exercise every lowering choice: attention and router kinds, every axis, precisions, recompute, schedules.
#include "tests/planner/plan/sample_plans.hpp"

#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"

namespace {

moe::plan::Plan make(const char* model, const char* hardware, int gpus, std::int64_t gbs,
                     std::vector<std::pair<const char*, const char*>> fields) {
    moe::plan::Plan plan;
    plan.model = std::make_shared<moe::model::Model>(moe::families::load_model(model));
    plan.hardware = std::make_shared<moe::machine::Hardware>(moe::machine::load_hardware(hardware));
    plan.stack = plan.hardware->default_stack;
    plan.gpus = gpus;
    plan.gbs = gbs;
    plan.seq = 4096;
    for (const auto& [field, value] : fields) moe::plan::set_field(plan, field, value);
    plan.dp = gpus / (plan.tp * plan.cp * plan.pp);
    plan.edp = gpus / (plan.ep * plan.etp * plan.pp);
    return plan;
}

} // namespace

std::vector<moe::plan::Plan> sample_plans() {
    std::vector<moe::plan::Plan> plans;
    plans.push_back(make("Qwen3-30B-A3B", "h100", 8, 32, {{"ep", "8"}}));
    plans.push_back(make("Qwen3-30B-A3B", "h100", 8, 32,
                         {{"ep", "8"}, {"recompute", "layernorm+moe_act+core_attn"}, {"dispatcher", "alltoall"}}));
    plans.push_back(make("Qwen3-30B-A3B", "h100", 16, 32,
                         {{"tp", "4"}, {"ep", "2"}, {"etp", "2"}, {"pp", "2"}, {"recompute", "full"}}));
    plans.push_back(make("Qwen3-30B-A3B", "h100", 16, 32, {{"cp", "2"}, {"ep", "16"}, {"dispatcher", "deepep"}}));
    plans.push_back(make("DeepSeek-V3", "gb200-nvl72", 256, 4096,
                         {{"ep", "64"},
                          {"pp", "4"},
                          {"vpp", "4"},
                          {"schedule", "interleaved"},
                          {"layout", "Et*4|(tttt|)*14tmL"},
                          {"precision", "mxfp8"},
                          {"dispatcher", "hybridep"}}));
    plans.push_back(make("DeepSeek-V3", "h100", 1024, 8192,
                         {{"tp", "2"},
                          {"ep", "64"},
                          {"pp", "8"},
                          {"vpp", "4"},
                          {"schedule", "interleaved"},
                          {"layout", "Et*3|(tt|)*29m|L"},
                          {"precision", "fp8-blockwise"},
                          {"recompute", "mla_up_proj+mlp"}}));
    plans.push_back(
        make("DeepSeek-V2-Lite", "h100", 8, 32, {{"tp", "2"}, {"ep", "4"}, {"etp", "2"}, {"dispatcher", "allgather"}}));
    plans.push_back(make("GLM-5.2", "gb200-nvl72", 192, 3072,
                         {{"pp", "6"},
                          {"ep", "32"},
                          {"layout", "Et*10|t*12|t*12|t*12|t*16|t*16mL"},
                          {"precision", "mxfp8"},
                          {"dispatcher", "hybridep"}}));
    plans.push_back(make("DeepSeek-V3.2", "h100", 256, 512,
                         {{"tp", "2"}, {"cp", "2"}, {"ep", "64"}, {"pp", "2"}, {"recompute", "full"}}));
    plans.push_back(make("Nemotron-3-Super", "gb200-nvl72", 64, 512,
                         {{"tp", "2"}, {"ep", "64"}, {"precision", "mxfp8"}, {"dispatcher", "hybridep"}}));
    plans.push_back(make("Nemotron-3-Nano", "h100", 16, 32,
                         {{"pp", "2"}, {"ep", "8"}, {"recompute", "layernorm+moe_act"}, {"dispatcher", "deepep"}}));
    plans.push_back(make("Mixtral-8x7B", "h100", 16, 64,
                         {{"tp", "2"}, {"ep", "8"}, {"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}}));
    plans.push_back(make("Qwen2-57B-A14B", "b200", 16, 64,
                         {{"tp", "4"}, {"ep", "4"}, {"precision", "nvfp4"}, {"recompute", "moe"}}));
    plans.push_back(make("GPT-OSS-20B", "h200", 8, 32, {{"ep", "4"}, {"tp", "2"}}));
    plans.push_back(make("Llama3-8B", "h100", 8, 32,
                         {{"tp", "2"}, {"pp", "2"}, {"precision", "fp8-tensor"}, {"recompute", "mlp"}}));
    plans.push_back(make("Llama4-Scout", "b200", 64, 128, {{"ep", "16"}}));
    plans.push_back(make("Qwen3-Next-80B-A3B", "h200", 64, 128, {{"ep", "32"}}));
    plans.push_back(make("DeepSeek-V4-Flash", "gb300-nvl72", 128, 256, {{"ep", "64"}}));
    plans.push_back(make("Grok-1", "h100", 64, 128, {{"tp", "4"}, {"ep", "8"}, {"pp", "4"}}));
    plans.push_back(make("Nemotron-4-340B", "b200", 64, 128, {{"tp", "8"}, {"pp", "4"}}));
    plans.push_back(make("Qwen2-57B-A14B", "b200", 16, 64,
                         {{"ep", "4"}, {"precision", "nvfp4"}, {"recompute", "moe"}, {"fsdp", "on"}}));
    plans.push_back(make("DeepSeek-V3", "gb200-nvl72", 128, 256,
                         {{"ep", "64"}, {"tp", "2"}, {"recompute", "full"}, {"fsdp", "on"}, {"gradients", "bf16"}}));
    plans.push_back(make("Llama3-8B", "b200", 16, 32,
                         {{"tp", "4"},
                          {"cp", "2"},
                          {"precision", "mxfp8"},
                          {"tp_overlap", "on"},
                          {"cp_comm", "alltoall"},
                          {"recompute", "full"}}));
    plans.push_back(make("DeepSeek-V3", "h100", 256, 512,
                         {{"tp", "2"}, {"cp", "4"}, {"ep", "64"}, {"tp_overlap", "on"}, {"cp_comm", "alltoall"}}));
    return plans;
}

std::shared_ptr<moe::model::Model> small_moe_model(int layers) {
    auto model = std::make_shared<moe::model::Model>();
    model->name = "small";
    model->hidden = 256;
    model->vocab = 4096;
    moe::model::LayerKind kind;
    kind.attention.heads = 8;
    kind.attention.kv_heads = 4;
    kind.attention.qk_dim = kind.attention.v_dim = 32;
    kind.moe = moe::model::Moe{};
    kind.moe->experts = 16;
    kind.moe->top_k = 2;
    kind.moe->ffn = 96;
    model->kinds = {kind};
    model->layers.assign(static_cast<std::size_t>(layers), 0);
    return model;
}
