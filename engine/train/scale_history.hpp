// Histories of delayed scaling: of each quantized tensor the largest magnitudes of the last steps, of which its scale
// in the next one is.
//
// Transformer Engine's DelayedScaling with its defaults (transformer_engine/common/recipe/__init__.py): the largest of
// 1,024 entries, no margin. An entry is the largest over the micro-batches and ranks of a step; there an entry is of
// one micro-batch. A step that is bad leaves none, and neither does a magnitude that is 0 or no finite number.
#pragma once

#include "engine/weights/checkpoint.hpp"

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace moe::train {

class ScaleHistory {
public:
    static constexpr std::int64_t length = 1024; // steps that count

    // Entries by tensor, the oldest first. Those that a later one is not below can never count again and are left out.
    using Entries = std::map<std::string, std::vector<weights::Largest>>;
    ScaleHistory() = default;
    explicit ScaleHistory(Entries entries) : entries_(std::move(entries)) {}
    const Entries& entries() const { return entries_; }

    // Of step `step`, from 1; steps are added in order, and of several magnitudes of one step the largest counts.
    void add(const std::string& tensor, std::int64_t step, float largest);
    // The largest of the `length` steps before `step`, 0 where there is none.
    float window(const std::string& tensor, std::int64_t step) const;

private:
    Entries entries_;
};

} // namespace moe::train
