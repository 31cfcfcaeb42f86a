// Operands whose extent can be asked for: a back end with memory of its own copies whole buffers there and back.
#pragma once

#include <cstddef>

namespace moe::test {

void* tracked_allocate(std::size_t bytes);
void tracked_free(void* start);

struct Extent {
    void* start = nullptr;
    std::size_t bytes = 0;
};
// The tracked buffer that p points into or just behind; a null start if there is none.
Extent extent_of(const void* p);

// Each buffer is an allocation of its own size, so that ASan sees every step outside.
template <class T>
struct Tracked {
    using value_type = T;

    Tracked() = default;
    template <class Other>
    Tracked(const Tracked<Other>&) {}
    T* allocate(std::size_t n) { return static_cast<T*>(tracked_allocate(n * sizeof(T))); }
    void deallocate(T* start, std::size_t) { tracked_free(start); }
    friend bool operator==(const Tracked&, const Tracked&) { return true; }
};

} // namespace moe::test
