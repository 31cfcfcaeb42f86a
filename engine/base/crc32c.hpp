// The checksum of checkpoints and of what tells one file from another.
#pragma once

#include <cstdint>
#include <span>

namespace moe::engine {

// CRC-32C (Castagnoli polynomial, RFC 3720 appendix B.4) of what `before` is the checksum of, with `bytes` behind it.
std::uint32_t crc32c(std::span<const char> bytes, std::uint32_t before = 0);

} // namespace moe::engine
