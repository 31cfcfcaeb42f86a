// Planned memory: no two things that live at once overlap, recompute frees what it should, and the arena is used well.
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/model.hpp"
#include "planner/program/program.hpp"
#include "tests/planner/plan/sample_plans.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>

using namespace moe;

namespace {

struct Span {
    program::TensorId id;
    int first, last;
};

// Lifetimes of transients in one template, worked out anew from the accesses.
std::vector<Span> transient_spans(const program::Program& program, const memory::MemoryPlan& memory,
                                  const program::Template& tmpl) {
    std::map<program::TensorId, Span> spans;
    for (std::size_t i = 0; i < tmpl.ops.size(); ++i) {
        const auto touch = [&](program::TensorId id) {
            if (id == program::no_tensor ||
                memory.places[static_cast<std::size_t>(id)].memory_class != memory::MemoryClass::transient)
                return;
            const program::TensorId base =
                program.tensors[static_cast<std::size_t>(id)].base; // a view lives where its base does
            if (base != program::no_tensor) id = base;
            auto [at, fresh] = spans.try_emplace(id, Span{id, static_cast<int>(i), static_cast<int>(i)});
            if (!fresh) at->second.last = static_cast<int>(i);
        };
        for (program::TensorId id : tmpl.ops[i].in) touch(id);
        for (program::TensorId id : tmpl.ops[i].out) touch(id);
    }
    std::vector<Span> list;
    for (const auto& [id, span] : spans) list.push_back(span);
    return list;
}

} // namespace

TEST_CASE("Nothing that lives at one time overlaps") {
    for (const plan::Plan& plan : sample_plans()) {
        CAPTURE(plan::plan_to_json(plan));
        const program::Program program = lower::lower(plan, plan.pp - 1);
        const memory::MemoryPlan memory = memory::plan_memory(program);
        const auto end = [&](program::TensorId id) {
            return memory.places[static_cast<std::size_t>(id)].offset +
                   program.tensors[static_cast<std::size_t>(id)].bytes();
        };
        for (const program::Template& tmpl : program.templates) {
            const std::vector<Span> spans = transient_spans(program, memory, tmpl);
            for (std::size_t i = 0; i < spans.size(); ++i) {
                CHECK(end(spans[i].id) <= memory.arena_bytes);
                for (std::size_t j = i + 1; j < spans.size(); ++j) {
                    if (spans[i].last < spans[j].first || spans[j].last < spans[i].first) continue;
                    const auto a = memory.places[static_cast<std::size_t>(spans[i].id)].offset,
                               b = memory.places[static_cast<std::size_t>(spans[j].id)].offset;
                    const bool apart = end(spans[i].id) <= b || end(spans[j].id) <= a;
                    CHECK_MESSAGE(apart, program.tensors[static_cast<std::size_t>(spans[i].id)].name
                                             << " over "
                                             << program.tensors[static_cast<std::size_t>(spans[j].id)].name);
                }
            }
        }
        // A tensor that is not transient has a region of its own.
        std::vector<std::pair<std::int64_t, std::int64_t>> regions;
        for (std::size_t id = 0; id < program.tensors.size(); ++id) {
            const memory::Place& place = memory.places[id];
            if (program.tensors[id].base != program::no_tensor || place.memory_class == memory::MemoryClass::transient)
                continue;
            if (place.block >= 0 || place.stride == 0) continue;
            regions.emplace_back(place.offset, place.offset + place.stride * place.instances);
        }
        std::map<int, std::pair<std::int64_t, std::int64_t>> pools;
        for (const memory::SavedBlock& block : memory.blocks) {
            const memory::Place& place = memory.places[static_cast<std::size_t>(block.tensors.front())];
            pools[block.pool] = {place.offset, place.offset + place.stride * place.instances};
        }
        for (const auto& [pool, region] : pools) regions.push_back(region);
        std::sort(regions.begin(), regions.end());
        for (std::size_t i = 1; i < regions.size(); ++i) CHECK(regions[i - 1].second <= regions[i].first);
        std::int64_t sum = 0;
        for (std::int64_t bytes : memory.class_bytes) sum += bytes;
        CHECK(sum == memory.arena_bytes);
    }
}

namespace {

// The holders of the instances of pools while ops run in their order: from the first that touches a block for a
// micro-batch to the last.
class Owners {
public:
    Owners(const program::Program& program, const memory::MemoryPlan& memory) : program_(program), memory_(memory) {
        for (program::OpWalk walk(program_); !walk.done(); walk.next())
            for_each_block(walk, [&](const memory::SavedBlock& block) { ++left_[owner(walk, block)]; });
    }
    void play() {
        for (program::OpWalk walk(program_); !walk.done(); walk.next())
            for_each_block(walk, [&](const memory::SavedBlock& block) {
                const int instance = block.instance[static_cast<std::size_t>(walk.slot().micro_batch)];
                REQUIRE(instance >= 0);
                REQUIRE(instance < memory_.places[static_cast<std::size_t>(block.tensors.front())].instances);
                const Owner mine = owner(walk, block);
                const auto taken = taken_.try_emplace({block.pool, instance}, mine).first;
                REQUIRE(taken->second == mine);
                if (--left_[mine] == 0) taken_.erase(taken);
            });
    }
    bool empty() const { return taken_.empty(); }

private:
    using Owner = std::pair<int, const memory::SavedBlock*>; // micro-batch

    static Owner owner(const program::OpWalk& walk, const memory::SavedBlock& block) {
        return {walk.slot().micro_batch, &block};
    }
    template <class Visit>
    void for_each_block(const program::OpWalk& walk, Visit visit) const {
        for (const auto* list : {&walk.op().in, &walk.op().out})
            for (program::TensorId id : *list) {
                if (id == program::no_tensor) continue;
                const program::TensorId base = program_.tensors[static_cast<std::size_t>(id)].base;
                const memory::Place& place =
                    memory_.places[static_cast<std::size_t>(base == program::no_tensor ? id : base)];
                if (place.memory_class == memory::MemoryClass::saved)
                    visit(memory_.blocks[static_cast<std::size_t>(place.block)]);
            }
    }

    const program::Program& program_;
    const memory::MemoryPlan& memory_;
    std::map<Owner, int> left_;                  // accesses to come
    std::map<std::pair<int, int>, Owner> taken_; // (pool, instance)
};

plan::Plan overlapped() {
    plan::Plan plan = sample_plans()[4];
    plan.ep_overlap = true;
    return plan;
}

} // namespace

// Every byte of a transient is handed on: the op that first touches the later tensor waits for, or runs behind, all
// that touched the earlier one.
TEST_CASE("Streams wait for those whose memory they take over, and for nobody else's") {
    int waits = 0, wrong = 0, missing = 0;
    for (const plan::Plan& plan : sample_plans()) {
        CAPTURE(plan::plan_to_json(plan));
        const program::Program program = lower::lower(plan, 0);
        const memory::MemoryPlan memory = memory::plan_memory(program);
        const memory::Reuses reuses = memory::reuses_of(program);
        for (std::size_t t = 0; t < program.templates.size(); ++t) {
            const std::vector<program::Op>& ops = program.templates[t].ops;
            REQUIRE(reuses[t].size() == ops.size());
            struct Placed {
                int first, last;
                std::int64_t begin, end;
            };
            std::vector<Placed> spans;
            for (const Span& s : transient_spans(program, memory, program.templates[t])) {
                const std::int64_t begin = memory.places[static_cast<std::size_t>(s.id)].offset;
                spans.push_back(
                    {s.first, s.last, begin, begin + program.tensors[static_cast<std::size_t>(s.id)].bytes()});
            }
            std::vector<std::set<int>> needed(ops.size()); // last ops of tensors whose bytes a later one takes over
            const Placed *const first = spans.data(), *const last = first + spans.size();
            for (const Placed* later = first; later != last; ++later)
                for (const Placed* earlier = first; earlier != last; ++earlier)
                    if (earlier->last < later->first && earlier->begin < later->end && later->begin < earlier->end)
                        needed[static_cast<std::size_t>(later->first)].insert(earlier->last);
            for (std::size_t i = 0; i < ops.size(); ++i) {
                for (const int other : reuses[t][i]) {
                    wrong +=
                        other >= static_cast<int>(i) || ops[static_cast<std::size_t>(other)].stream == ops[i].stream;
                    ++waits;
                }
                for (const int last : needed[i]) {
                    const program::Stream stream = ops[static_cast<std::size_t>(last)].stream;
                    const bool waited = std::any_of(reuses[t][i].begin(), reuses[t][i].end(), [&](int other) {
                        return other >= last && ops[static_cast<std::size_t>(other)].stream == stream;
                    });
                    missing += stream != ops[i].stream && !waited;
                }
            }
        }
    }
    CHECK(waits > 0);
    CHECK(wrong == 0);
    CHECK(missing == 0);
}

TEST_CASE("Saved activations that live at one time lie apart") {
    std::vector<plan::Plan> plans = sample_plans();
    plans.push_back(overlapped());
    for (const plan::Plan& plan : plans) {
        CAPTURE(plan::plan_to_json(plan));
        const program::Program program = lower::lower(plan, 0);
        const memory::MemoryPlan memory = memory::plan_memory(program);
        Owners owners(program, memory);
        owners.play();
        CHECK(owners.empty());
    }
}

TEST_CASE("EP overlap saves a layer while it releases another: one layer more than the micro-batches before the pair") {
    // arXiv 2603.07685 section 4.2.3: the merged forward and backward need no further activation memory.
    const plan::Plan plan = overlapped();
    plan::Plan apart = plan;
    apart.ep_overlap = false;
    const auto held = [](const plan::Plan& p) {
        const program::Program program = lower::lower(p, 1); // sixteen equal MoE layers
        return memory::plan_memory(program).class_bytes[static_cast<std::size_t>(memory::MemoryClass::saved)];
    };
    const std::int64_t layer =
        memory::segment_memory(lower::lower_segment(plan, lower::SegmentKind::layer, plan.model->layers[10])).saved;
    // Both warm up with 16 forwards and one more: 17 chunks of four layers; merged, a layer comes on top.
    CHECK(held(apart) == 17 * 4 * layer);
    CHECK(held(plan) == (17 * 4 + 1) * layer);
}

TEST_CASE(
    "Paged stash keeps 1.2 of the expected routed rows where a capacity plans 1.5, and works on planned buffers") {
    plan::Plan plan = sample_plans()[4];
    const auto memory = [&](double capacity, bool paged) {
        plan.capacity = capacity;
        plan.paged_stash = paged;
        return memory::plan_memory(lower::lower(plan, 1)).class_bytes;
    };
    const auto saved = static_cast<std::size_t>(memory::MemoryClass::saved),
               work = static_cast<std::size_t>(memory::MemoryClass::transient);
    const auto exact = memory(0.0, false), planned = memory(1.5, false), paged = memory(1.5, true);
    const auto over = [&](const auto& sizes) { return static_cast<double>(sizes[saved] - exact[saved]); };
    REQUIRE(over(planned) > 0.0);
    CHECK(over(paged) / over(planned) == nearly(0.2 / 0.5).epsilon(1e-3));
    // One layer's buffers of the experts' products wait for nobody else: the workspace holds them once more.
    CHECK(paged[work] > planned[work]);
    CHECK(paged[saved] + paged[work] < planned[saved] + planned[work]);
}

TEST_CASE("Chunks share instances: a rank of PP4 VPP4 keeps 19 to 13 pairs of chunk and micro-batch, not 24 or more") {
    // Megatron's interleaved schedule: 2 (4 - rank - 1) + 3 * 4 + 1 (arXiv 2603.07685 section 4.1; Megatron-LM
    // pipeline_parallel/schedules.py).
    plan::Plan plan = sample_plans()[4];
    REQUIRE(plan.pp * plan.vpp == 16);
    for (int rank = 0; rank < 4; ++rank) {
        const program::Program program = lower::lower(plan, rank);
        CHECK(memory::memory_breakdown(program, memory::plan_memory(program)).kept == 2 * (4 - rank - 1) + 3 * 4 + 1);
    }
}

TEST_CASE("The parts of a breakdown add up to the arena") {
    for (const plan::Plan& plan : sample_plans()) {
        CAPTURE(plan::plan_to_json(plan));
        const program::Program program = lower::lower(plan, plan.pp - 1);
        const memory::MemoryPlan memory = memory::plan_memory(program);
        const memory::MemoryBreakdown parts = memory::memory_breakdown(program, memory);
        std::int64_t all = 0, saved = 0;
        for (const std::int64_t bytes : parts.classes) all += bytes;
        for (const auto& [module, bytes] : parts.saved) saved += bytes;
        CHECK(all == memory.arena_bytes);
        CHECK(saved == parts.classes[static_cast<std::size_t>(memory::MemoryClass::saved)]);
        for (const memory::MemoryClass c :
             {memory::MemoryClass::weights, memory::MemoryClass::gradients, memory::MemoryClass::optimizer})
            CHECK(parts.expert[static_cast<std::size_t>(c)] <= parts.classes[static_cast<std::size_t>(c)]);
    }
}

TEST_CASE("Recompute frees exactly the tensors that it recomputes") {
    plan::Plan plan = sample_plans().front();
    const auto saved = [&](unsigned set) {
        plan.recompute = set;
        return memory::plan_memory(lower::lower(plan, 0))
            .class_bytes[static_cast<std::size_t>(memory::MemoryClass::saved)];
    };
    const std::int64_t none = saved(0), norm = saved(plan::recompute::layernorm), act = saved(plan::recompute::moe_act),
                       both = saved(plan::recompute::layernorm | plan::recompute::moe_act),
                       full = saved(plan::recompute::full);
    CHECK(norm < none);
    CHECK(act < none);
    // The sets touch different tensors, so their savings add up to the byte.
    CHECK(none - both == (none - norm) + (none - act));
    CHECK(full < both);
    // The full set keeps one residual input per layer (and what lies outside of layers).
    CHECK(full * 4 < none);
}

TEST_CASE("A segment's saved bytes are its share of the whole chunk") {
    const plan::Plan plan = sample_plans().front();
    const program::Program whole = lower::lower(plan, 0);
    const std::int64_t saved =
        memory::plan_memory(whole).class_bytes[static_cast<std::size_t>(memory::MemoryClass::saved)];
    std::int64_t sum = 0;
    for (std::size_t c = 0; c < whole.chunks.size(); ++c) {
        const plan::Stage& stage = whole.chunks[c];
        std::int64_t chunk = 0;
        for (int i = stage.first_layer; i < stage.first_layer + stage.layers; ++i) {
            const int kind = plan.model->layers[static_cast<std::size_t>(i)];
            chunk += memory::segment_memory(lower::lower_segment(plan, lower::SegmentKind::layer, kind)).saved;
        }
        if (stage.loss) chunk += memory::segment_memory(lower::lower_segment(plan, lower::SegmentKind::head)).saved;
        sum += chunk * whole.in_flight[c];
    }
    CHECK(static_cast<double>(sum) == nearly(static_cast<double>(saved)).epsilon(0.01));
}
