// Cuts two templates into layers, and layers into pieces that end with an exchange over EP.
#include "planner/passes/merge.hpp"

#include <algorithm>

namespace moe {

namespace {

using Pieces = std::vector<int>; // numbers of ops, in order

// Counts and choices are small, and what reads them follows at once.
bool exchanges(const Program& program, const Op& op) {
    return op.stream == Stream::expert && program.tensors[static_cast<std::size_t>(op.out[0])].dtype != Dtype::i32;
}

// The pieces of every layer of a template; what lies outside of layers counts as one on either side of them. Reductions
// of gradients, which the last backward has among its ops, belong to the layer that they follow.
std::vector<Pieces> layers_of(const Program& program, int number) {
    const Template& tmpl = program.templates[static_cast<std::size_t>(number)];
    std::vector<Pieces> layers;
    const Op* before = nullptr; // reductions left aside
    bool exchanged = false;
    for (const Op& op : tmpl.ops) {
        const bool reduction = op.phase == Phase::step;
        const bool fresh = layers.empty() || (!reduction && before != nullptr && before->layer != op.layer);
        if (fresh)
            layers.push_back({0});
        else if (exchanged && !exchanges(program, op))
            layers.back().push_back(0);
        ++layers.back().back();
        exchanged = exchanges(program, op);
        if (!reduction) before = &op;
    }
    return layers;
}

// One layer of each: piece by piece, the backward first, the forward's last piece behind all.
void interleave(const Pieces& forward, const Pieces& backward, std::vector<bool>& order) {
    const auto take = [&order](int ops, bool from_backward) {
        order.insert(order.end(), static_cast<std::size_t>(ops), from_backward);
    };
    std::size_t f = 0;
    for (const int ops : backward) {
        take(ops, true);
        if (f + 1 < forward.size()) take(forward[f++], false);
    }
    while (f < forward.size()) take(forward[f++], false);
}

} // namespace

int merge_templates(Program& program, int forward, int backward) {
    const auto known = std::find_if(program.merges.begin(), program.merges.end(), [&](const Merge& merge) {
        return merge.forward == forward && merge.backward == backward;
    });
    if (known != program.merges.end()) return static_cast<int>(known - program.merges.begin());
    const std::vector<Pieces> filled = layers_of(program, forward), emptied = layers_of(program, backward);
    Merge merge{forward, backward, {}};
    for (std::size_t i = 0; i < std::max(filled.size(), emptied.size()); ++i)
        interleave(i < filled.size() ? filled[i] : Pieces{}, i < emptied.size() ? emptied[i] : Pieces{},
                   merge.from_backward);
    program.merges.push_back(std::move(merge));
    return static_cast<int>(program.merges.size()) - 1;
}

} // namespace moe
