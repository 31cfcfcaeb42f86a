// Times products by the bytes that their rows' starts are multiples of.
#include "tests/kernels/cuda_alignment.hpp"

#include "kernels/cuda/cuda_kernels.hpp"
#include "tests/kernels/cuda_timing.hpp"

#include <fmt/format.h>

namespace moe::test {
namespace {

constexpr std::int64_t tokens = 8192;
constexpr const char* names[] = {"forward", "dgrad", "wgrad"};

// x[tokens, hidden], w[width, hidden], y[tokens, width].
double dense_seconds(DevicePool& pool, int product, std::int64_t width, std::int64_t hidden) {
    pool.reset();
    const Dst x = pool.take(Type::bf16, tokens * hidden), w = pool.take(Type::bf16, width * hidden),
              y = pool.take(Type::bf16, tokens * width), dw = pool.take(Type::f32, width * hidden);
    GemmShape s;
    if (product == 0) {
        s.m = tokens, s.n = width, s.k = hidden, s.transpose_b = true;
        return seconds_of([&](void* stream) { cuda_kernels()->gemm(s, Src(x), Src(w), y, stream); });
    }
    if (product == 1) {
        s.m = tokens, s.n = hidden, s.k = width;
        return seconds_of([&](void* stream) { cuda_kernels()->gemm(s, Src(y), Src(w), x, stream); });
    }
    s.m = width, s.n = hidden, s.k = tokens, s.transpose_a = true, s.accumulate = true;
    return seconds_of([&](void* stream) { cuda_kernels()->gemm(s, Src(y), Src(x), dw, stream); });
}

double grouped_seconds(DevicePool& pool, int product, std::int64_t width, std::int64_t hidden) {
    constexpr int experts = 8;
    pool.reset();
    const std::int32_t* counts = pool.ints(std::vector<std::int32_t>(experts, tokens / experts));
    const Dst x = pool.take(Type::bf16, tokens * hidden), w = pool.take(Type::bf16, experts * width * hidden),
              y = pool.take(Type::bf16, tokens * width), dw = pool.take(Type::f32, experts * width * hidden);
    GroupedShape s;
    s.product = static_cast<GroupedProduct>(product);
    s.groups = experts, s.n = width, s.k = hidden, s.capacity = tokens;
    const Src a = product == 0 ? Src(x) : Src(y), b = product == 2 ? Src(x) : Src(w);
    const Dst c = product == 0 ? y : product == 1 ? x : dw;
    return seconds_of([&](void* stream) { cuda_kernels()->grouped_gemm(s, a, b, counts, c, stream); });
}

} // namespace

std::vector<AlignedProduct> aligned_products() {
    struct Layer {
        std::int64_t width, hidden;
        bool grouped;
    };
    std::vector<AlignedProduct> out;
    DevicePool pool;
    for (const Layer& layer : {Layer{32000, 2048, false}, Layer{4096, 4096, false}, Layer{1408, 2048, false},
                               Layer{4096, 2048, true}, Layer{1408, 2048, true}})
        for (int product = 0; product < 3; ++product) {
            const auto seconds = [&](std::int64_t width) {
                return layer.grouped ? grouped_seconds(pool, product, width, layer.hidden)
                                     : dense_seconds(pool, product, width, layer.hidden);
            };
            const double whole = seconds(layer.width);
            for (const std::int64_t beyond : {1, 2, 4})
                out.push_back({fmt::format("{} {} of {} columns by {}", layer.grouped ? "8 experts'" : "dense",
                                           names[product], layer.width + beyond, layer.hidden),
                               seconds(layer.width + beyond), whole});
        }
    return out;
}

} // namespace moe::test
