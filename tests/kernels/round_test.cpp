// Rounding of operands to narrow formats against a search through their values, scales against their definition.
#include "kernels/bf16.hpp"
#include "kernels/rounding.hpp"
#include "tests/kernels/e4m3.hpp"
#include "tests/kernels/round_values.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <optional>

namespace moe::test {
namespace {

std::uint64_t splitmix64(std::uint64_t x) { // Vigna's, as published
    std::uint64_t z = x + 0x9e3779b97f4a7c15ULL;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ z >> 27) * 0x94d049bb133111ebULL;
    return z ^ z >> 31;
}

struct RoundData {
    RoundShape s;
    Index counts, positions, noise;
    Tensor x, largest, by_row, by_column;
    Tensor window = Tensor(Type::f32, Vec{0.0}); // of delayed scaling
    bool delayed = false;
    const std::int32_t* count() const { return counts.empty() ? nullptr : counts.data(); }
    RoundShape shape() const {
        RoundShape shape = s;
        if (delayed) shape.window = window.f32();
        return shape;
    }
};

// Begins of runs, and the end behind the last.
std::vector<std::int64_t> begins(const RoundData& d) {
    std::vector<std::int64_t> at{0};
    if (d.counts.empty())
        for (std::int64_t row = d.s.run; row < d.s.rows; row += d.s.run) at.push_back(row);
    else
        for (std::size_t e = 0; e + 1 < d.counts.size(); ++e)
            at.push_back(std::min<std::int64_t>(at.back() + d.counts[e], d.s.rows));
    at.push_back(filled(d.counts, d.s.rows));
    return at;
}

// Bits for column c of row i of run `run`.
std::uint64_t random_bits(const RoundData& d, std::int64_t run, std::int64_t row, std::int64_t i, std::int64_t c,
                          bool by_column) {
    const RoundShape& s = d.s;
    const std::uint64_t step = static_cast<std::uint32_t>(d.noise[0]) |
                               static_cast<std::uint64_t>(static_cast<std::uint32_t>(d.noise[1])) << 32;
    const std::uint64_t key = splitmix64(step ^ splitmix64(s.tensor + (by_column ? 1 : 0)));
    const auto of_row = [&](std::int64_t r) {
        const std::int64_t at = s.first + r;
        const auto sequence = static_cast<std::uint64_t>(d.noise[2] + at % s.batch);
        const auto position = static_cast<std::uint64_t>(d.positions[static_cast<std::size_t>(at / s.batch)]);
        return splitmix64(key ^ splitmix64((sequence << 32) + position));
    };
    const std::uint64_t of_group =
        (static_cast<std::uint64_t>(s.first_group + run) << 32) + static_cast<std::uint64_t>(i);
    const std::uint64_t counter = d.counts.empty() ? of_row(row) : splitmix64(of_row(0) ^ splitmix64(of_group));
    const std::int64_t col = s.first_col + c;
    return splitmix64(counter + static_cast<std::uint64_t>(col / 4) * 0x9e3779b97f4a7c15ULL) >> 16 * (col % 4) & 0xffff;
}

// What a block of values becomes; `bits` are those of stochastic rounding. of_tensor 0: nothing is known of it.
Vec rounded_block(const RoundShape& s, const Vec& x, double of_tensor, const std::vector<std::uint64_t>& bits) {
    Vec y;
    double scale = 1.0;
    switch (s.format) {
    case RoundFormat::e4m3:
        if (of_tensor > 0.0) scale = power_for(of_tensor, 448.0);
        break;
    case RoundFormat::e5m2:
        if (of_tensor > 0.0) scale = power_for(of_tensor, 57344.0);
        break;
    case RoundFormat::mxfp8:
        scale = power_for(largest_in(x), 448.0);
        break;
    case RoundFormat::nvfp4: {
        const double tensor = power_for(sixth_of(of_tensor), 448.0);
        scale = nearest_of(e4m3_table, sixth_of(largest_in(x)) / tensor) * tensor;
    }
    }
    for (std::size_t i = 0; i < x.size(); ++i) {
        if (s.format != RoundFormat::nvfp4)
            y.push_back(nearest_of(s.format == RoundFormat::e5m2 ? e5m2_table : e4m3_table, x[i] / scale) * scale);
        else if (scale == 0.0)
            y.push_back(0.0);
        else
            y.push_back((s.stochastic ? stochastic_of(x[i] / scale, bits[i]) : nearest_of(e2m1_table, x[i] / scale)) *
                        scale);
    }
    return y;
}

// The transform by its matrix, whose element i, j is (-1)^(number of bits that i and j share) / 4.
Vec transformed(const Vec& x) {
    Vec y(16, 0.0);
    for (unsigned i = 0; i < 16; ++i)
        for (unsigned j = 0; j < 16; ++j) {
            const unsigned turns = (hadamard_signs >> j & 1) + static_cast<unsigned>(__builtin_popcount(i & j));
            y[i] += (turns % 2 == 0 ? 0.25 : -0.25) * x[j];
        }
    return y;
}

// Every result, cell by cell; NaN where rows hold no data.
struct Expected {
    Vec by_row, by_column;
};
Expected expected(const RoundData& d) {
    const RoundShape& s = d.s;
    const std::int64_t width = s.format == RoundFormat::mxfp8 ? 32 : 16;
    const std::vector<std::int64_t> at = begins(d);
    const Vec x = d.x.values(0, at.back() * s.cols);
    Vec turned = x;
    const auto each_block = [&](auto visit) { // of rows: run, first row, rows
        for (std::size_t run = 0; run + 1 < at.size(); ++run)
            for (std::int64_t row = at[run]; row < at[run + 1]; row += width)
                visit(static_cast<std::int64_t>(run), row, std::min(width, at[run + 1] - row));
    };
    const auto cell = [&](std::int64_t r, std::int64_t c) { return static_cast<std::size_t>(r * s.cols + c); };
    if (s.transform)
        each_block([&](std::int64_t, std::int64_t row, std::int64_t rows) {
            for (std::int64_t c = 0; rows == 16 && c < s.cols; ++c) {
                Vec column;
                for (std::int64_t r = 0; r < 16; ++r) column.push_back(x[cell(row + r, c)]);
                column = transformed(column);
                for (std::int64_t r = 0; r < 16; ++r) turned[cell(row + r, c)] = column[static_cast<std::size_t>(r)];
            }
        });
    Expected want{Vec(x.size()), Vec(x.size())};
    const double of_rows = d.delayed ? d.window.at(0) : largest_in(x),
                 of_columns = d.delayed ? of_rows : largest_in(turned);
    each_block([&](std::int64_t run, std::int64_t row, std::int64_t rows) {
        const auto block = [&](std::int64_t r0, std::int64_t r1, std::int64_t c0, std::int64_t c1, bool by_column) {
            Vec values;
            std::vector<std::uint64_t> bits;
            for (std::int64_t r = r0; r < r1; ++r)
                for (std::int64_t c = c0; c < c1; ++c) {
                    values.push_back((by_column ? turned : x)[cell(r, c)]);
                    if (s.stochastic)
                        bits.push_back(random_bits(d, run, r, r - at[static_cast<std::size_t>(run)], c, by_column));
                }
            const Vec result = rounded_block(s, values, by_column ? of_columns : of_rows, bits);
            std::size_t next = 0;
            for (std::int64_t r = r0; r < r1; ++r)
                for (std::int64_t c = c0; c < c1; ++c)
                    (by_column ? want.by_column : want.by_row)[cell(r, c)] = result[next++];
        };
        for (std::int64_t c = 0; c < s.cols; c += width) {
            const std::int64_t end = std::min(s.cols, c + width);
            if (s.square) block(row, row + rows, c, end, false);
            for (std::int64_t r = row; r < row + rows && !s.square; ++r) block(r, r + 1, c, end, false);
        }
        for (std::int64_t c = 0; c < s.cols; ++c) block(row, row + rows, c, c + 1, true);
    });
    return want;
}

const char* word(RoundFormat format) {
    constexpr std::array words{"e4m3", "e5m2", "mxfp8", "nvfp4"};
    return words[static_cast<std::size_t>(format)];
}

// Whole numbers of one exponent where columns are transformed, so that FP32 holds every sum; else blocks of very
// different magnitudes.
Vec operand(Random& random, const RoundShape& s) {
    const std::int64_t n = s.rows * s.cols;
    Vec values = random.normal(n, 40.0);
    if (s.transform) {
        for (double& x : values) x = std::ldexp(std::clamp(std::round(x), -255.0, 255.0), -9);
        return values;
    }
    const Vec exponents = random.normal(n / 8 + 1, 3.0);
    for (std::int64_t i = 0; i < n; ++i)
        values[static_cast<std::size_t>(i)] *= std::exp2(std::round(exponents[static_cast<std::size_t>(i / 8)]));
    return values;
}

enum class Results { rows, columns, both };

std::shared_ptr<RoundData> data_for(const RoundShape& s, const Index& counts, Type type, const std::string& name) {
    Random random(name);
    const std::int64_t places = (s.first + s.rows + s.batch - 1) / s.batch;
    auto d = std::make_shared<RoundData>(RoundData{s,
                                                   counts,
                                                   Index(static_cast<std::size_t>(places)),
                                                   {0x76543210, -0x01234568, 6},
                                                   Tensor(type, operand(random, s)),
                                                   Tensor(Type::f32, 2),
                                                   Tensor(Type::bf16, s.rows * s.cols),
                                                   Tensor(Type::bf16, s.rows * s.cols)});
    for (std::size_t i = 0; i < d->positions.size(); ++i)
        d->positions[i] = static_cast<std::int32_t>(i + (2 * i < d->positions.size() ? 5 : 900));
    return d;
}

// A scale of `window`, and a largest magnitude of before, beside which x's is told; NaN: nobody asks.
struct Delayed {
    double window = 0.0, before = 0.0;
};

Case round_case(RoundShape s, const Index& counts, Type type, Results results,
                const std::optional<Delayed>& delayed = {}) {
    Case out;
    s.groups = static_cast<int>(counts.size());
    if (s.run == 0) s.run = s.rows;
    out.name =
        fmt::format("round_operand {}{}{}{} {} x {} {} run {} counts {} results {}", word(s.format),
                    s.square ? " squares" : "", s.transform ? " transformed" : "", s.stochastic ? " stochastic" : "",
                    s.rows, s.cols, name_of(type), s.run, fmt::join(counts, ","), static_cast<int>(results));
    if (delayed) out.name += fmt::format(" window {} before {}", delayed->window, delayed->before);
    auto d = data_for(s, counts, type, out.name);
    const bool asks = !delayed || !std::isnan(delayed->before);
    if (delayed) {
        d->delayed = true;
        d->window.set(0, delayed->window);
        if (asks) d->largest.set(0, delayed->before);
    }
    const auto elements = static_cast<double>(s.rows * s.cols);
    const double reads = s.format == RoundFormat::mxfp8 || delayed ? 1.0 : 2.0;
    out.bytes = elements * (reads * static_cast<double>(size_of(type)) + (results == Results::both ? 4.0 : 2.0));
    out.tolerance = 0.0;
    out.call = [d, results, asks] {
        table().round_operand(d->shape(), d->x.src(), d->count(), d->positions.data(), d->noise.data(),
                              asks ? d->largest.f32() : nullptr, results == Results::columns ? Dst{} : d->by_row.dst(),
                              results == Results::rows ? Dst{} : d->by_column.dst(), nullptr);
    };
    out.error = [d, results, delayed, asks] {
        const std::int64_t n = d->s.rows * d->s.cols;
        const Expected want = expected(*d);
        const auto used = static_cast<std::int64_t>(want.by_row.size());
        const auto off = [&](const Tensor& y, const Vec& values, bool asked) {
            return asked ? worst({demand(y.values(0, used) == values), demand(y.untouched(used, n - used))})
                         : demand(y.untouched(0, n));
        };
        const std::int64_t known = filled(d->counts, d->s.rows) * d->s.cols;
        if (delayed && asks &&
            (d->largest.at(0) != std::max(delayed->before, largest_in(d->x.values(0, known))) ||
             !d->largest.untouched(1, 1)))
            return demand(false);
        if (!asks && !d->largest.untouched(0, 2)) return demand(false);
        return worst({off(d->by_row, want.by_row, results != Results::columns),
                      off(d->by_column, want.by_column, results != Results::rows)});
    };
    return out;
}

RoundShape shape_of(RoundFormat format, std::int64_t rows, std::int64_t cols) {
    RoundShape s;
    s.format = format, s.rows = rows, s.cols = cols;
    return s;
}

float round_one(RoundFormat format, std::vector<float> block, std::size_t i) {
    const auto n = static_cast<std::int64_t>(block.size());
    Tensor x(Type::f32, Vec(block.begin(), block.end())), largest(Type::f32, 2), y(Type::bf16, n);
    RoundShape s = shape_of(format, 1, n);
    s.run = 1;
    table().round_operand(s, x.src(), nullptr, nullptr, nullptr, largest.f32(), y.dst(), {}, nullptr);
    return static_cast<float>(y.at(static_cast<std::int64_t>(i)));
}

} // namespace

TEST_CASE("round: scales of blocks and tensors, by hand") {
    // 500 asks for 2: 500 / 2 = 250 lies between 240 and 256, 3 / 2 between 1.5 and 1.625.
    CHECK(round_one(RoundFormat::mxfp8, {500.0f, 3.0f}, 0) == 512.0f);
    CHECK(round_one(RoundFormat::mxfp8, {500.0f, 3.1f}, 1) == 3.0f);
    CHECK(round_one(RoundFormat::mxfp8, {448.0f, 3.1f}, 1) == 3.0f);
    CHECK(round_one(RoundFormat::e4m3, {500.0f, 0.004f}, 1) == 0.00390625f); // 2^-8, the least above 0
    CHECK(round_one(RoundFormat::e5m2, {500.0f, 0.004f}, 1) == 0.00390625f);
    CHECK(round_one(RoundFormat::e5m2, {500.0f, 450.0f}, 1) == 448.0f);
    // 12 / 6 = 2 brings the tensor's scale to 2^-7, 2 / 2^-7 = 256 is E4M3's: 7 / 2 = 3.5 ties to 4.
    CHECK(round_one(RoundFormat::nvfp4, {12.0f, 7.0f, -2.6f}, 0) == 12.0f);
    CHECK(round_one(RoundFormat::nvfp4, {12.0f, 7.0f, -2.6f}, 1) == 8.0f);
    CHECK(round_one(RoundFormat::nvfp4, {12.0f, 7.0f, -2.6f}, 2) == -3.0f);
    // 13 / 6 / 2^-7 = 277.3 rounds to 288: the scale is 2.25, and 13 / 2.25 = 5.8 becomes 6.
    CHECK(round_one(RoundFormat::nvfp4, {13.0f}, 0) == 13.5f);
}

TEST_CASE("round_operand: every format by rows, by columns and both, whole blocks and parts of them") {
    for (const RoundFormat format : {RoundFormat::e4m3, RoundFormat::e5m2, RoundFormat::mxfp8, RoundFormat::nvfp4}) {
        for (const Results results : {Results::rows, Results::columns, Results::both}) {
            check(round_case(shape_of(format, 64, 96), {}, Type::bf16, results));
            check(round_case(shape_of(format, 37, 41), {}, Type::bf16, results));
            check(round_case(shape_of(format, 70, 40), {33, 0, 7, 20}, Type::bf16, results));
        }
        check(round_case(shape_of(format, 33, 38), {}, Type::f32, Results::both));
        check(round_case(shape_of(format, 20, 530), {9, 40}, Type::bf16, Results::both)); // cut at the buffer's end
        RoundShape runs = shape_of(format, 60, 34);
        runs.run = 24;
        check(round_case(runs, {}, Type::bf16, Results::both));
        check(round_case(shape_of(format, 1, 1), {}, Type::bf16, Results::both));
        check(round_case(shape_of(format, 8, 16), {0, 0}, Type::bf16, Results::both));
    }
}

// Magnitudes of operand() reach some 2^13: windows below saturate, those above leave places of the format unused.
TEST_CASE("round_operand: a scale of the steps before, beyond which values saturate, and the largest of this one") {
    const double nobody = std::numeric_limits<double>::quiet_NaN();
    for (const RoundFormat format : {RoundFormat::e4m3, RoundFormat::e5m2})
        for (const double window : {0.0, 1e-30, 0.75, 448.0, 449.0, 57344.0, 3e38}) {
            for (const double before : {0.0, 7.0, 1e9, nobody}) {
                check(round_case(shape_of(format, 37, 41), {}, Type::bf16, Results::rows, Delayed{window, before}));
                check(round_case(shape_of(format, 70, 40), {33, 0, 7, 20}, Type::bf16, Results::rows,
                                 Delayed{window, before}));
            }
            check(round_case(shape_of(format, 64, 96), {}, Type::bf16, Results::both, Delayed{window, 0.0}));
            check(round_case(shape_of(format, 20, 530), {9, 40}, Type::f32, Results::columns, Delayed{window, 1.0}));
            check(round_case(shape_of(format, 8, 16), {0, 0}, Type::bf16, Results::rows, Delayed{window, 0.5}));
        }
}

TEST_CASE("round_operand: with a scale of the steps before infinity saturates, NaN stays, and both are told") {
    for (const double odd : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
        Tensor x(Type::bf16, Vec{odd, -1000.0, 1.0}), window(Type::f32, Vec{448.0}), largest(Type::f32, Vec{2.0, 0.0}),
            y(Type::bf16, 3);
        RoundShape s = shape_of(RoundFormat::e4m3, 1, 3);
        s.run = 1, s.window = window.f32();
        table().round_operand(s, x.src(), nullptr, nullptr, nullptr, largest.f32(), y.dst(), {}, nullptr);
        CHECK((std::isnan(odd) ? std::isnan(y.at(0)) : y.at(0) == 448.0));
        CHECK(y.at(1) == -448.0);
        CHECK(y.at(2) == 1.0);
        CHECK_FALSE(std::isfinite(largest.at(0)));
    }
}

TEST_CASE("round_operand: nvfp4 in squares, behind a transform, and stochastically") {
    RoundShape square = shape_of(RoundFormat::nvfp4, 72, 50);
    square.square = true;
    check(round_case(square, {}, Type::bf16, Results::rows));
    square.run = 36; // two experts
    check(round_case(square, {}, Type::bf16, Results::rows));
    for (const bool stochastic : {false, true}) {
        RoundShape s = shape_of(RoundFormat::nvfp4, 48, 70);
        s.transform = true, s.stochastic = stochastic, s.tensor = 0xfedcba9876543210u;
        check(round_case(s, {}, Type::bf16, Results::both));
        check(round_case(s, {}, Type::bf16, Results::columns));
        check(round_case(s, {17, 3, 20}, Type::bf16, Results::both));
        s.first = 40, s.batch = 3, s.first_col = 66, s.first_group = 5, s.run = 24;
        check(round_case(s, {}, Type::bf16, Results::both));
        check(round_case(s, {16, 0, 31}, Type::bf16, Results::both));
        s.cols = 33;
        check(round_case(s, {}, Type::bf16, Results::rows));
    }
}

TEST_CASE("round_operand: a value that is no number shows in all that shares a scale with it") {
    for (const RoundFormat format : {RoundFormat::mxfp8, RoundFormat::nvfp4, RoundFormat::e4m3}) {
        constexpr std::int64_t rows = 40, cols = 64;
        Random random("no number");
        Tensor x = random.tensor(Type::bf16, rows * cols), largest(Type::f32, 2), y(Type::bf16, rows * cols),
               turned(Type::bf16, rows * cols);
        x.set(33 * cols + 5, std::numeric_limits<double>::infinity());
        RoundShape s = shape_of(format, rows, cols);
        s.run = rows;
        table().round_operand(s, x.src(), nullptr, nullptr, nullptr, largest.f32(), y.dst(), turned.dst(), nullptr);
        for (std::int64_t i = 0; i < rows * cols; ++i) {
            const bool all = format != RoundFormat::mxfp8;
            CHECK(std::isnan(y.at(i)) == (all || (i / cols == 33 && i % cols < 32)));
            CHECK(std::isnan(turned.at(i)) == (all || (i / cols >= 32 && i % cols == 5)));
        }
    }
}

TEST_CASE("round: the transform leaves products over rows what they are, and spreads an outlier") {
    Random random("hadamard");
    float a[16], b[16];
    double before = 0.0, after = 0.0;
    for (int i = 0; i < 16; ++i) {
        a[i] = static_cast<float>(random.below(200) - 100), b[i] = static_cast<float>(random.below(200) - 100);
        before += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    }
    hadamard(a), hadamard(b);
    for (int i = 0; i < 16; ++i) after += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    CHECK(after == before);
    float outlier[16] = {};
    outlier[3] = 8.0f;
    hadamard(outlier);
    for (const float x : outlier) CHECK(std::abs(x) == 2.0f);
}

TEST_CASE("round_operand: stochastic rounding is right on average, and another tensor's draws are others") {
    constexpr std::int64_t rows = 512, cols = 256, n = rows * cols;
    RoundShape s = shape_of(RoundFormat::nvfp4, rows, cols);
    s.run = rows, s.stochastic = true;
    Vec values(n, 0.8);
    for (std::int64_t i = 0; i < n; i += 16) values[static_cast<std::size_t>(i)] = 6.0; // brings the scale to 1
    const Tensor x(Type::bf16, values);
    Index positions(rows), noise{1, 2, 3};
    for (std::size_t i = 0; i < rows; ++i) positions[i] = static_cast<std::int32_t>(i);
    Tensor largest(Type::f32, 2), y(Type::bf16, n), other(Type::bf16, n);
    const auto mean = [&](const Tensor& t) {
        double sum = 0.0;
        for (std::int64_t i = 0; i < n; ++i) sum += i % 16 == 0 ? 0.0 : t.at(i);
        return sum / static_cast<double>(n - n / 16);
    };
    table().round_operand(s, x.src(), nullptr, positions.data(), noise.data(), largest.f32(), y.dst(), {}, nullptr);
    s.tensor = 1;
    table().round_operand(s, x.src(), nullptr, positions.data(), noise.data(), largest.f32(), other.dst(), {}, nullptr);
    CHECK(std::abs(mean(y) - x.at(1)) < 4.0 * 0.25 / std::sqrt(static_cast<double>(n))); // deviations of 1/4 at most
    CHECK(std::abs(mean(other) - x.at(1)) < 4.0 * 0.25 / std::sqrt(static_cast<double>(n)));
    std::int64_t same = 0;
    for (std::int64_t i = 0; i < n; ++i) same += i % 16 != 0 && y.at(i) == other.at(i);
    CHECK(static_cast<double>(same) / static_cast<double>(n - n / 16) < 0.55); // 0.6^2 + 0.4^2 = 0.52
}

std::vector<Case> round_benchmarks() {
    std::vector<Case> list;
    for (const RoundFormat format : {RoundFormat::e4m3, RoundFormat::mxfp8, RoundFormat::nvfp4}) {
        RoundShape s = shape_of(format, 1024, 1024);
        list.push_back(round_case(s, {}, Type::bf16, Results::both));
        if (format == RoundFormat::e4m3)
            list.push_back(round_case(s, {}, Type::bf16, Results::both, Delayed{448.0, 0.0}));
        if (format != RoundFormat::nvfp4) continue;
        s.transform = s.stochastic = true;
        list.push_back(round_case(s, {}, Type::bf16, Results::both));
    }
    return list;
}

} // namespace moe::test
