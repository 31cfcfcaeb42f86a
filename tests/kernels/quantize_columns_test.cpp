// Columns of routed rows in E4M3, and of E5M2, against the nearest value by search and scales by their definition.
#include "kernels/bf16.hpp"
#include "tests/kernels/e4m3.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

namespace moe::test {
namespace {

enum class From { rows, both, low }; // wide rows, those that are quantized by rows, too, or quantized rows

struct Data {
    RowData rows;
    Bytes q;
    Tensor scale;
};

// What the columns are of: x in BF16, or what its quantized rows stand for.
double source(const Data& d, From from, std::int64_t row, std::int64_t col) {
    const std::int64_t at = row * d.rows.s.cols + col;
    const double x = from != From::low ? d.rows.x.at(at)
                                       : static_cast<double>(float_of_e4m3(d.rows.q[static_cast<std::size_t>(at)])) *
                                             d.rows.scale.at(row * scale_blocks(d.rows.s.cols) + col / scale_block);
    return static_cast<double>(float_of_bf16(bf16_of_float(static_cast<float>(x))));
}

// Wrong bytes and scales of the block of `rows` rows that begins with row `first`.
std::int64_t wrong_block(const Data& d, From from, std::int64_t block, std::int64_t first, std::int64_t rows) {
    std::int64_t wrong = 0;
    for (std::int64_t col = 0; col < d.rows.s.cols; ++col) {
        const std::int64_t column = block * d.rows.s.cols + col;
        Vec values(static_cast<std::size_t>(rows));
        for (std::int64_t r = 0; r < rows; ++r) values[static_cast<std::size_t>(r)] = source(d, from, first + r, col);
        const double scale = scale_of(values);
        wrong += d.scale.at(column) != scale;
        values.resize(scale_block, 0.0);
        for (std::int64_t r = 0; r < scale_block; ++r)
            wrong += d.q[static_cast<std::size_t>(column * scale_block + r)] !=
                     nearest(values[static_cast<std::size_t>(r)] / scale);
    }
    return wrong;
}

std::int64_t wrong_columns(const Data& d, From from) {
    const std::int64_t rows = d.rows.s.rows, cols = d.rows.s.cols, groups = d.rows.s.groups;
    std::int64_t wrong = from == From::both ? wrong_rows(d.rows) : 0, block = 0, first = 0;
    const Index counts = d.rows.counts.empty() ? Index{static_cast<int>(rows)} : d.rows.counts;
    for (const std::int32_t count : counts) {
        const std::int64_t end = std::min<std::int64_t>(first + count, rows);
        for (; first < end; first = std::min<std::int64_t>(first + scale_block, end), ++block)
            wrong += wrong_block(d, from, block, first, std::min<std::int64_t>(scale_block, end - first));
    }
    const std::int64_t all = column_blocks(rows, groups);
    wrong += !d.scale.untouched(block * cols, (all - block) * cols);
    for (std::int64_t i = block * cols * scale_block; i < all * cols * scale_block; ++i)
        wrong += d.q[static_cast<std::size_t>(i)] != poison_byte;
    return wrong;
}

// What rows of E5M2 with one scale stand for, and what their columns do: the same, with zeros behind a group's last
// row.
std::int64_t lost_values(const Data& d) {
    const auto value = [](std::uint8_t byte, double scale) { return static_cast<double>(float_of_e5m2(byte)) * scale; };
    const std::int64_t cols = d.rows.s.cols;
    std::int64_t lost = 0, block = 0, first = 0;
    for (const std::int32_t count : d.rows.counts) {
        for (std::int64_t r = 0; r < (count + scale_block - 1) / scale_block * scale_block; ++r)
            for (std::int64_t col = 0; col < cols; ++col) {
                const std::int64_t column = (block + r / scale_block) * cols + col, row = first + r;
                const double want = r < count ? value(d.rows.q[static_cast<std::size_t>(row * cols + col)],
                                                      d.rows.scale.at(row * scale_blocks(cols)))
                                              : 0.0;
                lost += value(d.q[static_cast<std::size_t>(column * scale_block + r % scale_block)],
                              d.scale.at(column)) != want;
            }
        first += count, block += scale_blocks(count);
    }
    return lost;
}

Case columns_case(std::int64_t rows, std::int64_t cols, const Index& counts, Type type, From from) {
    Case out;
    out.name = fmt::format("{} {} x {} {} counts {}{}", from == From::low ? "requantize_columns" : "quantize_columns",
                           rows, cols, name_of(type), fmt::join(counts, ","), from == From::both ? " and rows" : "");
    Random random(out.name);
    Vec x = random.normal(rows * cols);
    for (double& value : x)
        value = static_cast<double>(
            float_of_bf16(bf16_of_float(static_cast<float>(value * std::exp2(random.below(20) - 10)))));
    const auto groups = static_cast<int>(counts.size());
    const std::int64_t blocks = column_blocks(rows, groups);
    auto d = std::make_shared<Data>(Data{{{rows, cols, groups},
                                          counts,
                                          Tensor(type, x),
                                          Bytes(static_cast<std::size_t>(rows * cols), poison_byte),
                                          Tensor(Type::f32, rows * scale_blocks(cols)),
                                          Tensor(type, 1)},
                                         Bytes(static_cast<std::size_t>(blocks * cols * scale_block), poison_byte),
                                         Tensor(Type::f32, blocks * cols)});
    if (from == From::low) {
        for (std::uint8_t& byte : d->rows.q)
            byte = static_cast<std::uint8_t>(random.below(0x7f) | random.below(2) << 7);
        for (std::int64_t i = 0; i < d->rows.scale.size(); ++i) d->rows.scale.set(i, std::exp2(random.below(20) - 10));
    }
    out.bytes =
        static_cast<double>(rows * cols) *
        ((from == From::low ? 2.0 : 1.0 + static_cast<double>(size_of(type))) + (from == From::both ? 1.0 : 0.0));
    out.tolerance = 0.0;
    out.call = [d, from] {
        RowData& r = d->rows;
        const Fp8Columns to{d->q.data(), d->scale.f32()};
        const Fp8Rows low{r.q.data(), r.scale.f32()};
        if (from == From::low)
            table().requantize_columns(r.s, low, r.count(), to, nullptr);
        else
            table().quantize_columns(r.s, r.x.src(), r.count(), from == From::both ? low : Fp8Rows{}, to, nullptr);
    };
    out.error = [d, from] { return static_cast<double>(wrong_columns(*d, from)); };
    return out;
}

} // namespace

TEST_CASE("quantize_columns: blocks of 128 rows of a group, zeros behind its last row, the rows' form beside it") {
    for (const Type type : {Type::bf16, Type::f32}) {
        for (const From from : {From::rows, From::both, From::low}) {
            check(columns_case(128, 128, {}, type, from));
            check(columns_case(300, 272, {}, type, from));
            check(columns_case(5, 16, {}, type, from));
            check(columns_case(400, 144, {130, 0, 1, 77, 64}, type, from));
            check(columns_case(256, 528, {128, 0, 128}, type, from));
            check(columns_case(130, 32, {100, 60, 9}, type, from)); // cut at the capacity
            check(columns_case(6, 144, {0, 0}, type, from));
            check(columns_case(70, 48, Index(70, 1), type, from)); // more groups than a warp has lanes
        }
    }
}

TEST_CASE("requantize_columns: rows of E5M2 with one scale lose nothing, subnormal values neither") {
    const Index counts{130, 0, 1, 77, 64};
    for (const std::int64_t cols : {std::int64_t{16}, std::int64_t{272}}) {
        const std::int64_t rows = 272, blocks = column_blocks(rows, 5);
        Case out;
        out.name = fmt::format("requantize_columns E5M2 {} x {}", rows, cols);
        Random random(out.name);
        auto d = std::make_shared<Data>(
            Data{{{rows, cols, 5, true},
                  counts,
                  Tensor(Type::bf16, 1),
                  Bytes(static_cast<std::size_t>(rows * cols)),
                  Tensor(Type::f32, Vec(static_cast<std::size_t>(rows * scale_blocks(cols)), 0x1p-9)),
                  Tensor(Type::bf16, 1)},
                 Bytes(static_cast<std::size_t>(blocks * cols * scale_block), poison_byte),
                 Tensor(Type::f32, blocks * cols)});
        for (std::uint8_t& byte : d->rows.q)
            byte = static_cast<std::uint8_t>(random.below(0x7c) | random.below(2) << 7);
        out.tolerance = 0.0;
        out.call = [d] {
            RowData& r = d->rows;
            table().requantize_columns(r.s, {r.q.data(), r.scale.f32()}, r.count(), {d->q.data(), d->scale.f32()},
                                       nullptr);
        };
        out.error = [d] { return static_cast<double>(lost_values(*d)); };
        check(out);
    }
}

TEST_CASE("quantize_columns: a value that is no number shows in its column of a block, and only there") {
    const std::int64_t cols = 32;
    Tensor x(Type::bf16, Vec(static_cast<std::size_t>(200 * cols), 1.0));
    x.set(3 * cols + 5, std::nan(""));
    x.set(150 * cols + 6, std::numeric_limits<double>::infinity());
    Bytes q(static_cast<std::size_t>(2 * cols * scale_block));
    Tensor scale(Type::f32, 2 * cols);
    table().quantize_columns({200, cols, 0}, x.src(), nullptr, {}, {q.data(), scale.f32()}, nullptr);
    for (std::int64_t i = 0; i < 2 * cols; ++i) {
        INFO("block ", i / cols, " column ", i % cols);
        if (i == 5 || i == cols + 6)
            CHECK(std::isnan(scale.at(i)));
        else
            CHECK(scale.at(i) == std::ldexp(1.0, -8));
    }
    CHECK(q[static_cast<std::size_t>((cols + 6) * scale_block + 127)] == 0); // behind the last row
}

std::vector<Case> quantize_columns_benchmarks() {
    std::vector<Case> out;
    for (const From from : {From::rows, From::both, From::low})
        out.push_back(columns_case(4096, 2048, Index(8, 512), Type::bf16, from));
    return out;
}

} // namespace moe::test
