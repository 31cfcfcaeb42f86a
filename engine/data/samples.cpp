// Order of samples: by blend weight between datasets, plain or permuted within one.
#include "engine/data/data.hpp"
#include "planner/base/error.hpp"

#include <algorithm>
#include <cmath>

namespace moe::data {

namespace {

// One round function of the Feistel network: a 64-bit finalizer (splitmix64's) of half, key and round.
std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

} // namespace

std::int64_t permuted(std::int64_t index, std::int64_t size, std::uint64_t key) {
    if (size <= 1) return 0;
    int half = 1;
    while (half < 31 && (std::int64_t{1} << (2 * half)) < size) ++half;
    const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
    auto x = static_cast<std::uint64_t>(index);
    do {
        std::uint64_t left = x >> half, right = x & mask;
        for (std::uint64_t round = 0; round < 6; ++round) {
            const std::uint64_t next = left ^ (mix(right + key + round * 0x9e3779b97f4a7c15u) & mask);
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= static_cast<std::uint64_t>(size));
    return static_cast<std::int64_t>(x);
}

SampleData::SampleData(const std::vector<BlendEntry>& blend, std::int64_t seq, std::int64_t global_batch,
                       std::int64_t vocab, bool shuffle, std::uint64_t seed)
    : seq_(seq), vocab_(vocab), shuffle_(shuffle), seed_(seed), drawn_(blend.size(), 0) {
    if (blend.empty()) refuse("no training data: give at least one dataset prefix");
    double sum = 0.0;
    for (const BlendEntry& entry : blend) {
        if (!std::isfinite(entry.weight) || entry.weight <= 0.0)
            refuse("the blend weight {} of {} is not a positive number", entry.weight, entry.prefix);
        sum += entry.weight;
    }
    for (const BlendEntry& entry : blend) {
        Entry e{std::make_unique<IndexedDataset>(entry.prefix), entry.weight / sum, 0};
        const std::int64_t needed = global_batch * seq + 1;
        if (e.data->tokens() < needed)
            refuse("{}: {} tokens are fewer than one global batch needs ({} sequences of {} and one label: {}); use "
                   "more text, a smaller gbs or seq",
                   entry.prefix, e.data->tokens(), global_batch, seq, needed);
        e.samples = (e.data->tokens() - 1) / seq;
        entries_.push_back(std::move(e));
    }
}

std::int64_t SampleData::tokens() const {
    std::int64_t sum = 0;
    for (const Entry& entry : entries_) sum += entry.data->tokens();
    return sum;
}

// The dataset that sample `sample` comes from and how many were drawn from it before.
std::pair<std::size_t, std::int64_t> SampleData::locate(std::int64_t sample) {
    if (entries_.size() == 1) return {0, sample};
    if (sample < walked_) {
        walked_ = 0;
        std::fill(drawn_.begin(), drawn_.end(), 0);
    }
    while (true) {
        std::size_t behind = 0;
        double most = -1.0;
        for (std::size_t i = 0; i < entries_.size(); ++i) {
            const double lag = entries_[i].share * static_cast<double>(walked_ + 1) - static_cast<double>(drawn_[i]);
            if (lag > most) {
                most = lag;
                behind = i;
            }
        }
        const std::int64_t before = drawn_[behind]++;
        if (walked_++ == sample) return {behind, before};
    }
}

void SampleData::read(std::int64_t sample, std::span<std::int32_t> out) {
    if (static_cast<std::int64_t>(out.size()) != seq_ + 1)
        fail("a sample has {} tokens, {} were asked for", seq_ + 1, out.size());
    const auto [entry, before] = locate(sample);
    const Entry& e = entries_[entry];
    std::int64_t index = before % e.samples;
    if (shuffle_)
        index =
            permuted(index, e.samples, mix(seed_ + mix(static_cast<std::uint64_t>(before / e.samples) + 1)) + entry);
    e.data->read(index * seq_, out, vocab_);
}

double SampleData::unigram_entropy(std::int64_t most_tokens) const {
    std::vector<double> counts(static_cast<std::size_t>(vocab_), 0.0);
    std::vector<std::int32_t> block(4096);
    for (const Entry& e : entries_) {
        const std::int64_t tokens = std::min(e.data->tokens(), most_tokens);
        for (std::int64_t first = 0; first < tokens; first += static_cast<std::int64_t>(block.size())) {
            const auto n = static_cast<std::size_t>(
                std::min<std::int64_t>(static_cast<std::int64_t>(block.size()), tokens - first));
            e.data->read(first, std::span(block).first(n), vocab_);
            for (std::size_t i = 0; i < n; ++i)
                counts[static_cast<std::size_t>(block[i])] += e.share / static_cast<double>(tokens);
        }
    }
    double entropy = 0.0;
    for (const double p : counts)
        if (p > 0.0) entropy -= p * std::log(p);
    return entropy;
}

} // namespace moe::data
