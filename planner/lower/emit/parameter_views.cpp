// What a chunk's buckets hold, key by key: the list of all parameters, and views of a weight and of its gradient.
#include "planner/base/error.hpp"
#include "planner/lower/emit/builder.hpp"
#include "planner/lower/emit/parameters.hpp"

#include <algorithm>

namespace moe::emit {

// Lists the parameters in the order of declaration, copies written out.
void ParameterSet::list_parameters(program::Program& program, int first_bucket) const {
    std::vector<const Key*> order;
    for (const auto& [key, entry] : keys_) order.push_back(&entry);
    std::sort(order.begin(), order.end(), [](const Key* a, const Key* b) { return a->first < b->first; });
    for (const Key* entry : order) {
        const std::int64_t shift = entry->decay ? 0 : buckets_[static_cast<std::size_t>(entry->bucket)].decayed;
        for (int copy = 0; copy < entry->copies; ++copy)
            for (std::size_t i = entry->first; i < entry->first + entry->count; ++i) {
                program::Parameter p = parameters_[i];
                p.copy = buckets_[static_cast<std::size_t>(p.bucket)].copy;
                p.bucket += first_bucket;
                p.offset += shift + entry->elements / entry->copies * copy;
                if (p.domain == plan::Domain::expert) p.local_expert = copy;
                program.parameters.push_back(std::move(p));
            }
    }
}

Weight ParameterSet::weight(program::Program& program, const std::string& key, std::int64_t n, std::int64_t k) {
    const auto found = keys_.find(key);
    if (found == keys_.end() && shared_with_ && shared_with_->has(key)) return shared_with_->weight(program, key, n, k);
    if (!sealed_ || found == keys_.end()) fail("no parameter is declared under '{}'", key);
    Key& entry = found->second;
    if (n * k != entry.elements) fail("parameter '{}' holds {} elements, not {} x {}", key, entry.elements, n, k);
    const auto view = entry.views.find({n, k});
    if (view != entry.views.end()) return {view->second.first, view->second.second, n, k};
    const program::Bucket& b = buckets_[static_cast<std::size_t>(entry.bucket)];
    const auto add = [&](program::TensorId base, const char* what, std::int64_t forms) {
        const program::Tensor& whole = program.tensors[static_cast<std::size_t>(base)];
        program::Tensor t;
        if (named_) t.name = key + what;
        t.dtype = whole.dtype;
        t.storage = whole.storage;
        t.rows = forms * n; // rows of all forms, of which a product reads one
        t.cols = k;
        t.expected_rows = static_cast<double>(n);
        t.chunk = chunk_;
        t.base = base;
        t.offset = forms * (entry.offset + (entry.decay ? 0 : b.decayed));
        program.tensors.push_back(std::move(t));
        return static_cast<program::TensorId>(program.tensors.size() - 1);
    };
    const Weight weight{
        add(b.resharded() ? b.gathered : b.weights, ".weight", b.matrices.empty() ? 1 : 2),
        b.frozen ? program::no_tensor : add(b.resharded() ? b.whole_gradients : b.gradients, ".gradient", 1), n, k};
    entry.views.emplace(std::pair{n, k}, std::pair{weight.value, weight.gradient});
    return weight;
}

std::int64_t ParameterSet::elements(const std::string& key) const {
    if (const auto found = keys_.find(key); found != keys_.end()) return found->second.elements;
    return shared_with_ != nullptr ? shared_with_->elements(key) : 0;
}

bool ParameterSet::decays(const std::string& key) const {
    const auto found = keys_.find(key);
    return found != keys_.end() ? found->second.decay : shared_with_ != nullptr && shared_with_->decays(key);
}

} // namespace moe::emit
