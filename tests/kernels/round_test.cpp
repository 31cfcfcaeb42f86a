// Rounding of operands to narrow formats against a search through their values, scales against their definition.
#include "kernels/bf16.hpp"
#include "kernels/rounding.hpp"
#include "tests/kernels/e4m3.hpp"
#include "tests/kernels/round_reference.hpp"
#include "tests/kernels/round_values.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <optional>

namespace moe::test {
namespace {

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

// The bytes of a format beside its values: each stands for the value, with one scale in every place.
Case codes_case(RoundShape s, const Index& counts, Type type, bool beside, const std::optional<Delayed>& delayed) {
    Case out = round_case(s, counts, type, Results::rows, delayed);
    out.name += beside ? " bytes beside" : " bytes";
    s.groups = static_cast<int>(counts.size()), s.run = s.rows;
    auto d = data_for(s, counts, type, out.name);
    if (delayed) d->delayed = true, d->window.set(0, delayed->window), d->largest.set(0, delayed->before);
    const std::int64_t n = s.rows * s.cols, across = scale_blocks(s.cols);
    auto q = std::make_shared<Bytes>(static_cast<std::size_t>(n), poison_byte);
    auto scale = std::make_shared<Tensor>(Type::f32, s.rows * across);
    out.call = [d, q, scale, beside] {
        RoundShape shape = d->shape();
        shape.codes = {q->data(), scale->f32()};
        table().round_operand(shape, d->x.src(), d->count(), nullptr, nullptr, d->largest.f32(),
                              beside ? d->by_row.dst() : Dst{}, {}, nullptr);
    };
    out.error = [d, q, scale, beside, n, across] {
        const Vec want = expected(*d).by_row;
        const auto used = static_cast<std::int64_t>(want.size());
        const std::int64_t rows = used / d->s.cols;
        std::int64_t wrong = scale->untouched(rows * across, (d->s.rows - rows) * across) ? 0 : 1;
        for (std::int64_t i = 0; i < n; ++i) {
            const std::uint8_t byte = (*q)[static_cast<std::size_t>(i)];
            if (i >= used) {
                wrong += byte != poison_byte;
                continue;
            }
            const double s = scale->at(i / d->s.cols * across + i % d->s.cols / scale_block);
            const float value = d->s.format == RoundFormat::e5m2 ? float_of_e5m2(byte) : float_of_e4m3(byte);
            wrong += static_cast<double>(value) * s != want[static_cast<std::size_t>(i)] || s != scale->at(0);
        }
        return worst({demand(wrong == 0),
                      beside ? demand(d->by_row.values(0, used) == want) : demand(d->by_row.untouched(0, n))});
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

TEST_CASE("round_operand: bytes of E4M3 and E5M2 with the tensor's scale in every place, alone and beside values") {
    for (const RoundFormat format : {RoundFormat::e4m3, RoundFormat::e5m2})
        for (const bool beside : {false, true})
            for (const std::optional<Delayed>& delayed :
                 {std::optional<Delayed>{}, std::optional<Delayed>{{0.0, 7.0}}, std::optional<Delayed>{{0.75, 0.0}},
                  std::optional<Delayed>{{449.0, 0.0}}}) {
                check(codes_case(shape_of(format, 64, 96), {}, Type::bf16, beside, delayed));
                check(codes_case(shape_of(format, 37, 400), {}, Type::f32, beside, delayed));
                check(codes_case(shape_of(format, 70, 272), {33, 0, 7, 20}, Type::bf16, beside, delayed));
                check(codes_case(shape_of(format, 20, 528), {9, 40}, Type::bf16, beside, delayed));
                check(codes_case(shape_of(format, 8, 16), {0, 0}, Type::bf16, beside, delayed));
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
    constexpr std::int64_t rows = 512, cols = 256, n = rows * cols, others = n - n / 16;
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
        return sum / static_cast<double>(others);
    };
    table().round_operand(s, x.src(), nullptr, positions.data(), noise.data(), largest.f32(), y.dst(), {}, nullptr);
    s.tensor = 1;
    table().round_operand(s, x.src(), nullptr, positions.data(), noise.data(), largest.f32(), other.dst(), {}, nullptr);
    CHECK(std::abs(mean(y) - x.at(1)) < 4.0 * 0.25 / std::sqrt(static_cast<double>(n))); // deviations of 1/4 at most
    CHECK(std::abs(mean(other) - x.at(1)) < 4.0 * 0.25 / std::sqrt(static_cast<double>(n)));
    std::int64_t same = 0;
    for (std::int64_t i = 0; i < n; ++i) same += i % 16 != 0 && y.at(i) == other.at(i);
    CHECK(static_cast<double>(same) / static_cast<double>(others) < 0.55); // 0.6^2 + 0.4^2 = 0.52
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
