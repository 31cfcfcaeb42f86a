// Cuts two templates into layers, and layers into pieces that end with an exchange over EP.
#include "planner/lower/passes/merge.hpp"

#include "planner/program/peer_blocks.hpp"

#include <algorithm>

namespace moe::passes {

namespace {

using Pieces = std::vector<int>; // numbers of ops, in order

// Counts and choices are small, and what reads them follows at once.
bool exchanges(const program::Program& program, const program::Op& op) {
    return op.stream == program::Stream::expert &&
           program.tensors[static_cast<std::size_t>(op.out[0])].dtype != program::Dtype::i32;
}

// The pieces of every layer of one side; what lies outside of layers counts as one on either side of them. Reductions
// of gradients, which the last backward has among its ops, belong to the layer that they follow.
std::vector<Pieces> layers_of(const program::Program& program, const std::vector<LayerOp>& ops) {
    std::vector<Pieces> layers;
    const LayerOp* before = nullptr; // last op that is no reduction
    bool exchanged = false;
    for (const LayerOp& at : ops) {
        const bool reduction = at.op->phase == program::Phase::step;
        const bool fresh = layers.empty() || (!reduction && before != nullptr && before->layer != at.layer);
        if (fresh)
            layers.push_back({0});
        else if (exchanged && !exchanges(program, *at.op))
            layers.back().push_back(0);
        ++layers.back().back();
        exchanged = exchanges(program, *at.op);
        if (!reduction) before = &at;
    }
    return layers;
}

std::vector<LayerOp> ops_of(const program::Template& tmpl) {
    std::vector<LayerOp> ops;
    for (const program::Op& op : tmpl.ops) ops.push_back({&op, op.layer});
    return ops;
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

// The products are those of experts: our kernels share tiles out in advance. Tokens are on their way for about as long
// as two of them take; cuBLASLt's products do not gain by it.
constexpr int reserving_products = 2;
// A second one does not where the first has taken longer than tokens on their way can: FLOPs to a byte of their rows
// (650 TFLOPS, 150 GB/s, a quarter of what they have).
constexpr double most_flops_per_byte = 4800.0;

std::vector<std::uint8_t> reserved_sms_in(const program::Program& program, const program::Merge& merge) {
    const program::Template* const of[] = {&program.templates[static_cast<std::size_t>(merge.forward)],
                                           &program.templates[static_cast<std::size_t>(merge.backward)]};
    std::size_t next[] = {0, 0};
    std::vector<std::uint8_t> reserved_sms;
    ReservedSms reserving;
    for (const bool from_backward : merge.from_backward) {
        const program::Op& op = of[from_backward]->ops[next[from_backward]++];
        reserved_sms.push_back(reserving.next(op) ? program::peer_blocks_beside : 0);
    }
    return reserved_sms;
}

} // namespace

bool ReservedSms::next(const program::Op& op) {
    if (op.kind == program::OpKind::dispatch_tokens || op.kind == program::OpKind::combine_tokens) {
        products_ = 0;
        flops_ = 0.0;
        bytes_ = op.bytes;
    }
    if (op.kind != program::OpKind::grouped_gemm || bytes_ == 0.0) return false;
    const bool reserves = products_++ < reserving_products && flops_ <= most_flops_per_byte * bytes_;
    flops_ += op.flops;
    return reserves;
}

std::vector<bool> merged_order(const program::Program& program, const std::vector<LayerOp>& forward,
                               const std::vector<LayerOp>& backward) {
    const std::vector<Pieces> filled = layers_of(program, forward), emptied = layers_of(program, backward);
    std::vector<bool> from_backward;
    for (std::size_t i = 0; i < std::max(filled.size(), emptied.size()); ++i)
        interleave(i < filled.size() ? filled[i] : Pieces{}, i < emptied.size() ? emptied[i] : Pieces{}, from_backward);
    return from_backward;
}

int merge_templates(program::Program& program, int forward, int backward) {
    const auto known = std::find_if(program.merges.begin(), program.merges.end(), [&](const program::Merge& merge) {
        return merge.forward == forward && merge.backward == backward;
    });
    if (known != program.merges.end()) return static_cast<int>(known - program.merges.begin());
    const auto ops = [&program](int number) { return ops_of(program.templates[static_cast<std::size_t>(number)]); };
    program::Merge merge{forward, backward, merged_order(program, ops(forward), ops(backward)), {}};
    merge.reserved_sms = reserved_sms_in(program, merge);
    program.merges.push_back(std::move(merge));
    return static_cast<int>(program.merges.size()) - 1;
}

} // namespace moe::passes
