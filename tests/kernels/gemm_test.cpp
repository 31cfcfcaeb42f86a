// Dense and grouped products against triple loops in double.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <array>
#include <numeric>

namespace moe::test {
namespace {

struct Types {
    Type a = Type::f32, b = Type::f32, c = Type::f32;
};
std::string name_of(Types t) { return test::name_of(t.a) + "*" + test::name_of(t.b) + "->" + test::name_of(t.c); }

// `extra` columns lie between the rows of every operand and before its start.
Case gemm_case(GemmShape s, Types types, std::int64_t extra = 0) {
    struct Data {
        GemmShape s;
        Tensor a, b, c;
        Vec before;
    };
    const std::int64_t a_rows = s.transpose_a ? s.k : s.m, a_cols = s.transpose_a ? s.m : s.k;
    const std::int64_t b_rows = s.transpose_b ? s.n : s.k, b_cols = s.transpose_b ? s.k : s.n;
    if (extra > 0) {
        s.lda = a_cols + extra, s.ldb = b_cols + extra, s.ldc = s.n + extra;
        s.a_offset = s.b_offset = s.c_offset = extra;
    }
    const std::int64_t lda = a_cols + extra, ldb = b_cols + extra, ldc = s.n + extra;
    Case out;
    out.name = fmt::format("gemm {}x{}x{}{}{}{} extra {} {}", s.m, s.n, s.k, s.transpose_a ? " A^T" : "",
                           s.transpose_b ? " B^T" : "", s.accumulate ? " +=" : "", extra, name_of(types));
    Random random(out.name);
    auto d = std::make_shared<Data>(Data{s,
                                         random.tensor(types.a, a_rows * lda + extra),
                                         random.tensor(types.b, b_rows * ldb + extra),
                                         Tensor(types.c, s.m * ldc + extra),
                                         {}});
    if (s.accumulate) {
        for (std::int64_t i = 0; i < s.m; ++i) {
            for (std::int64_t j = 0; j < s.n; ++j) d->c.set(extra + i * ldc + j, random.normal(1)[0]);
        }
    }
    d->before = d->c.values();
    out.tolerance = tolerance(types.c);
    out.flops = 2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k);
    out.bytes = static_cast<double>(s.m * s.k) * static_cast<double>(size_of(types.a)) +
                static_cast<double>(s.k * s.n) * static_cast<double>(size_of(types.b)) +
                static_cast<double>(s.m * s.n) * static_cast<double>(size_of(types.c)) * (s.accumulate ? 2.0 : 1.0);
    out.call = [d] { table().gemm(d->s, d->a.src(), d->b.src(), d->c.dst(), nullptr); };
    out.error = [d, extra, lda, ldb, ldc] {
        const GemmShape& g = d->s;
        Vec got, want;
        bool gaps = extra == 0 || d->c.untouched(0, extra);
        for (std::int64_t i = 0; i < g.m; ++i) {
            for (std::int64_t j = 0; j < g.n; ++j) {
                double sum = g.accumulate ? d->before[static_cast<std::size_t>(extra + i * ldc + j)] : 0.0;
                for (std::int64_t l = 0; l < g.k; ++l) {
                    const double a = d->a.at(extra + (g.transpose_a ? l * lda + i : i * lda + l));
                    const double b = d->b.at(extra + (g.transpose_b ? j * ldb + l : l * ldb + j));
                    sum += a * b;
                }
                want.push_back(sum);
                got.push_back(d->c.at(extra + i * ldc + j));
            }
            gaps = gaps && d->c.untouched(extra + i * ldc + g.n, extra);
        }
        return worst({relative_error(got, want), demand(gaps)});
    };
    return out;
}

// The matrices of an operand, one for every product: side by side in its rows, or one behind another with rows between.
struct Lying {
    std::int64_t ld, step;
    Lying(std::int64_t rows, std::int64_t cols, int batch, bool beside)
        : ld(beside ? batch * cols : cols), step(beside ? cols : (rows + 2) * cols) {}
    std::int64_t elements(std::int64_t rows, std::int64_t cols, int batch) const {
        return (batch - 1) * step + (rows - 1) * ld + cols;
    }
};

// Several products at once, whose operands lie side by side or behind one another.
Case batch_case(GemmShape s, int batch, std::array<bool, 3> beside, Types types) {
    struct Data {
        GemmShape s;
        Tensor a, b, c;
        Vec before;
    };
    const std::int64_t a_rows = s.transpose_a ? s.k : s.m, a_cols = s.transpose_a ? s.m : s.k;
    const std::int64_t b_rows = s.transpose_b ? s.n : s.k, b_cols = s.transpose_b ? s.k : s.n;
    const Lying a(a_rows, a_cols, batch, beside[0]), b(b_rows, b_cols, batch, beside[1]), c(s.m, s.n, batch, beside[2]);
    s.batch = batch;
    s.lda = a.ld, s.ldb = b.ld, s.ldc = c.ld;
    s.a_step = a.step, s.b_step = b.step, s.c_step = c.step;
    Case out;
    out.name =
        fmt::format("gemm {} of {}x{}x{}{}{}{} beside {} {}", batch, s.m, s.n, s.k, s.transpose_a ? " A^T" : "",
                    s.transpose_b ? " B^T" : "", s.accumulate ? " +=" : "", fmt::join(beside, ","), name_of(types));
    Random random(out.name);
    auto d = std::make_shared<Data>(Data{s,
                                         random.tensor(types.a, a.elements(a_rows, a_cols, batch)),
                                         random.tensor(types.b, b.elements(b_rows, b_cols, batch)),
                                         Tensor(types.c, c.elements(s.m, s.n, batch)),
                                         {}});
    const auto each = [s](auto on) { // calls on(product, row, column, place in C)
        for (int p = 0; p < s.batch; ++p)
            for (std::int64_t i = 0; i < s.m; ++i)
                for (std::int64_t j = 0; j < s.n; ++j) on(p, i, j, p * s.c_step + i * s.ldc + j);
    };
    if (s.accumulate)
        each([&](int, std::int64_t, std::int64_t, std::int64_t at) { d->c.set(at, random.normal(1)[0]); });
    d->before = d->c.values();
    out.tolerance = tolerance(types.c);
    out.flops = 2.0 * batch * static_cast<double>(s.m * s.n * s.k);
    out.bytes = batch * (static_cast<double>(s.m * s.k) * static_cast<double>(size_of(types.a)) +
                         static_cast<double>(s.k * s.n) * static_cast<double>(size_of(types.b)) +
                         static_cast<double>(s.m * s.n) * static_cast<double>(size_of(types.c)));
    out.call = [d] { table().gemm(d->s, d->a.src(), d->b.src(), d->c.dst(), nullptr); };
    out.error = [d, each] {
        const GemmShape& g = d->s;
        Vec got, want;
        each([&](int p, std::int64_t i, std::int64_t j, std::int64_t at) {
            double sum = g.accumulate ? d->before[static_cast<std::size_t>(at)] : 0.0;
            for (std::int64_t l = 0; l < g.k; ++l)
                sum += d->a.at(p * g.a_step + (g.transpose_a ? l * g.lda + i : i * g.lda + l)) *
                       d->b.at(p * g.b_step + (g.transpose_b ? j * g.ldb + l : l * g.ldb + j));
            want.push_back(sum);
            got.push_back(d->c.at(at));
        });
        bool gaps = true;
        for (int p = 0; p + 1 < g.batch && g.c_step > g.m * g.ldc; ++p)
            gaps = gaps && d->c.untouched(p * g.c_step + g.m * g.ldc, g.c_step - g.m * g.ldc);
        return worst({relative_error(got, want), demand(gaps)});
    };
    return out;
}

const char* name_of(GroupedProduct p) {
    return p == GroupedProduct::forward ? "forward" : p == GroupedProduct::dgrad ? "dgrad" : "wgrad";
}

std::int64_t total(const Index& counts) { return std::accumulate(counts.begin(), counts.end(), std::int64_t{0}); }

// Rows beyond the counts are NaN in the inputs and must stay poison in the outputs.
Case grouped_case(GroupedProduct product, const Index& counts, std::int64_t n, std::int64_t k, std::int64_t capacity,
                  Types types, bool accumulate = true) {
    struct Data {
        GroupedShape s;
        Index counts;
        Tensor a, b, c;
        Vec before;
    };
    const bool wgrad = product == GroupedProduct::wgrad, adds = wgrad && accumulate;
    const auto groups = static_cast<int>(counts.size());
    const std::int64_t rows = std::min(total(counts), capacity), weights = groups * n * k;
    const std::int64_t a_cols = product == GroupedProduct::forward ? k : n;
    const std::int64_t out_cols = product == GroupedProduct::forward ? n : k;
    Case out;
    out.name = fmt::format("grouped_gemm {}{} counts {} n {} k {} capacity {} {}", name_of(product), adds ? " +=" : "",
                           fmt::join(counts.begin(), counts.begin() + std::min<std::ptrdiff_t>(groups, 8), ","), n, k,
                           capacity, name_of(types));
    Random random(out.name);
    auto d = std::make_shared<Data>(
        Data{{product, groups, n, k, capacity, accumulate},
             counts,
             Tensor(types.a, capacity * a_cols),
             wgrad ? Tensor(types.b, capacity * k) : random.tensor(types.b, weights),
             adds ? random.tensor(types.c, weights) : Tensor(types.c, wgrad ? weights : capacity * out_cols),
             {}});
    for (std::int64_t i = 0; i < rows * a_cols; ++i) d->a.set(i, random.normal(1)[0]);
    if (wgrad) {
        for (std::int64_t i = 0; i < rows * k; ++i) d->b.set(i, random.normal(1)[0]);
    }
    d->before = d->c.values();
    out.tolerance = tolerance(types.c);
    out.flops = 2.0 * static_cast<double>(rows) * static_cast<double>(n) * static_cast<double>(k);
    const double a_bytes = static_cast<double>(rows * a_cols) * static_cast<double>(size_of(types.a));
    const double b_bytes = static_cast<double>(wgrad ? rows * k : weights) * static_cast<double>(size_of(types.b));
    const double c_bytes = static_cast<double>(adds    ? 2 * weights
                                               : wgrad ? weights
                                                       : rows * out_cols) *
                           static_cast<double>(size_of(types.c));
    out.bytes = a_bytes + b_bytes + c_bytes;
    out.call = [d] { table().grouped_gemm(d->s, d->a.src(), d->b.src(), d->counts.data(), d->c.dst(), nullptr); };
    out.error = [d, wgrad, adds, rows, out_cols, weights] {
        const GroupedShape& s = d->s;
        Vec want = adds ? d->before : Vec(static_cast<std::size_t>(wgrad ? weights : rows * out_cols), 0.0);
        std::int64_t row = 0;
        for (int e = 0; e < s.groups; ++e) {
            for (int i = 0; i < d->counts[static_cast<std::size_t>(e)] && row < rows; ++i, ++row) {
                for (std::int64_t x = 0; x < s.n; ++x) {
                    for (std::int64_t y = 0; y < s.k; ++y) {
                        const std::int64_t weight = (e * s.n + x) * s.k + y;
                        if (s.product == GroupedProduct::forward) {
                            want[static_cast<std::size_t>(row * s.n + x)] += d->a.at(row * s.k + y) * d->b.at(weight);
                        } else if (s.product == GroupedProduct::dgrad) {
                            want[static_cast<std::size_t>(row * s.k + y)] += d->a.at(row * s.n + x) * d->b.at(weight);
                        } else {
                            want[static_cast<std::size_t>(weight)] += d->a.at(row * s.n + x) * d->b.at(row * s.k + y);
                        }
                    }
                }
            }
        }
        if (wgrad) return relative_error(d->c, want);
        return worst({relative_error(d->c.values(0, rows * out_cols), want),
                      demand(d->c.untouched(rows * out_cols, (s.capacity - rows) * out_cols))});
    };
    return out;
}

GemmShape shape(std::int64_t m, std::int64_t n, std::int64_t k, bool ta = false, bool tb = false,
                bool accumulate = false) {
    GemmShape s;
    s.m = m, s.n = n, s.k = k, s.transpose_a = ta, s.transpose_b = tb, s.accumulate = accumulate;
    return s;
}

constexpr Type f32 = Type::f32, bf16 = Type::bf16;
const Types all_f32{f32, f32, f32};
const std::pair<GroupedProduct, bool> products[] = { // and whether C is added to
    {GroupedProduct::forward, false},
    {GroupedProduct::dgrad, false},
    {GroupedProduct::wgrad, false},
    {GroupedProduct::wgrad, true}};

} // namespace

TEST_CASE("gemm: every transposition, accumulation, stride and storage") {
    for (const Types types :
         {all_f32, Types{bf16, bf16, f32}, Types{bf16, bf16, bf16}, Types{f32, bf16, bf16}, Types{f32, bf16, f32}}) {
        for (const bool ta : {false, true}) {
            for (const bool tb : {false, true}) {
                for (const bool accumulate : {false, true}) {
                    check(gemm_case(shape(17, 33, 9, ta, tb, accumulate), types));
                    check(gemm_case(shape(5, 12, 31, ta, tb, accumulate), types, 3));
                }
            }
        }
    }
}

// Heads' products: operands of columns beside others, of rows behind others, sums over all rows, and sizes and places
// that a library takes all at once, one by one, or not at all.
TEST_CASE("gemm: several products at once, side by side and behind one another") {
    const Types mixed{f32, bf16, f32}, to_f32{bf16, bf16, f32}, bf{bf16, bf16, bf16};
    for (const Types types : {all_f32, bf, mixed}) {
        for (const bool ta : {false, true})
            for (const bool tb : {false, true}) {
                check(batch_case(shape(17, 9, 12, ta, tb), 3, {true, false, true}, types));
                check(batch_case(shape(6, 10, 33, ta, tb, true), 4, {false, true, false}, types));
            }
        check(batch_case(shape(8, 16, 24), 1, {true, true, true}, types));
    }
    check(batch_case(shape(72, 64, 40), 5, {true, false, true}, bf));
    check(batch_case(shape(72, 40, 64, false, true), 5, {true, false, true}, bf));
    for (const bool accumulate : {false, true})
        check(batch_case(shape(32, 64, 600, true, false, accumulate), 6, {true, true, false}, to_f32));
    check(batch_case(shape(130, 24, 256, false, true), 2, {true, false, true}, {f32, bf16, bf16}));
}

TEST_CASE("gemm: single rows, columns and products, and an empty contraction") {
    for (const Types types : {all_f32, Types{bf16, bf16, bf16}}) {
        check(gemm_case(shape(1, 64, 33), types));
        check(gemm_case(shape(64, 1, 33, false, true), types, 1));
        check(gemm_case(shape(7, 5, 1, true), types));
        check(gemm_case(shape(1, 1, 1), types));
        check(gemm_case(shape(3, 4, 0), types));
        check(gemm_case(shape(3, 4, 0, false, false, true), types));
    }
}

TEST_CASE("gemm: sizes beyond one widened block in each direction") {
    const Types mixed{bf16, bf16, bf16};
    check(gemm_case(shape(515, 3, 40), mixed));
    check(gemm_case(shape(515, 3, 40, true, true), mixed, 2));
    check(gemm_case(shape(4, 1029, 37), mixed));
    check(gemm_case(shape(4, 1029, 37, false, true, true), mixed));
    check(gemm_case(shape(6, 5, 1031), mixed));
    check(gemm_case(shape(6, 5, 2050, true), {bf16, f32, f32}));
}

TEST_CASE("gemm: few tiles and a contraction long enough to be cut into parts that run side by side") {
    for (const Types types : {Types{f32, bf16, f32}, Types{f32, bf16, bf16}, Types{f32, f32, f32}}) {
        check(gemm_case(shape(16, 100, 4096, true, false, true), types));
        check(gemm_case(shape(16, 100, 4096, true), types, 3));
        check(gemm_case(shape(3, 70, 768, false, true), types, 2));
        check(gemm_case(shape(65, 5, 1280, true, true, true), types));
        check(gemm_case(shape(9, 8, 514), types)); // parts of 257 and no shorter ones
    }
}

TEST_CASE("gemm: FP32 beside BF16, large enough that a device multiplies two parts of it, in chunks of rows") {
    for (const Types types : {Types{f32, bf16, f32}, Types{f32, bf16, bf16}}) {
        for (const bool accumulate : {false, true}) {
            check(gemm_case(shape(600, 96, 128, false, false, accumulate), types));
            check(gemm_case(shape(8300, 16, 128, false, true, accumulate), types));
            check(gemm_case(shape(128, 16, 8300, true, false, accumulate), types, 8));
        }
    }
}

TEST_CASE("gemm: small products whose right operand is read in place, with every remainder of a tile") {
    for (const Types types : {all_f32, Types{bf16, bf16, bf16}, Types{bf16, f32, f32}, Types{f32, bf16, f32}}) {
        for (std::int64_t m = 1; m <= 7; ++m)
            check(gemm_case(shape(m, 16 + 3 * m, 64, false, false, m % 2 == 0), types));
        for (const std::int64_t n : {1, 7, 8, 9, 15, 31, 40}) check(gemm_case(shape(13, n, 70), types, n % 3));
        check(gemm_case(shape(6, 64, 1024), types)); // the largest, and one more
        check(gemm_case(shape(6, 64, 1025), types));
        check(gemm_case(shape(520, 17, 65, false, false, true), types));
    }
}

TEST_CASE("grouped_gemm: uneven, empty, single-row and lone experts, and counts beyond the capacity") {
    for (const auto& [p, adds] : products) {
        for (const Types types : {all_f32, Types{bf16, bf16, bf16}, Types{bf16, bf16, f32}, Types{bf16, f32, f32}}) {
            check(grouped_case(p, {3, 0, 1, 5}, 13, 7, 12, types, adds));
            check(grouped_case(p, {0, 0, 9, 0}, 8, 5, 9, types, adds));
            check(grouped_case(p, {1, 1, 1}, 6, 11, 3, types, adds));
            check(grouped_case(p, {0, 0}, 4, 4, 3, types, adds));
            check(grouped_case(p, {70}, 33, 20, 80, types, adds));
            check(grouped_case(p, {4, 6, 5}, 5, 6, 8, types, adds));
        }
    }
}

// Sizes that kernels of fixed tiles take (rows of whole 16 bytes): parts of tiles in every direction, and groups that
// end at every place of the 16 rows that one product of tensor cores contracts.
TEST_CASE("grouped_gemm: groups that begin and end inside of tiles of 64 and 128 rows, of 64 to 256 columns") {
    for (const auto& [p, adds] : products) {
        for (const Type result : p == GroupedProduct::wgrad ? std::vector{f32, bf16} : std::vector{bf16}) {
            const Types types{bf16, bf16, result};
            check(grouped_case(p, {130, 0, 1, 77, 64}, 264, 72, 300, types, adds));
            check(grouped_case(p, {130, 0, 1, 77, 64}, 72, 264, 272, types, adds));
            check(grouped_case(p, {15, 16, 17, 31, 33, 63, 65, 0, 127, 129}, 64, 136, 500, types, adds));
            check(grouped_case(p, {0, 0, 257, 0}, 200, 40, 400, types, adds));
            check(grouped_case(p, {100, 60}, 72, 192, 130, types, adds)); // cut at the capacity
            check(grouped_case(p, Index(33, 1), 128, 64, 33, types, adds));
            check(grouped_case(p, {0, 0}, 64, 64, 64, types, adds));
            check(grouped_case(p, {3, 5}, 8, 8, 8, types, adds));
            check(grouped_case(p, {70, 200}, 520, 24, 270, types, adds));
        }
    }
}

std::vector<Case> gemm_benchmarks() {
    std::vector<Case> out;
    const Types bf{bf16, bf16, bf16};
    for (const Types types : {all_f32, bf}) {
        out.push_back(gemm_case(shape(512, 512, 512, false, true), types));
        out.push_back(gemm_case(shape(1024, 2048, 1024, false, true), types));
        out.push_back(gemm_case(shape(1024, 1024, 2048), types));
        out.push_back(gemm_case(shape(2048, 1024, 1024, true, false, true), {types.a, types.b, f32}));
        for (const GroupedProduct p : {GroupedProduct::forward, GroupedProduct::dgrad, GroupedProduct::wgrad}) {
            const Types t{types.a, types.b, p == GroupedProduct::wgrad ? f32 : types.c};
            out.push_back(grouped_case(p, Index(8, 128), 512, 512, 1024, t));
            out.push_back(grouped_case(p, Index(32, 16), 256, 256, 512, t));
        }
    }
    return out;
}

} // namespace moe::test
