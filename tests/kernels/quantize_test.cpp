// Quantization to E4M3 against a search for the nearest value, scales against the definition.
#include "kernels/bf16.hpp"
#include "tests/kernels/e4m3.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <algorithm>
#include <optional>

namespace moe::test {
namespace {

// Values of very different blocks: magnitudes from far below FP8's to far above.
Vec drawn(Random& random, std::int64_t n, std::int64_t block) {
    Vec values = random.normal(n);
    const Vec exponents = random.normal(n / block + 1, 8.0);
    for (std::int64_t i = 0; i < n; ++i)
        values[static_cast<std::size_t>(i)] *= std::exp2(std::round(exponents[static_cast<std::size_t>(i / block)]));
    return values;
}

Case rows_case(std::int64_t rows, std::int64_t cols, const Index& counts, Type type, bool back) {
    Case out;
    out.name = fmt::format("{} {} x {} {} counts {}", back ? "dequantize_rows" : "quantize_rows", rows, cols,
                           name_of(type), fmt::join(counts, ","));
    Random random(out.name);
    auto d = std::make_shared<RowData>(RowData{{rows, cols, static_cast<int>(counts.size())},
                                               counts,
                                               Tensor(type, drawn(random, rows * cols, scale_block)),
                                               Bytes(static_cast<std::size_t>(rows * cols), poison_byte),
                                               Tensor(Type::f32, rows * scale_blocks(cols)),
                                               Tensor(type, rows * cols)});
    const auto elements = static_cast<double>(rows * cols);
    out.bytes = elements * (static_cast<double>(size_of(type)) + 1.0 + 4.0 / scale_block);
    out.tolerance = 0.0;
    if (back) {
        for (std::uint8_t& byte : d->q) byte = static_cast<std::uint8_t>(random.below(0x7f) | random.below(2) << 7);
        for (std::int64_t i = 0; i < d->scale.size(); ++i) d->scale.set(i, std::exp2(random.below(40) - 20));
        out.call = [d] { table().dequantize_rows(d->s, d->q.data(), d->scale.f32(), d->count(), d->y.dst(), nullptr); };
        out.error = [d] {
            const std::int64_t used = filled(d->counts, d->s.rows) * d->s.cols;
            Vec want;
            for (std::int64_t i = 0; i < used; ++i)
                want.push_back(static_cast<double>(float_of_e4m3(d->q[static_cast<std::size_t>(i)])) *
                               d->scale.at(i / d->s.cols * scale_blocks(d->s.cols) + i % d->s.cols / scale_block));
            return worst(
                {demand(d->y.values(0, used) == want), demand(d->y.untouched(used, d->s.rows * d->s.cols - used))});
        };
        return out;
    }
    out.call = [d] { table().quantize_rows(d->s, d->x.src(), d->count(), d->q.data(), d->scale.f32(), nullptr); };
    out.error = [d] { return static_cast<double>(wrong_rows(*d)); };
    return out;
}

struct WeightData {
    QuantizedWeights s;
    Tensor w;
    Bytes q, qt;
    Tensor scale, qt_scale;
    // Of one scale: as RoundShape has them. delayed: the scale is that of window.
    Tensor window = Tensor(Type::f32, Vec{0.0}), largest = Tensor(Type::f32, Vec{0.0});
    bool delayed = false;
    QuantizedWeights shape() {
        QuantizedWeights shape = s;
        if (delayed) shape.window = window.f32();
        if (s.one_scale) shape.largest = largest.f32();
        return shape;
    }
};

double largest_in(const Vec& values) {
    double largest = 0.0;
    for (const double x : values) largest = std::max(largest, std::abs(x));
    return largest;
}

// Either form against blocks cut out of the weights one by one. `before`: what stood where the largest magnitude goes.
std::int64_t wrong_weights(const WeightData& d, double before) {
    const std::int64_t groups = d.s.groups, n = d.s.n, k = d.s.k;
    const std::int64_t down = scale_blocks(n), across = scale_blocks(k);
    std::int64_t wrong = 0;
    Vec rounded = d.w.values();
    for (double& x : rounded) x = static_cast<double>(float_of_bf16(bf16_of_float(static_cast<float>(x))));
    const double largest = largest_in(rounded);
    const double whole = !d.delayed ? scale_of({largest}) : d.window.at(0) > 0.0 ? scale_of({d.window.at(0)}) : 1.0;
    if (d.s.one_scale) wrong += d.largest.at(0) != std::max(largest, d.delayed ? before : 0.0);
    for (std::int64_t g = 0; g < groups; ++g) {
        for (std::int64_t block = 0; block < down * across; ++block) {
            const std::int64_t row = block / across * scale_block, col = block % across * scale_block;
            Vec values;
            for (std::int64_t r = row; r < std::min(n, row + scale_block); ++r)
                for (std::int64_t c = col; c < std::min(k, col + scale_block); ++c)
                    values.push_back(rounded[static_cast<std::size_t>((g * n + r) * k + c)]);
            const double scale = d.s.one_scale ? whole : scale_of(values);
            wrong += d.scale.at(g * down * across + block) != scale;
            wrong += d.qt_scale.at((g * across + block % across) * down + block / across) != scale;
            std::size_t next = 0;
            for (std::int64_t r = row; r < std::min(n, row + scale_block); ++r) {
                for (std::int64_t c = col; c < std::min(k, col + scale_block); ++c) {
                    const std::uint8_t want = nearest(std::clamp(values[next++] / scale, -448.0, 448.0));
                    wrong += d.q[static_cast<std::size_t>((g * n + r) * k + c)] != want;
                    wrong += d.qt[static_cast<std::size_t>((g * k + c) * n + r)] != want;
                }
            }
        }
    }
    return wrong;
}

// With a scale for each square, one of their own, or one of the steps before.
struct OneScale {
    bool on = false;
    std::optional<double> window = {};
};

Case weights_case(int groups, std::int64_t n, std::int64_t k, Type type, const OneScale& one = {}) {
    constexpr double before = 3.0;
    Case out;
    out.name = fmt::format("quantize_weights {} x {} x {} {}{}", groups, n, k, name_of(type),
                           one.window ? fmt::format(" window {}", *one.window)
                           : one.on   ? " one scale"
                                      : "");
    Random random(out.name);
    const std::int64_t elements = groups * n * k, blocks = groups * scale_blocks(n) * scale_blocks(k);
    auto d = std::make_shared<WeightData>(WeightData{{groups, n, k, one.on},
                                                     Tensor(type, drawn(random, elements, 16 * k)),
                                                     Bytes(static_cast<std::size_t>(elements)),
                                                     Bytes(static_cast<std::size_t>(elements)),
                                                     Tensor(Type::f32, blocks),
                                                     Tensor(Type::f32, blocks)});
    d->delayed = one.window.has_value();
    if (one.window) d->window.set(0, *one.window);
    d->largest.set(0, before);
    const double reads = one.on && !one.window ? 2.0 : 1.0;
    out.bytes = static_cast<double>(elements) * (reads * static_cast<double>(size_of(type)) + 2.0);
    out.tolerance = 0.0;
    out.call = [d] {
        table().quantize_weights(d->shape(), d->w.src(), d->q.data(), d->scale.f32(), d->qt.data(), d->qt_scale.f32(),
                                 nullptr);
    };
    out.error = [d] { return static_cast<double>(wrong_weights(*d, before)); };
    return out;
}

} // namespace

TEST_CASE("quantize: E4M3 to the nearest, ties to even, and scales at the edges of a power of two") {
    for (int byte = 0; byte < 256; ++byte) {
        const float x = float_of_e4m3(static_cast<std::uint8_t>(byte));
        if (!std::isnan(x)) CHECK(e4m3_of_float(x) == byte);
    }
    Random random("e4m3");
    for (const double x : random.normal(4000, 2.0)) {
        const auto value = static_cast<float>(x * std::exp2(random.below(22) - 12));
        CHECK(e4m3_of_float(value) == nearest(static_cast<double>(value)));
    }
    CHECK(e4m3_of_float(0x1.1p0f) == 0x38); // between 1 and 1.125: to even
    CHECK(e4m3_of_float(0x1.3p0f) == 0x3a); // between 1.125 and 1.25
    CHECK(e4m3_of_float(0x1p-10f) == 0x00); // half of the smallest
    CHECK(e4m3_of_float(1e9f) == 0x7e);
    CHECK(e4m3_of_float(std::nanf("")) == 0x7f);
    CHECK(fp8_scale(448.0f) == 1.0f);
    CHECK(fp8_scale(std::nextafter(448.0f, 500.0f)) == 2.0f);
    CHECK(fp8_scale(224.0f) == 0.5f);
    CHECK(fp8_scale(0.0f) == 0x1p-126f);
    CHECK(fp8_scale(1e-40f) == 0x1p-126f);
    CHECK(fp8_scale(0x1.fffffep127f) == 0x1p120f);
    CHECK(std::isnan(fp8_scale(std::numeric_limits<float>::infinity())));
    CHECK(std::isnan(fp8_scale(std::nanf(""))));
}

TEST_CASE("quantize_rows: whole and partial blocks, rows beyond the counts stay as they were") {
    for (const Type type : {Type::bf16, Type::f32}) {
        for (const bool back : {false, true}) {
            check(rows_case(5, 128, {}, type, back));
            check(rows_case(33, 400, {}, type, back));
            check(rows_case(7, 16, {}, type, back));
            check(rows_case(40, 272, {3, 0, 12, 1}, type, back));
            check(rows_case(10, 256, {8, 9}, type, back)); // cut at the capacity
            check(rows_case(6, 144, {0, 0}, type, back));
        }
    }
}

TEST_CASE("quantize_rows: a value that is no number shows in its whole block, and only there") {
    RowData d{{2, 256, 0},         {}, Tensor(Type::bf16, Vec(512, 1.0)), Bytes(512), Tensor(Type::f32, 4),
              Tensor(Type::f32, 1)};
    d.x.set(130, std::nan(""));
    d.x.set(300, std::numeric_limits<double>::infinity());
    table().quantize_rows(d.s, d.x.src(), nullptr, d.q.data(), d.scale.f32(), nullptr);
    CHECK(d.scale.at(0) == std::ldexp(1.0, -8));
    CHECK(std::isnan(d.scale.at(1)));
    CHECK(std::isnan(d.scale.at(2)));
    CHECK(d.scale.at(3) == std::ldexp(1.0, -8));
}

TEST_CASE("quantize_weights: both forms, partial blocks, several matrices, BF16 and FP32") {
    for (const Type type : {Type::bf16, Type::f32}) {
        check(weights_case(1, 128, 128, type));
        check(weights_case(1, 576, 272, type));
        check(weights_case(3, 144, 400, type));
        check(weights_case(2, 16, 16, type));
        check(weights_case(1, 32, 640, type));
    }
}

TEST_CASE("quantize_weights: one scale for all of them, of their own largest magnitude or of the steps before") {
    for (const Type type : {Type::bf16, Type::f32})
        for (const OneScale& one :
             {OneScale{true}, OneScale{true, 0.0}, OneScale{true, 1e-3}, OneScale{true, 449.0}, OneScale{true, 3e9}}) {
            check(weights_case(1, 128, 128, type, one));
            check(weights_case(3, 144, 272, type, one));
            check(weights_case(2, 16, 16, type, one));
        }
}

std::vector<Case> quantize_benchmarks() {
    return {rows_case(4096, 2048, {}, Type::bf16, false), rows_case(4096, 2048, {}, Type::bf16, true),
            weights_case(8, 768, 1024, Type::f32)};
}

} // namespace moe::test
