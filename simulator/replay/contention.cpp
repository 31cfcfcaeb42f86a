// Prices ops beside communication by what of it is still to come.
#include "simulator/replay/contention.hpp"

#include <algorithm>

namespace moe {

// Counts are small, and are there at once.
bool exchanges_rows(const Program& program, const Op& op) {
    return op.stream == Stream::expert && is_communication(op.kind) &&
           program.tensors[static_cast<std::size_t>(op.out[0])].dtype != Dtype::i32;
}

double slowed(const Travels& travels, double lost, double start, double seconds) {
    const double rate = 1.0 - lost;
    double now = start, left = seconds; // work, at full rate
    for (const auto& [from, until] : travels) {
        if (from >= now + left) break; // done before they leave
        const double before = std::max(0.0, from - now);
        const double beside = std::min((left - before) / rate, until - now - before);
        if (beside <= 0.0) continue; // they have come before it begins, or take no time
        left -= before + beside * rate;
        now += before + beside;
    }
    return now + left - start - seconds;
}

double Beside::longer(const Program& program, const Op& op, double start, double seconds, bool merged) {
    if (price_.none()) return 0.0;
    const bool spares = merged && sparing_.next(op);
    // Outside of merged slots something computes beside those that say so.
    const auto* rows = std::get_if<RowsAttr>(&op.attr);
    if (price_.lost > 0.0 && exchanges_rows(program, op) && (merged || (rows != nullptr && rows->beside)))
        tokens_.emplace_back(start, start + seconds);
    if (price_.to_collectives > 0.0 && op.stream == Stream::data && is_communication(op.kind))
        collectives_.emplace_back(start, start + seconds);
    if (op.stream != Stream::compute) return 0.0;
    for (Travels* travels : {&tokens_, &collectives_})
        while (!travels->empty() && travels->front().second <= start) travels->pop_front();
    const double tokens = for_tokens(op, start, seconds, spares);
    return tokens + slowed(collectives_, price_.to_collectives, start, seconds + tokens);
}

double Beside::for_tokens(const Op& op, double start, double seconds, bool spares) const {
    const auto* product = std::get_if<GroupedGemmAttr>(&op.attr);
    if (product == nullptr) return slowed(tokens_, price_.lost, start, seconds);
    if (product->spared > 0) return 0.0; // priced so
    if (spares) return seconds * (price_.sparing - 1.0);
    return tokens_.empty() || tokens_.front().first > start ? 0.0 : tokens_.front().second - start;
}

} // namespace moe
