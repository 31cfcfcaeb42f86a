// Turns first and last touches of every activation into steps up and down, and takes the maximum of each interval.
#include "planner/memory/memory_timeline.hpp"

#include "planner/program/program.hpp"
#include "planner/program/timeline.hpp"

#include <algorithm>
#include <limits>
#include <map>

namespace moe::memory {
namespace {

constexpr auto saved = static_cast<std::size_t>(MemoryClass::saved);

// First and last op of a template that touch a tensor.
struct Span {
    program::TensorId id;
    int first, last;
};

std::vector<std::vector<Span>> spans_of(const program::Program& program) {
    std::vector<std::vector<Span>> result(program.templates.size());
    for (std::size_t t = 0; t < program.templates.size(); ++t) {
        std::map<program::TensorId, std::size_t> known;
        const std::vector<program::Op>& ops = program.templates[t].ops;
        for (std::size_t i = 0; i < ops.size(); ++i)
            for (const auto* list : {&ops[i].in, &ops[i].out})
                for (const program::TensorId id : *list) {
                    if (id == program::no_tensor) continue;
                    const program::TensorId base = program.tensors[static_cast<std::size_t>(id)].base;
                    const program::TensorId root = base == program::no_tensor ? id : base;
                    if (program.tensors[static_cast<std::size_t>(root)].storage != program::Storage::activation)
                        continue;
                    const auto [at, fresh] = known.try_emplace(root, result[t].size());
                    if (fresh) result[t].push_back({root, static_cast<int>(i), static_cast<int>(i)});
                    result[t][at->second].last = static_cast<int>(i);
                }
    }
    return result;
}

struct Step {
    double time;
    std::size_t memory_class;
    double bytes; // bytes taken; negative: freed
};

// A saved block begins in the forward and ends in the backward of its micro-batch, or in a half of it.
bool begins(const SavedBlock& block, plan::SlotKind kind) {
    return kind == (block.from_dgrad ? plan::SlotKind::dgrad : plan::SlotKind::forward);
}
bool ends(const SavedBlock& block, plan::SlotKind kind) {
    return kind == plan::SlotKind::backward ||
           kind == (block.until_wgrad ? plan::SlotKind::wgrad : plan::SlotKind::dgrad);
}

// Start and end of every op of one slot; ops of other slots may run in between.
struct SlotTimes {
    std::vector<double> start, end;
};

std::vector<Step> steps_of(const program::Program& program, const MemoryPlan& memory, const program::Timeline& timeline,
                           int rank) {
    std::vector<SlotTimes> slots(program.slots.size());
    for (std::size_t s = 0; s < slots.size(); ++s) {
        const std::size_t ops = program.templates[static_cast<std::size_t>(program.slots[s].index)].ops.size();
        slots[s].start.assign(ops, 0.0);
        slots[s].end.assign(ops, 0.0);
    }
    for (const program::TimelineRow& row : timeline.rows) {
        if (row.rank != rank) continue;
        SlotTimes& slot = slots[static_cast<std::size_t>(row.slot)];
        slot.start[static_cast<std::size_t>(row.op)] = row.start;
        slot.end[static_cast<std::size_t>(row.op)] = row.end;
    }
    const std::vector<std::vector<Span>> spans = spans_of(program);
    std::vector<Step> steps;
    for (std::size_t s = 0; s < slots.size(); ++s) {
        const auto t = static_cast<std::size_t>(program.slots[s].index);
        const plan::SlotKind kind = program.templates[t].kind;
        for (const Span& span : spans[t]) {
            const auto id = static_cast<std::size_t>(span.id);
            const auto c = static_cast<std::size_t>(memory.places[id].memory_class);
            const auto bytes = static_cast<double>(program.tensors[id].bytes());
            const SavedBlock* block =
                c == saved ? &memory.blocks[static_cast<std::size_t>(memory.places[id].block)] : nullptr;
            if (block == nullptr || begins(*block, kind))
                steps.push_back({slots[s].start[static_cast<std::size_t>(span.first)], c, bytes});
            if (block == nullptr || ends(*block, kind))
                steps.push_back({slots[s].end[static_cast<std::size_t>(span.last)], c, -bytes});
        }
    }
    // Frees come first at one moment: an op's output may take the place of what the op before it used.
    std::sort(steps.begin(), steps.end(),
              [](const Step& a, const Step& b) { return a.time != b.time ? a.time < b.time : a.bytes < b.bytes; });
    return steps;
}

} // namespace

std::vector<MemoryUse> memory_over_time(const program::Program& program, const MemoryPlan& memory,
                                        const program::Timeline& timeline, int rank, int samples) {
    std::array<double, memory_class_count> now{};
    for (int c = 0; c < memory_class_count; ++c) {
        const auto i = static_cast<std::size_t>(c);
        const auto kind = static_cast<MemoryClass>(c);
        if (kind != MemoryClass::saved && kind != MemoryClass::transient)
            now[i] = static_cast<double>(memory.class_bytes[i]);
    }
    const std::vector<Step> steps = steps_of(program, memory, timeline, rank);
    const double end = std::max(timeline.step_seconds, steps.empty() ? 0.0 : steps.back().time);
    std::vector<MemoryUse> uses;
    std::size_t next = 0;
    for (int i = 0; i < samples; ++i) {
        MemoryUse use{end * i / samples, end * (i + 1) / samples, now};
        // The maximum of the sum is what counts; classes are those of that moment.
        double most = -1.0;
        const auto look = [&] {
            double sum = 0.0;
            for (const double bytes : now) sum += bytes;
            if (sum > most) most = sum, use.bytes = now;
        };
        while (next < steps.size() && steps[next].bytes < 0.0 && steps[next].time <= use.from) {
            now[steps[next].memory_class] += steps[next].bytes;
            ++next;
        }
        look();
        for (; next < steps.size() && (steps[next].time < use.to || i + 1 == samples); ++next) {
            now[steps[next].memory_class] += steps[next].bytes;
            if (steps[next].bytes > 0.0) look();
        }
        uses.push_back(use);
    }
    return uses;
}

} // namespace moe::memory
