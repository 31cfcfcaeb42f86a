// Sizes of tensors, and the names of their types.
#include "planner/program/tensor.hpp"

#include <algorithm>
#include <cmath>

namespace moe::program {

std::int64_t bytes_of(Dtype dtype, std::int64_t elements) {
    const auto blocks = [elements](std::int64_t size) { return (elements + size - 1) / size; };
    switch (dtype) {
    case Dtype::f32:
    case Dtype::i32:
        return 4 * elements;
    case Dtype::bf16:
        return 2 * elements;
    case Dtype::fp8_tensor:
        return elements;
    case Dtype::fp8_block:
    case Dtype::fp8_columns:
        return elements + 4 * blocks(fp8_block_size);
    case Dtype::mxfp8:
        return elements + blocks(32);
    case Dtype::nvfp4:
        return (elements + 1) / 2 + blocks(16);
    }
    return 0;
}

std::int64_t Tensor::bytes() const {
    if (dtype != Dtype::fp8_block || cols == 1) return bytes_of(dtype, elements());
    return scale_offset() + 4 * rows * ((cols + fp8_block_size - 1) / fp8_block_size);
}

std::int64_t rows_in_blocks(std::int64_t rows, std::int64_t groups) {
    const std::int64_t begun = std::clamp<std::int64_t>(groups, 1, std::max<std::int64_t>(rows, 1));
    return (rows + (fp8_block_size - 1) * begun) / fp8_block_size * fp8_block_size;
}

double expected_in_blocks(double rows, std::int64_t groups) {
    if (groups <= 1) return static_cast<double>(rows_in_blocks(static_cast<std::int64_t>(std::ceil(rows)), 1));
    return rows + static_cast<double>(groups) * 0.5 * static_cast<double>(fp8_block_size - 1);
}

double Tensor::expected_bytes() const {
    if (rows > 0 && expected_rows == static_cast<double>(rows)) return static_cast<double>(bytes());
    const double share = rows > 0 ? expected_rows / static_cast<double>(rows) : 0.0;
    return static_cast<double>(bytes()) * share;
}

const char* to_string(Dtype dtype) {
    switch (dtype) {
    case Dtype::f32:
        return "f32";
    case Dtype::bf16:
        return "bf16";
    case Dtype::fp8_tensor:
        return "fp8-tensor";
    case Dtype::fp8_block:
        return "fp8-blockwise";
    case Dtype::fp8_columns:
        return "fp8-columns";
    case Dtype::mxfp8:
        return "mxfp8";
    case Dtype::nvfp4:
        return "nvfp4";
    case Dtype::i32:
        return "i32";
    }
    return "?";
}

} // namespace moe::program
