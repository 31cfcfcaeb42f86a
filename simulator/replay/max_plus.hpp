// The effect of a piece of work on the clocks of one GPU: longest paths from its start to its end.
#pragma once

#include <limits>

namespace moe::replay {

// Seconds since the start of the step. host: everything so far has been issued; device: and is through; ring: free are
// the streams of what needs nothing of the work before (rings of context parallelism, copies from and to the host) and
// the buffers that the copies use.
struct StreamClocks {
    double host = 0.0, device = 0.0, ring = 0.0;
};

// Seconds by which one clock is ahead of the others where it must not matter: longer than any segment or pair lasts.
inline constexpr double far_ahead = 1e3;

// An op starts at the latest of what it waits for and ends a fixed time later. The clocks at the end are therefore
// linear in those at the start in the algebra of maximum and plus, and pieces of work in a row multiply like matrices.
struct MaxPlusMatrix {
    static constexpr double never = -std::numeric_limits<double>::infinity(); // no path
    // The clocks at the end when one of those at the start is 0 and the others are long past.
    StreamClocks from_host{0.0, never, never}, from_device{never, 0.0, never}, from_ring{never, never, 0.0};
    // The clocks at the end when the neighbour's message arrives at 0; without it a part of the work (recomputation)
    // can begin.
    StreamClocks from_message{never, 0.0, never};

    // Clocks at the end. message: when it is there; `never` for work that needs none.
    StreamClocks after(const StreamClocks& start, double message) const;
    // The matrix of this work and `next` behind it, which begins with what this ends with.
    MaxPlusMatrix then(const MaxPlusMatrix& next) const;
    // The host waits for something on the device on the way.
    bool waits() const { return from_device.host > never; }
};

// Clocks of which none is reached on any path.
inline constexpr StreamClocks no_clocks{MaxPlusMatrix::never, MaxPlusMatrix::never, MaxPlusMatrix::never};

// Clock by clock.
StreamClocks latest(const StreamClocks& a, const StreamClocks& b);

} // namespace moe::replay
