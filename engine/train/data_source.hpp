// The samples of a dataset as a trainer takes them.
#pragma once

#include "engine/train/trainer.hpp"

#include <cstdint>
#include <span>

namespace moe::train {

// Of a SampleData or an InOrder, which must outlive the source. It has counts where the data have a loss mask.
template <class Data>
SampleSource samples_of(Data& data) {
    SampleSource source(
        [&data](std::int64_t sample, std::span<std::int32_t> out) { data.read(sample, out); },
        [&data](std::int64_t sample, std::span<std::int32_t> starts) { data.read_documents(sample, starts); });
    if (data.has_loss_mask())
        source.counts = [&data](std::int64_t sample, std::span<std::int32_t> counts) {
            data.read_counts(sample, counts);
        };
    return source;
}

} // namespace moe::train
