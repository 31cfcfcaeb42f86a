// Operands of products rounded to the values of a narrow format, by rows and by columns.
#include "kernels/cpu/rows.hpp"
#include "kernels/rounding.hpp"

#include <bit>

namespace moe::cpu {
namespace {

// Rows in which blocks lie: `rows` from `first` on, those of a group, or of a run.
struct Run {
    std::int64_t first = 0, rows = 0, group = 0;
};

template <class Visit>
void each_run(const RoundShape& s, const std::int32_t* counts, Visit visit) {
    if (counts == nullptr) {
        for (std::int64_t row = 0; row < s.rows; row += s.run) visit(Run{row, std::min(s.run, s.rows - row)});
        return;
    }
    std::int64_t row = 0;
    for (int e = 0; e < s.groups; ++e) {
        const std::int64_t rows = rows_of(counts, e, row, s.rows);
        visit(Run{row, rows, e});
        row += rows;
    }
}

// The larger magnitude, compared by bits, where NaN lies above all numbers.
float larger(float largest, float x) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x) & 0x7fffffffu;
    return std::bit_cast<float>(std::max(std::bit_cast<std::uint32_t>(largest), bits));
}

float largest_of(const float* x, std::int64_t n) {
    std::uint32_t largest = 0;
    for (std::int64_t i = 0; i < n; ++i) largest = std::max(largest, std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffu);
    return std::bit_cast<float>(largest);
}

// The random 16 bits of a row's columns.
struct Noise {
    const RoundShape& shape;
    const std::int32_t* positions;
    const std::int32_t* noise;
    bool grouped;

    std::uint64_t place(std::int64_t row) const {
        const std::int64_t at = shape.first + row;
        return static_cast<std::uint64_t>(noise[2] + at % shape.batch) << 32 |
               static_cast<std::uint32_t>(positions[at / shape.batch]);
    }
    // Of the row `i` of a run.
    std::uint64_t of_row(const Run& run, std::int64_t i, bool by_column) const {
        const std::uint64_t step = static_cast<std::uint32_t>(noise[0]) |
                                   static_cast<std::uint64_t>(static_cast<std::uint32_t>(noise[1])) << 32;
        const std::uint64_t key = splitmix(step ^ splitmix(shape.tensor + (by_column ? 1 : 0)));
        if (!grouped) return splitmix(key ^ splitmix(place(run.first + i)));
        const auto in_group =
            static_cast<std::uint64_t>(shape.first_group + run.group) << 32 | static_cast<std::uint64_t>(i);
        return splitmix(splitmix(key ^ splitmix(place(0))) ^ splitmix(in_group));
    }
    // The bits that column `col` of the tensor shares with those beside it.
    static std::uint64_t of_columns(std::uint64_t row, std::int64_t col) {
        return splitmix(row + static_cast<std::uint64_t>(col / noise_columns) * splitmix_step);
    }
};

constexpr bool scales_tensor(RoundFormat format) { return format != RoundFormat::mxfp8; }
constexpr std::int64_t block_of(RoundFormat format) {
    return format == RoundFormat::mxfp8 ? mxfp8_values : nvfp4_values;
}

// Of the values that share it; inverse: of powers of two.
struct Scale {
    float scale = 1.0f, inverse = 1.0f;
};
Scale power_of_two(float scale) { return {scale, 1.0f / scale}; }

template <RoundFormat format>
Scale tensor_scale(float largest) {
    if constexpr (format == RoundFormat::e4m3) return power_of_two(fp8_scale(largest));
    if constexpr (format == RoundFormat::e5m2) return power_of_two(e5m2_scale(largest));
    if constexpr (format == RoundFormat::nvfp4) return power_of_two(nvfp4_tensor_scale(largest));
    return {};
}
template <RoundFormat format>
Scale block_scale(float largest, const Scale& tensor) {
    if constexpr (format == RoundFormat::mxfp8) return power_of_two(fp8_scale(largest));
    if constexpr (format == RoundFormat::nvfp4) return {nvfp4_scale(largest, tensor.scale), 0.0f};
    return tensor;
}
template <RoundFormat format>
float rounded(float x, float scale, float inverse) {
    if constexpr (format == RoundFormat::nvfp4) return rounded_to_e2m1(x, scale);
    if constexpr (format == RoundFormat::e5m2) return rounded_to_e5m2(x * inverse) * scale;
    return rounded_to_e4m3(x * inverse) * scale;
}

template <RoundFormat format>
std::uint8_t code(float x, float inverse) {
    return format == RoundFormat::e5m2 ? e5m2_of_float(x * inverse) : e4m3_of_float(x * inverse);
}

// A few rows of x in FP32, and where they are written.
struct Stripe {
    const RoundShape& shape;
    Run run;
    std::int64_t from, rows; // rows from `from` of the run on
    float* x;                // [rows, cols]
    float* y;

    std::int64_t first() const { return (run.first + from) * shape.cols; }
    std::int64_t elements() const { return rows * shape.cols; }
};

// Columns become what is rounded of them: transformed where the block is whole.
void transform(const Stripe& t) {
    if (!t.shape.transform || t.rows < nvfp4_values) return;
    for (std::int64_t c = 0; c < t.shape.cols; ++c) {
        float column[nvfp4_values];
        for (std::int64_t r = 0; r < nvfp4_values; ++r) column[r] = t.x[r * t.shape.cols + c];
        hadamard(column);
        for (std::int64_t r = 0; r < nvfp4_values; ++r) t.x[r * t.shape.cols + c] = column[r];
    }
}

// n values of a row from column c on, each with its scale.
void round_stochastically(const Stripe& t, const Noise& noise, std::uint64_t row, std::int64_t c, std::int64_t n,
                          const float* x, const float* scale, std::int64_t step, float* y) {
    std::uint64_t bits = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t col = t.shape.first_col + c + i;
        if (i == 0 || col % noise_columns == 0) bits = noise.of_columns(row, col);
        const auto drawn = static_cast<std::uint32_t>(bits >> noise_bits * (col % noise_columns));
        y[i] = stochastic_e2m1(x[i], scale[i * step], drawn & ((1u << noise_bits) - 1));
    }
}

template <RoundFormat format>
void round_rows(const Stripe& t, const Scale& tensor, const Noise& noise, Dst to) {
    constexpr std::int64_t block = block_of(format);
    const std::int64_t cols = t.shape.cols;
    for (std::int64_t c = 0; c < cols; c += block) {
        const std::int64_t n = std::min(block, cols - c);
        float of_square = 0.0f;
        for (std::int64_t r = 0; t.shape.square && r < t.rows; ++r)
            of_square = larger(of_square, largest_of(t.x + r * cols + c, n));
        for (std::int64_t r = 0; r < t.rows; ++r) {
            const float* const x = t.x + r * cols + c;
            float* const y = t.y + r * cols + c;
            const Scale s = block_scale<format>(t.shape.square ? of_square : largest_of(x, n), tensor);
            if (t.shape.stochastic) {
                round_stochastically(t, noise, noise.of_row(t.run, t.from + r, false), c, n, x, &s.scale, 0, y);
                continue;
            }
            for (std::int64_t i = 0; i < n; ++i) y[i] = rounded<format>(x[i], s.scale, s.inverse);
        }
    }
    store(to, t.first(), t.elements(), t.y);
}

template <RoundFormat format>
void round_columns(const Stripe& t, const Scale& tensor, const Noise& noise, Dst to) {
    const std::int64_t cols = t.shape.cols;
    float *const scale = scratch(Slot::c, cols), *const inverse = scratch(Slot::d, cols);
    std::fill_n(scale, cols, 0.0f); // the largest magnitudes at first
    for (std::int64_t r = 0; r < t.rows; ++r)
        for (std::int64_t c = 0; c < cols; ++c) scale[c] = larger(scale[c], t.x[r * cols + c]);
    for (std::int64_t c = 0; c < cols; ++c) {
        const Scale s = block_scale<format>(scale[c], tensor);
        scale[c] = s.scale, inverse[c] = s.inverse;
    }
    for (std::int64_t r = 0; r < t.rows; ++r) {
        const float* const x = t.x + r * cols;
        float* const y = t.y + r * cols;
        if (t.shape.stochastic) {
            round_stochastically(t, noise, noise.of_row(t.run, t.from + r, true), 0, cols, x, scale, 1, y);
            continue;
        }
        for (std::int64_t c = 0; c < cols; ++c) y[c] = rounded<format>(x[c], scale[c], inverse[c]);
    }
    store(to, t.first(), t.elements(), t.y);
}

// Rows in one byte for each value, with the tensor's scale in every place.
template <RoundFormat format>
void put_codes(const Stripe& t, const Scale& tensor) {
    const std::int64_t across = scale_blocks(t.shape.cols), row = t.run.first + t.from;
    for (std::int64_t i = 0; i < t.elements(); ++i)
        t.shape.codes.data[t.first() + i] = code<format>(t.x[i], tensor.inverse);
    std::fill_n(t.shape.codes.scale + row * across, t.rows * across, tensor.scale);
}

template <class Visit>
void each_stripe(const RoundShape& s, Src x, const std::int32_t* counts, Visit visit) {
    const std::int64_t block = block_of(s.format);
    float *const wide = scratch(Slot::a, block * s.cols), *const result = scratch(Slot::b, block * s.cols);
    each_run(s, counts, [&](const Run& run) {
        for (std::int64_t from = 0; from < run.rows; from += block) {
            const std::int64_t rows = std::min(block, run.rows - from);
            load(x, (run.first + from) * s.cols, rows * s.cols, wide);
            visit(Stripe{s, run, from, rows, wide, result});
        }
    });
}

template <RoundFormat format>
void round_format(const RoundShape& s, Src x, const std::int32_t* counts, const Noise& noise, float* largest,
                  Dst by_row, Dst by_column) {
    float found[2] = {0.0f, 0.0f};
    if (scales_tensor(format) && s.window == nullptr) {
        each_stripe(s, x, counts, [&](const Stripe& t) {
            found[0] = larger(found[0], largest_of(t.x, t.elements()));
            if (by_column.data != nullptr) transform(t);
            found[1] = larger(found[1], largest_of(t.x, t.elements()));
        });
        std::copy_n(found, 2, largest);
    }
    const auto scale = [&](float own) {
        if (s.window == nullptr) return tensor_scale<format>(own);
        return *s.window > 0.0f ? tensor_scale<format>(*s.window) : Scale{};
    };
    const Scale rows = scale(found[0]), columns = scale(found[1]);
    each_stripe(s, x, counts, [&](const Stripe& t) {
        if (s.window != nullptr && largest != nullptr) *largest = larger(*largest, largest_of(t.x, t.elements()));
        if (s.codes.data != nullptr) put_codes<format>(t, rows);
        if (by_row.data != nullptr) round_rows<format>(t, rows, noise, by_row);
        if (by_column.data == nullptr) return;
        transform(t);
        round_columns<format>(t, columns, noise, by_column);
    });
}

void round_operand(const RoundShape& s, Src x, const std::int32_t* counts, const std::int32_t* positions,
                   const std::int32_t* noise, float* largest, Dst by_row, Dst by_column, void*) {
    const Noise random{s, positions, noise, counts != nullptr};
    switch (s.format) {
    case RoundFormat::e4m3:
        return round_format<RoundFormat::e4m3>(s, x, counts, random, largest, by_row, by_column);
    case RoundFormat::e5m2:
        return round_format<RoundFormat::e5m2>(s, x, counts, random, largest, by_row, by_column);
    case RoundFormat::mxfp8:
        return round_format<RoundFormat::mxfp8>(s, x, counts, random, largest, by_row, by_column);
    case RoundFormat::nvfp4:
        return round_format<RoundFormat::nvfp4>(s, x, counts, random, largest, by_row, by_column);
    }
}

} // namespace

void add_round(Kernels& table) { table.round_operand = round_operand; }

} // namespace moe::cpu
