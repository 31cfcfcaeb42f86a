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

// The flag by which a product says whether it adds to its result, a whole gradient; null for other ops.
bool* adds(program::Op& op, const program::Tensor& gradient);

// Which elements of one bucket's gradients have been written, and which of them by a product that set them.
class WrittenGradients {
public:
    bool overlaps(std::int64_t begin, std::int64_t end) const;
    void write(std::int64_t begin, std::int64_t end, bool set);
    bool any_set() const { return !set_.empty(); }
    // Elements [begin, end) of `elements` that no product sets, in order.
    std::vector<std::pair<std::int64_t, std::int64_t>> unset(std::int64_t elements) const;

private:
    using Ranges = std::map<std::int64_t, std::int64_t>; // begin -> end, apart from each other
    static void insert(Ranges& ranges, std::int64_t begin, std::int64_t end);

    Ranges written_, set_;
};

// Goes through the templates of a rank in the order of its slots and keeps which elements of each bucket are written.
class FirstGradients {
public:
    explicit FirstGradients(const program::Program& program) : program_(program) {}

    // `tmpl` as the next slot runs it: products whose gradient nobody has written a part of yet set it, and move that
    // many bytes less. Nothing where it has none such.
    std::optional<program::Template> next(const program::Template& tmpl);
    bool sets(const program::Bucket& bucket) const; // any of its gradients
    // Elements [begin, end) of a bucket's gradients that products do not set, in order.
    std::vector<std::pair<std::int64_t, std::int64_t>> unset(const program::Bucket& bucket) const;

private:
    const program::Program& program_;
    std::map<program::TensorId, WrittenGradients> written_; // by the tensor that holds a bucket's gradients
};

} // namespace moe::passes
