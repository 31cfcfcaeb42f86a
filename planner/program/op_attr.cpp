// Sizes that follow from an op's attributes: scales, bytes and FLOPs of scans, memory that a call uses.
#include "planner/program/op_attr.hpp"

#include "planner/program/tensor.hpp"

namespace moe::program {

std::int64_t QuantizeAttr::scales() const {
    const auto blocks = [](std::int64_t side) { return (side + fp8_block_size - 1) / fp8_block_size; };
    return groups * blocks(n) * blocks(k);
}

// The kernels of state-spaces/mamba (mamba_ssm, ops/triton/ssd_combined.py: mamba_split_conv1d_scan_combined) read and
// write in turn, since each passes its results on through memory: per row d = n p elements of the heads, g of the
// groups' keys (and as many of queries), s = d state / chunk of the chunks' states, c = groups chunk of their products.
// Forward: convolution, states of chunks (FP32), their sums along the sequence, products of keys and queries (FP32),
// outputs, norm. Backward makes convolution, states and products again, and takes eleven kernels for the gradients.
double ScanAttr::forward_bytes() const {
    const double d = heads * head_dim, g = groups * state, s = d * state / chunk, c = groups * chunk;
    return static_cast<double>(rows) * (16.0 * d + 16.0 * g + 12.0 * s + 8.0 * c);
}
double ScanAttr::backward_bytes() const {
    const double d = heads * head_dim, g = groups * state, s = d * state / chunk, c = groups * chunk;
    return static_cast<double>(rows) * (42.0 * d + 42.0 * g + 38.0 * s + 28.0 * c);
}

std::int64_t StateAttr::work(bool grad) const {
    constexpr std::int64_t chunk = 64; // state_chunk of kernels/kernel_args.hpp
    const std::int64_t k = key_dim, v = value_dim, chunks = (rows / batch + chunk - 1) / chunk;
    const std::int64_t heads = batch * value_heads * chunks;
    if (ssd) return heads * ((grad ? 2 : 1) * k * v + 4) + (grad ? batch * chunks * 2 * chunk * keys() : 0);
    const std::int64_t each = 2 * chunk + (grad ? 3 * k + 2 * v : k + v);
    return heads * (chunk * each + (grad ? 2 * k * v : 0));
}

// A delta rule reads, changes and asks its state, Mamba-2 adds to it and asks it; of a chunk's 64 rows half take part.
double StateAttr::flops() const {
    const double products = ssd ? 2.0 : 3.0, inner = ssd ? 32.0 : 64.0;
    const double per_head = products * key_dim * value_dim + inner * (key_dim + value_dim);
    return 2.0 * static_cast<double>(rows) * value_heads * per_head;
}

} // namespace moe::program
