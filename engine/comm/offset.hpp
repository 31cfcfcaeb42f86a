// Addresses some bytes behind the start of a buffer.
#pragma once

#include <cstdint>

namespace moe::comm {

inline char* offset(void* base, std::int64_t bytes) { return static_cast<char*>(base) + bytes; }
inline const char* offset(const void* base, std::int64_t bytes) { return static_cast<const char*>(base) + bytes; }

} // namespace moe::comm
