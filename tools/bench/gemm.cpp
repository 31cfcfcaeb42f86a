// Our CPU products beside Eigen's and OpenBLAS's on one core, shape by shape. Build target bench-gemm.
#include "kernels/bf16.hpp"
#include "kernels/kernels.hpp"

#include <Eigen/Core>
#ifdef MOE_OPENBLAS
#include <cblas.h>
#endif

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace {

using namespace moe;
using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using In = Eigen::Map<const Matrix>;

// C[m, n] (+)= op(A) op(B), `groups` times: routed experts of m rows each, every one with its own weights.
struct Product {
    GemmShape shape;
    int groups = 1;
};

struct Operands {
    std::vector<float> a, b, c;
    std::vector<std::uint16_t> narrow_a, narrow_b, narrow_c;
};

std::vector<float> numbers(std::int64_t n) {
    std::vector<float> out(static_cast<std::size_t>(n));
    std::uint32_t state = 1;
    for (float& x : out) {
        state = state * 1664525u + 1013904223u;
        x = static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
    }
    return out;
}

std::vector<std::uint16_t> narrowed(const std::vector<float>& x) {
    std::vector<std::uint16_t> out(x.size());
    std::transform(x.begin(), x.end(), out.begin(), bf16_of_float);
    return out;
}

Operands operands_of(const Product& p) {
    const GemmShape& s = p.shape;
    Operands o{numbers(p.groups * s.m * s.k), numbers(p.groups * s.n * s.k), numbers(p.groups * s.m * s.n), {}, {}, {}};
    o.narrow_a = narrowed(o.a), o.narrow_b = narrowed(o.b), o.narrow_c = narrowed(o.c);
    return o;
}

void ours(const Product& p, Src a, Src b, Dst c) {
    const GemmShape& s = p.shape;
    if (p.groups == 1) return cpu_kernels().gemm(s, a, b, c, nullptr);
    GroupedShape g;
    g.groups = p.groups;
    // The grouped forms: forward C = A B^T, dgrad C = A B, wgrad C += A^T B, whose contraction runs over the rows.
    if (s.transpose_a) {
        g.product = GroupedProduct::wgrad, g.n = s.m, g.k = s.n, g.capacity = p.groups * s.k;
    } else {
        g.product = s.transpose_b ? GroupedProduct::forward : GroupedProduct::dgrad;
        g.n = s.transpose_b ? s.n : s.k, g.k = s.transpose_b ? s.k : s.n, g.capacity = p.groups * s.m;
    }
    const std::vector<std::int32_t> counts(static_cast<std::size_t>(p.groups),
                                           static_cast<std::int32_t>(s.transpose_a ? s.k : s.m));
    cpu_kernels().grouped_gemm(g, a, b, counts.data(), c, nullptr);
}

template <class A, class B>
void into(const GemmShape& s, const A& a, const B& b, float* c) {
    Eigen::Map<Matrix> out(c, s.m, s.n);
    if (s.accumulate) {
        out.noalias() += a * b;
    } else {
        out.noalias() = a * b;
    }
}

void eigen(const Product& p, Operands& o) {
    const GemmShape& s = p.shape;
    for (int e = 0; e < p.groups; ++e) {
        const In a(o.a.data() + e * s.m * s.k, s.transpose_a ? s.k : s.m, s.transpose_a ? s.m : s.k);
        const In b(o.b.data() + e * s.n * s.k, s.transpose_b ? s.n : s.k, s.transpose_b ? s.k : s.n);
        float* c = o.c.data() + e * s.m * s.n;
        if (s.transpose_a && s.transpose_b) {
            into(s, a.transpose(), b.transpose(), c);
        } else if (s.transpose_a) {
            into(s, a.transpose(), b, c);
        } else if (s.transpose_b) {
            into(s, a, b.transpose(), c);
        } else {
            into(s, a, b, c);
        }
    }
}

#ifdef MOE_OPENBLAS
void openblas(const Product& p, Operands& o) {
    const GemmShape& s = p.shape;
    const auto blas = [](std::int64_t n) { return static_cast<blasint>(n); };
    for (int e = 0; e < p.groups; ++e) {
        cblas_sgemm(CblasRowMajor, s.transpose_a ? CblasTrans : CblasNoTrans, s.transpose_b ? CblasTrans : CblasNoTrans,
                    blas(s.m), blas(s.n), blas(s.k), 1.0f, o.a.data() + e * s.m * s.k, blas(s.transpose_a ? s.m : s.k),
                    o.b.data() + e * s.n * s.k, blas(s.transpose_b ? s.k : s.n), s.accumulate ? 1.0f : 0.0f,
                    o.c.data() + e * s.m * s.n, blas(s.n));
    }
}
#endif

// The shortest call of each candidate. They take turns, so that what else runs on the machine slows all of them alike.
std::vector<double> shortest(const std::vector<std::function<void()>>& candidates, double seconds) {
    using Clock = std::chrono::steady_clock;
    std::vector<double> best(candidates.size(), 1e300);
    const auto start = Clock::now();
    for (int round = 0; round < 5 || std::chrono::duration<double>(Clock::now() - start).count() < seconds; ++round) {
        for (std::size_t i = 0; i < candidates.size(); ++i) {
            const auto before = Clock::now();
            candidates[i]();
            if (round > 0) best[i] = std::min(best[i], std::chrono::duration<double>(Clock::now() - before).count());
        }
    }
    return best;
}

std::string name_of(const Product& p) {
    const GemmShape& s = p.shape;
    return fmt::format("{}{}x{}x{}{}{}{}", p.groups > 1 ? fmt::format("{} experts ", p.groups) : "", s.m, s.n, s.k,
                       s.transpose_a ? " A^T" : "", s.transpose_b ? " B^T" : "", s.accumulate ? " +=" : "");
}

// Prints one row and returns the lower of the two ratios of our rate to the better library's.
double compare(const Product& p, double seconds) {
    Operands o = operands_of(p);
    Operands mine = o;
    const auto wide = [](const std::vector<float>& x) { return Src{x.data(), Type::f32}; };
    const auto thin = [](const std::vector<std::uint16_t>& x) { return Src{x.data(), Type::bf16}; };
    std::vector<std::function<void()>> candidates{
        [&] {
            ours(p, wide(mine.a), wide(mine.b), {mine.c.data(), Type::f32});
        },
        // Gradients of weights are summed in FP32 whatever is stored.
        [&] {
            ours(p, thin(mine.narrow_a), thin(mine.narrow_b),
                 p.shape.accumulate ? Dst{mine.c.data(), Type::f32} : Dst{mine.narrow_c.data(), Type::bf16});
        },
        [&] { eigen(p, o); },
    };
#ifdef MOE_OPENBLAS
    candidates.push_back([&] { openblas(p, o); });
#endif
    const std::vector<double> best = shortest(candidates, seconds);
    const double flops = 2e-9 * p.groups * static_cast<double>(p.shape.m * p.shape.n * p.shape.k);
    const double library = *std::min_element(best.begin() + 2, best.end());
    fmt::print("{:<32}", name_of(p));
    for (const double s : best) fmt::print("{:10.1f}", flops / s);
    if (best.size() < 4) fmt::print("{:>10}", "-");
    fmt::print("{:9.2f}{:9.2f}\n", library / best[0], library / best[1]);
    std::fflush(stdout);
    return library / std::max(best[0], best[1]);
}

Product product(std::int64_t m, std::int64_t n, std::int64_t k, bool ta, bool tb, int groups = 1) {
    Product p;
    p.shape.m = m, p.shape.n = n, p.shape.k = k, p.shape.transpose_a = ta, p.shape.transpose_b = tb;
    p.shape.accumulate = ta && !tb; // The shape is the gradient of a weight.
    p.groups = groups;
    return p;
}

// The products of a linear layer on `rows` tokens: forward, gradient of the input, gradient of the weight.
void add_linear(std::vector<Product>& out, std::int64_t rows, std::int64_t n, std::int64_t k, int groups = 1) {
    out.push_back(product(rows, n, k, false, true, groups));
    out.push_back(product(rows, k, n, false, false, groups));
    out.push_back(product(n, k, rows, true, false, groups));
}

std::vector<Product> products() {
    std::vector<Product> out;
    for (const std::int64_t n : {64, 128, 256}) add_linear(out, n, n, n);
    add_linear(out, 512, 16, 512); // shape of a router
    add_linear(out, 64, 512, 256);
    add_linear(out, 256, 256, 64);
    add_linear(out, 512, 1024, 2048);
    out.push_back(product(512, 1024, 2048, true, true)); // No step has this form; the table does.
    add_linear(out, 16, 256, 128, 16);
    add_linear(out, 64, 256, 256, 8);
    add_linear(out, 128, 1024, 512, 8);
    return out;
}

} // namespace

// Usage: bench-gemm [SECONDS PER SHAPE [PART OF A NAME]]
int main(int argc, char** argv) {
    std::string why;
    if (!cpu_supported(why)) {
        fmt::print(stderr, "{}\n", why);
        return 1;
    }
    const double seconds = argc > 1 ? std::strtod(argv[1], nullptr) : 0.3;
#ifdef MOE_OPENBLAS
    openblas_set_num_threads(1);
    fmt::print("OpenBLAS: {}, {}\n", openblas_get_config(), openblas_get_corename());
#else
    fmt::print("OpenBLAS was not found when this was built\n");
#endif
    fmt::print("GFLOP/s on one core; ratios to the better library, which computes in FP32 throughout\n");
    fmt::print("{:<32}{:>10}{:>10}{:>10}{:>10}{:>9}{:>9}\n", "C[m, n] = op(A) op(B), m x n x k", "fp32", "bf16",
               "Eigen", "OpenBLAS", "fp32 /", "bf16 /");
    double lowest = 1e300;
    for (const Product& p : products()) {
        if (argc > 2 && name_of(p).find(argv[2]) == std::string::npos) continue;
        lowest = std::min(lowest, compare(p, seconds));
    }
    fmt::print("lowest ratio {:.2f}\n", lowest);
    return 0;
}
