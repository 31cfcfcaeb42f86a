// Results of round_operand, cell by cell: scales by their definition, values by a search through tables.
#include "tests/kernels/round_reference.hpp"
#include "kernels/rounding.hpp"
#include "tests/kernels/e4m3.hpp"
#include "tests/kernels/round_values.hpp"

#include <algorithm>
#include <cmath>

namespace moe::test {
namespace {

std::uint64_t splitmix64(std::uint64_t x) { // Vigna's, as published
    std::uint64_t z = x + 0x9e3779b97f4a7c15ULL;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ z >> 27) * 0x94d049bb133111ebULL;
    return z ^ z >> 31;
}

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

} // namespace

Vec transformed(const Vec& x) {
    Vec y(16, 0.0);
    for (unsigned i = 0; i < 16; ++i)
        for (unsigned j = 0; j < 16; ++j) {
            const unsigned turns = (hadamard_signs >> j & 1) + static_cast<unsigned>(__builtin_popcount(i & j));
            y[i] += (turns % 2 == 0 ? 0.25 : -0.25) * x[j];
        }
    return y;
}

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

} // namespace moe::test
