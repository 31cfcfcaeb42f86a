// What Muon does with a bucket: its matrices, the window around a shard, and the place that Newton-Schulz works in.
#include "planner/base/error.hpp"
#include "planner/lower/emit/builder.hpp"
#include "planner/lower/emit/parameters.hpp"
#include "planner/plan/mesh.hpp"

#include <algorithm>

namespace moe::emit {

namespace {

// FLOPs of five iterations on a matrix of these sides: X X^T, its square, and its product with X.
double newton_schulz_flops(double short_side, double long_side) {
    return 5.0 * (4.0 * short_side * short_side * long_side + 2.0 * short_side * short_side * short_side);
}

// What the rank has to multiply whose shard touches most, as so many matrices of the mean shape by FLOPs.
void count_products(program::Bucket& b) {
    program::Bucket::Muon& muon = b.muon;
    const std::int64_t own = b.elements / b.group_size;
    std::vector<double> by_shard(static_cast<std::size_t>(b.group_size), 0.0);
    double all = 0.0, short_sides = 0.0, long_sides = 0.0;
    for (const program::Bucket::Muon::Matrix& m : muon.matrices) {
        const auto rows = static_cast<double>(m.rows * (m.shard_dim == 0 ? muon.parts : 1)),
                   cols = static_cast<double>(m.cols * (m.shard_dim == 1 ? muon.parts : 1));
        const double flops = newton_schulz_flops(std::min(rows, cols), std::max(rows, cols));
        for (int copy = 0; copy < m.copies; ++copy) {
            const std::int64_t first = m.offset + copy * m.stride, last = first + m.rows * m.cols - 1;
            for (std::int64_t shard = first / own; shard <= last / own; ++shard)
                by_shard[static_cast<std::size_t>(shard)] += flops;
        }
        all += m.copies * flops;
        short_sides += m.copies * flops * std::min(rows, cols);
        long_sides += m.copies * flops * std::max(rows, cols);
    }
    muon.attr.short_side = short_sides / all;
    muon.attr.long_side = long_sides / all;
    muon.attr.matrices = *std::max_element(by_shard.begin(), by_shard.end()) /
                         newton_schulz_flops(muon.attr.short_side, muon.attr.long_side);
}

} // namespace

void ParameterSet::add_muon(program::Program& program, std::size_t index) {
    program::Bucket& b = buckets_[index];
    program::Bucket::Muon& muon = b.muon;
    if (b.cut != 0) muon.parts = plan::group_size(plan_, {b.domain, b.cut});
    std::int64_t whole = 0, square = 0;
    for (const auto& [key, entry] : keys_) {
        if (entry.bucket != static_cast<int>(index)) continue;
        for (std::size_t i = entry.first; i < entry.first + entry.count; ++i) {
            const program::Parameter& p = parameters_[i];
            muon.matrices.push_back({p.offset, entry.elements / entry.copies, entry.copies, p.local_rows, p.local_cols,
                                     muon.parts > 1 ? p.shard_dim : -1});
            muon.halo = std::max(muon.halo, p.local_elements());
            whole = std::max(whole, p.rows * p.cols);
            square = std::max(square, std::min(p.rows, p.cols));
        }
    }
    std::sort(muon.matrices.begin(), muon.matrices.end(),
              [](const auto& x, const auto& y) { return x.offset < y.offset; });
    muon.window = std::min(b.elements, b.elements / b.group_size + 2 * muon.halo);
    count_products(b);
    const auto add = [&](const char* what, program::Dtype dtype, std::int64_t elements) {
        return add_flat(program, fmt::format("chunk{}.bucket{}{}", chunk_, index, what), dtype,
                        program::Storage::activation, elements, chunk_);
    };
    const program::Dtype act = activation_dtype(plan_.precision);
    if (muon.parts > 1) {
        muon.collected = add(".collected", act, muon.window);
        muon.updates = add(".updates", act, muon.parts * muon.window);
    }
    // Operands begin where accesses of 256 bytes do.
    const auto aligned = [](std::int64_t elements) { return (elements + 127) / 128 * 128; };
    muon.work = add(".work", act, 2 * aligned(whole) + 3 * aligned(square * square));
    muon.norm = add(".norm", program::Dtype::f32, 1);
}

} // namespace moe::emit
