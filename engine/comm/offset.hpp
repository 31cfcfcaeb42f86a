// Addresses within a buffer, and copies between buffers.
#pragma once

#include <cstdint>
#include <cstring>

namespace moe::comm {

inline char* offset(void* base, std::int64_t bytes) { return static_cast<char*>(base) + bytes; }
inline const char* offset(const void* base, std::int64_t bytes) { return static_cast<const char*>(base) + bytes; }

// A member's own part is often where it belongs already, and nothing may lie nowhere.
inline void copy(void* to, const void* from, std::int64_t bytes) {
    if (bytes > 0 && to != from) std::memmove(to, from, static_cast<std::size_t>(bytes));
}

} // namespace moe::comm
