// Precisions of the linear layers, by which machines state their peaks and plans what they train in.
#pragma once

#include <cstdint>
#include <string>

namespace moe::machine {

enum class Precision : std::uint8_t { fp32, bf16, fp8_tensor, fp8_blockwise, mxfp8, nvfp4 };
inline constexpr int precision_count = 6;
const char* to_string(Precision precision);
Precision precision_from_string(const std::string& text); // throws Error (bad_input) naming the six

} // namespace moe::machine
