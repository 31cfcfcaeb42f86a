// Order of samples: by blend weight between datasets, plain or permuted within one.
#include "engine/data/data.hpp"
#include "planner/base/counted.hpp"
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
    : seq_(seq), global_batch_(global_batch), vocab_(vocab), shuffle_(shuffle), seed_(seed), drawn_(blend.size(), 0) {
    if (blend.empty()) refuse("no training data: give at least one dataset prefix");
    double sum = 0.0;
    for (const BlendEntry& entry : blend) {
        if (!std::isfinite(entry.weight) || entry.weight <= 0.0)
            refuse("the blend weight {} of {} is not a positive number", entry.weight, entry.prefix);
        sum += entry.weight;
    }
    for (const BlendEntry& entry : blend) {
        Entry e{std::make_unique<IndexedDataset>(entry.prefix), entry.weight / sum, {}};
        const std::int64_t needed = global_batch * seq + 1;
        if (e.data->tokens() < needed)
            refuse(
                "{}: {}, and one global batch needs {} ({} of {} and one label); use more text, a smaller gbs or seq",
                entry.prefix, counted(e.data->tokens(), "token"), counted(needed), counted(global_batch, "sequence"),
                seq);
        e.start = {entry.prefix, e.data->tokens(), e.data->documents(), e.data->mark(), entry.weight};
        e.start.order = static_cast<std::int64_t>(entries_.size());
        e.start.block = seq;
        entries_.push_back(std::move(e));
    }
}

std::int64_t SampleData::tokens() const {
    std::int64_t sum = 0;
    for (const Entry& entry : entries_) sum += entry.data->tokens();
    return sum;
}

std::size_t SampleData::next_entry() const {
    std::size_t behind = 0;
    double most = -1.0;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
        const double lag = entries_[i].share * static_cast<double>(all_drawn_ + 1) - static_cast<double>(drawn_[i]);
        if (lag > most) {
            most = lag;
            behind = i;
        }
    }
    return behind;
}

void SampleData::walk_to(std::int64_t sample) {
    if (sample < walked_) {
        walked_ = first_;
        all_drawn_ = 0;
        for (std::size_t i = 0; i < entries_.size(); ++i) all_drawn_ += drawn_[i] = entries_[i].start.drawn;
    }
    if (entries_.size() == 1) {
        drawn_[0] += sample - walked_;
        all_drawn_ = drawn_[0];
        walked_ = sample;
    }
    for (; walked_ < sample; ++walked_, ++all_drawn_) ++drawn_[next_entry()];
}

DatasetPosition SampleData::behind(const Entry& entry, std::int64_t taken) const {
    DatasetPosition p = entry.start;
    p.drawn += taken;
    const std::int64_t rest = (p.tokens - 1) / p.block * p.block - p.consumed, left = std::max<std::int64_t>(0, rest);
    if (taken < left / seq_) {
        p.consumed += taken * seq_;
        return p;
    }
    taken -= left / seq_;
    const std::int64_t samples = (p.tokens - 1) / seq_;
    p.pass += 1 + taken / samples;
    p.block = seq_;
    p.consumed = taken % samples * seq_;
    return p;
}

DataPosition SampleData::position(std::int64_t sample) {
    walk_to(sample);
    DataPosition position{shuffle_, seq_, global_batch_, {}};
    for (std::size_t i = 0; i < entries_.size(); ++i)
        position.datasets.push_back(behind(entries_[i], drawn_[i] - entries_[i].start.drawn));
    return position;
}

void SampleData::start(std::int64_t sample, const DataPosition& position, bool same_order) {
    std::vector<const DatasetPosition*> left;
    for (const DatasetPosition& d : position.datasets) left.push_back(&d);
    bool same_blend = position.datasets.size() == entries_.size();
    std::int64_t order = 0; // numbers of new datasets lie behind those of old ones
    for (const DatasetPosition& d : position.datasets) order = std::max(order, d.order + 1);
    for (std::size_t i = 0; i < entries_.size(); ++i) {
        DatasetPosition& here = entries_[i].start;
        const auto found = std::find_if(left.begin(), left.end(),
                                        [&](const DatasetPosition* d) { return d != nullptr && d->same_tokens(here); });
        same_blend = same_blend && found == left.begin() + static_cast<std::ptrdiff_t>(i) &&
                     (*found)->weight == here.weight; // NOLINT: equal as it was written
        if (found == left.end()) {
            here.order = order++;
            continue;
        }
        const std::string prefix = here.prefix;
        const double weight = here.weight;
        here = **found;
        here.prefix = prefix;
        here.weight = weight;
        *found = nullptr;
        if (!same_order && here.consumed > 0) {
            ++here.pass;
            here.consumed = 0;
        }
        if (here.consumed == 0) here.block = seq_;
    }
    if (!same_blend)
        for (Entry& entry : entries_) entry.start.drawn = 0;
    first_ = sample;
    walked_ = sample + 1; // The next walk begins anew.
    walk_to(sample);
}

template <class Run>
void SampleData::for_each_piece(std::int64_t sample, Run run) {
    walk_to(sample);
    const std::size_t from = next_entry();
    const Entry& entry = entries_[from];
    const DatasetPosition p = behind(entry, drawn_[from] - entry.start.drawn);
    const std::uint64_t key =
        mix(seed_ + mix(static_cast<std::uint64_t>(p.pass) + 1)) + static_cast<std::uint64_t>(p.order);
    for (std::int64_t done = 0; done < seq_;) {
        const std::int64_t at = p.consumed + done, blocks = (p.tokens - 1) / p.block;
        const std::int64_t block = shuffle_ ? permuted(at / p.block, blocks, key) : at / p.block;
        const std::int64_t count = std::min(p.block - at % p.block, seq_ - done);
        run(*entry.data, block * p.block + at % p.block, done, count);
        done += count;
    }
}

void SampleData::read(std::int64_t sample, std::span<std::int32_t> out) {
    if (static_cast<std::int64_t>(out.size()) != seq_ + 1)
        fail("a sample has {} tokens, {} were asked for", seq_ + 1, out.size());
    for_each_piece(sample, [&](const IndexedDataset& data, std::int64_t first, std::int64_t at, std::int64_t count) {
        data.read(first, out.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(count) + 1), vocab_);
    });
}

void SampleData::read_documents(std::int64_t sample, std::span<std::int32_t> starts) {
    if (static_cast<std::int64_t>(starts.size()) != seq_ + 1)
        fail("a sample has {} tokens, the documents of {} were asked for", seq_ + 1, starts.size());
    std::vector<std::int64_t> firsts;
    // Neighbouring pieces go on: they begin at `from` in the dataset, at `begin` in the sample.
    std::int64_t from = 0, begin = 0, expected = -1;
    for_each_piece(sample, [&](IndexedDataset& data, std::int64_t first, std::int64_t at, std::int64_t count) {
        if (first != expected) from = first, begin = at;
        expected = first + count;
        firsts.resize(static_cast<std::size_t>(count) + 1); // With the label behind the piece.
        data.read_documents(first, firsts);
        for (std::size_t i = 0; i < firsts.size(); ++i)
            starts[static_cast<std::size_t>(at) + i] =
                static_cast<std::int32_t>(begin + std::max<std::int64_t>(0, firsts[i] - from));
    });
}

void SampleData::read_counts(std::int64_t sample, std::span<std::int32_t> counts) {
    if (static_cast<std::int64_t>(counts.size()) != seq_ + 1)
        fail("a sample has {} tokens, the labels of {} were asked for", seq_ + 1, counts.size());
    for_each_piece(sample, [&](const IndexedDataset& data, std::int64_t first, std::int64_t at, std::int64_t count) {
        data.read_counts(first, counts.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(count) + 1));
    });
}

bool SampleData::has_loss_mask() const {
    return std::any_of(entries_.begin(), entries_.end(), [](const Entry& e) { return e.data->has_loss_mask(); });
}

std::map<std::int64_t, double> SampleData::document_lengths() {
    std::map<std::int64_t, double> lengths;
    for (const Entry& entry : entries_) {
        const std::vector<std::int64_t>& firsts = entry.data->first_of_document();
        const double weight = entry.share * static_cast<double>(tokens()) / static_cast<double>(entry.data->tokens());
        for (std::size_t d = 0; d < firsts.size(); ++d) {
            const std::int64_t end = d + 1 < firsts.size() ? firsts[d + 1] : entry.data->tokens();
            if (end > firsts[d]) lengths[end - firsts[d]] += weight;
        }
    }
    return lengths;
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
