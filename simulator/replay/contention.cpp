// Prices ops beside communication by what of it is still to come.
#include "simulator/replay/contention.hpp"

#include "planner/program/communicators.hpp"

#include <algorithm>

namespace moe::replay {

// Counts are small, and are there at once.
bool exchanges_rows(const program::Program& program, const program::Op& op) {
    return op.stream == program::Stream::expert && program::is_communication(op.kind) &&
           program.tensors[static_cast<std::size_t>(op.out[0])].dtype != program::Dtype::i32;
}

double slowed(const CommIntervals& travels, double lost, double start, double seconds) {
    const double rate = 1.0 - lost;
    double now = start, left = seconds; // left: seconds of work, at full rate
    for (const auto& [from, until] : travels) {
        if (from >= now + left) break; // The op ends before the rows leave.
        const double before = std::max(0.0, from - now);
        const double beside = std::min((left - before) / rate, until - now - before);
        if (beside <= 0.0) continue; // The rows have come before the op begins, or take no time.
        left -= before + beside * rate;
        now += before + beside;
    }
    return now + left - start - seconds;
}

double Contention::longer(const program::Program& program, const program::Op& op, double start, double seconds,
                          bool merged) {
    if (price_.none()) return 0.0;
    const bool spares = merged && reserved_.next(op);
    // Outside of merged slots something computes beside those that say so.
    const auto* rows = std::get_if<program::RowsAttr>(&op.attr);
    if (price_.lost > 0.0 && exchanges_rows(program, op) && (merged || (rows != nullptr && rows->beside)))
        tokens_.emplace_back(start, start + seconds);
    if (price_.to_collectives > 0.0 && op.stream == program::Stream::data && program::is_communication(op.kind))
        collectives_.emplace_back(start, start + seconds);
    if (price_.to_copies > 0.0 && program::copies_with_host(op.kind)) copies_.emplace_back(start, start + seconds);
    if (op.stream != program::Stream::compute) return 0.0;
    for (CommIntervals* travels : {&tokens_, &collectives_, &copies_})
        while (!travels->empty() && travels->front().second <= start) travels->pop_front();
    double longer = for_tokens(op, start, seconds, spares);
    longer += slowed(collectives_, price_.to_collectives, start, seconds + longer);
    if (op.kind != program::OpKind::grouped_gemm) longer += slowed(copies_, price_.to_copies, start, seconds + longer);
    return longer;
}

double Contention::for_tokens(const program::Op& op, double start, double seconds, bool spares) const {
    const auto* product = std::get_if<program::GroupedGemmAttr>(&op.attr);
    if (product == nullptr) return slowed(tokens_, price_.lost, start, seconds);
    if (product->reserved_sms > 0) return 0.0; // The price counts the SMs.
    if (spares) return seconds * (price_.reserved_slowdown - 1.0);
    return tokens_.empty() || tokens_.front().first > start ? 0.0 : tokens_.front().second - start;
}

} // namespace moe::replay
