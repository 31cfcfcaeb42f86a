// Grouped products on Hopper: what the kernel takes, its tensor maps, and the choice of tiles.
#include "kernels/cuda/sm90/grouped_gemm.cuh"
#include "kernels/cuda/sm90/launch.cuh"

#include "kernels/cuda/cuda_kernels.hpp"
#include "kernels/cuda/products/product.cuh"
#include "kernels/cuda/scratch.hpp"

namespace moe::cuda {
namespace {

using sm90::Config;
using sm90::Grouped;
using sm90::Maps;
using sm90::Pair;
using sm90::Sides;
using sm90::Turns;
using sm90::Update;

struct Call {
    const GroupedShape& shape;
    Src a, b;
    const std::int32_t* counts;
    Dst c;
    int multiprocessors;
    cudaStream_t stream;
};

Maps maps_of(const Call& call, bool swapped) {
    const GroupedShape& s = call.shape;
    switch (s.product) {
    case GroupedProduct::forward:
        return {sm90::map_of<__nv_bfloat16>(call.a.data, s.k, s.capacity, 1),
                sm90::map_of<__nv_bfloat16>(call.b.data, s.k, s.n, s.groups),
                sm90::map_of<__nv_bfloat16>(call.c.data, s.n, s.capacity, 1)};
    case GroupedProduct::dgrad:
        return {sm90::map_of<__nv_bfloat16>(call.a.data, s.n, s.capacity, 1),
                sm90::map_of<__nv_bfloat16>(call.b.data, s.k, s.n, s.groups),
                sm90::map_of<__nv_bfloat16>(call.c.data, s.k, s.capacity, 1)};
    default:
        return {sm90::group_map_of<__nv_bfloat16>(call.a.data, s.n, sm90::gradient_k),
                sm90::group_map_of<__nv_bfloat16>(call.b.data, s.k, sm90::gradient_k),
                call.c.type == Type::bf16 ? sm90::map_of<__nv_bfloat16>(call.c.data, s.k, s.n, s.groups)
                                          : sm90::map_of<float>(call.c.data, s.k, s.n, s.groups, swapped ? 32 : 64)};
    }
}

Grouped grouped_of(const Call& call) {
    const GroupedShape& s = call.shape;
    const auto n = static_cast<int>(s.n), k = static_cast<int>(s.k), capacity = static_cast<int>(s.capacity);
    switch (s.product) {
    case GroupedProduct::forward:
        return {s.groups, 0, n, k, capacity, call.counts};
    case GroupedProduct::dgrad:
        return {s.groups, 0, k, n, capacity, call.counts};
    default:
        return {s.groups, n, k, 0, capacity, call.counts};
    }
}

template <const auto& kinds, class... Configs>
void launch(const Call& call) {
    const Grouped product = grouped_of(call);
    sm90::with_fastest<kinds, Configs...>(product, call.multiprocessors, [&](auto c) {
        using C = decltype(c);
        Grouped p = product;
        p.claims = claims_of(call.stream);
        Maps maps = maps_of(call, C::swapped);
        if (C::swapped) std::swap(p.m, p.n), std::swap(maps.a, maps.b);
        sm90::launch<C>(sm90::grouped_kernel<C>, call.multiprocessors, call.stream, maps, p, call.c);
    });
}

template <GroupedProduct form>
void launch_rows(const Call& call) {
    launch<row_tiles, Config<form, 256, 4, 2, Pair::along_n>, Config<form, 192, 5, 1, Pair::along_n, Turns::in_turn>,
           Config<form, 128, 6, 2, Pair::along_n>>(call);
}
// Results are so many bytes for the products of few rows that they always leave beside the next tile's products. Those
// of BF16 need fewer buffers, which leaves room for another stage.
template <Update update, bool low>
void launch_gradient(const Call& call) {
    constexpr GroupedProduct form = GroupedProduct::wgrad;
    constexpr int stages = low ? 5 : 4, buffers = low ? 1 : 4;
    launch<gradient_tiles, Config<form, 192, stages, buffers, Pair::along_m, Turns::in_turn, update, Sides::given, low>,
           Config<form, 192, stages, buffers, Pair::along_m, Turns::in_turn, update, Sides::swapped, low>,
           Config<form, 128, 5, 4, Pair::along_n, Turns::in_turn, update, Sides::given, low>>(call);
}

bool takes(const GroupedShape& s, Src a, Src b, Dst c) {
    const bool wgrad = s.product == GroupedProduct::wgrad; // BF16 gradients are set; they are summed in FP32.
    const bool result = c.type == Type::bf16 ? !wgrad || !s.accumulate : wgrad;
    return a.type == Type::bf16 && b.type == Type::bf16 && result && s.n % 8 == 0 && s.k % 8 == 0 &&
           (!wgrad || s.capacity <= ptx::GroupBox::span) &&
           sm90::within_reach({a.data, b.data, c.data}, {s.n, s.k, s.capacity});
}

} // namespace

bool sm90_grouped_gemm(const GroupedShape& s, Src a, Src b, const std::int32_t* counts, Dst c, cudaStream_t stream) {
    if (!takes(s, a, b, c)) return false;
    // A cluster that finds its place taken by something else begins late, with the one tile that is its own from the
    // start: the product would end as late as that tile.
    const int multiprocessors = sm90::multiprocessors() - s.reserved_sms / 2 * 2;
    if (multiprocessors <= 0) return false;
    const Call call{s, a, b, counts, c, multiprocessors, stream};
    switch (s.product) {
    case GroupedProduct::forward:
        launch_rows<GroupedProduct::forward>(call);
        break;
    case GroupedProduct::dgrad:
        launch_rows<GroupedProduct::dgrad>(call);
        break;
    case GroupedProduct::wgrad:
        if (s.accumulate) {
            launch_gradient<Update::add, false>(call);
        } else {
            c.type == Type::bf16 ? launch_gradient<Update::store, true>(call)
                                 : launch_gradient<Update::store, false>(call);
        }
        break;
    }
    return true;
}

} // namespace moe::cuda

namespace moe {

bool cuda_has_tiles() { return cuda::sm90::multiprocessors() > 0; }

} // namespace moe
