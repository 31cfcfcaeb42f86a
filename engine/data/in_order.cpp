// Blocks of a dataset in their order.
#include "engine/data/in_order.hpp"

#include "planner/base/error.hpp"

#include <algorithm>

namespace moe::data {

InOrder::InOrder(const std::string& prefix, std::int64_t seq, std::int64_t vocab)
    : data_(prefix), seq_(seq), vocab_(vocab) {
    if (data_.tokens() < 2) refuse("{}: {} token has no label to predict; use more text", prefix, data_.tokens());
}

void InOrder::read(std::int64_t sample, std::span<std::int32_t> out) const {
    if (static_cast<std::int64_t>(out.size()) != seq_ + 1 || sample >= samples())
        fail("sample {} of {} tokens was asked for, there are {} of {}", sample, out.size(), samples(), seq_ + 1);
    const auto here = static_cast<std::size_t>(std::min(seq_ + 1, data_.tokens() - sample * seq_));
    data_.read(sample * seq_, out.first(here), vocab_);
    std::fill(out.begin() + static_cast<std::ptrdiff_t>(here), out.end(), -1);
}

void InOrder::read_counts(std::int64_t sample, std::span<std::int32_t> counts) const {
    const auto here =
        static_cast<std::size_t>(std::min(static_cast<std::int64_t>(counts.size()), data_.tokens() - sample * seq_));
    data_.read_counts(sample * seq_, counts.first(here));
    std::fill(counts.begin() + static_cast<std::ptrdiff_t>(here), counts.end(), 0);
}

void InOrder::read_documents(std::int64_t sample, std::span<std::int32_t> starts) {
    std::vector<std::int64_t> firsts(starts.size());
    data_.read_documents(sample * seq_, firsts);
    for (std::size_t i = 0; i < starts.size(); ++i)
        starts[i] = static_cast<std::int32_t>(std::max<std::int64_t>(0, firsts[i] - sample * seq_));
}

} // namespace moe::data
