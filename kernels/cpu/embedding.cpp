// The embedding table's slice of the vocabulary: look-up and gradient.
#include "kernels/cpu/rows.hpp"

#include <Eigen/Core>

namespace moe::cpu {
namespace {

using In = Eigen::Map<const Eigen::ArrayXf>;
using Out = Eigen::Map<Eigen::ArrayXf>;

void embedding(const std::int32_t* ids, Src table, Dst x, std::int64_t rows, std::int64_t cols, std::int64_t first,
               std::int64_t vocab_local, void*) {
    const std::size_t row_bytes = static_cast<std::size_t>(cols) * size_of(x.type);
    for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t id = ids[r] - first;
        if (id >= 0 && id < vocab_local) {
            move(table, id * cols, x, r * cols, cols);
        } else if (row_bytes != 0) {
            std::memset((x + r * cols).data, 0, row_bytes);
        }
    }
}

void embedding_grad(const std::int32_t* ids, Src dx, float* dtable, std::int64_t rows, std::int64_t cols,
                    std::int64_t first, std::int64_t vocab_local, void*) {
    float* wide = scratch(Slot::a, cols);
    for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t id = ids[r] - first;
        if (id < 0 || id >= vocab_local) continue;
        Out(dtable + id * cols, cols) += In(read(dx, r * cols, cols, wide), cols);
    }
}

} // namespace

void add_embedding(Kernels& table) {
    table.embedding = embedding;
    table.embedding_grad = embedding_grad;
}

} // namespace moe::cpu
