// Steps of ring attention as Programs order them: whether a library takes them, and how long they last.
#include "kernels/cuda/check.hpp"
#include "kernels/cuda/cuda_kernels.hpp"
#include "tests/kernels/cuda_ring.hpp"
#include "tests/kernels/cuda_timing.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

namespace moe::test {
namespace {

bool has_library() { return cuda_attention_library().rfind("cuDNN", 0) == 0; }

// A rank's queries and the keys that have come `step` places round the ring; merge: the result joins what is there.
AttentionShape step_of(int ranks, int rank, int step, bool merge, std::int64_t seq, std::int64_t batch) {
    AttentionShape s;
    s.batch = batch, s.seq_q = s.seq_k = seq / ranks;
    s.heads = 32, s.kv_heads = 4, s.qk_dim = s.v_dim = 128;
    s.scale = 0.08838834764831845; // 1 / sqrt(128)
    s.spread = ranks > 1, s.merge = merge;
    const std::int64_t run = s.seq_q / 2;
    const int other = (rank + ranks - step) % ranks;
    s.q_start[0] = rank * run, s.q_start[1] = (2 * ranks - 1 - rank) * run;
    s.k_start[0] = other * run, s.k_start[1] = (2 * ranks - 1 - other) * run;
    return s;
}

struct Operands {
    Dst q, k, v, o, dout, dq, dk, dv;
    float* lse;

    Operands(DevicePool& pool, const AttentionShape& s) {
        const std::int64_t rows = s.seq_q * s.batch, wide = rows * s.heads * s.qk_dim,
                           narrow = rows * s.kv_heads * s.qk_dim;
        for (Dst* x : {&q, &o, &dout, &dq}) *x = pool.take(Type::bf16, wide);
        for (Dst* x : {&k, &v, &dk, &dv}) *x = pool.take(Type::bf16, narrow);
        lse = pool.floats(rows * s.heads);
    }
    void forward(const AttentionShape& s, void* stream) const {
        cuda_kernels()->attention(s, Src(q), Src(k), Src(v), {}, o, lse, stream);
    }
    void backward(const AttentionShape& s, void* stream) const {
        cuda_kernels()->attention_grad(s, Src(dout), Src(q), Src(k), Src(v), Src(o), lse, {}, dq, dk, dv, nullptr,
                                       stream);
    }
};

} // namespace

TEST_CASE("ring attention: a library takes every step, in the order that Programs have them") {
    if (!has_library()) {
        MESSAGE("not checked: ", cuda_attention_library());
        return;
    }
    DevicePool pool;
    for (const int ranks : {2, 4}) {
        const std::int64_t seq = 512 * ranks;
        const Operands x(pool, step_of(ranks, 0, 0, false, seq, 2));
        const AttentionCalls before = cuda_attention_calls();
        for (int rank = 0; rank < ranks; ++rank) {
            for (int step = 0; step < ranks; ++step) x.forward(step_of(ranks, rank, step, step > 0, seq, 2), nullptr);
            for (int turn = 1; turn <= ranks; ++turn)
                x.backward(step_of(ranks, rank, turn % ranks, turn > 1, seq, 2), nullptr);
        }
        CUDA_CHECK(cudaDeviceSynchronize());
        const AttentionCalls after = cuda_attention_calls();
        CHECK(after.plain == before.plain);
        CHECK(after.library - before.library == 2 * ranks * ranks);
        cuda_forget_stream(nullptr);
    }
}

std::vector<RingStep> ring_steps() {
    std::vector<RingStep> out;
    if (!has_library()) return out;
    constexpr std::int64_t seq = 4096, batch = 2;
    DevicePool pool;
    const AttentionShape whole = step_of(1, 0, 0, false, seq / 2, batch); // as many pairs as each step
    const Operands x(pool, whole);
    x.forward(whole, nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
    const double causal = seconds_of([&](void* stream) { x.backward(whole, stream); });
    for (const int rank : {0, 1})
        for (const int step : {1, 0}) {
            const AttentionShape s = step_of(2, rank, step, step == 0, seq, batch);
            out.push_back({fmt::format("attention_grad of {} keys, rank {} of a ring of 2, {} sequences of {}",
                                       step == 0 ? "its own" : "the other's", rank, batch, seq),
                           seconds_of([&](void* stream) { x.backward(s, stream); }), causal});
        }
    cuda_forget_stream(nullptr);
    return out;
}

} // namespace moe::test
