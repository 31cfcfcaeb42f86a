// Muon's ops: momentum, the slices that a shard touches, and the step along whole matrices that are orthogonalized.
#include "engine/ops/newton_schulz.hpp"
#include "engine/ops/operands.hpp"

#include <algorithm>
#include <cmath>

namespace moe::ops {

namespace {

// The momentum, and the scale by which an orthogonal update has the size of AdamW's (arXiv 2502.16982, section 2.2).
constexpr double momentum_kept = 0.95, size_of_adamw = 0.2;

using Muon = program::Bucket::Muon;

const program::Bucket& bucket_of(const OpContext& context) {
    return context.program.buckets[static_cast<std::size_t>(std::get<program::MuonAttr>(context.op.attr).bucket)];
}

// First element of the bucket in the window around this rank's shard.
std::int64_t window_begin(const OpContext& context, const program::Bucket& bucket) {
    return std::clamp<std::int64_t>(context.shard_offset - bucket.muon.halo, 0, bucket.elements - bucket.muon.window);
}

void momentum(const OpContext& context) {
    const program::AdamAttr& adam = std::get<program::AdamAttr>(context.op.attr);
    each_moving_part(context, adam.elements, [&](const ShardPart& part) {
        context.kernels.momentum(momentum_kept, floats_out(context, 1) + part.first, floats(context, 1),
                                 floats(context, 2), floats(context, 4), dst(context, 0) + part.first, part.count,
                                 context.stream);
    });
}

void collect(const OpContext& context) {
    const program::Bucket& bucket = bucket_of(context);
    context.kernels.cast(src(context, 0) + window_begin(context, bucket), dst(context, 0), bucket.muon.window,
                         context.stream);
}

// The elements [begin, end) of the bucket of one matrix' slice that this rank's shard holds, by parts of it that move.
template <class Visit>
void each_own_part(const OpContext& context, std::int64_t begin, std::int64_t end, Visit visit) {
    const program::Bucket& bucket = bucket_of(context);
    each_moving_part(context, bucket.elements / bucket.group_size, [&](const ShardPart& part) {
        const std::int64_t first = std::max(begin, context.shard_offset + part.first),
                           last = std::min(end, context.shard_offset + part.first + part.count);
        if (first < last) visit(first, last, part);
    });
}

void orthogonalize(const OpContext& context, const Muon& muon, const Muon::Matrix& m, std::int64_t begin) {
    const std::int64_t slice = m.rows * m.cols, end = begin + slice;
    bool touched = false;
    each_own_part(context, begin, end, [&](std::int64_t, std::int64_t, const ShardPart&) { touched = true; });
    if (!touched) return;
    const int parts = m.shard_dim < 0 ? 1 : muon.parts;
    const bool split_rows = m.shard_dim == 0, split_cols = m.shard_dim == 1;
    const std::int64_t rows = split_rows ? m.rows * parts : m.rows, cols = split_cols ? m.cols * parts : m.cols;
    const program::Bucket& bucket = bucket_of(context);
    NewtonSchulz product(context.kernels, context.stream, {dst(context, 2), floats_out(context, 3), floats(context, 2)},
                         rows, cols);
    // Slices of the members lie window by window, and alone as the bucket does.
    const std::int64_t at = muon.parts > 1 ? begin - window_begin(context, bucket) : begin;
    for (int part = 0; part < parts; ++part)
        context.kernels.copy_columns({m.rows, m.cols, m.cols, 0, cols, split_cols ? part * m.cols : 0, false},
                                     src(context, 0) + (part * muon.window + at),
                                     product.x() + (split_rows ? part * slice : 0), context.stream);
    product.run();
    const int member = bucket.cut == plan::axis::key_parts    ? context.position.key_part
                       : bucket.domain == plan::Domain::dense ? context.position.tensor
                                                              : context.position.expert_tensor;
    Src own = product.x() + (split_rows ? member * slice : 0);
    if (split_cols) {
        context.kernels.copy_columns({m.rows, m.cols, cols, member * m.cols, m.cols, 0, false}, product.x(),
                                     product.spare(), context.stream);
        own = product.spare();
    }
    const double factor = size_of_adamw * std::sqrt(static_cast<double>(std::max(rows, cols)));
    each_own_part(context, begin, end, [&](std::int64_t first, std::int64_t last, const ShardPart& part) {
        const std::int64_t to = first - context.shard_offset;
        const Dst weights = dst(context, 1);
        context.kernels.orthogonal_step({last - first, 0, 0, part.rate, part.decay}, factor, own + (first - begin),
                                        floats(context, 1), floats(context, 2), floats(context, 4),
                                        floats_out(context, 0) + to, weights.data == nullptr ? weights : weights + to,
                                        context.stream);
    });
}

void newton_schulz(const OpContext& context) {
    const Muon& muon = bucket_of(context).muon;
    for (const Muon::Matrix& m : muon.matrices)
        for (int copy = 0; copy < m.copies; ++copy) orthogonalize(context, muon, m, m.offset + copy * m.stride);
}

} // namespace

void add_muon_kernels(Backend& backend) {
    backend.table[static_cast<std::size_t>(program::OpKind::momentum)] = momentum;
    backend.table[static_cast<std::size_t>(program::OpKind::collect)] = collect;
    backend.table[static_cast<std::size_t>(program::OpKind::newton_schulz)] = newton_schulz;
}

} // namespace moe::ops
