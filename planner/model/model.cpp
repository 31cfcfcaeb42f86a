// Sizes that follow from a model's fields.
#include "planner/model/model.hpp"

namespace moe::model {

std::int64_t Model::padded_vocab(int tp) const {
    const std::int64_t step = vocab_divisor * tp;
    return (vocab + step - 1) / step * step;
}

} // namespace moe::model
