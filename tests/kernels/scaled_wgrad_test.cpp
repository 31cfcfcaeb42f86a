// Gradients of weights from columns of scaled E4M3, or E5M2 by E4M3, against triple loops in double.
#include "tests/kernels/e4m3.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <string_view>

namespace moe::test {
namespace {

// Within a block Hopper's tensor cores align products to the largest of a step and keep about 14 bits of them
// (DeepSeek-V3, arXiv:2412.19437, section 3.3.2); 2^-10 of the norm leaves room for 128 products of either sign.
constexpr double tensor_tolerance = 0x1p-10;
double sums_tolerance() { return std::string_view(table().name) == "cpu" ? f32_tolerance : tensor_tolerance; }

struct Operand {
    Bytes q;
    Tensor scale;
    bool e5m2 = false;
    Fp8Columns columns() { return {q.data(), scale.f32()}; }
    double at(std::int64_t column, std::int64_t row) const {
        const std::uint8_t byte = q[static_cast<std::size_t>(column * scale_block + row)];
        return static_cast<double>(e5m2 ? float_of_e5m2(byte) : float_of_e4m3(byte)) * scale.at(column);
    }
};

struct Data {
    ScaledGradient s;
    Index counts;
    Operand a, b;
    Tensor before, c;
    const std::int32_t* count() const { return counts.empty() ? nullptr : counts.data(); }
};

// Rows of every group, cut at the capacity.
std::vector<std::int64_t> rows_of(const Data& d) {
    if (d.counts.empty()) return {d.s.capacity};
    std::vector<std::int64_t> out;
    std::int64_t left = d.s.capacity;
    for (const std::int32_t count : d.counts) {
        out.push_back(std::min<std::int64_t>(count, left));
        left -= out.back();
    }
    return out;
}

// Blocks that hold rows have every value but the NaNs, and zeros behind a group's last row; those behind are NaN, bytes
// and scales.
Operand drawn(Random& random, const std::vector<std::int64_t>& rows, std::int64_t blocks, std::int64_t cols,
              bool e5m2 = false) {
    const std::int32_t end = e5m2 ? 0x7c : 0x7f; // E5M2 has infinities
    Operand out{Bytes(static_cast<std::size_t>(blocks * cols * scale_block), 0x7f), Tensor(Type::f32, blocks * cols),
                e5m2};
    std::int64_t block = 0;
    for (const std::int64_t count : rows) {
        for (std::int64_t first = 0; first < count; first += scale_block, ++block) {
            for (std::int64_t column = block * cols; column < (block + 1) * cols; ++column) {
                out.scale.set(column, std::exp2(random.below(6) - 3));
                for (std::int64_t r = 0; r < scale_block; ++r)
                    out.q[static_cast<std::size_t>(column * scale_block + r)] =
                        first + r < count ? static_cast<std::uint8_t>(random.below(end) | random.below(2) << 7) : 0;
            }
        }
    }
    return out;
}

double element(const Data& d, std::int64_t first, std::int64_t rows, std::int64_t n, std::int64_t k) {
    double sum = 0.0;
    for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t block = first + r / scale_block;
        sum += d.a.at(block * d.s.n + n, r % scale_block) * d.b.at(block * d.s.k + k, r % scale_block);
    }
    return sum;
}

Vec expected(const Data& d) {
    Vec want;
    std::int64_t first = 0;
    for (const std::int64_t rows : rows_of(d)) {
        for (std::int64_t n = 0; n < d.s.n; ++n)
            for (std::int64_t k = 0; k < d.s.k; ++k) {
                const auto at = static_cast<std::int64_t>(want.size());
                want.push_back(element(d, first, rows, n, k) + (d.s.accumulate ? d.before.at(at) : 0.0));
            }
        first += scale_blocks(rows);
    }
    return want;
}

std::shared_ptr<Data> data_of(const std::string& name, const Index& counts, const ScaledGradient& s, Type result) {
    Random random(name);
    auto d = std::make_shared<Data>(
        Data{s, counts, {{}, Tensor(Type::f32, 0)}, {{}, Tensor(Type::f32, 0)}, Tensor(result, 0), Tensor(result, 0)});
    const std::int64_t blocks = column_blocks(s.capacity, s.groups);
    d->a = drawn(random, rows_of(*d), blocks, s.n, s.e5m2), d->b = drawn(random, rows_of(*d), blocks, s.k);
    d->before = random.tensor(result, s.groups * s.n * s.k, 1e4);
    d->c = s.accumulate ? d->before : Tensor(result, s.groups * s.n * s.k);
    return d;
}

Case wgrad_case(const Index& counts, std::int64_t n, std::int64_t k, std::int64_t capacity, bool accumulate,
                Type result = Type::f32, bool e5m2 = false) {
    const auto groups = counts.empty() ? 1 : static_cast<int>(counts.size());
    Case out;
    out.name = fmt::format("scaled_wgrad{} counts {} n {} k {} capacity {} {} {}", e5m2 ? " E5M2" : "",
                           fmt::join(counts, ","), n, k, capacity, accumulate ? "+=" : "=", name_of(result));
    auto d = data_of(out.name, counts, {groups, n, k, capacity, accumulate, 0, e5m2}, result);
    const auto rows = static_cast<double>(filled(counts, capacity));
    out.flops = 2.0 * rows * static_cast<double>(n * k);
    out.bytes = rows * static_cast<double>(n + k) +
                static_cast<double>(groups * n * k) * static_cast<double>(size_of(result)) * (accumulate ? 2.0 : 1.0);
    out.tolerance = result == Type::bf16 ? bf16_tolerance : sums_tolerance();
    out.call = [d] { table().scaled_wgrad(d->s, d->a.columns(), d->b.columns(), d->count(), d->c.dst(), nullptr); };
    out.error = [d] { return relative_error(d->c, expected(*d)); };
    return out;
}

} // namespace

TEST_CASE("scaled_wgrad: blocks and tiles in part, empty and single-row groups, counts beyond the capacity") {
    for (const bool adds : {true, false}) {
        for (const Type result : {Type::f32, Type::bf16}) {
            check(wgrad_case({3, 0, 1, 5}, 13, 7, 12, adds, result));
            check(wgrad_case({130, 0, 1, 77, 64}, 80, 48, 300, adds, result));
            check(wgrad_case({130, 0, 1, 77, 64}, 80, 48, 300, adds, result, true));
            check(wgrad_case({3, 0, 1, 5}, 13, 7, 12, adds, result, true));
            check(wgrad_case({70, 200}, 528, 400, 270, adds, result)); // tiles beyond a cluster's in both directions
        }
        check(wgrad_case({130, 0, 1, 77, 64}, 272, 80, 300, adds));
        check(wgrad_case({130, 0, 1, 77, 64}, 80, 272, 272, adds));
        check(wgrad_case({15, 16, 129, 256, 0, 33}, 64, 144, 500, adds));
        check(wgrad_case({0, 0, 257, 0}, 208, 48, 400, adds));
        check(wgrad_case({100, 60, 9}, 80, 192, 130, adds)); // cut at the capacity
        check(wgrad_case(Index(33, 1), 32, 64, 33, adds));
        check(wgrad_case({0, 0}, 64, 64, 64, adds));
        check(wgrad_case({3, 5}, 16, 16, 8, adds));
        check(wgrad_case({1000, 30}, 272, 272, 1030, adds, Type::f32, true));
        check(wgrad_case({}, 144, 208, 190, adds, Type::f32, true));
        check(wgrad_case({1000, 30}, 272, 272, 1030, adds)); // more blocks than stages
        check(wgrad_case({}, 144, 208, 190, adds));
    }
}

TEST_CASE("scaled_wgrad: the same bits every time, whichever way tiles are claimed") {
    const Index counts{300, 0, 5, 700, 129, 128};
    std::vector<Vec> seen;
    for (int repeat = 0; repeat < 3; ++repeat) {
        const auto d = data_of("repeat scaled_wgrad", counts, {6, 528, 784, 1262, true}, Type::f32);
        table().scaled_wgrad(d->s, d->a.columns(), d->b.columns(), d->count(), d->c.dst(), nullptr);
        seen.push_back(d->c.values());
    }
    CHECK(seen[0] == seen[1]);
    CHECK(seen[0] == seen[2]);
}

// What training does: gradients from what two matrices of BF16 are quantized to, whose scales follow their columns.
TEST_CASE("scaled_wgrad: of quantized columns it is the product of what they stand for, 5 % from that of the rows") {
    const Index counts{200, 56, 0, 128};
    const std::int64_t rows = 384, n = 64, k = 96;
    Random random("quantized wgrad");
    const Tensor x = random.tensor(Type::bf16, rows * n), y = random.tensor(Type::bf16, rows * k);
    const std::int64_t blocks = column_blocks(rows, 4);
    Data d{{4, n, k, rows, false},
           counts,
           {Bytes(static_cast<std::size_t>(blocks * n * scale_block)), Tensor(Type::f32, blocks * n)},
           {Bytes(static_cast<std::size_t>(blocks * k * scale_block)), Tensor(Type::f32, blocks * k)},
           Tensor(Type::f32, 0),
           Tensor(Type::f32, 4 * n * k)};
    table().quantize_columns({rows, n, 4}, x.src(), d.count(), {}, d.a.columns(), nullptr);
    table().quantize_columns({rows, k, 4}, y.src(), d.count(), {}, d.b.columns(), nullptr);
    table().scaled_wgrad(d.s, d.a.columns(), d.b.columns(), d.count(), d.c.dst(), nullptr);
    CHECK(relative_error(d.c, expected(d)) < sums_tolerance());
    Vec exact;
    std::int64_t first = 0;
    for (const std::int32_t count : counts) {
        for (std::int64_t i = 0; i < n * k; ++i) {
            double sum = 0.0;
            for (std::int64_t r = first; r < first + count; ++r) sum += x.at(r * n + i / k) * y.at(r * k + i % k);
            exact.push_back(sum);
        }
        first += count;
    }
    const double error = relative_error(d.c, exact);
    CHECK(error < 0.05);
    CHECK(error > 0.005); // it was E4M3 that was multiplied
}

} // namespace moe::test
