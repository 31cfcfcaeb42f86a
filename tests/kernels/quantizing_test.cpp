// Kernels that quantize what they write: their results against their plain ones, and E4M3 against a search in those.
#include "tests/kernels/e4m3.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

namespace moe::test {
namespace {

// The room where a kernel leaves rows in E4M3, all poison at first.
RowData room(std::int64_t rows, std::int64_t cols, const Index& counts) {
    return {{rows, cols, static_cast<int>(counts.size())},
            counts,
            Tensor(Type::bf16, 1),
            Bytes(static_cast<std::size_t>(rows * cols), poison_byte),
            Tensor(Type::f32, rows * scale_blocks(cols)),
            Tensor(Type::f32, 1)};
}
Fp8Rows rows_of(RowData& d) { return {d.q.data(), d.scale.f32()}; }

// Bytes and scales that are not those of `plain` in BF16.
std::int64_t wrong(RowData& d, const Tensor& plain) {
    d.x = Tensor(Type::bf16, plain.values());
    return wrong_rows(d);
}

struct Inputs {
    ActivationShape shape;
    std::int64_t width, used; // of a row of x; rows that hold data
    std::string name;
    Tensor x, dy, probs;
};

Inputs drawn(const char* kernel, const ActivationShape& form, const Index& counts, Type type) {
    ActivationShape s = form;
    s.groups = static_cast<int>(counts.size());
    const std::int64_t width = s.gated ? 2 * s.ffn : s.ffn;
    const std::string name = fmt::format("quantizing {} {} x {}{} counts {} {}", kernel, s.rows, s.ffn,
                                         s.gated ? " gated" : "", fmt::join(counts, ","), name_of(type));
    Random random(name);
    return {s,
            width,
            filled(counts, s.rows),
            name,
            random.tensor(type, s.rows * width, 2.0),
            random.tensor(type, s.rows * s.ffn),
            random.tensor(Type::f32, s.rows)};
}

void check_activation(const ActivationShape& form, const Index& counts, Type type) {
    const Inputs in = drawn("activation", form, counts, type);
    INFO(in.name);
    const ActivationShape& s = in.shape;
    const std::int64_t used = in.used;
    const std::int32_t* const count = counts.empty() ? nullptr : counts.data();
    Tensor plain(type, s.rows * s.ffn), y = plain;
    RowData both = room(s.rows, s.ffn, counts), alone = both;
    const auto call = [&](Dst to, Fp8Rows q) {
        table().activation(s, in.x.src(), in.probs.f32(), count, to, q, nullptr);
    };
    call(plain.dst(), {});
    call(y.dst(), rows_of(both));
    call({}, rows_of(alone));
    CHECK(relative_error(y.values(0, used * s.ffn), plain.values(0, used * s.ffn)) <= tolerance(type));
    CHECK(y.untouched(used * s.ffn, (s.rows - used) * s.ffn));
    CHECK(wrong(both, y) == 0);
    CHECK(wrong(alone, y) == 0);
}

void check_gradient(const ActivationShape& form, const Index& counts, Type type) {
    Inputs in = drawn("activation_grad", form, counts, type);
    INFO(in.name);
    const ActivationShape& s = in.shape;
    const std::int64_t width = in.width, used = in.used;
    const std::int32_t* const count = counts.empty() ? nullptr : counts.data();
    Tensor plain(type, s.rows * width), dx = plain, forward(type, s.rows * s.ffn), y = forward, other = y;
    Tensor dprobs(Type::f32, s.rows), again = dprobs;
    RowData low = room(s.rows, width, counts), placed = low;
    const auto call = [&](Dst to, Tensor& dp, Dst activated, Fp8Rows q) {
        table().activation_grad(s, in.dy.src(), in.x.src(), in.probs.f32(), count, to, dp.f32(), activated, q, nullptr);
    };
    table().activation(s, in.x.src(), in.probs.f32(), count, forward.dst(), {}, nullptr);
    call(plain.dst(), dprobs, {}, {});
    call(dx.dst(), again, y.dst(), rows_of(low));
    CHECK(relative_error(dx.values(0, used * width), plain.values(0, used * width)) <= tolerance(type));
    CHECK(relative_error(again.values(0, used), dprobs.values(0, used)) <= f32_tolerance);
    CHECK(relative_error(y.values(0, used * s.ffn), forward.values(0, used * s.ffn)) <= tolerance(type));
    CHECK(dx.untouched(used * width, (s.rows - used) * width));
    CHECK(y.untouched(used * s.ffn, (s.rows - used) * s.ffn));
    CHECK(wrong(low, dx) == 0);
    call(dx.dst(), again, other.dst(), {}); // y alone, of any width
    CHECK(other.values(0, used * s.ffn) == y.values(0, used * s.ffn));
    call(in.x.dst(), again, {}, rows_of(placed)); // over x
    CHECK(in.x.values(0, used * width) == dx.values(0, used * width));
    CHECK(wrong(placed, dx) == 0);
}

ActivationShape shape(std::int64_t rows, std::int64_t ffn, Curve curve, bool gated, double limit = 0.0) {
    ActivationShape s;
    s.rows = rows, s.ffn = ffn, s.curve = curve, s.gated = gated, s.limit = limit;
    return s;
}

} // namespace

TEST_CASE("quantizing: activations leave E4M3 of what they are in BF16, with y and without") {
    for (const Type type : {Type::bf16, Type::f32}) {
        check_activation(shape(5, 128, Curve::silu, true), {}, type);
        check_activation(shape(9, 768, Curve::silu, true), {2, 0, 3}, type);
        check_activation(shape(7, 144, Curve::silu, true), {}, type); // blocks of 16 at the end of rows
        check_activation(shape(3, 16, Curve::gelu, false), {}, type);
        check_activation(shape(6, 1408, Curve::quick_gelu, true, 1.5), {4, 1}, type);
        check_activation(shape(4, 400, Curve::relu2, false), {0, 0}, type);
    }
}

TEST_CASE("quantizing: gradients of activations in E4M3 and the activation again") {
    for (const Type type : {Type::bf16, Type::f32}) {
        check_gradient(shape(5, 128, Curve::silu, true), {}, type);
        check_gradient(shape(9, 768, Curve::silu, true), {2, 0, 3}, type);
        check_gradient(shape(6, 1408, Curve::quick_gelu, true, 1.5), {4, 1}, type);
        check_gradient(shape(7, 144, Curve::gelu, false), {}, type);
        check_gradient(shape(4, 384, Curve::relu2, false), {1, 1}, type);
    }
}

} // namespace moe::test
