// TP above the number of key heads: each head on several ranks trains what one rank trains, and is counted and kept
// once.
#include "engine/train/checkpoint_writer.hpp"
#include "engine/weights/checkpoint.hpp"
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/program/program.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>

using namespace moe;

namespace {

struct Case {
    const char* model;
    Fields config; // of the model
    int ranks;
    Fields fields;
};

std::string text(const Case& c) {
    std::string words = fmt::format("{} on {} ranks", c.model, c.ranks);
    for (const Fields* list : {&c.config, &c.fields})
        for (const auto& [field, value] : *list) words.append(" ").append(field).append("=").append(value);
    return words;
}

plan::Plan plan_of(const Case& c) { return small_plan(small_model(c.model, c.config), c.ranks, c.fields); }

plan::Plan one_rank(const Case& c) {
    constexpr std::array trained{"documents", "optimizer", "lora", "aux_loss"};
    Fields fields;
    for (const auto& field : c.fields)
        if (std::find(trained.begin(), trained.end(), field.first) != trained.end()) fields.push_back(field);
    return small_plan(small_model(c.model, c.config), 1, fields);
}

void hold(const std::vector<Case>& cases) {
    for (const Case& c : cases) {
        CAPTURE(text(c));
        const plan::Plan plan = plan_of(c);
        REQUIRE(plan::key_replicas(plan) > 1);
        CHECK(disagreement(train_three(plan), train_three(one_rank(c)), parity_tolerance, parity_tolerance) == "");
    }
}

Fields keys(const char* count) { return {{"num_key_value_heads", count}}; }

} // namespace

TEST_CASE("key heads on several TP ranks: norms, biases, gates, sinks and windows train as on one rank") {
    hold({{"qwen3", {}, 8, {{"tp", "8"}, {"ep", "2"}}},
          {"qwen3", keys("2"), 8, {{"tp", "4"}, {"ep", "4"}, {"etp", "2"}}},
          {"qwen3", keys("1"), 4, {{"tp", "4"}}},
          {"qwen2", keys("2"), 4, {{"tp", "4"}, {"ep", "4"}}},
          {"gptoss", keys("2"), 8, {{"tp", "4"}, {"mbs", "2"}}},
          {"olmoe", keys("2"), 4, {{"tp", "4"}}},
          {"olmoe", keys("1"), 2, {{"tp", "2"}}},
          {"laguna", keys("2"), 4, {{"tp", "4"}}},
          {"qwen3next", keys("2"), 4, {{"tp", "4"}}},
          {"mimo", {}, 8, {{"tp", "8"}, {"ep", "2"}}},
          {"llama", keys("2"), 4, {{"tp", "4"}, {"recompute", "full"}}}});
}

TEST_CASE("key heads on several TP ranks: pipelines, CP, documents, overlap, FSDP, Muon and adapters train the same") {
    hold({{"llama", keys("2"), 8, {{"tp", "4"}, {"pp", "2"}, {"vpp", "2"}, {"schedule", "zb-v"}}},
          {"qwen2", keys("2"), 8, {{"tp", "4"}, {"pp", "2"}, {"schedule", "zero-bubble"}}},
          {"llama", keys("2"), 8, {{"tp", "4"}, {"cp", "2"}, {"documents", "mask"}}},
          {"llama", keys("2"), 4, {{"tp", "4"}, {"tp_overlap", "on"}}},
          {"qwen3", keys("2"), 8, {{"tp", "4"}, {"rank_order", "dp-tp-cp-ep-pp"}, {"offload", "optimizer"}}},
          {"llama", keys("2"), 8, {{"tp", "4"}, {"fsdp", "on"}}},
          {"qwen2", keys("1"), 8, {{"tp", "4"}, {"fsdp", "on"}, {"ep", "2"}}},
          {"llama", keys("2"), 8, {{"tp", "4"}, {"fsdp", "on"}, {"fsdp_replicas", "2"}}},
          {"llama", keys("2"), 4, {{"tp", "4"}, {"optimizer", "muon"}}},
          {"qwen3", keys("2"), 8, {{"tp", "4"}, {"ep", "2"}, {"optimizer", "muon"}}},
          {"llama", keys("1"), 4, {{"tp", "4"}, {"optimizer", "muon"}}},
          {"qwen3", keys("2"), 8, {{"tp", "4"}, {"lora", "4"}}},
          {"laguna", keys("2"), 4, {{"tp", "4"}, {"lora", "3:6:attention"}}}});
}

TEST_CASE("replicated key heads: a rank has one head's weights and products, in an arena of the planned size") {
    const plan::Plan plan = plan_of({"llama", keys("2"), 8, {{"tp", "4"}}});
    const plan::Mesh mesh(plan);
    CHECK(mesh.members({plan::Domain::dense, plan::axis::key_replicas}, 3) == std::vector{2, 3});
    CHECK(mesh.members({plan::Domain::dense, plan::axis::key_parts}, 3) == std::vector{1, 3});
    CHECK(mesh.members({plan::Domain::dense, plan::axis::tensor}, 3) == std::vector{0, 1, 2, 3});
    const program::Program program = lower::lower(plan, 0);
    const model::Attention& a = plan.model->kinds.front().attention;
    for (const program::Parameter& p : program.parameters) {
        if (p.name.find("k_proj") == std::string::npos && p.name.find("v_proj") == std::string::npos) continue;
        CHECK(p.local_rows == a.qk_dim);
        CHECK(program.buckets[static_cast<std::size_t>(p.bucket)].group_size == 4); // two of TP, two of DP
    }
    double flops = 0.0;
    for (const program::Template& ops : program.templates)
        if (ops.kind == plan::SlotKind::forward)
            for (const program::Op& op : ops.ops)
                if (op.kind == program::OpKind::gemm && op.module == program::Module::attn_in && op.layer == 0)
                    flops += op.flops;
    CHECK(flops == doctest::Approx(2.0 * static_cast<double>(plan.tokens_gathered()) *
                                   static_cast<double>(plan.model->hidden) * (a.heads / 4 + 2) * a.qk_dim));
    train::TrainOptions options;
    options.permits = 2;
    train::Trainer trainer(plan, options);
    trainer.step(made_up_samples(plan));
    CHECK(trainer.arena_gib() * (1 << 30) ==
          doctest::Approx(static_cast<double>(memory::plan_memory(program).arena_bytes)));
}

TEST_CASE("replicated key heads: checkpoints hold each weight once and go on under any plan") {
    train::TrainOptions options;
    options.steps = 3;
    options.eps = 1e-3; // see parity.cpp
    options.permits = 2;
    options.ema = 0.5;
    const plan::Plan wide = plan_of({"qwen2", keys("2"), 8, {{"tp", "4"}, {"ep", "2"}}}),
                     narrow = plan_of({"qwen2", keys("2"), 2, {{"tp", "2"}}});
    for (const auto& [from, to] : {std::pair{&wide, &narrow}, std::pair{&narrow, &wide}}) {
        const Folder folder;
        const train::SampleSource source = made_up_samples(*from);
        train::Trainer whole(*from, options);
        whole.step(source);
        train::CheckpointWriter writer(folder / "run", "test");
        writer.save(whole);
        writer.finish();
        whole.step(source);
        std::vector<std::string> skipped;
        const auto stored = weights::newest_checkpoint(folder / "run", skipped);
        REQUIRE(stored != nullptr);
        CHECK(stored->shapes().at("model.layers.0.self_attn.k_proj.weight").rows == 2 * 4);
        train::Trainer other(*to, options);
        other.restore(*stored);
        other.step(source);
        for (const auto& [name, shape] : whole.parameters()) {
            const std::string held_name = name; // no structured binding can be captured
            CAPTURE(held_name);
            CHECK(relative_distance(other.read_weight(name), whole.read_weight(name)) <= parity_tolerance);
        }
    }
}

TEST_CASE("replicated key heads: what is not made for them is refused by its field") {
    const auto refusal = [](const Case& c) { return message([&c] { plan_of(c); }); };
    CHECK(mentions(refusal({"llama", keys("2"), 8, {{"tp", "4"}, {"cp", "2"}, {"cp_comm", "alltoall"}}}),
                   "kv heads = 2"));
    CHECK(mentions(refusal({"llama",
                            {{"num_key_value_heads", "2"}, {"num_attention_heads", "6"}, {"head_dim", "4"}},
                            3,
                            {{"tp", "3"}}}),
                   "num_key_value_heads = 2 is not divisible by tp = 3"));
    const plan::Plan fp8 = small_plan(wide_model("qwen3", keys("2")), 4, {{"tp", "4"}, {"precision", "fp8-blockwise"}});
    CHECK(mentions(plan::check_executable(fp8).message, "precision = fp8-blockwise: tp = 4 is above the 2 key heads"));
}
