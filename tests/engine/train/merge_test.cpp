// EP overlap: a forward and the backward of another micro-batch run as one list of ops, and train the same to the bit.
#include "engine/comm/check.hpp"
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/model.hpp"
#include "planner/program/peer_blocks.hpp"
#include "tests/engine/train/parity.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace moe;

namespace {

std::string text(const Fields& fields) {
    std::string out;
    for (const auto& [field, value] : fields) out += field + "=" + value + " ";
    return out;
}

struct Pair {
    plan::Plan apart, merged;
};

Pair pair_of(const std::string& model, int ranks, Fields fields) {
    fields.emplace_back("ep_overlap", "on");
    const plan::Plan merged = small_plan(model, ranks, fields);
    plan::Plan apart = merged;
    apart.ep_overlap = apart.delay_wgrad = false;
    return {apart, merged};
}

// Merged slots of all stages.
int merged_slots(const plan::Plan& plan) {
    int count = 0;
    for (int stage = 0; stage < plan.pp; ++stage)
        for (const program::Slot& slot : lower::lower(plan, stage).slots) count += slot.merge >= 0 ? 1 : 0;
    return count;
}

void check_same(const std::string& model, const Fields& fields) {
    INFO(model, " ", text(fields));
    const auto [apart, merged] = pair_of(model, 8, fields);
    CHECK(merged_slots(apart) == 0);
    CHECK(merged_slots(merged) > 0);
    const Trained expected = train_three(apart), got = train_three(merged);
    check_bits(got, expected);
    CHECK(got.routed == expected.routed);
    const train::Trainer trainer(merged, {});
    std::int64_t largest = 0;
    for (int stage = 0; stage < merged.pp; ++stage)
        largest = std::max(largest, memory::plan_memory(lower::lower(merged, stage)).arena_bytes);
    CHECK(trainer.memory_gib() == static_cast<double>(largest) / (1 << 30));
}

} // namespace

TEST_CASE("EP overlap: the same bits as slot by slot, alone and with what else changes slots") {
    const Fields base{{"tp", "4"}, {"ep", "4"}};
    const auto with = [](Fields fields, std::initializer_list<Fields::value_type> more) {
        fields.insert(fields.end(), more);
        return fields;
    };
    check_same("qwen3", base);
    check_same("qwen3", {{"cp", "2"}, {"tp", "2"}, {"ep", "2"}, {"etp", "2"}});
    check_same("qwen3", with(base, {{"dispatcher", "allgather"}}));
    check_same("qwen3", with(base, {{"delay_wgrad", "on"}, {"recompute", "layernorm+moe_act"}}));
    for (const char* set : {"full", "moe", "core_attn+moe_act"}) check_same("qwen3", with(base, {{"recompute", set}}));
    check_same("qwen3", with(base, {{"offload", "expert_fc1+core_attn+mlp_norm"}}));
    check_same("qwen2", base);
    check_same("gptoss", with(base, {{"recompute", "full"}}));
    check_same("deepseek3", with(base, {{"aux_loss", "0.1"}, {"bias_update", "0.01"}}));
    check_same("deepseek3-mtp", base);
    const Fields interleaved{{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"},
                             {"ep", "2"}, {"etp", "2"}, {"tp", "4"}};
    check_same("qwen3", interleaved);
    check_same("deepseek3", with(interleaved, {{"delay_wgrad", "on"}}));
    check_same("deepseek3-mtp", with(interleaved, {{"recompute", "full"}, {"layout", "Ett|t||tmmL"}}));
    const Fields v{{"pp", "2"}, {"vpp", "2"}, {"schedule", "dualpipe-v"}, {"ep", "2"}, {"tp", "4"}};
    check_same("qwen3", v);
    check_same("deepseek3-mtp", with(v, {{"recompute", "layernorm+moe_act"}}));
    check_same("qwen3", {{"pp", "2"}, {"ep", "2"}, {"tp", "4"}});
    check_same("qwen3", {{"pp", "4"}, {"ep", "2"}, {"tp", "2"}});
}

// A rank waits for a merged turn's inputs before it computes anything of it: that must close no cycle of ranks.
TEST_CASE("EP overlap: every schedule's messages come through, however many stages and micro-batches") {
    const auto model = small_model("qwen3", {{"num_hidden_layers", "32"}});
    int plans = 0;
    for (const int pp : {2, 3, 4, 8})
        for (const int vpp : {1, 2, 4})
            for (const char* schedule : {"1f1b", "interleaved", "dualpipe-v"})
                for (const int groups : {1, 2, 3, 5}) {
                    const std::string kind = schedule;
                    if ((kind == "1f1b") != (vpp == 1) || (kind == "dualpipe-v" && vpp != 2)) continue;
                    const int micro_batches = kind == "dualpipe-v" ? (groups + 1) * pp : groups * pp;
                    INFO("pp ", pp, " vpp ", vpp, " ", kind, " micro-batches ", micro_batches);
                    const plan::Plan plan = small_plan(model, 2 * pp,
                                                       {{"pp", std::to_string(pp)},
                                                        {"schedule", kind},
                                                        {"vpp", std::to_string(vpp)},
                                                        {"ep", "2"},
                                                        {"tp", "2"},
                                                        {"ep_overlap", "on"}},
                                                       {32, micro_batches});
                    std::vector<program::Program> programs;
                    for (int stage = 0; stage < pp; ++stage) programs.push_back(lower::lower(plan, stage));
                    CHECK_NOTHROW(comm::check_communication(programs, plan::Mesh(plan)));
                    ++plans;
                }
    CHECK(plans == 4 * 4 * 4);
}

TEST_CASE("EP overlap: what is measured are the ops of the merged list, in its order") {
    const auto [apart, merged] = pair_of("qwen3", 4, {{"tp", "2"}, {"ep", "4"}});
    train::TrainOptions options;
    train::Trainer trainer(merged, options);
    trainer.step(made_up_tokens(merged.model->vocab));
    const program::Program program = lower::lower(merged, 0);
    const std::vector<program::TimelineRow> rows = trainer.timeline().rows;
    std::size_t row = 0;
    int turns = 0; // from one of two merged slots to the other
    for (program::OpWalk walk(program); !walk.done(); walk.next(), ++row) {
        REQUIRE(row < rows.size());
        REQUIRE(rows[row].rank == 0);
        CHECK(rows[row].slot == static_cast<int>(walk.slot_number()));
        CHECK(rows[row].op == static_cast<int>(walk.index()));
        CHECK(rows[row].kind == walk.op().kind);
        if (row > 0 && rows[row].slot < rows[row - 1].slot) ++turns;
    }
    // Two forwards of four layers beside backwards, in each layer once for every exchange and once at its end.
    CHECK(turns > 2 * 4 * 2);
    CHECK(rows.size() == 4 * row);
}

// Attention of the forward, experts of the backward, experts of the forward, attention of the backward: each sends what
// the next but one reads.
TEST_CASE("EP overlap: tokens travel under what the other slot computes") {
    const program::Program program =
        lower::lower(pair_of("qwen3", 2, {{"ep", "2"}, {"dispatcher", "hybridep"}}).merged, 0);
    std::string exchanges, want; // of the backward in capitals
    int computed = 0;            // products since the last exchange
    for (program::OpWalk walk(program); !walk.done(); walk.next()) {
        const program::OpKind kind = walk.op().kind;
        computed += kind == program::OpKind::gemm || kind == program::OpKind::grouped_gemm;
        if (!walk.merged() || (kind != program::OpKind::dispatch_tokens && kind != program::OpKind::combine_tokens))
            continue;
        const bool backward = walk.ops().kind == plan::SlotKind::backward;
        exchanges += kind == program::OpKind::dispatch_tokens ? (backward ? 'D' : 'd') : (backward ? 'C' : 'c');
        CHECK(computed > 0);
        computed = 0;
    }
    for (int i = 0; i < 4 * merged_slots(pair_of("qwen3", 2, {{"ep", "2"}, {"dispatcher", "hybridep"}}).merged); ++i)
        want += "DdCc";
    CHECK(exchanges == want);
}

TEST_CASE("EP overlap: the first two products of experts behind each departure leave tokens their multiprocessors") {
    const plan::Plan plan = pair_of("qwen3", 2, {{"ep", "2"}, {"dispatcher", "hybridep"}}).merged;
    const program::Program program = lower::lower(plan, 0);
    int products = 2, reserving = 0; // products of experts since tokens left
    for (program::OpWalk walk(program); !walk.done(); walk.next()) {
        const program::OpKind kind = walk.op().kind;
        if (kind == program::OpKind::dispatch_tokens || kind == program::OpKind::combine_tokens) products = 0;
        const bool spares = walk.merged() && kind == program::OpKind::grouped_gemm && products++ < 2;
        CHECK(walk.reserved_sms() == (spares ? program::peer_blocks_beside : 0));
        reserving += spares ? 1 : 0;
    }
    // The backward's two behind the forward's dispatch, and the forward's two behind the backward's combine.
    CHECK(reserving == 4 * 4 * merged_slots(plan));
    const program::Program apart =
        lower::lower(pair_of("qwen3", 2, {{"ep", "2"}, {"dispatcher", "hybridep"}}).apart, 0);
    for (program::OpWalk walk(apart); !walk.done(); walk.next()) CHECK(walk.reserved_sms() == 0);
}
