// Proof of a common secret: SHA-256 (FIPS 180-4) and HMAC (RFC 2104) over it.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace moe::engine {

using Digest = std::array<std::uint8_t, 32>;

Digest sha256(std::string_view bytes);
Digest hmac_sha256(std::string_view key, std::string_view message);
// In a time that does not depend on where they differ.
bool same_digest(const Digest& a, const Digest& b);

} // namespace moe::engine
