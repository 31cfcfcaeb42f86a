// AdamW with exp_avg in MXFP8 against its formula in double, and what its blocks keep.
#include "kernels/mxfp8.hpp"
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace moe::test {
namespace {

using Bytes = std::vector<std::uint8_t, Tracked<std::uint8_t>>;

// exp_avg as blocks of 32: what it stands for behind the step is the sum in double, rounded to E4M3 of its block.
Case mxfp8_case(AdamShape s, double clip, Type squares_in, Type weights) {
    struct Data {
        AdamShape s;
        Tensor g, squares, hyper, master, v, w;
        Bytes code, scale;
        Vec master_before, m_before, v_before;
    };
    Case out;
    out.name =
        fmt::format("adamw in MXFP8 {} of a bucket from {} decayed {} rate {} decay {} clip {} squares {} weights {}",
                    s.elements, s.offset, s.decayed, s.rate, s.decay, clip, name_of(squares_in), name_of(weights));
    Random random(out.name);
    const std::int64_t n = s.elements;
    Vec v = random.normal(n, 0.1), m = random.normal(n, 0.1);
    std::vector<float> held;
    for (std::size_t i = 0; i < m.size(); ++i) {
        v[i] = v[i] * v[i];
        held.push_back(
            static_cast<float>(i / 32 % 5 == 3 ? 0.0 : m[i] * std::pow(2.0, -20.0 * static_cast<double>(i / 32 % 3))));
    }
    Bytes code(held.size()), scale(held.size() / mxfp8_block);
    encode_mxfp8(held.data(), n, code.data(), scale.data());
    decode_mxfp8(code.data(), scale.data(), n, held.data());
    const Vec hyper{0.01, 0.9, 0.95, 1e-8, 0.1, clip, 1.0 - std::pow(0.9, 3), 1.0 - std::pow(0.95, 3), 0.0};
    auto d = std::make_shared<Data>(Data{s,
                                         random.tensor(Type::f32, n),
                                         Tensor(Type::f32, Vec{9.0}),
                                         Tensor(Type::f32, hyper),
                                         random.tensor(Type::f32, n),
                                         Tensor(squares_in, v),
                                         Tensor(weights, n),
                                         std::move(code),
                                         std::move(scale),
                                         {},
                                         Vec(held.begin(), held.end()),
                                         {}});
    d->master_before = d->master.values(), d->v_before = d->v.values();
    out.tolerance = worst({tolerance(squares_in), tolerance(weights)});
    out.flops = 16.0 * static_cast<double>(n);
    out.bytes = static_cast<double>(n) * (14.0 + 2.0 / 32 + 2.0 * static_cast<double>(size_of(squares_in)) +
                                          static_cast<double>(size_of(weights)));
    out.call = [d] {
        table().adamw_mxfp8(d->s, d->g.f32(), d->squares.f32(), d->hyper.f32(), nullptr, d->master.f32(),
                            d->code.data(), d->scale.data(), d->v.dst(), d->w.dst(), nullptr);
    };
    out.error = [d, clip] {
        const double factor = clip > 0.0 && 3.0 > clip ? clip / (3.0 + 1e-6) : 1.0;
        std::vector<float> got(d->code.size());
        decode_mxfp8(d->code.data(), d->scale.data(), d->s.elements, got.data());
        Vec master, v_want, m_want;
        double beyond = 0.0; // by which a value lies beyond its half place
        for (std::size_t i = 0; i < got.size(); ++i) {
            const double g = d->g.at(static_cast<std::int64_t>(i)) * factor;
            const double decay = d->s.decay >= 0.0f ? static_cast<double>(d->s.decay)
                                 : d->s.offset + static_cast<std::int64_t>(i) < d->s.decayed ? d->hyper.at(4)
                                                                                             : 0.0;
            const double m = d->hyper.at(1) * d->m_before[i] + (1.0 - d->hyper.at(1)) * g;
            m_want.push_back(m);
            v_want.push_back(d->hyper.at(2) * d->v_before[i] + (1.0 - d->hyper.at(2)) * g * g);
            const double update = m / d->hyper.at(6) / (std::sqrt(v_want.back() / d->hyper.at(7)) + d->hyper.at(3));
            master.push_back(d->master_before[i] -
                             d->hyper.at(0) * static_cast<double>(d->s.rate) * (update + decay * d->master_before[i]));
        }
        for (std::size_t first = 0; first < got.size(); first += mxfp8_block) {
            double largest = 0.0;
            for (std::size_t i = first; i < first + mxfp8_block; ++i) largest = std::max(largest, std::abs(m_want[i]));
            // Half of the last of three places, or of subnormal values' 2^-9 of a scale that is above largest / 448.
            for (std::size_t i = first; i < first + mxfp8_block; ++i)
                beyond = std::max(beyond, std::abs(static_cast<double>(got[i]) - m_want[i]) /
                                                  std::max(std::abs(m_want[i]) / 16.0, largest / 224.0 / 1024.0) -
                                              1.0);
        }
        return worst({relative_error(d->master, master) * tolerance(d->w.type()) / f32_tolerance,
                      relative_error(d->v, v_want), relative_error(d->w, master), beyond});
    };
    return out;
}

AdamShape shape(std::int64_t elements, std::int64_t offset, std::int64_t decayed, float rate = 1.0f,
                float decay = -1.0f) {
    return {elements, offset, decayed, rate, decay};
}

} // namespace

TEST_CASE("mxfp8: powers of two keep what they scale, in any company that it fits") {
    for (int byte = 1; byte < 255; ++byte) CHECK(e8m0_of_float(float_of_e8m0(static_cast<std::uint8_t>(byte))) == byte);
    CHECK(std::isnan(float_of_e8m0(255)));
    Random random("mxfp8");
    const Vec drawn = random.normal(mxfp8_block * 40, 1.0);
    std::vector<float> values, again(drawn.size());
    for (std::size_t i = 0; i < drawn.size(); ++i)
        values.push_back(static_cast<float>(drawn[i] * std::pow(2.0, static_cast<double>(i / 32) * 6.0 - 120.0)));
    const auto n = static_cast<std::int64_t>(values.size());
    std::vector<std::uint8_t> code(values.size()), scale(values.size() / mxfp8_block);
    encode_mxfp8(values.data(), n, code.data(), scale.data());
    decode_mxfp8(code.data(), scale.data(), n, again.data());
    // A largest value that has been rounded down may ask for half the scale: other bytes for the same values.
    encode_mxfp8(again.data(), n, code.data(), scale.data());
    std::vector<float> third(values.size());
    decode_mxfp8(code.data(), scale.data(), n, third.data());
    CHECK(third == again);
    // Piece by piece into zeros, as a checkpoint is read: the same bytes.
    std::vector<float> block(mxfp8_block, 0.0f), held(mxfp8_block);
    std::uint8_t codes[mxfp8_block], one = 0;
    for (const std::size_t piece : {5, 9, 18}) {
        std::copy_n(again.begin() + static_cast<std::ptrdiff_t>(640 + piece - 5), 5,
                    block.begin() + static_cast<std::ptrdiff_t>(piece - 5));
        encode_mxfp8(block.data(), mxfp8_block, codes, &one);
        decode_mxfp8(codes, &one, mxfp8_block, held.data());
        CHECK(held == block);
    }
    std::vector<float> wrong(mxfp8_block, 1.0f);
    wrong[7] = std::numeric_limits<float>::infinity();
    encode_mxfp8(wrong.data(), mxfp8_block, codes, &one);
    CHECK(one == 255); // shows in all that the block takes part in
}

TEST_CASE("adamw in MXFP8: clipping, the decayed part of the bucket, storages") {
    for (const Type squares : {Type::f32, Type::bf16})
        for (const Type weights : {Type::f32, Type::bf16}) {
            for (const double clip : {0.0, 1.0, 100.0}) check(mxfp8_case(shape(96, 64, 130), clip, squares, weights));
            check(mxfp8_case(shape(4512, 32, 2300), 1.0, squares, weights));
            check(mxfp8_case(shape(32, 0, 0), 1.0, squares, weights));
            for (const float decay : {0.0f, 4.0f})
                check(mxfp8_case(shape(4512, 32, 2300, 3.0f, decay), 1.0, squares, weights));
        }
}

std::vector<Case> mxfp8_benchmarks() {
    const std::int64_t n = 4 << 20;
    return {mxfp8_case(shape(n, 0, n), 1.0, Type::bf16, Type::bf16)};
}

} // namespace moe::test
