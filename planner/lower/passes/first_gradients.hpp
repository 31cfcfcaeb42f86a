// The first product that writes a weight's gradient in a step sets it; only what no product sets is zeroed.
#pragma once

#include "planner/program/program.hpp"

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace moe::passes {

// True where the plan's software sets a first gradient instead of adding to zeros. Published stacks zero whole buckets
// and add to them; FSDP's products write new whole gradients in every backward.
bool sets_first_gradients(const plan::Plan& plan);

// Goes through the templates of a rank in the order of its slots and keeps which elements of each bucket are written.
class FirstGradients {
public:
    explicit FirstGradients(const program::Program& program) : program_(program) {}

    // `tmpl` as the next slot runs it: products whose gradient nobody has written a part of yet set it, and move that
    // many bytes less. Nothing where it has none such.
    std::optional<program::Template> next(const program::Template& tmpl);
    bool sets(const program::Bucket& bucket) const { return set_.count(bucket.gradients) > 0; } // any of its gradients
    // Elements [begin, end) of a bucket's gradients that products do not set, in order.
    std::vector<std::pair<std::int64_t, std::int64_t>> unset(const program::Bucket& bucket) const;

private:
    using Ranges = std::map<std::int64_t, std::int64_t>; // begin -> end, apart from each other

    const program::Program& program_;
    std::map<program::TensorId, Ranges> written_, set_; // ranges by the tensor that holds a bucket's gradients
};

} // namespace moe::passes
