// Passes that change where things wait and in which order they are computed: not one bit of the training, and exactly
// the planned bytes of memory.
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/program/peer_blocks.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/support/draws.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>

using namespace moe;

namespace {

Fields with(Fields fields, const char* field, const char* value) {
    fields.emplace_back(field, value);
    return fields;
}

// Bytes of a rank's saved activations by name.
std::map<std::string, std::int64_t> saved(const program::Program& program, const memory::MemoryPlan& memory) {
    std::map<std::string, std::int64_t> found;
    for (std::size_t id = 0; id < program.tensors.size(); ++id) {
        const memory::Place& place = memory.places[id];
        if (place.memory_class != memory::MemoryClass::saved || place.block < 0) continue;
        found[program.tensors[id].name] += memory::aligned(program.tensors[id].bytes());
    }
    return found;
}

std::int64_t held(const memory::MemoryPlan& memory, memory::MemoryClass of) {
    return memory.class_bytes[static_cast<std::size_t>(of)];
}

// One micro-batch in flight and one chunk per rank: what is saved is there once, and bytes can be added up.
const Fields base{{"tp", "2"}, {"ep", "4"}, {"mbs", "2"}};

struct Freed {
    std::string field, value;
    std::vector<std::string> tensors; // that are no longer saved, by the end of their names
};

bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// The pass changes no bit; of what was saved exactly `tensors` is gone, and nothing else came.
void check_freed(const std::string& model, const Freed& freed) {
    INFO(model, " ", freed.field, "=", freed.value);
    const plan::Plan before = small_plan(model, 8, base),
                     after = small_plan(model, 8, with(base, freed.field.c_str(), freed.value.c_str()));
    const Trained expected = train_three(before), got = train_three(after);
    CHECK(got.losses == expected.losses);
    CHECK(got.gradients == expected.gradients);
    CHECK(got.weights == expected.weights);

    const program::Program old_program = lower::lower(before, 0), new_program = lower::lower(after, 0);
    const memory::MemoryPlan old_memory = memory::plan_memory(old_program),
                             new_memory = memory::plan_memory(new_program);
    REQUIRE(old_program.in_flight == std::vector<int>{1}); // so that bytes of layers just add up
    const auto was = saved(old_program, old_memory), is = saved(new_program, new_memory);
    std::int64_t bytes = 0;
    std::set<std::string> seen;
    for (const auto& [name, size] : was) {
        if (is.count(name) > 0) continue;
        const auto found = std::find_if(freed.tensors.begin(), freed.tensors.end(),
                                        [&, &name = name](const std::string& end) { return ends_with(name, end); });
        CHECK_MESSAGE(found != freed.tensors.end(), name);
        if (found != freed.tensors.end()) seen.insert(*found);
        bytes += size;
    }
    CHECK(seen.size() == freed.tensors.size());
    for (const auto& [name, size] : is) CHECK_MESSAGE(was.count(name) == 1, name);
    CHECK(bytes > 0);
    CHECK(held(old_memory, memory::MemoryClass::saved) - held(new_memory, memory::MemoryClass::saved) == bytes);
    // The engine allocates what was planned.
    const train::Trainer trainer(after, {});
    std::int64_t largest = 0;
    for (int stage = 0; stage < after.pp; ++stage)
        largest = std::max(largest, memory::plan_memory(lower::lower(after, stage)).arena_bytes);
    CHECK(trainer.memory_gib() == static_cast<double>(largest) / (1 << 30));
}

} // namespace

TEST_CASE("recompute by module: the same bits, and what the module wrote is no longer saved") {
    check_freed("qwen3", {"recompute", "layernorm", {".attn_norm", ".attn_norm.rstd", ".moe_norm", ".moe_norm.rstd"}});
    check_freed("qwen3", {"recompute", "core_attn", {".attn_out", ".attn_lse"}});
    check_freed("qwen3", {"recompute", "moe_act", {".expert_act"}});
    check_freed("deepseek3", {"recompute", "mla_up_proj", {".q", ".k", ".v"}});
    check_freed("deepseek3", {"recompute", "mlp", {".mlp_fc1", ".mlp_act"}});
    check_freed("qwen2",
                {"recompute", "shared_experts", {".shared_fc1", ".shared_act", ".shared_fc2_local", ".shared_gate"}});
}

TEST_CASE("recompute whole layers: the same bits, and of a layer only what comes in and goes out is saved") {
    const auto outside = [](const std::string& name) {
        const auto dot = name.find('.');
        return name.compare(0, 5, "layer") != 0 || ends_with(name, ".moe_residual") ||
               (dot != std::string::npos && ends_with(name, ".mlp_residual"));
    };
    for (const char* model : {"qwen3", "qwen2", "deepseek3", "gptoss", "mixtral"}) {
        const plan::Plan plan = small_plan(model, 8, base);
        const program::Program program = lower::lower(plan, 0);
        Freed freed{"recompute", "full", {}};
        for (const auto& [name, bytes] : saved(program, memory::plan_memory(program)))
            if (!outside(name)) freed.tensors.push_back(name);
        CHECK(freed.tensors.size() > 4 * 10);
        check_freed(model, freed);
    }
}

TEST_CASE("routing weights behind FC2: its output is saved as well, in exactly its bytes") {
    for (const char* model : {"qwen3", "deepseek3", "gptoss"}) {
        INFO(model);
        const plan::Plan early = small_plan(model, 8, base),
                         late = small_plan(model, 8, with(base, "memory_efficient_permutation", "off"));
        CHECK(disagreement(train_three(late), train_three(early), parity_tolerance, parity_tolerance) == "");
        const program::Program before = lower::lower(early, 0), after = lower::lower(late, 0);
        const auto was = saved(before, memory::plan_memory(before)), is = saved(after, memory::plan_memory(after));
        std::int64_t more = 0;
        for (const auto& [name, bytes] : is)
            if (was.count(name) == 0) {
                CHECK_MESSAGE(ends_with(name, model == std::string("gptoss") ? ".expert_fc2_bias" : ".expert_fc2"),
                              name);
                more += bytes;
            }
        for (const auto& [name, bytes] : was) CHECK_MESSAGE(is.count(name) == 1, name);
        CHECK(more > 0);
        CHECK(held(memory::plan_memory(after), memory::MemoryClass::saved) -
                  held(memory::plan_memory(before), memory::MemoryClass::saved) ==
              more);
        const train::Trainer trainer(late, {});
        CHECK(trainer.memory_gib() == static_cast<double>(memory::plan_memory(after).arena_bytes) / (1 << 30));
    }
}

TEST_CASE("offload by module: the same bits, and what the module reads waits on the host instead") {
    check_freed("qwen3", {"offload", "attn_norm", {"embedding_local", ".moe_residual"}});
    check_freed("qwen3", {"offload", "mlp_norm", {".attn_residual"}});
    check_freed("qwen3", {"offload", "qkv_linear", {".attn_norm"}});
    check_freed("qwen3", {"offload", "core_attn", {".qkv_rope"}});
    check_freed("qwen3", {"offload", "attn_proj", {".attn_out"}});
    check_freed("qwen3", {"offload", "expert_fc1", {".expert_in.sorted"}});
    check_freed("qwen3", {"offload", "moe_act", {".expert_fc1"}});
}

TEST_CASE("offloaded activations lie on the host once per micro-batch in flight") {
    const Fields pipeline{{"pp", "2"}, {"ep", "2"}, {"offload", "moe_act"}};
    const plan::Plan plan = small_plan("qwen3", 4, pipeline);
    for (const int stage : {0, 1}) {
        const program::Program program = lower::lower(plan, stage);
        std::int64_t bytes = 0;
        for (const program::Tensor& t : program.tensors)
            if (t.storage == program::Storage::host) bytes += memory::aligned(t.bytes());
        CHECK(program.in_flight == std::vector<int>{2 - stage});
        CHECK(memory::plan_memory(program).host_bytes == bytes * (2 - stage));
    }
    const Trained kept = train_three(small_plan("qwen3", 4, {{"pp", "2"}, {"ep", "2"}})), away = train_three(plan);
    CHECK(away.gradients == kept.gradients);
}

TEST_CASE("optimizer states on the host between steps: the same bits, the arena without them") {
    const plan::Plan kept = small_plan("qwen3", 8, base),
                     away = small_plan("qwen3", 8, with(base, "offload", "optimizer"));
    const Trained expected = train_three(kept), got = train_three(away);
    CHECK(got.losses == expected.losses);
    CHECK(got.weights == expected.weights);
    const program::Program program = lower::lower(away, 0);
    const memory::MemoryPlan before = memory::plan_memory(lower::lower(kept, 0)), after = memory::plan_memory(program);
    std::int64_t states = 0;
    for (const program::Bucket& b : program.buckets) states += 3 * memory::aligned(4 * b.elements / b.group_size);
    CHECK(held(before, memory::MemoryClass::optimizer) == states);
    CHECK(held(after, memory::MemoryClass::optimizer) == 0);
    CHECK(after.host_bytes == states);
    CHECK(before.arena_bytes - after.arena_bytes ==
          states - (held(after, memory::MemoryClass::transient) - held(before, memory::MemoryClass::transient)));
}

TEST_CASE("the host steps: the same bits, and the device has no states at all") {
    const std::vector<std::pair<std::string, Fields>> cases{
        {"qwen3", base},
        {"qwen3", with(base, "optimizer", "adamw+bf16_moments")},
        {"qwen3", with(base, "optimizer", "adamw+fp8_exp_avg")},
        {"qwen3", {{"precision", "bf16"}, {"ep", "4"}, {"pp", "2"}, {"gradients", "bf16"}}},
        {"qwen3", {{"fsdp", "on"}, {"ep", "2"}, {"tp", "2"}}},
        {"qwen3", {{"lora", "4"}, {"tp", "2"}, {"ep", "4"}}},
        {"qwen3", {{"ep", "4"}, {"capacity", "1"}}}, // steps are run again
        {"deepseek3-mtp", {{"pp", "2"}, {"vpp", "2"}, {"schedule", "zb-v"}, {"tp", "2"}, {"ep", "2"}}},
        {"gptoss", {{"ep", "4"}, {"cp", "2"}, {"mbs", "2"}, {"z_loss", "0.01"}}},
    };
    for (const auto& one : thinned(cases)) {
        const std::string model = one.first;
        CAPTURE(model);
        const plan::Plan kept = small_plan(model, 8, one.second);
        plan::Plan away = kept;
        away.offload |= plan::offload::optimizer_step;
        REQUIRE_FALSE(static_cast<bool>(plan::check_plan(away)));
        const Trained expected = train_three(kept), got = train_three(away);
        CHECK(got.losses == expected.losses);
        CHECK(got.weights == expected.weights);
        for (int stage = 0; stage < away.pp; ++stage) {
            const program::Program with_states = lower::lower(kept, stage), without = lower::lower(away, stage);
            const memory::MemoryPlan before = memory::plan_memory(with_states), after = memory::plan_memory(without);
            const std::int64_t states = held(before, memory::MemoryClass::optimizer);
            CHECK(states > 0);
            CHECK(held(after, memory::MemoryClass::optimizer) == 0);
            CHECK(before.arena_bytes - after.arena_bytes == states); // nothing comes back for the step
            CHECK(after.host_bytes - before.host_bytes > states);
        }
    }
}

TEST_CASE("the host steps: a bad step changes nothing, and the next one goes on from there") {
    struct Steps {
        std::vector<double> losses;
        int skipped = 0;
        bool operator==(const Steps&) const = default;
    };
    const auto run = [](const Fields& fields) {
        train::TrainOptions options;
        options.skip_bad = true;
        options.spike = 0.98; // of the median: every other step or so is one
        train::Trainer trainer(small_plan("qwen3", 4, fields), options);
        const train::SampleSource source = made_up_tokens(61);
        Steps steps;
        for (int step = 0; step < 12; ++step) {
            const train::StepResult result = trainer.step(source);
            steps.losses.push_back(result.loss);
            steps.skipped += result.skipped ? 1 : 0;
        }
        return steps;
    };
    const Steps device = run({{"ep", "4"}});
    CHECK(device.skipped > 0);
    CHECK(device.skipped < 11);
    CHECK(run({{"ep", "4"}, {"offload", "optimizer_step"}}) == device);
}

TEST_CASE("the host steps: what needs masters or matrices on the device is refused by its field") {
    const auto refused = [](const std::string& model, const Fields& fields) {
        try {
            small_plan(model, 4, fields);
        } catch (const Error& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    const auto names = [](const std::string& message, const char* words) {
        CAPTURE(message);
        return message.find(words) != std::string::npos;
    };
    CHECK(names(refused("qwen3", {{"offload", "optimizer+optimizer_step"}}), "leave optimizer out"));
    CHECK(names(refused("qwen3", {{"offload", "optimizer_step"}, {"optimizer", "muon"}}), "optimizer = muon"));
    CHECK(names(refused("qwen3", {{"offload", "optimizer_step"}, {"precision", "fp8-blockwise"}}), "fp8-blockwise"));
    CHECK(names(refused("deepseek3", {{"offload", "optimizer_step"}, {"bias_update", "0.01"}}),
                "excludes offload = optimizer_step"));
    CHECK(refused("deepseek3", {{"offload", "optimizer_step"}}).empty());
}

TEST_CASE("moments of FP8: training follows FP32's, and exp_avg takes 33/32 of a byte") {
    const plan::Plan wide = small_plan("qwen3", 8, base),
                     narrow = small_plan("qwen3", 8, with(base, "optimizer", "adamw+fp8_exp_avg"));
    const Trained expected = train_three(wide), got = train_three(narrow);
    CHECK(got.losses.front() == expected.losses.front());
    CHECK(disagreement(got, expected, 1e-3, 1e-2) == "");
    CHECK(got.weights != expected.weights);
    const program::Program program = lower::lower(narrow, 0);
    std::int64_t less = 0;
    for (const program::Bucket& b : program.buckets) {
        const std::int64_t own = b.elements / b.group_size;
        less += memory::aligned(4 * own) - memory::aligned(own + own / 32) + memory::aligned(4 * own) -
                memory::aligned(2 * own);
    }
    CHECK(memory::plan_memory(lower::lower(wide, 0)).arena_bytes - memory::plan_memory(program).arena_bytes == less);
}

TEST_CASE("moments of FP8: every plan trains what one rank trains") {
    const Fields fp8{{"optimizer", "adamw+fp8_exp_avg"}};
    for (const std::string model : {"qwen3", "deepseek3", "gptoss"}) {
        const Trained one = train_three(small_plan(model, 1, fp8));
        for (const Fields& fields : thinned(std::vector<Fields>{{{"tp", "2"}, {"ep", "4"}},
                                                                {{"cp", "2"}, {"pp", "2"}},
                                                                {{"fsdp", "on"}, {"ep", "8"}},
                                                                {{"tp", "4"}, {"etp", "2"}, {"mbs", "2"}},
                                                                {{"pp", "4"}, {"offload", "optimizer"}}})) {
            Fields all = fp8;
            all.insert(all.end(), fields.begin(), fields.end());
            CAPTURE(model);
            CHECK(disagreement(train_three(small_plan(model, 8, all)), one, 1e-4, 1e-3) == "");
        }
    }
}

TEST_CASE("BF16 moments: the same losses to their rounding, half of the moments' bytes") {
    const plan::Plan wide = small_plan("qwen3", 8, base),
                     narrow = small_plan("qwen3", 8, with(base, "optimizer", "adamw+bf16_moments"));
    const Trained expected = train_three(wide), got = train_three(narrow);
    CHECK(got.losses.front() == expected.losses.front());
    CHECK(disagreement(got, expected, 1e-4, 1e-3) == "");
    CHECK(got.weights != expected.weights);
    const program::Program program = lower::lower(narrow, 0);
    std::int64_t less = 0;
    for (const program::Bucket& b : program.buckets) {
        const std::int64_t own = b.elements / b.group_size;
        less += 2 * (memory::aligned(4 * own) - memory::aligned(2 * own));
    }
    CHECK(memory::plan_memory(lower::lower(wide, 0)).arena_bytes - memory::plan_memory(program).arena_bytes == less);
}

TEST_CASE("delayed weight gradients: they leave multiprocessors to the tokens that they run beside") {
    const plan::Plan plan = small_plan("qwen3", 2, {{"ep", "2"}, {"dispatcher", "hybridep"}, {"delay_wgrad", "on"}});
    const program::Program program = lower::lower(plan, 0);
    int exchanges = 0, products = 0;
    for (const program::Template& t : program.templates) {
        if (t.kind != plan::SlotKind::backward) continue;
        bool left = false; // the layer's tokens
        for (const program::Op& op : t.ops) {
            if (op.kind == program::OpKind::dispatch_tokens) left = false;
            if (op.kind == program::OpKind::combine_tokens) {
                CHECK(std::get<program::RowsAttr>(op.attr).beside);
                left = true;
                ++exchanges;
            }
            if (op.kind != program::OpKind::grouped_gemm) continue;
            const bool delayed = op.phase == program::Phase::wgrad;
            CHECK(delayed == left);
            CHECK(std::get<program::GroupedGemmAttr>(op.attr).reserved_sms ==
                  (delayed ? program::peer_blocks_beside : 0));
            products += delayed ? 1 : 0;
        }
    }
    CHECK(exchanges > 0);
    CHECK(products == 2 * exchanges);
    const Trained expected = train_three(small_plan("qwen3", 2, {{"ep", "2"}, {"dispatcher", "hybridep"}}));
    check_bits(train_three(plan), expected);
}

TEST_CASE("delayed weight gradients: another order, the same bits") {
    for (const char* model : {"qwen3", "deepseek3"}) {
        const Fields fields{{"tp", "2"}, {"pp", "2"}, {"ep", "4"}, {"mbs", "2"}};
        const plan::Plan plan = small_plan(model, 8, fields),
                         delayed = small_plan(model, 8, with(fields, "delay_wgrad", "on"));
        const auto order = [](const plan::Plan& p) {
            std::string text;
            for (const program::Template& t : lower::lower(p, 1).templates)
                if (t.kind == plan::SlotKind::backward)
                    for (const program::Op& op : t.ops)
                        text += fmt::format("{} {};", program::to_string(op.kind), program::to_string(op.phase));
            return text;
        };
        CHECK(order(plan) != order(delayed));
        const Trained expected = train_three(plan), got = train_three(delayed);
        CHECK(got.gradients == expected.gradients);
        CHECK(got.weights == expected.weights);
    }
}
