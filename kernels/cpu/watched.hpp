// Asks AddressSanitizer for a matrix as a whole, before code that is compiled without it.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace moe::cpu {

// Reports the first byte of the rows that lies outside of any memory; nothing in builds without AddressSanitizer.
template <class T>
void watch([[maybe_unused]] const T* x, [[maybe_unused]] std::int64_t rows, [[maybe_unused]] std::int64_t cols,
           [[maybe_unused]] std::int64_t ld) {
#if defined(__SANITIZE_ADDRESS__)
    for (std::int64_t r = 0; cols > 0 && r < rows; ++r) {
        T* row = const_cast<T*>(x) + r * ld;
        const void* wrong = __asan_region_is_poisoned(row, static_cast<std::size_t>(cols) * sizeof(T));
        if (wrong != nullptr) static_cast<void>(*static_cast<const volatile char*>(wrong));
    }
#endif
}

} // namespace moe::cpu
