// Draws models, machines, stacks, degrees and features until a plan passes the checks.
#include "tests/simulator/pricing/random_plans.hpp"

#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/bf16_layers.hpp"
#include "planner/plan/plan.hpp"
#include "tests/support/dice.hpp"
#include "tests/support/draws.hpp"

#include <map>
#include <utility>

namespace {

constexpr const char* models[] = {"DeepSeek-V3",  "DeepSeek-V2-Lite", "Qwen3-30B-A3B",    "Qwen3-235B-A22B",
                                  "Mixtral-8x7B", "Qwen2-57B-A14B",   "Llama3-8B",        "GPT-OSS-20B",
                                  "Kimi-K2",      "Nemotron-3-Nano",  "Nemotron-3-Super", "DeepSeek-V3.2",
                                  "GLM-5.2"};
constexpr const char* machines[] = {"h100", "h200", "b200", "gb200-nvl72", "gb300-nvl72"};
constexpr const char* stacks[] = {"bridge-26.08", "bridge-26.04", "mcore-2603.07685", "moe-plan"};

std::shared_ptr<const moe::model::Model> model(const std::string& name) {
    static std::map<std::string, std::shared_ptr<const moe::model::Model>> known;
    auto& entry = known[name];
    if (!entry) entry = std::make_shared<const moe::model::Model>(moe::families::load_model(name));
    return entry;
}

std::shared_ptr<const moe::machine::Hardware> machine(const std::string& name) {
    static std::map<std::string, std::shared_ptr<const moe::machine::Hardware>> known;
    auto& entry = known[name];
    if (!entry) entry = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware(name));
    return entry;
}

bool draw(Dice& random, RandomPlan& out) {
    constexpr int small[] = {1, 1, 2, 4}, wide[] = {1, 2, 4, 8, 16, 32}, pipeline[] = {1, 1, 2, 3, 4, 8},
                  chunks[] = {1, 1, 2, 3, 4};
    constexpr int batches[] = {2, 4, 8, 16, 24, 32}, lengths[] = {2048, 4096, 8192};
    moe::plan::Plan p;
    p.model = model(random.of(models));
    p.hardware = machine(random.of(machines));
    const std::string stack = random.of(stacks);
    if (stack == "moe-plan" && p.hardware->compute_capability > 10.0) return false; // its kernels are not for it
    out.stack = moe::stack::load_stack(stack, *p.hardware);
    p.stack = out.stack.name;
    p.tp = random.of(small);
    p.cp = random.of(small);
    p.pp = random.of(pipeline);
    p.dp = random.of(wide);
    p.ep = random.of(wide);
    p.etp = random.of(small);
    p.vpp = random.of(chunks);
    p.mbs = random.of(small);
    p.seq = random.of(lengths);
    Dice wider = random; // a draw that leaves the other plans of a seed as they are
    wider.next();
    if (out.stack.executable && wider.next() % 3 == 0) p.tp *= 4; // beyond the key heads of some models
    p.gpus = p.tp * p.cp * p.pp * p.dp;
    if (p.gpus / p.pp % (p.ep * p.etp) != 0) return false;
    p.edp = p.gpus / p.pp / (p.ep * p.etp);
    p.schedule = p.vpp > 1 ? moe::plan::ScheduleKind::interleaved : moe::plan::ScheduleKind::one_f_one_b;
    p.gbs = p.dp * p.mbs * random.of(batches) * (p.vpp > 1 ? p.pp : 1);
    p.precision = random.of(out.stack.precisions);
    p.recompute = random.of(out.stack.recompute_sets);
    p.dispatcher = random.of(out.stack.dispatchers);
    p.cuda_graph = random.of(out.stack.cuda_graphs);
    p.ep_overlap = random.next() % 8 == 0;
    p.fsdp = !out.stack.executable && random.next() % 4 == 0;
    p.gradients =
        !out.stack.executable && random.next() % 8 == 0 ? moe::machine::Precision::bf16 : moe::machine::Precision::fp32;
    if (random.next() % 4 == 0) p.capacity = 1.5;
    p.paged_stash = p.capacity > 0.0 && random.next() % 2 == 0;
    p.memory_efficient_permutation = p.fsdp || random.next() % 8 != 0;
    if (!out.stack.executable && random.next() % 4 == 0) {
        p.attention_precision = moe::machine::Precision::fp8_tensor;
        if (p.precision != moe::machine::Precision::bf16) p.head_precision = p.precision;
        p.expert_precision = random.of(out.stack.precisions);
        p.fp8_scaling = random.next() % 2 == 0 ? moe::plan::Fp8Scaling::current : moe::plan::Fp8Scaling::delayed;
    }
    p.fp8_wgrad = p.precision == moe::machine::Precision::fp8_blockwise && p.blocks_by_rows() && random.next() % 2 == 0;
    p.tp_overlap = !out.stack.executable && p.tp > 1 && random.next() % 3 == 0;
    if (!out.stack.executable && p.cp > 1 && random.next() % 3 == 0) p.cp_comm = moe::plan::ContextComm::alltoall;
    if (!out.stack.executable && random.next() % 3 == 0) {
        constexpr unsigned sets[] = {
            moe::plan::offload::optimizer, moe::plan::offload::expert_fc1 | moe::plan::offload::moe_act,
            moe::plan::offload::attn_norm | moe::plan::offload::core_attn | moe::plan::offload::attn_proj,
            moe::plan::offload::qkv_linear | moe::plan::offload::mlp_norm | moe::plan::offload::optimizer,
            moe::plan::offload::expert_fc1 | moe::plan::offload::optimizer};
        p.offload = random.of(sets);
    }
    Dice apart = random;
    apart.next();
    // Under FSDP closed forms count the buffers of both kinds of layers all the time.
    if (!out.stack.executable && !p.reshards() && p.precision > moe::machine::Precision::bf16 && apart.next() % 4 == 0)
        moe::plan::keep_in_bf16(p, 1, static_cast<int>(p.model->layers.size()) / 8);
    Dice aside = random; // a draw that leaves the other plans of a seed as they are
    p.delay_wgrad = !out.stack.executable && (p.ep_overlap || p.pp > 1) && aside.next() % 8 == 0;
    if (aside.next() % 8 == 0) {
        p.documents = moe::plan::Documents::mask;
        p.lengths = "300:40+2500:6+20000:1";
    }
    p.optimizer.muon = out.stack.muon && aside.next() % 3 == 0;
    if (out.stack.executable && p.pp == 1 && !p.ep_overlap && !p.optimizer.muon && aside.next() % 2 == 0) {
        p.fsdp = p.precision == moe::machine::Precision::bf16;
        const bool whole = p.edp == 1 || p.edp % 2 == 0;
        if (p.fsdp && p.dp % 2 == 0 && whole && aside.next() % 2 == 0) p.fsdp_replicas = 2;
        if (aside.next() % 4 == 0) p.gradients = moe::machine::Precision::bf16;
    }
    if (out.stack.executable && p.precision <= moe::machine::Precision::bf16 && !p.optimizer.muon && !p.fsdp &&
        aside.next() % 3 == 0)
        p.lora = moe::plan::lora_from_string(aside.next() % 2 == 0 ? "16" : "8:8:attention+experts");
    if (out.stack.executable && p.precision <= moe::machine::Precision::bf16 && !p.optimizer.muon) {
        if (aside.next() % 4 == 0) p.offload |= moe::plan::offload::optimizer_step;
        if (aside.next() % 4 == 0) p.optimizer.moments = moe::plan::Moments::fp8;
    }
    if (moe::plan::check_plan(p) || moe::stack::check_stack(p, out.stack)) return false;
    // The choices of plan.json, which ends with the whole model and hardware.
    out.text = moe::plan::plan_to_json(p);
    out.text.resize(out.text.find("\"model\":"));
    std::erase_if(out.text, [](char c) { return c == ' ' || c == '\n' || c == '"'; });
    out.text = p.model->name + " " + p.hardware->name + " " + out.text;
    out.plan = std::move(p);
    return true;
}

} // namespace

std::vector<RandomPlan> random_plans(std::uint64_t seed, std::size_t count) {
    Dice random(seed * 2 + 1);
    std::vector<RandomPlan> plans;
    while (plans.size() < count) {
        RandomPlan next;
        if (draw(random, next)) plans.push_back(std::move(next));
    }
    return plans;
}

std::uint64_t seed_of_run() { return environment("MOE_PLAN_SEED", 1); }
