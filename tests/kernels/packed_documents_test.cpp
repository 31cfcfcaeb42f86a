// Documents packed into one sequence against the same documents one by one, and losses whose scale holds for some
// labels.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <cmath>
#include <string>

namespace moe::test {
namespace {

struct Rows { // packed rows [rows, (heads + 2 kv_heads) dim] of one sequence, and all that attention makes of them
    Tensor qkv, dout, o, lse, dqkv;
};

AttentionShape shape_of(std::int64_t rows, int heads, int kv_heads, int dim, std::int64_t window) {
    AttentionShape s;
    s.seq_q = s.seq_k = rows;
    s.heads = heads, s.kv_heads = kv_heads, s.qk_dim = s.v_dim = dim;
    s.q_stride = s.k_stride = s.v_stride = std::int64_t{heads + 2 * kv_heads} * dim;
    s.k_offset = std::int64_t{heads} * dim, s.v_offset = s.k_offset + std::int64_t{kv_heads} * dim;
    s.window = window, s.scale = 1.0 / std::sqrt(dim), s.deterministic = true;
    return s;
}

void run(const AttentionShape& s, Rows& x) {
    table().attention(s, x.qkv.src(), x.qkv.src(), x.qkv.src(), {}, x.o.dst(), x.lse.f32(), nullptr);
    table().attention_grad(s, x.dout.src(), x.qkv.src(), x.qkv.src(), x.qkv.src(), x.o.src(), x.lse.f32(), {},
                           x.dqkv.dst(), x.dqkv.dst(), x.dqkv.dst(), nullptr, nullptr);
}

// Rows [first, first + rows) of what has `cols` columns.
Vec cut(const Tensor& x, std::int64_t first, std::int64_t rows, std::int64_t cols) {
    return x.values(first * cols, rows * cols);
}

void check_packed(const std::vector<std::int64_t>& documents, int heads, int kv_heads, int dim, std::int64_t window,
                  Type type) {
    const std::string name = fmt::format("packed documents {} heads {}/{} dim {} window {} {}",
                                         fmt::join(documents, "+"), heads, kv_heads, dim, window, name_of(type));
    INFO(name, " MOE_TEST_SEED=", seed());
    Random random(name);
    std::int64_t rows = 0;
    Index starts;
    for (const std::int64_t length : documents) {
        starts.insert(starts.end(), static_cast<std::size_t>(length), static_cast<std::int32_t>(rows));
        rows += length;
    }
    const std::int64_t width = std::int64_t{heads + 2 * kv_heads} * dim, out = std::int64_t{heads} * dim;
    Rows packed{random.tensor(type, rows * width), random.tensor(type, rows * out), Tensor(type, rows * out),
                Tensor(Type::f32, heads * rows), Tensor(type, rows * width)};
    AttentionShape s = shape_of(rows, heads, kv_heads, dim, window);
    s.document_start = starts.data();
    run(s, packed);
    // One order of sums on the CPU; a device's blocks begin where they begin.
    const bool exact = std::string(table().name) == "cpu";
    const double allowed = exact ? 0.0 : 3.0 * tolerance(type);
    for (std::int64_t first = 0, d = 0; d < static_cast<std::int64_t>(documents.size()); ++d) {
        const std::int64_t length = documents[static_cast<std::size_t>(d)];
        CAPTURE(d);
        Rows alone{Tensor(type, cut(packed.qkv, first, length, width)),
                   Tensor(type, cut(packed.dout, first, length, out)), Tensor(type, length * out),
                   Tensor(Type::f32, heads * length), Tensor(type, length * width)};
        run(shape_of(length, heads, kv_heads, dim, window), alone);
        CHECK(relative_error(cut(packed.o, first, length, out), alone.o.values()) <= allowed);
        CHECK(relative_error(cut(packed.dqkv, first, length, width), alone.dqkv.values()) <= allowed);
        for (int h = 0; h < heads; ++h)
            CHECK(relative_error(packed.lse.values(h * rows + first, length), alone.lse.values(h * length, length)) <=
                  allowed);
        first += length;
    }
}

} // namespace

TEST_CASE("packed documents are what each is alone, to the bit on the CPU") {
    for (const Type type : {Type::f32, Type::bf16}) {
        check_packed({1, 5, 64, 2, 130, 63}, 4, 2, 8, 0, type);
        check_packed({300, 7, 270}, 2, 1, 16, 0, type);
        check_packed({100, 300, 33}, 2, 2, 16, 90, type);
        check_packed({70}, 2, 1, 6, 0, type);
    }
}

// A step's labels may be fewer than its rows: what is summed is scaled by a number that the device holds.
TEST_CASE("a loss times its share is the loss of that scale") {
    Random random("loss share");
    const std::int64_t rows = 5, vocab = 23;
    Tensor share(Type::f32, Vec{1.75});
    const Tensor logits = random.tensor(Type::f32, rows * vocab);
    const Index labels{3, -1, 22, 0, -1};
    const auto losses = [&](double scale, const float* with) {
        LossShape s{rows, vocab, vocab, 0, scale, with};
        Tensor max(Type::f32, rows), stat(Type::f32, 2 * rows), loss(Type::f32, Vec{0.0}), d(Type::f32, rows * vocab),
            again(Type::f32, Vec{0.0}), grad(Type::f32, rows * vocab);
        table().cross_entropy(s, 2.0 * scale, logits.src(), labels.data(), max.f32(), stat.f32(), loss.f32(), d.dst(),
                              nullptr);
        table().ce_loss(s, max.f32(), stat.f32(), again.f32(), nullptr);
        table().ce_grad(s, logits.src(), max.f32(), stat.f32(), labels.data(), grad.dst(), nullptr);
        Vec all = d.values(), other = grad.values();
        all.insert(all.end(), other.begin(), other.end());
        all.push_back(loss.at(0));
        all.push_back(again.at(0));
        return all;
    };
    CHECK(relative_error(losses(0.2, share.f32()), losses(0.35, nullptr)) <= f32_tolerance);
    share.set(0, 1.0);
    CHECK(losses(0.2, share.f32()) == losses(0.2, nullptr));
}

} // namespace moe::test
