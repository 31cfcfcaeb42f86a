// Schedules with split backwards: legal orders, the bubbles and the memory of the papers, and what the split leaves in
// Programs and their memory.
#include "planner/base/error.hpp"
#include "planner/lower/emit/parameters.hpp"
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/split_orders.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/nearly.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>

using namespace moe;

namespace {

// Seconds of one chunk's forward, dgrad and wgrad; a whole backward takes both, a merged pair `pair`.
struct Times {
    double forward = 1.0, dgrad = 1.0, wgrad = 1.0, pair = 0.0;
    double of(const plan::Turn& turn) const {
        switch (turn.kind) {
        case plan::SlotKind::forward:
            return forward;
        case plan::SlotKind::dgrad:
            return dgrad;
        case plan::SlotKind::wgrad:
            return wgrad;
        default:
            return dgrad + wgrad;
        }
    }
};

using Orders = std::vector<std::vector<plan::Turn>>;

Orders orders(plan::ScheduleKind kind, int pp, int micro_batches, bool merged = false) {
    Orders all;
    for (int rank = 0; rank < pp; ++rank)
        all.push_back(plan::order(kind, pp, plan::in_a_v(kind) ? 2 : 1, micro_batches, rank, merged));
    return all;
}

// Plays the ranks against each other, turn by turn; messages take no time.
class Play {
public:
    Play(plan::ScheduleKind kind, const Orders& all, const Times& times) : kind_(kind), all_(all), times_(times) {
        free_.assign(all.size(), 0.0);
        next_.assign(all.size(), 0);
    }
    double run() {
        for (bool moved = true; moved;) {
            moved = false;
            for (int rank = 0; rank < pp(); ++rank)
                while (advance(rank)) moved = true;
        }
        for (int rank = 0; rank < pp(); ++rank) REQUIRE(next_[at(rank)] == all_[at(rank)].size());
        return *std::max_element(free_.begin(), free_.end());
    }

private:
    static std::size_t at(int i) { return static_cast<std::size_t>(i); }
    int pp() const { return static_cast<int>(all_.size()); }

    // The time when the inputs of a turn are there; -1 = not yet.
    double ready(int rank, const plan::Turn& turn) const {
        const int stage = plan::stage_of(kind_, pp(), rank, turn.chunk), stages = pp() * (plan::in_a_v(kind_) ? 2 : 1);
        const auto when = [&](bool forward, int s) {
            const auto found = done_.find({forward, s, turn.micro_batch});
            return found == done_.end() ? -1.0 : found->second;
        };
        if (turn.forward()) return stage == 0 ? 0.0 : when(true, stage - 1);
        if (turn.kind == plan::SlotKind::wgrad) return when(false, stage);
        const double own = when(true, stage), above = stage + 1 == stages ? own : when(false, stage + 1);
        return own < 0.0 || above < 0.0 ? -1.0 : std::max(own, above);
    }
    bool advance(int rank) {
        std::size_t& next = next_[at(rank)];
        const std::vector<plan::Turn>& turns = all_[at(rank)];
        if (next == turns.size()) return false;
        const bool pair = turns[next].merged;
        double start = free_[at(rank)], seconds = pair ? times_.pair : times_.of(turns[next]);
        for (std::size_t i = next; i < next + (pair ? 2 : 1); ++i) {
            const double there = ready(rank, turns[i]);
            if (there < 0.0) return false;
            start = std::max(start, there);
        }
        for (std::size_t i = next; i < next + (pair ? 2 : 1); ++i)
            if (turns[i].kind != plan::SlotKind::wgrad)
                done_[{turns[i].forward(), plan::stage_of(kind_, pp(), rank, turns[i].chunk), turns[i].micro_batch}] =
                    start + seconds;
        free_[at(rank)] = start + seconds;
        next += pair ? 2 : 1;
        return true;
    }

    plan::ScheduleKind kind_;
    const Orders& all_;
    Times times_;
    std::vector<double> free_;
    std::vector<std::size_t> next_;
    std::map<std::tuple<bool, int, int>, double> done_; // (forward, stage, micro-batch)
};

double bubble(plan::ScheduleKind kind, int pp, int m, const Times& times) {
    const double work = m * (plan::in_a_v(kind) ? 2 : 1) * (times.forward + times.dgrad + times.wgrad);
    return Play(kind, orders(kind, pp, m, times.pair > 0.0), times).run() - work;
}

int most_kept(const std::vector<plan::Turn>& turns) {
    int now = 0, most = 0;
    for (const plan::Turn& turn : turns) most = std::max(most, now += turn.forward() ? 1 : turn.last() ? -1 : 0);
    return most;
}

constexpr plan::ScheduleKind split_kinds[] = {plan::ScheduleKind::zero_bubble, plan::ScheduleKind::zb_v,
                                              plan::ScheduleKind::dualpipe_v};

plan::Plan qwen(plan::ScheduleKind schedule, int pp = 4) {
    plan::Plan plan = published_plan("Qwen3-30B-A3B", "h100", "bridge-26.04");
    plan.gpus = 8 * pp;
    plan.dp = plan.ep = 8;
    plan.pp = pp;
    plan.vpp = plan::in_a_v(schedule) ? 2 : 1;
    plan.gbs = 8 * 12;
    plan.schedule = schedule;
    return plan;
}

std::map<std::string, double> totals(const std::vector<const program::Template*>& templates) {
    std::map<std::string, double> sum;
    for (const program::Template* tmpl : templates)
        for (const program::Op& op : tmpl->ops)
            sum[std::string(program::to_string(op.kind)) + program::to_string(op.phase)] += 1.0 + op.bytes + op.flops;
    return sum;
}

const program::Template* find(const program::Program& program, plan::SlotKind kind, int chunk) {
    const auto found = std::find_if(program.templates.begin(), program.templates.end(),
                                    [&](const program::Template& t) { return t.kind == kind && t.chunk == chunk; });
    return found == program.templates.end() ? nullptr : &*found;
}

} // namespace

TEST_CASE("split schedules: every slot once, in order, without a deadlock") {
    for (const plan::ScheduleKind kind : split_kinds)
        for (const int pp : {2, 3, 4, 5, 8, 16})
            for (const int more : {0, 1, 2, 7, 40}) {
                const int chunks = plan::in_a_v(kind) ? 2 : 1, m = chunks * pp + more;
                CAPTURE(plan::to_string(kind));
                CAPTURE(pp);
                CAPTURE(m);
                const Orders all = orders(kind, pp, m);
                for (const std::vector<plan::Turn>& turns : all) {
                    std::map<std::pair<int, int>, int> forward, backward, weights; // (chunk, -) -> next micro-batch
                    for (const plan::Turn& turn : turns) {
                        const std::pair<int, int> chunk{turn.chunk, 0};
                        if (turn.forward()) REQUIRE(turn.micro_batch == forward[chunk]++);
                        if (turn.kind == plan::SlotKind::backward || turn.kind == plan::SlotKind::dgrad)
                            REQUIRE(turn.micro_batch == backward[chunk]++);
                        if (turn.last()) REQUIRE(turn.micro_batch == weights[chunk]++);
                        REQUIRE(backward[chunk] <= forward[chunk]);
                        REQUIRE(weights[chunk] <= backward[chunk]);
                    }
                    for (int c = 0; c < chunks; ++c) CHECK(weights[{c, 0}] == m);
                    CHECK(turns.back().chunk == 0); // on the rank that both ends of a V share, its table is done last
                }
                Play(kind, all, {}).run();
            }
}

TEST_CASE("split schedules: bubbles of the papers") {
    for (const int pp : {2, 3, 4, 8})
        for (const int m : {2 * pp, 3 * pp + 1, 8 * pp}) {
            CAPTURE(pp);
            CAPTURE(m);
            // ZB-H1 (arXiv 2401.10241 section 2.2): (p-1)(F + B - W), 1F1B's is (p-1)(F + B + W).
            for (const Times& t : {Times{}, Times{1.0, 1.2, 0.8}, Times{2.0, 2.0, 1.0}})
                CHECK(bubble(plan::ScheduleKind::zero_bubble, pp, m, t) ==
                      nearly((pp - 1) * (t.forward + t.dgrad - t.wgrad)));
            // ZB-V (its section 6): with F = B = W nobody waits but for the first forward to come by.
            CHECK(bubble(plan::ScheduleKind::zb_v, pp, m, {}) == nearly(pp - 1));
            // DualPipeV (DeepSeek's DualPipe repository): (PP/2 - 1)(F&B + B - 3W), PP = 2p chunks, B whole.
            for (const double w : {1.0, 0.75}) {
                const Times t{1.0, 1.0, w, 2.0 + w};
                CHECK(bubble(plan::ScheduleKind::dualpipe_v, pp, m, t) ==
                      nearly((pp - 1) * (t.pair + t.dgrad + t.wgrad - 3.0 * t.wgrad)));
            }
        }
}

TEST_CASE("split schedules: what is kept at most, in chunks") {
    for (const int pp : {2, 3, 4, 8})
        for (const int m : {2 * pp, 5 * pp + 1})
            for (int rank = 0; rank < pp; ++rank) {
                // Every rank keeps as much as the first rank of 1F1B; halves of it in a V; DualPipe's one more.
                CHECK(most_kept(plan::order(plan::ScheduleKind::zero_bubble, pp, 1, m, rank)) == pp);
                CHECK(most_kept(plan::order(plan::ScheduleKind::zb_v, pp, 2, m, rank)) == 2 * pp);
                CHECK(most_kept(plan::order(plan::ScheduleKind::dualpipe_v, pp, 2, m, rank)) == 2 * pp + 1);
            }
}

TEST_CASE("split schedules: the halves are the backward, and weight gradients leave the path of the message") {
    const program::Program whole = lower::lower(qwen(plan::ScheduleKind::one_f_one_b), 1),
                           split = lower::lower(qwen(plan::ScheduleKind::zero_bubble), 1);
    const program::Template *backward = find(whole, plan::SlotKind::backward, 0),
                            *dgrad = find(split, plan::SlotKind::dgrad, 0),
                            *wgrad = find(split, plan::SlotKind::wgrad, 0);
    REQUIRE(dgrad != nullptr);
    REQUIRE(wgrad != nullptr);
    CHECK(find(split, plan::SlotKind::backward, 0) == nullptr);
    CHECK(totals({backward}) == totals({dgrad, wgrad}));
    for (const program::Op& op : wgrad->ops) CHECK(op.phase == program::Phase::wgrad);
    for (const program::Op& op : dgrad->ops)
        CHECK((op.kind != program::OpKind::grouped_gemm || op.phase != program::Phase::wgrad));
    CHECK(dgrad->ops.back().kind == program::OpKind::send);
    // The first rank has nobody to send to; its backwards stay whole.
    CHECK(find(lower::lower(qwen(plan::ScheduleKind::zero_bubble), 0), plan::SlotKind::dgrad, 0) == nullptr);
}

TEST_CASE("split schedules: gradients are reduced once, behind the last slot that adds to them") {
    for (const plan::ScheduleKind kind : split_kinds)
        for (int rank = 0; rank < 4; ++rank) {
            const program::Program program = lower::lower(qwen(kind), rank);
            std::map<program::TensorId, int> reduced;
            std::set<int> closed; // chunks
            for (const program::Slot& slot : program.slots) {
                const program::Template& tmpl = program.templates[static_cast<std::size_t>(slot.index)];
                if (tmpl.chunk >= 0) CHECK(closed.count(tmpl.chunk) == 0);
                for (const program::Op& op : tmpl.ops)
                    if (op.kind == program::OpKind::reduce_scatter && op.module == program::Module::data_parallel) {
                        ++reduced[op.in.front()];
                        closed.insert(tmpl.chunk);
                    }
            }
            for (const program::Bucket& bucket : program.buckets)
                CHECK(reduced[bucket.gradients] == (bucket.group_size > 1 ? 1 : 0));
        }
}

TEST_CASE("split schedules: a weight gradient keeps its inputs and what dgrad writes for it, nothing else") {
    const program::Program split = lower::lower(qwen(plan::ScheduleKind::zero_bubble), 3);
    const memory::MemoryPlan memory = memory::plan_memory(split);
    std::int64_t early = 0, late = 0, between = 0; // bytes of one micro-batch of layer 40
    for (const memory::SavedBlock& block : memory.blocks) {
        if (block.layer != 40) continue;
        (block.from_dgrad ? between : block.until_wgrad ? late : early) += block.bytes;
    }
    CHECK(early > 0);
    CHECK(late > 0);
    CHECK(between > 0);
    // No two micro-batches share an instance while either needs it.
    for (const memory::SavedBlock& block : memory.blocks) {
        std::map<int, int> holder; // instance -> micro-batch
        for (const program::Slot& slot : split.slots) {
            const plan::SlotKind kind = split.templates[static_cast<std::size_t>(slot.index)].kind;
            if (kind == plan::SlotKind::begin || kind == plan::SlotKind::finish) continue;
            const int instance = block.instance[static_cast<std::size_t>(slot.micro_batch)];
            if (kind == (block.from_dgrad ? plan::SlotKind::dgrad : plan::SlotKind::forward)) {
                REQUIRE(holder.count(instance) == 0);
                holder[instance] = slot.micro_batch;
            }
            if (kind == (block.until_wgrad ? plan::SlotKind::wgrad : plan::SlotKind::dgrad)) {
                REQUIRE(holder.at(instance) == slot.micro_batch);
                holder.erase(instance);
            }
        }
    }
    // Before a dgrad of the last rank one micro-batch is whole, and three wait: what only dgrad reads is there once.
    std::int64_t expected = 0;
    for (const memory::SavedBlock& block : memory.blocks)
        expected += block.bytes * (block.from_dgrad || block.until_wgrad ? 4 : 1);
    CHECK(memory.class_bytes[static_cast<std::size_t>(memory::MemoryClass::saved)] == expected);
}

TEST_CASE("split schedules: in a V embedding and MTP share one table, which is trained once") {
    plan::Plan plan = qwen(plan::ScheduleKind::zb_v);
    plan.model = std::make_shared<const model::Model>(families::load_model("DeepSeek-V3"));
    plan.layout = "";
    REQUIRE(plan::check_plan(plan).message == "");
    CHECK(emit::table_holders(plan) == std::vector<int>{0});
    const program::Program first = lower::lower(plan, 0);
    CHECK(std::count_if(first.parameters.begin(), first.parameters.end(),
                        [](const program::Parameter& p) { return p.name == "model.embed_tokens.weight"; }) == 1);
    std::set<program::TensorId> tables;
    for (const program::Template& tmpl : first.templates)
        for (const program::Op& op : tmpl.ops)
            if (op.kind == program::OpKind::embedding_grad) tables.insert(op.out.front());
    CHECK(tables.size() == 1);
}

TEST_CASE("split schedules: requests that make no sense are refused, naming the field") {
    const auto refused = [](plan::ScheduleKind kind, auto change) {
        plan::Plan plan = qwen(kind);
        change(plan);
        return plan::check_plan(plan).message;
    };
    for (const plan::ScheduleKind kind : split_kinds) {
        CHECK(refused(kind, [](plan::Plan&) {}) == "");
        CHECK(refused(kind, [](plan::Plan& p) { p.vpp = 3; }).find("but pp = 4, vpp = 3") != std::string::npos);
        CHECK(refused(kind, [](plan::Plan& p) {
                  p.gbs = 8 * 3;
              }).find("micro-batches or more, but gbs / (dp * mbs) = 3") != std::string::npos);
        CHECK(refused(kind, [](plan::Plan& p) { p.offload = plan::offload::moe_act; }).find("offload = moe_act") !=
              std::string::npos);
        const bool merges = kind == plan::ScheduleKind::dualpipe_v;
        CHECK((refused(kind, [](plan::Plan& p) { p.ep_overlap = true; }) == "") == merges);
        CHECK((refused(kind, [](plan::Plan& p) { p.delay_wgrad = true; }) == "") == merges);
        CHECK_THROWS_AS(plan::order(kind, 4, plan::in_a_v(kind) ? 2 : 1, 3, 0), Error);
        CHECK_THROWS_AS(plan::order(kind, 1, plan::in_a_v(kind) ? 2 : 1, 8, 0), Error);
        CHECK_THROWS_AS(plan::order(kind, 4, 3, 12, 0), Error);
    }
}
