// Kernels that write columns of E4M3 or E5M2 beside rows: bit for bit what passes make of their plain results.
#include "tests/kernels/e4m3.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <algorithm>
#include <bit>

namespace moe::test {
namespace {

// Bytes and scales of rows or columns, all poison at first.
struct Low {
    Bytes q;
    Tensor scale;
    Low(std::int64_t bytes, std::int64_t scales)
        : q(static_cast<std::size_t>(bytes), poison_byte), scale(Type::f32, scales) {}
    static Low of_rows(const FilledRows& s) { return {s.rows * s.cols, s.rows * scale_blocks(s.cols)}; }
    static Low of_columns(const FilledRows& s) {
        const std::int64_t blocks = column_blocks(s.rows, s.groups);
        return {blocks * s.cols * scale_block, blocks * s.cols};
    }
    Fp8Rows rows() { return {q.data(), scale.f32()}; }
    Fp8Columns columns() { return {q.data(), scale.f32()}; }
    // The scales' bits, so that what nothing has written is compared as well.
    bool same(const Low& other) const {
        return q == other.q &&
               std::equal(scale.f32(), scale.f32() + scale.size(), other.scale.f32(), [](float a, float b) {
                   return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
               });
    }
};

void check_gradient(const ActivationShape& form, const Index& counts, bool with_probs) {
    ActivationShape s = form;
    s.groups = static_cast<int>(counts.size());
    const std::int64_t width = s.gated ? 2 * s.ffn : s.ffn, used = filled(counts, s.rows);
    const std::string name = fmt::format("activation_grad_columns {} x {}{} counts {}{}", s.rows, s.ffn,
                                         s.gated ? " gated" : "", fmt::join(counts, ","), with_probs ? " probs" : "");
    INFO(name);
    Random random(name);
    const Tensor x = random.tensor(Type::bf16, s.rows * width, 2.0), dy = random.tensor(Type::bf16, s.rows * s.ffn),
                 probs = random.tensor(Type::f32, s.rows);
    const float* const p = with_probs ? probs.f32() : nullptr;
    const std::int32_t* const count = counts.empty() ? nullptr : counts.data();
    const FilledRows wide{s.rows, width, s.groups}, narrow{s.rows, s.ffn, s.groups};

    Tensor dx(Type::bf16, s.rows * width), y(Type::bf16, s.rows * s.ffn), dprobs(Type::f32, s.rows), found = dprobs;
    Low rows = Low::of_rows(wide), columns = Low::of_columns(wide), of_y = Low::of_columns(narrow);
    Low rows_found = rows, columns_found = columns, of_y_found = of_y;
    table().activation_grad(s, dy.src(), x.src(), p, count, dx.dst(), dprobs.f32(), y.dst(), rows.rows(), nullptr);
    table().quantize_columns(wide, dx.src(), count, {}, columns.columns(), nullptr);
    table().quantize_columns(narrow, y.src(), count, {}, of_y.columns(), nullptr);
    table().activation_grad_columns(s, dy.src(), x.src(), p, count, found.f32(), rows_found.rows(),
                                    columns_found.columns(), of_y_found.columns(), nullptr);
    CHECK(rows_found.same(rows));
    CHECK(columns_found.same(columns));
    CHECK(of_y_found.same(of_y));
    CHECK(relative_error(found.values(0, used), dprobs.values(0, used)) <= f32_tolerance);
    CHECK(found.untouched(used, s.rows - used));
}

// Tokens whose copies become rows; dropped copies become none.
void check_permuted(std::int64_t tokens, std::int64_t cols, int top_k, int experts, bool e5m2, bool drops) {
    const std::string name = fmt::format("permute_columns tokens {} cols {} top {} experts {}{}{}", tokens, cols, top_k,
                                         experts, e5m2 ? " e5m2" : "", drops ? " dropped" : "");
    INFO(name);
    Random random(name);
    const PermuteShape p{tokens, cols, top_k};
    const std::int64_t copies = tokens * top_k, across = scale_blocks(cols);
    const FilledRows s{copies, cols, experts, e5m2}, of_tokens{tokens, cols, 0};
    Index index = random.indices(copies, experts), counts(static_cast<std::size_t>(experts)),
          row_of(static_cast<std::size_t>(copies)), token_of(static_cast<std::size_t>(copies), -9);
    for (std::size_t i = 0; drops && i < index.size(); i += 3) index[i] = -1;
    table().permute_map(index.data(), counts.data(), row_of.data(), nullptr, tokens, top_k, experts, 0, nullptr);
    Low from = Low::of_rows(of_tokens), rows = Low::of_rows(s), columns = Low::of_columns(s);
    for (std::uint8_t& byte : from.q)
        byte = static_cast<std::uint8_t>(random.below(e5m2 ? 0x7c : 0x7f) | random.below(2) << 7);
    for (std::int64_t i = 0; i < from.scale.size(); ++i)
        from.scale.set(i, e5m2 ? 0x1p-9 : std::exp2(random.below(20) - 10));

    Low found = columns;
    for (std::int64_t copy = 0; copy < copies; ++copy) {
        const std::int64_t row = row_of[static_cast<std::size_t>(copy)], token = copy / top_k;
        if (row < 0) continue;
        std::copy_n(from.q.begin() + token * cols, cols, rows.q.begin() + row * cols);
        std::copy_n(from.scale.f32() + token * across, across, rows.scale.f32() + row * across);
    }
    table().requantize_columns(s, rows.rows(), counts.data(), columns.columns(), nullptr);
    table().permute_columns(p, s, from.rows(), row_of.data(), counts.data(), token_of.data(), found.columns(), nullptr);
    CHECK(found.same(columns));
}

ActivationShape shape(std::int64_t rows, std::int64_t ffn, Curve curve, bool gated, double limit = 0.0) {
    ActivationShape s;
    s.rows = rows, s.ffn = ffn, s.curve = curve, s.gated = gated, s.limit = limit;
    return s;
}

} // namespace

TEST_CASE("columns written by the gradient of an activation are those of its results in BF16, and so are the rows") {
    check_gradient(shape(128, 128, Curve::silu, true), {}, true);
    check_gradient(shape(300, 256, Curve::silu, true), {130, 0, 1, 77, 64}, true);
    check_gradient(shape(5, 384, Curve::silu, true), {2, 0, 3}, false);
    check_gradient(shape(200, 1152, Curve::silu, true), {128, 72}, true);   // nine squares side by side
    check_gradient(shape(130, 128, Curve::silu, true), {100, 60, 9}, true); // cut at the capacity
    check_gradient(shape(6, 128, Curve::silu, true), {0, 0}, true);
    check_gradient(shape(140, 256, Curve::quick_gelu, true, 1.5), {4, 132}, true);
    check_gradient(shape(131, 384, Curve::relu2, false), {}, true);
    check_gradient(shape(70, 128, Curve::gelu, false), Index(70, 1), false); // more groups than a warp has lanes
}

TEST_CASE("columns of permuted tokens are those of their rows") {
    for (const bool e5m2 : {false, true}) {
        check_permuted(100, 128, 4, 3, e5m2, false);
        check_permuted(37, 528, 8, 40, e5m2, false);
        check_permuted(130, 144, 2, 5, e5m2, true);
        check_permuted(1, 16, 1, 2, e5m2, false);
    }
}

} // namespace moe::test
