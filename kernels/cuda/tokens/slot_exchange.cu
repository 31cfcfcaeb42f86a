// The exchange of slots through windows: their sizes, and the launch of a call.
#include "kernels/cuda/tokens/slot_exchange.cuh"

#include "kernels/cuda/cuda_kernels.hpp"
#include "kernels/cuda/tokens/nccl_windows.hpp"

#include <stdexcept>

namespace moe::cuda {
namespace {

constexpr std::int64_t pages(std::int64_t bytes) { return ceil_div<std::int64_t>(bytes, 4096) * 4096; }

std::int64_t window_bytes(int members, std::int64_t slots_bytes, bool remote) {
    return Exchange::head_bytes(members) + (remote ? 2 : 1) * pages(slots_bytes);
}

void exchange(const SlotGroup& group, const ChunkShape& shape, const void* x, const std::int32_t* counts, void* y,
              void* stream) {
    require(group.blocks <= most_exchange_blocks, "blocks of an exchange", group.blocks, most_exchange_blocks);
    const bool remote = group.remote > 0;
    const std::int64_t slots = group.members * shape.slot_bytes(),
                       room = (group.window_bytes - Exchange::head_bytes(group.members)) / (remote ? 2 : 1);
    if (slots > room || shape.row_bytes % 2 != 0)
        throw std::runtime_error("cuda: an exchange of " + std::to_string(slots) + " bytes, rows of " +
                                 std::to_string(shape.row_bytes) + ", in a window for " + std::to_string(room));
    const Exchange e{group, shape, room, static_cast<const char*>(x), counts, static_cast<char*>(y)};
    if (remote)
        nccl_exchange(e, stream);
    else
        launch_exchange(e, NoNetwork{}, stream);
}

} // namespace
} // namespace moe::cuda

namespace moe {

const ExchangeKernels& cuda_exchange_kernels() {
    static const ExchangeKernels table{cuda::window_bytes, cuda::exchange};
    return table;
}

} // namespace moe
