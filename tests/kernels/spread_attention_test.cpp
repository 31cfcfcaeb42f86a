// Attention over a sequence that is spread over ranks in two runs each: all partial calls together against the plain
// softmax in double over the whole sequence, gradients against its central differences.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <cmath>
#include <limits>

namespace moe::test {
namespace {

struct Whole { // packed rows [seq * batch, (heads + 2 kv_heads) dim]
    std::int64_t seq, batch;
    int heads, kv_heads, dim;
    std::int64_t window;
    bool with_sinks;
    std::int64_t document = 0; // tokens of each document but the last, 0: no documents

    std::int64_t width() const { return std::int64_t{heads + 2 * kv_heads} * dim; }

    // o[seq * batch, heads * dim] of packed rows and sinks.
    Vec forward(const Vec& x, const Vec& sinks) const {
        Vec o(static_cast<std::size_t>(seq * batch * heads * dim), 0.0);
        for (std::int64_t b = 0; b < batch; ++b)
            for (int h = 0; h < heads; ++h)
                for (std::int64_t i = 0; i < seq; ++i) attend(x, sinks, b, h, i, o);
        return o;
    }

private:
    double at(const Vec& x, std::int64_t position, std::int64_t b, std::int64_t col) const {
        return x[static_cast<std::size_t>((position * batch + b) * width() + col)];
    }
    void attend(const Vec& x, const Vec& sinks, std::int64_t b, int h, std::int64_t i, Vec& o) const {
        const int kv = h / (heads / kv_heads);
        const std::int64_t k_col = std::int64_t{heads + kv} * dim, v_col = k_col + std::int64_t{kv_heads} * dim;
        const std::int64_t seen = window > 0 ? std::max<std::int64_t>(0, i - window + 1) : 0;
        const std::int64_t first = document > 0 ? std::max(seen, i / document * document) : seen;
        Vec weight;
        double sum = with_sinks ? std::exp(sinks[static_cast<std::size_t>(h)]) : 0.0;
        for (std::int64_t j = first; j <= i; ++j) {
            double dot = 0.0;
            for (int c = 0; c < dim; ++c) dot += at(x, i, b, std::int64_t{h} * dim + c) * at(x, j, b, k_col + c);
            weight.push_back(std::exp(dot / std::sqrt(dim)));
            sum += weight.back();
        }
        for (std::int64_t j = first; j <= i; ++j)
            for (int c = 0; c < dim; ++c)
                o[static_cast<std::size_t>(((i * batch + b) * heads + h) * dim + c)] +=
                    weight[static_cast<std::size_t>(j - first)] / sum * at(x, j, b, v_col + c);
    }
};

// The rows of `rank` out of those of the whole: runs `rank` and 2 ranks - 1 - rank of 2 ranks.
Vec part_of(const Vec& whole, const Whole& w, std::int64_t cols, int ranks, int rank) {
    const std::int64_t run = w.seq / (2 * ranks) * w.batch * cols;
    Vec part;
    for (const std::int64_t at : {std::int64_t{rank}, std::int64_t{2 * ranks - 1 - rank}})
        part.insert(part.end(), whole.begin() + at * run, whole.begin() + (at + 1) * run);
    return part;
}

struct Rank {
    Tensor qkv, o, lse, dout, dq, dkv;
    Index starts;
};

// Where the documents of a rank's queries begin in the whole; empty without documents.
Index starts_of(const Whole& w, int ranks, int rank) {
    Index starts;
    const std::int64_t run = w.seq / (2 * ranks);
    for (const std::int64_t at : {std::int64_t{rank}, std::int64_t{2 * ranks - 1 - rank}})
        for (std::int64_t row = at * run * w.batch; w.document > 0 && row < (at + 1) * run * w.batch; ++row)
            starts.push_back(static_cast<std::int32_t>(row / w.batch / w.document * w.document));
    return starts;
}

AttentionShape shape_of(const Whole& w, int ranks, int q_rank, int k_rank, bool merge) {
    AttentionShape s;
    s.batch = w.batch;
    s.seq_q = s.seq_k = w.seq / ranks;
    s.heads = w.heads, s.kv_heads = w.kv_heads, s.qk_dim = s.v_dim = w.dim;
    s.q_stride = s.k_stride = s.v_stride = w.width();
    s.k_offset = std::int64_t{w.heads} * w.dim, s.v_offset = s.k_offset + std::int64_t{w.kv_heads} * w.dim;
    s.window = w.window, s.scale = 1.0 / std::sqrt(w.dim);
    s.spread = true, s.merge = merge;
    const std::int64_t run = w.seq / (2 * ranks);
    s.q_start[0] = q_rank * run, s.q_start[1] = (2 * ranks - 1 - q_rank) * run;
    s.k_start[0] = k_rank * run, s.k_start[1] = (2 * ranks - 1 - k_rank) * run;
    return s;
}

void check_spread(const Whole& w, int ranks, Type type) {
    const std::string name =
        fmt::format("spread attention seq {} batch {} heads {}/{} dim {} window {}{}{} ranks {} {}", w.seq, w.batch,
                    w.heads, w.kv_heads, w.dim, w.window, w.with_sinks ? " sinks" : "",
                    w.document > 0 ? fmt::format(" documents of {}", w.document) : std::string(), ranks, name_of(type));
    INFO(name, " MOE_TEST_SEED=", seed());
    Random random(name);
    const std::int64_t out_cols = std::int64_t{w.heads} * w.dim;
    const Tensor x = random.tensor(type, w.seq * w.batch * w.width());
    const Tensor dy = random.tensor(type, w.seq * w.batch * out_cols);
    const Tensor sinks = random.tensor(type, w.heads);
    const Src sink = w.with_sinks ? sinks.src() : Src{};
    Tensor dsinks(Type::f32, Vec(static_cast<std::size_t>(w.heads), 0.0));
    std::vector<Rank> all;
    for (int r = 0; r < ranks; ++r) {
        const Vec part = part_of(x.values(), w, w.width(), ranks, r);
        const std::int64_t rows = w.seq / ranks * w.batch;
        all.push_back({Tensor(type, part), Tensor(type, rows * out_cols), Tensor(Type::f32, rows * w.heads),
                       Tensor(type, part_of(dy.values(), w, out_cols, ranks, r)), Tensor(type, rows * w.width()),
                       Tensor(Type::f32, Vec(static_cast<std::size_t>(rows * w.width()), 0.0)),
                       starts_of(w, ranks, r)});
    }
    // Own keys first, as a ring brings them: every query then sees something.
    for (int r = 0; r < ranks; ++r)
        for (int step = 0; step < ranks; ++step) {
            Rank &me = all[static_cast<std::size_t>(r)],
                 &other = all[static_cast<std::size_t>((r + ranks - step) % ranks)];
            AttentionShape s = shape_of(w, ranks, r, (r + ranks - step) % ranks, step > 0);
            if (w.document > 0) s.document_start = me.starts.data();
            table().attention(s, me.qkv.src(), other.qkv.src(), other.qkv.src(), step == 0 ? sink : Src{}, me.o.dst(),
                              me.lse.f32(), nullptr);
        }
    // Own keys last, as gradients of others' are on their way meanwhile: queries may begin without any key.
    for (int r = 0; r < ranks; ++r)
        for (int turn = 1; turn <= ranks; ++turn) {
            const int step = turn % ranks;
            Rank &me = all[static_cast<std::size_t>(r)],
                 &other = all[static_cast<std::size_t>((r + ranks - step) % ranks)];
            Tensor dkv(type, other.dkv.size()); // of this step; columns of queries stay what they are
            AttentionShape s = shape_of(w, ranks, r, (r + ranks - step) % ranks, turn > 1);
            if (w.document > 0) s.document_start = me.starts.data();
            table().attention_grad(s, me.dout.src(), me.qkv.src(), other.qkv.src(), other.qkv.src(), me.o.src(),
                                   me.lse.f32(), step == 0 ? sink : Src{}, me.dq.dst(), dkv.dst(), dkv.dst(),
                                   step == 0 && w.with_sinks ? dsinks.f32() : nullptr, nullptr);
            const std::int64_t rows = dkv.size() / w.width(), from = std::int64_t{w.heads} * w.dim;
            for (std::int64_t row = 0; row < rows; ++row)
                for (std::int64_t c = from; c < w.width(); ++c)
                    other.dkv.set(row * w.width() + c, other.dkv.at(row * w.width() + c) + dkv.at(row * w.width() + c));
        }
    const Vec want = w.forward(x.values(), sinks.values());
    const Vec dx = gradient([&](const Vec& at) { return w.forward(at, sinks.values()); }, x.values(), dy.values());
    const double allowed = type == Type::f32 ? 2.0 * f32_tolerance : 3.0 * bf16_tolerance;
    for (int r = 0; r < ranks; ++r) {
        Rank& me = all[static_cast<std::size_t>(r)];
        CHECK(relative_error(me.o, part_of(want, w, out_cols, ranks, r)) <= allowed);
        const Vec reference = part_of(dx, w, w.width(), ranks, r);
        const std::int64_t rows = me.dq.size() / w.width(), q = std::int64_t{w.heads} * w.dim;
        Vec got = me.dkv.values();
        for (std::int64_t row = 0; row < rows; ++row)
            for (std::int64_t c = 0; c < q; ++c)
                got[static_cast<std::size_t>(row * w.width() + c)] = me.dq.at(row * w.width() + c);
        CHECK(relative_error(got, reference) <= allowed);
        CHECK(me.dq.untouched(q, w.width() - q)); // keys and values have a place of their own
    }
    if (!w.with_sinks) return;
    const Vec ds = gradient([&](const Vec& at) { return w.forward(x.values(), at); }, sinks.values(), dy.values());
    CHECK(relative_error(dsinks, ds) <= allowed);
}

} // namespace

TEST_CASE("attention over a spread sequence: grouped heads, windows, sinks, two to four ranks") {
    for (const Type type : {Type::f32, Type::bf16}) {
        check_spread({8, 2, 4, 2, 3, 0, false}, 2, type);
        check_spread({12, 1, 2, 2, 4, 0, true}, 3, type);
        check_spread({16, 2, 4, 1, 2, 5, false}, 4, type);
        check_spread({16, 1, 2, 1, 3, 1, true}, 2, type);
        check_spread({24, 1, 2, 2, 2, 9, true}, 4, type);
    }
}

// Heads of whole 16 bytes, which libraries take in BF16.
TEST_CASE("attention over a spread sequence: wide heads") {
    check_spread({16, 2, 4, 2, 8, 0, true}, 2, Type::bf16);
    check_spread({36, 1, 2, 1, 16, 0, false}, 3, Type::bf16);
    check_spread({16, 1, 2, 2, 8, 5, false}, 2, Type::bf16);
}

// Documents that end within runs, between them, and that a window cuts as well.
TEST_CASE("attention over a spread sequence: documents see only themselves") {
    for (const Type type : {Type::f32, Type::bf16}) {
        check_spread({12, 2, 4, 2, 3, 0, false, 5}, 2, type);
        check_spread({24, 1, 2, 1, 2, 4, true, 7}, 3, type);
        check_spread({16, 2, 2, 2, 8, 0, true, 3}, 4, type);
    }
    check_spread({560, 1, 1, 1, 1, 0, false, 150}, 2, Type::f32);
}

// Runs longer than a block of queries (64), keys over more than one block (256).
TEST_CASE("attention over a spread sequence: runs over several blocks") {
    check_spread({560, 1, 1, 1, 1, 0, false}, 2, Type::f32);
}

} // namespace moe::test
