// Cuts two templates into layers, and layers into pieces that end with an exchange over EP.
#include "planner/passes/merge.hpp"

#include "planner/peer_blocks.hpp"

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

// Of experts: our kernels share tiles out in advance. Tokens are on their way for about as long as two of them take;
// cuBLASLt's products do not gain by it.
constexpr int sparing_products = 2;
// A product that leaves 24 of 132 multiprocessors takes 1.2 times as long; one that does not waits for them until the
// tokens have come. Beyond so many FLOPs to a byte of rows on their way (650 TFLOPS, 600 GB/s) the wait is shorter.
constexpr double most_flops_per_byte = 4800.0;

std::vector<std::uint8_t> spared_in(const Program& program, const Merge& merge) {
    const Template* const of[] = {&program.templates[static_cast<std::size_t>(merge.forward)],
                                  &program.templates[static_cast<std::size_t>(merge.backward)]};
    std::size_t next[] = {0, 0};
    std::vector<std::uint8_t> spared;
    int products = sparing_products; // since tokens left
    double bytes = 0.0;              // of those
    for (const bool from_backward : merge.from_backward) {
        const Op& op = of[from_backward]->ops[next[from_backward]++];
        if (op.kind == OpKind::dispatch_tokens || op.kind == OpKind::combine_tokens) products = 0, bytes = op.bytes;
        const bool spares =
            op.kind == OpKind::grouped_gemm && products++ < sparing_products && op.flops <= most_flops_per_byte * bytes;
        spared.push_back(spares ? peer_blocks_beside : 0);
    }
    return spared;
}

} // namespace

int merge_templates(Program& program, int forward, int backward) {
    const auto known = std::find_if(program.merges.begin(), program.merges.end(), [&](const Merge& merge) {
        return merge.forward == forward && merge.backward == backward;
    });
    if (known != program.merges.end()) return static_cast<int>(known - program.merges.begin());
    const std::vector<Pieces> filled = layers_of(program, forward), emptied = layers_of(program, backward);
    Merge merge{forward, backward, {}, {}};
    for (std::size_t i = 0; i < std::max(filled.size(), emptied.size()); ++i)
        interleave(i < filled.size() ? filled[i] : Pieces{}, i < emptied.size() ? emptied[i] : Pieces{},
                   merge.from_backward);
    merge.spared = spared_in(program, merge);
    program.merges.push_back(std::move(merge));
    return static_cast<int>(program.merges.size()) - 1;
}

} // namespace moe
