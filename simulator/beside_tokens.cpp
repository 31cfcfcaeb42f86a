// Prices ops beside an exchange by what of it is still to come.
#include "simulator/beside_tokens.hpp"

#include <algorithm>

namespace moe {

// Counts are small, and are there at once.
bool exchanges_rows(const Program& program, const Op& op) {
    return op.stream == Stream::expert && is_communication(op.kind) &&
           program.tensors[static_cast<std::size_t>(op.out[0])].dtype != Dtype::i32;
}

double BesideTokens::longer(const Program& program, const Op& op, double start, double seconds, bool merged) {
    if (price_.none()) return 0.0;
    const bool spares = merged && sparing_.next(op);
    // Outside of merged slots something computes beside those that say so.
    const auto* rows = std::get_if<RowsAttr>(&op.attr);
    if (exchanges_rows(program, op) && (merged || (rows != nullptr && rows->beside)))
        travels_.emplace_back(start, start + seconds);
    if (op.stream != Stream::compute) return 0.0;
    while (!travels_.empty() && travels_.front().second <= start) travels_.pop_front();
    if (const auto* product = std::get_if<GroupedGemmAttr>(&op.attr)) {
        if (product->spared > 0) return 0.0; // priced so
        if (spares) return seconds * (price_.sparing - 1.0);
        return travels_.empty() || travels_.front().first > start ? 0.0 : travels_.front().second - start;
    }
    return slowed(start, seconds);
}

double BesideTokens::slowed(double start, double seconds) const {
    const double rate = 1.0 - price_.lost;
    double now = start, left = seconds; // work, at full rate
    for (const auto& [from, until] : travels_) {
        const double before = std::min(left, std::max(0.0, from - now));
        const double beside = std::min((left - before) / rate, until - now - before);
        if (beside <= 0.0) break; // done before they leave
        left -= before + beside * rate;
        now += before + beside;
    }
    return now + left - start - seconds;
}

} // namespace moe
