// Intervals of gradient buckets: which are written, and which of them by a product that may as well set them.
#include "planner/lower/passes/first_gradients.hpp"

#include "planner/lower/passes/tensor.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <iterator>
#include <variant>

namespace moe::passes {

bool* adds(program::Op& op, const program::Tensor& gradient) {
    if (auto* g = std::get_if<program::GroupedGemmAttr>(&op.attr))
        return g->mode == program::GroupedMode::wgrad ? &g->accumulate : nullptr;
    auto* g = std::get_if<program::GemmAttr>(&op.attr);
    const bool whole = g != nullptr && g->m * g->n == gradient.elements() && g->ldc == 0 && g->c_offset == 0;
    return whole ? &g->accumulate : nullptr;
}

bool WrittenGradients::overlaps(std::int64_t begin, std::int64_t end) const {
    const auto behind = written_.lower_bound(begin);
    if (behind != written_.end() && behind->first < end) return true;
    return behind != written_.begin() && std::prev(behind)->second > begin;
}

void WrittenGradients::insert(Ranges& ranges, std::int64_t begin, std::int64_t end) {
    auto at = ranges.upper_bound(begin);
    if (at != ranges.begin() && std::prev(at)->second >= begin) --at;
    while (at != ranges.end() && at->first <= end) {
        begin = std::min(begin, at->first);
        end = std::max(end, at->second);
        at = ranges.erase(at);
    }
    ranges.emplace(begin, end);
}

void WrittenGradients::write(std::int64_t begin, std::int64_t end, bool set) {
    insert(written_, begin, end);
    if (set) insert(set_, begin, end);
}

std::vector<std::pair<std::int64_t, std::int64_t>> WrittenGradients::unset(std::int64_t elements) const {
    std::vector<std::pair<std::int64_t, std::int64_t>> rest;
    std::int64_t from = 0;
    for (const auto& [begin, end] : set_) {
        if (begin > from) rest.emplace_back(from, begin);
        from = end;
    }
    if (from < elements) rest.emplace_back(from, elements);
    return rest;
}

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
            WrittenGradients& written = written_[t.base];
            bool* const add = adds(op, t);
            const bool set = add != nullptr && *add && !written.overlaps(begin, end);
            if (set) {
                *add = false;
                op.bytes -= t.expected_bytes(); // The old values are no longer read.
                if (!result) result = tmpl;
                result->ops[i] = std::move(op);
            }
            written.write(begin, end, set);
        }
    return result;
}

bool FirstGradients::sets(const program::Bucket& bucket) const {
    const auto found = written_.find(bucket.gradients);
    return found != written_.end() && found->second.any_set();
}

std::vector<std::pair<std::int64_t, std::int64_t>> FirstGradients::unset(const program::Bucket& bucket) const {
    const std::int64_t elements = tensor(program_, bucket.gradients).elements();
    const auto found = written_.find(bucket.gradients);
    if (found == written_.end()) return {{0, elements}};
    return found->second.unset(elements);
}

} // namespace moe::passes
