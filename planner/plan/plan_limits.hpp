// Upper bounds of a plan's numbers: above any machine, and low enough that sizes made of them stay inside 64 bits.
#pragma once

#include <cstdint>

namespace moe::plan::limits {

inline constexpr std::int64_t max_gpus = 1 << 22;
inline constexpr std::int64_t max_seq = 1 << 27;                              // tokens
inline constexpr std::int64_t max_gbs = 1 << 24;                              // sequences
inline constexpr std::int64_t max_micro_batch_tokens = std::int64_t{1} << 31; // mbs * seq

// Work of one request: the passes of a step that a simulation keeps at once, of one rank and of all stages together. A
// plan at the bound takes seconds and about a GiB. Published trainings reach 1,024 (Kimi-K2 on H100) and 49,152
// (Llama-3.1-405B on GB200), profiles/runs.
inline constexpr std::int64_t max_micro_batches = 1 << 12; // of a rank
inline constexpr std::int64_t max_scheduled = 1 << 17;     // micro-batches * pp * vpp

inline constexpr double most_capacity = 1e6; // times the balanced load

} // namespace moe::plan::limits
