// Packing of rounded operands for block-scaled tensor cores: codes times scales are the rounded values to the bit, and
// scales lie where the library looks for them.
#include "tests/kernels/packed_bytes.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <limits>

namespace moe::test {
namespace {

// The values that table() rounds an operand to, in both forms.
struct Rounded {
    Tensor by_row, by_column;
};
Rounded rounded(const RoundShape& s, const Tensor& x) {
    Rounded out{Tensor(Type::bf16, s.rows * s.cols), Tensor(Type::bf16, s.rows * s.cols)};
    Tensor largest(Type::f32, 2);
    Index positions(static_cast<std::size_t>(s.rows)), noise{1, 2, 3};
    for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<std::int32_t>(i);
    table().round_operand(s, x.src(), nullptr, positions.data(), noise.data(), largest.f32(), out.by_row.dst(),
                          s.square ? Dst{} : out.by_column.dst(), nullptr);
    return out;
}

// Magnitudes from row to row as far apart as a scale's range, so that scales of blocks are subnormal, too.
Tensor operand(Random& random, std::int64_t rows, std::int64_t cols, double spread) {
    Vec values = random.normal(rows * cols);
    const Vec exponents = random.normal(rows * cols / 16 + 1, spread);
    for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] *= std::exp2(std::round(exponents[i / 16]));
        if (i % 97 == 0) values[i] = 0.0;
    }
    for (std::int64_t i = 0; i < cols; ++i) values[static_cast<std::size_t>(i)] = 0.0;
    return Tensor(Type::bf16, values);
}

struct Kind {
    const char* name;
    RoundFormat format;
    bool square, transform, stochastic;
};
const Kind kinds[] = {{"mxfp8", RoundFormat::mxfp8, false, false, false},
                      {"nvfp4 of weights", RoundFormat::nvfp4, true, false, false},
                      {"nvfp4 of activations", RoundFormat::nvfp4, false, true, false},
                      {"nvfp4 of gradients", RoundFormat::nvfp4, false, true, true}};

// Elements whose packed form stands for something else.
std::int64_t wrong_values(const BlockShape& s, const Tensor& x, const PackedBytes& p) {
    std::int64_t wrong = 0;
    for (std::int64_t row = 0; row < s.rows; ++row)
        for (std::int64_t k = 0; k < s.k; ++k) {
            const double want = x.at(s.contracted_first ? k * s.stride + row : row * s.stride + k);
            wrong += unpacked(s, p.codes.data(), p.scales.data(), p.t, row, k) != want;
        }
    return wrong;
}

} // namespace

TEST_CASE("block_scaled: scales lie in tiles of 128 rows and 4 blocks") {
    // By hand, from the table of the library's documentation: 16 bytes hold rows r, r + 32, r + 64, r + 96.
    const BlockShape s{RoundFormat::mxfp8, 300, 32 * 6};
    CHECK(s.scale_bytes() == 3 * 2 * 512);
    CHECK(scale_place(s, 0, 0) == 0);
    CHECK(scale_place(s, 0, 3) == 3);
    CHECK(scale_place(s, 1, 0) == 16);
    CHECK(scale_place(s, 32, 0) == 4);
    CHECK(scale_place(s, 97, 2) == 16 + 12 + 2);
    CHECK(scale_place(s, 127, 3) == 511);
    CHECK(scale_place(s, 0, 4) == 512);
    CHECK(scale_place(s, 128, 0) == 1024);
    CHECK(scale_place(s, 299, 5) == 2 * 1024 + 512 + 43 % 32 * 16 + 4 + 1);
    const BlockShape fp4{RoundFormat::nvfp4, 128, 64};
    CHECK(fp4.scale_bytes() == 512);
    CHECK(fp4.code_bytes() == 128 * 32);
}

TEST_CASE("block_scaled: packed operands stand for the values that products round to") {
    for (const Kind& kind : kinds) {
        for (const auto& [rows, cols, spread] : {std::tuple{160, 96, 2.0}, {64, 288, 6.0}, {32, 32, 0.0}}) {
            INFO(kind.name, " ", rows, " x ", cols, " spread ", spread);
            Random random(kind.name + std::to_string(rows));
            RoundShape shape;
            shape.rows = rows, shape.cols = cols, shape.run = rows, shape.format = kind.format;
            shape.square = kind.square, shape.transform = kind.transform, shape.stochastic = kind.stochastic;
            const Rounded r = rounded(shape, operand(random, rows, cols, spread));
            const BlockShape along_rows{kind.format, rows, cols, cols, false},
                along_columns{kind.format, cols, rows, cols, true};
            const Tensor& columns = kind.square ? r.by_row : r.by_column;
            for (const auto& [s, x] : {std::pair{along_rows, &r.by_row}, {along_columns, &columns}}) {
                const PackedBytes p = packed(s, *x);
                CHECK(wrong_values(s, *x, p) == 0);
                const PackedBytes host = packed_by_host(s, *x);
                CHECK(p.t == host.t);
                CHECK(p.codes == host.codes);
                CHECK(p.scales == host.scales); // zeros beyond rows and blocks as well
            }
        }
    }
}

TEST_CASE("block_scaled: gradients that were all rounded down keep their scales") {
    // 4 of a block whose scale is 448 t: of a t that follows from the largest value alone it would be out of range.
    Vec values(64, 0.0);
    for (std::size_t i = 0; i < 16; ++i) values[i] = (i % 2 == 0 ? 4.0 : 3.0) * 448.0;
    for (std::size_t i = 16; i < 32; ++i) values[i] = (i % 2 == 0 ? 6.0 : -0.5) * 0x1p-9;
    for (std::size_t i = 32; i < 48; ++i) values[i] = (i % 2 == 0 ? -4.0 : 0.5) * 3 * 0x1p-9;
    const Tensor x(Type::bf16, values);
    const BlockShape s{RoundFormat::nvfp4, 2, 32, 32, false};
    const PackedBytes p = packed(s, x);
    CHECK(p.t == 1.0f);
    CHECK(wrong_values(s, x, p) == 0);
}

TEST_CASE("block_scaled: what is no block of the format becomes NaN, in no other block") {
    for (const Kind& kind : {kinds[0], kinds[1]}) {
        for (const double odd :
             {1.0 + 0x1p-6, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
            INFO(kind.name, " ", odd);
            Vec values(64, 1.0);
            values[3] = odd;
            const Tensor x(Type::bf16, values);
            const BlockShape s{kind.format, 2, 32, 32, false};
            const PackedBytes p = packed(s, x);
            CHECK(std::isnan(unpacked(s, p.codes.data(), p.scales.data(), p.t, 0, 0)));
            for (std::int64_t k = 0; k < 32; ++k)
                CHECK(unpacked(s, p.codes.data(), p.scales.data(), p.t, 1, k) == 1.0f);
            const PackedBytes host = packed_by_host(s, x);
            CHECK(p.t == host.t);
            CHECK(p.scales == host.scales);
        }
    }
}

PackedBytes packed_by_host(const BlockShape& s, const Tensor& x) {
    PackedBytes p(s);
    p.t = pack_blocks(s, static_cast<const std::uint16_t*>(x.src().data), p.codes.data(), p.scales.data());
    return p;
}

} // namespace moe::test
