// Upper bounds of a plan's numbers: above any machine, and low enough that sizes made of them stay inside 64 bits.
#pragma once

#include <cstdint>

namespace moe::plan::limits {

inline constexpr std::int64_t max_gpus = 1 << 22;
inline constexpr std::int64_t max_seq = 1 << 27;                              // tokens
inline constexpr std::int64_t max_gbs = 1 << 24;                              // sequences
inline constexpr std::int64_t max_micro_batch_tokens = std::int64_t{1} << 31; // mbs * seq

inline constexpr double most_capacity = 1e6; // times the balanced load

} // namespace moe::plan::limits
