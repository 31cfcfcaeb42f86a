// Products of the (max, +) algebra of clocks.
#include "simulator/replay/max_plus.hpp"

#include <algorithm>

namespace moe::replay {

StreamClocks MaxPlusMatrix::after(const StreamClocks& start, double message) const {
    const auto at = [&](double StreamClocks::*clock) {
        return std::max({start.host + from_host.*clock, start.device + from_device.*clock,
                         start.ring + from_ring.*clock, message + from_message.*clock});
    };
    return {at(&StreamClocks::host), at(&StreamClocks::device), at(&StreamClocks::ring)};
}

MaxPlusMatrix MaxPlusMatrix::then(const MaxPlusMatrix& next) const {
    const auto row = [&next](const StreamClocks& clocks) { return next.after(clocks, clocks.device); };
    return {row(from_host), row(from_device), row(from_ring), row(from_message)};
}

StreamClocks latest(const StreamClocks& a, const StreamClocks& b) {
    return {std::max(a.host, b.host), std::max(a.device, b.device), std::max(a.ring, b.ring)};
}

} // namespace moe::replay
