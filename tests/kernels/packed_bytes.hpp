// Packed operands of the back end under test.
#pragma once

#include "kernels/block_scaled.hpp"
#include "tests/kernels/case.hpp"

#include <cstdint>
#include <vector>

namespace moe::test {

struct PackedBytes {
    std::vector<std::uint8_t> codes, scales;
    float t = 0.0f; // the power of two that all scales share
    explicit PackedBytes(const BlockShape& s)
        : codes(static_cast<std::size_t>(s.code_bytes())), scales(static_cast<std::size_t>(s.scale_bytes()), 0xee) {}
};

// By the back end under test; each executable says how. Throws std::runtime_error where it wrote anywhere else.
PackedBytes packed(const BlockShape& s, const Tensor& x);
PackedBytes packed_by_host(const BlockShape& s, const Tensor& x);

} // namespace moe::test
