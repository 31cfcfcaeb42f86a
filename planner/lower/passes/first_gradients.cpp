// Intervals of gradient buckets: which are written, and which of them by a product that may as well set them.
#include "planner/lower/passes/first_gradients.hpp"

#include "planner/plan/plan.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <iterator>
#include <variant>

namespace moe::passes {

namespace {

const program::Tensor& tensor(const program::Program& program, program::TensorId id) {
    return program.tensors[static_cast<std::size_t>(id)];
}

// The flag by which a product says whether it adds to its result, a whole gradient; null for other ops.
bool* adds(program::Op& op, const program::Tensor& gradient) {
    if (auto* g = std::get_if<program::GroupedGemmAttr>(&op.attr))
        return g->mode == program::GroupedMode::wgrad ? &g->accumulate : nullptr;
    auto* g = std::get_if<program::GemmAttr>(&op.attr);
    const bool whole = g != nullptr && g->m * g->n == gradient.elements() && g->ldc == 0 && g->c_offset == 0;
    return whole ? &g->accumulate : nullptr;
}

using Ranges = std::map<std::int64_t, std::int64_t>;

bool overlaps(const Ranges& ranges, std::int64_t begin, std::int64_t end) {
    const auto behind = ranges.lower_bound(begin);
    if (behind != ranges.end() && behind->first < end) return true;
    return behind != ranges.begin() && std::prev(behind)->second > begin;
}

void insert(Ranges& ranges, std::int64_t begin, std::int64_t end) {
    auto at = ranges.upper_bound(begin);
    if (at != ranges.begin() && std::prev(at)->second >= begin) --at;
    while (at != ranges.end() && at->first <= end) {
        begin = std::min(begin, at->first);
        end = std::max(end, at->second);
        at = ranges.erase(at);
    }
    ranges.emplace(begin, end);
}

} // namespace

bool sets_first_gradients(const plan::Plan& plan) {
    return plan::stack_traits(plan).sets_first_gradients && !plan.reshards();
}

std::optional<program::Template> FirstGradients::next(const program::Template& tmpl) {
    std::optional<program::Template> result;
    for (std::size_t i = 0; i < tmpl.ops.size(); ++i)
        for (const program::TensorId id : tmpl.ops[i].out) {
            if (id == program::no_tensor) continue;
            const program::Tensor& t = tensor(program_, id);
            if (t.storage != program::Storage::gradient || t.base == program::no_tensor) continue;
            const std::int64_t begin = t.offset, end = t.offset + t.elements();
            program::Op op = tmpl.ops[i];
            if (bool* const add = adds(op, t); add != nullptr && *add && !overlaps(written_[t.base], begin, end)) {
                *add = false;
                op.bytes -= t.expected_bytes(); // The old values are no longer read.
                insert(set_[t.base], begin, end);
                if (!result) result = tmpl;
                result->ops[i] = std::move(op);
            }
            insert(written_[t.base], begin, end);
        }
    return result;
}

std::vector<std::pair<std::int64_t, std::int64_t>> FirstGradients::unset(const program::Bucket& bucket) const {
    std::vector<std::pair<std::int64_t, std::int64_t>> rest;
    const std::int64_t elements = tensor(program_, bucket.gradients).elements();
    std::int64_t from = 0;
    if (const auto found = set_.find(bucket.gradients); found != set_.end())
        for (const auto& [begin, end] : found->second) {
            if (begin > from) rest.emplace_back(from, begin);
            from = end;
        }
    if (from < elements) rest.emplace_back(from, elements);
    return rest;
}

} // namespace moe::passes
