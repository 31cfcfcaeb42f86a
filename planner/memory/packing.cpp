// First-fit packing over lifetimes, and the waits that follow from memory that is given on.
#include "planner/memory/packing.hpp"

#include <algorithm>
#include <map>

namespace moe::memory {

std::vector<Use> uses(const program::Program& program) {
    std::vector<Use> use(program.tensors.size());
    for (const program::Template& tmpl : program.templates)
        for_each_access(program, tmpl, [&](program::TensorId id, int, bool) {
            Use& u = use[static_cast<std::size_t>(id)];
            (tmpl.kind == plan::SlotKind::forward ? u.forward : u.backward) = true;
            u.dgrad = u.dgrad || tmpl.kind == plan::SlotKind::dgrad;
            u.wgrad = u.wgrad || tmpl.kind == plan::SlotKind::wgrad;
        });
    return use;
}

std::vector<std::pair<program::TensorId, Lifetime>>
transients(const program::Program& program, const program::Template& tmpl, const std::vector<Use>& use) {
    std::vector<Lifetime> life(program.tensors.size());
    for_each_access(program, tmpl, [&](program::TensorId id, int op, bool written) {
        if (use[static_cast<std::size_t>(id)].saved()) return;
        Lifetime& l = life[static_cast<std::size_t>(id)];
        if (l.last < 0) l.first = written ? op : 0;
        l.last = op;
    });
    std::vector<std::pair<program::TensorId, Lifetime>> list;
    for (std::size_t id = 0; id < life.size(); ++id)
        if (life[id].last >= 0) list.emplace_back(static_cast<program::TensorId>(id), life[id]);
    return list;
}

// Few tensors live at once, so the list of neighbours in time stays short.
std::int64_t pack(const program::Program& program, std::vector<std::pair<program::TensorId, Lifetime>> list,
                  std::vector<Packed>& placed) {
    const auto bytes = [&](program::TensorId id) {
        return aligned(program.tensors[static_cast<std::size_t>(id)].bytes());
    };
    std::stable_sort(list.begin(), list.end(),
                     [&](const auto& a, const auto& b) { return bytes(a.first) > bytes(b.first); });
    std::int64_t height = 0;
    std::vector<std::pair<std::int64_t, std::int64_t>> taken;
    for (const auto& [id, life] : list) {
        taken.clear();
        for (const Packed& other : placed)
            if (other.life.first <= life.last && life.first <= other.life.last)
                taken.emplace_back(other.offset, other.offset + other.bytes);
        std::sort(taken.begin(), taken.end());
        std::int64_t offset = 0;
        const std::int64_t size = bytes(id);
        for (const auto& [begin, end] : taken) {
            if (begin - offset >= size) break;
            offset = std::max(offset, end);
        }
        placed.push_back({id, life, offset, size});
        height = std::max(height, offset + size);
    }
    return height;
}

namespace {

using LastTouch = std::array<int, program::stream_count>; // last touch by stream, -1 = none

// The last touch of each of the template's transients, by TensorId of the root.
std::map<program::TensorId, LastTouch> last_touches(const program::Program& program, const program::Template& tmpl) {
    std::map<program::TensorId, LastTouch> touches;
    for_each_access(program, tmpl, [&](program::TensorId id, int op, bool) {
        const auto [at, fresh] = touches.try_emplace(id);
        if (fresh) at->second.fill(-1);
        at->second[static_cast<std::size_t>(tmpl.ops[static_cast<std::size_t>(op)].stream)] = op;
    });
    return touches;
}

std::vector<std::vector<int>> reuses_of(const program::Program& program, const program::Template& tmpl,
                                        const std::vector<Packed>& packed) {
    const std::map<program::TensorId, LastTouch> touches = last_touches(program, tmpl);
    std::vector<LastTouch> needed(tmpl.ops.size());
    for (LastTouch& none : needed) none.fill(-1);
    for (const Packed& later : packed) {
        LastTouch& latest = needed[static_cast<std::size_t>(later.life.first)];
        for (const Packed& earlier : packed) {
            const bool apart =
                earlier.offset >= later.offset + later.bytes || later.offset >= earlier.offset + earlier.bytes;
            if (earlier.life.last >= later.life.first || apart) continue;
            const LastTouch& touched = touches.at(earlier.id);
            for (std::size_t s = 0; s < latest.size(); ++s) latest[s] = std::max(latest[s], touched[s]);
        }
    }
    std::vector<std::vector<int>> result(tmpl.ops.size());
    for (std::size_t i = 0; i < result.size(); ++i)
        for (std::size_t s = 0; s < program::stream_count; ++s)
            if (needed[i][s] >= 0 && s != static_cast<std::size_t>(tmpl.ops[i].stream))
                result[i].push_back(needed[i][s]);
    return result;
}

} // namespace

Reuses reuses_of(const program::Program& program) {
    const std::vector<Use> use = uses(program);
    Reuses result;
    for (const program::Template& tmpl : program.templates) {
        std::vector<Packed> packed;
        const bool one_stream = std::all_of(tmpl.ops.begin(), tmpl.ops.end(), [](const program::Op& op) {
            return op.stream == program::Stream::compute;
        });
        if (!one_stream) pack(program, transients(program, tmpl, use), packed);
        result.push_back(reuses_of(program, tmpl, packed));
    }
    return result;
}

} // namespace moe::memory
