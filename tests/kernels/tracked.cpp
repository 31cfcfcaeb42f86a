// The list of tracked buffers, ordered by address.
#include "tests/kernels/tracked.hpp"

#include <map>
#include <new>

namespace moe::test {
namespace {

using Extents = std::map<const unsigned char*, std::size_t>;

// Never destroyed: test data with static lifetime may be freed after any destructor here.
Extents& extents() {
    static Extents& list = *new Extents;
    return list;
}

const unsigned char* key(const void* p) { return static_cast<const unsigned char*>(p); }

} // namespace

void* tracked_allocate(std::size_t bytes) {
    void* start = ::operator new(bytes);
    extents()[key(start)] = bytes;
    return start;
}

void tracked_free(void* start) {
    extents().erase(key(start));
    ::operator delete(start);
}

Extent extent_of(const void* p) {
    auto at = extents().upper_bound(key(p));
    if (at == extents().begin()) return {};
    --at;
    if (key(p) > at->first + at->second) return {};
    return {const_cast<unsigned char*>(at->first), at->second};
}

} // namespace moe::test
