// Products of the (max, +) algebra of clocks.
#include "simulator/replay/max_plus.hpp"

#include <algorithm>

namespace moe {

Clocks Passage::after(const Clocks& start, double message) const {
    const auto at = [&](double Clocks::*clock) {
        return std::max({start.host + from_host.*clock, start.device + from_device.*clock,
                         start.ring + from_ring.*clock, message + from_message.*clock});
    };
    return {at(&Clocks::host), at(&Clocks::device), at(&Clocks::ring)};
}

Passage Passage::then(const Passage& next) const {
    const auto row = [&next](const Clocks& clocks) { return next.after(clocks, clocks.device); };
    return {row(from_host), row(from_device), row(from_ring), row(from_message)};
}

Clocks latest(const Clocks& a, const Clocks& b) {
    return {std::max(a.host, b.host), std::max(a.device, b.device), std::max(a.ring, b.ring)};
}

} // namespace moe
