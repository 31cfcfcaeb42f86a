// Times memory-bound kernels on device buffers of random numbers that are far larger than the caches.
#include "tests/kernels/cuda_bandwidth.hpp"

#include "kernels/cuda/check.hpp"
#include "tests/kernels/cuda_bandwidth_cases.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace moe::test {
namespace {

std::vector<std::int32_t> random_ints(Row n, int below) {
    std::mt19937 engine(2);
    std::vector<std::int32_t> out(static_cast<std::size_t>(n));
    for (std::int32_t& i : out) i = std::uniform_int_distribution<std::int32_t>(0, below - 1)(engine);
    return out;
}

class Cases : BandwidthCases {
public:
    using BandwidthCases::BandwidthCases;
    std::vector<Moved> run() {
        flat(Type::bf16);
        flat(Type::f32);
        for (const Row cols : {2048, 7168}) norms(cols, Type::bf16);
        norms(2048, Type::f32);
        for (const Type type : {Type::bf16, Type::f32}) {
            rows(type);
            routed(type, 2048, 8, 128);
            routed(type, 4096, 2, 8);
        }
        ropes();
        losses();
        embeddings();
        optimizer();
        routers();
        return std::move(moved_);
    }

private:
    void flat(Type type) {
        const Row n = tokens * 7168;
        const auto each = static_cast<double>(n);
        const std::string name = type == Type::f32 ? "f32" : "bf16";
        Dst a = pool_.take(type, n), b = pool_.take(type, n), y = pool_.take(type, n);
        time("add " + name, of(type, 3 * each), [=, this](void* s) { k_.add(a, b, y, n, s); });
        a = pool_.take(type, n), y = pool_.take(type, n);
        time("cast to its own type " + name, of(type, 2 * each), [=, this](void* s) { k_.cast(a, y, n, s); });
        const Type other = type == Type::f32 ? Type::bf16 : Type::f32;
        a = pool_.take(type, n), b = pool_.take(other, n);
        time("cast from " + name, 6 * each, [=, this](void* s) { k_.cast(a, b, n, s); });
        a = pool_.take(type, n), b = pool_.take(type, 7168), y = pool_.take(type, n);
        time("bias_add " + name, of(type, 2 * each), [=, this](void* s) { k_.bias_add(a, b, y, tokens, 7168, s); });
        a = pool_.take(type, n);
        float* const db = pool_.floats(7168);
        time("bias_grad " + name, of(type, each), [=, this](void* s) { k_.bias_grad(a, db, tokens, 7168, s); });
        a = pool_.take(type, n), y = pool_.take(type, n);
        const std::int32_t *const positions = pool_.ints(std::vector<std::int32_t>(tokens)), *const noise =
                                                                                                 pool_.ints({1, 2, 3});
        const JitterShape noisy{tokens, 7168, 0, 1, 0, 0.01};
        time("jitter " + name, of(type, 2 * each), [=, this](void* s) { k_.jitter(noisy, a, positions, noise, y, s); });
        a = pool_.take(type, n), y = pool_.take(type, n);
        time("copy_columns 576 of 7168 " + name, of(type, 2.0 * tokens * 4 * 576), [=, this](void* s) {
            k_.copy_columns({tokens * 4, 576, 1792, 512, 576, 0, false}, a, y, s);
        });
        a = pool_.take(type, n), y = pool_.take(type, n);
        const Row part = n / 4;
        time("reduce_sum of 4 " + name, of(type, 1.25 * each), [=, this](void* s) {
            const void* from[4];
            for (int i = 0; i < 4; ++i) from[i] = (Src(a) + i * part).data;
            k_.reduce_sum(y, from, 4, part, type, s);
        });
    }

    void norms(Row cols, Type type) {
        const std::string name = fmt::format("{}x{} {}", tokens, cols, type == Type::f32 ? "f32" : "bf16");
        const auto each = of(type, static_cast<double>(tokens * cols));
        Dst x = pool_.take(type, tokens * cols), y = pool_.take(type, tokens * cols), w = pool_.take(type, cols);
        float* rstd = pool_.floats(tokens);
        time("rmsnorm " + name, 2 * each, [=, this](void* s) { k_.rmsnorm(x, w, y, rstd, tokens, cols, 0, 1e-6, s); });
        x = pool_.take(type, tokens * cols), y = pool_.take(type, tokens * cols), w = pool_.take(type, cols);
        const Dst residual = pool_.take(type, tokens * cols), dx = pool_.take(type, tokens * cols);
        rstd = pool_.floats(tokens);
        float* const dw = pool_.floats(cols);
        time("rmsnorm_grad " + name, 3 * each,
             [=, this](void* s) { k_.rmsnorm_grad(y, x, w, rstd, {}, dx, dw, tokens, cols, 0, s); });
        time("rmsnorm_grad residual " + name, 4 * each,
             [=, this](void* s) { k_.rmsnorm_grad(y, x, w, rstd, residual, dx, dw, tokens, cols, 0, s); });
    }

    // Rows of experts, with routing weights and counts on the device.
    void rows(Type type) {
        const std::string name = type == Type::f32 ? "f32" : "bf16";
        for (const auto& [count, ffn] : {std::pair<Row, Row>{copies, 768}, {tokens, 6144}}) {
            const auto each = of(type, static_cast<double>(count * ffn));
            const bool routed = count == copies;
            ActivationShape shape;
            shape.rows = count, shape.ffn = ffn, shape.groups = routed ? experts : 0;
            const Dst x = pool_.take(type, 2 * count * ffn), dx = pool_.take(type, 2 * count * ffn),
                      y = pool_.take(type, count * ffn);
            const float* const p = routed ? pool_.floats(count) : nullptr;
            float* const dp = routed ? pool_.floats(count) : nullptr;
            const std::int32_t* const counts =
                routed ? pool_.ints(std::vector<std::int32_t>(experts, static_cast<int>(copies / experts))) : nullptr;
            const std::string size = fmt::format("{}x{}{} {}", count, ffn, routed ? " routed" : "", name);
            const auto forward = [=, this](void* s) { k_.activation(shape, x, p, counts, y, {}, s); };
            const auto backward = [=, this](void* s) { k_.activation_grad(shape, y, x, p, counts, dx, dp, {}, {}, s); };
            add("activation " + size, 3 * each, forward);
            time("activation_grad " + size, 5 * each, backward);
        }
        const auto each = of(type, static_cast<double>(copies * 2048));
        const auto* counts = pool_.ints(std::vector<std::int32_t>(experts, static_cast<int>(copies / experts)));
        Dst x = pool_.take(type, copies * 2048), y = pool_.take(type, copies * 2048),
            z = pool_.take(type, copies * 2048);
        const float* const p = pool_.floats(copies);
        float* const dp = pool_.floats(copies);
        const Dst b = pool_.take(type, experts * 2048);
        float* const db = pool_.floats(experts * 2048);
        const auto all = [&](const char* op, double times, const Call& call) {
            add(fmt::format("{} {}x2048 {}", op, copies, name), times * each, call);
        };
        all("scale_rows", 2, [=, this](void* s) { k_.scale_rows(x, p, counts, y, experts, copies, 2048, s); });
        all("scale_rows_grad", 3,
            [=, this](void* s) { k_.scale_rows_grad(x, y, p, counts, z, dp, experts, copies, 2048, s); });
        all("grouped_bias_add", 2,
            [=, this](void* s) { k_.grouped_bias_add(x, b, counts, p, y, experts, 2048, copies, 1.0f, s); });
        all("grouped_bias_grad", 1, [=, this](void* s) {
            k_.grouped_bias_grad(x, counts, b, nullptr, db, nullptr, experts, 2048, copies, 1.0f, s);
        });
        pool_.reset();
    }

    void routed(Type type, Row cols, int top_k, int experts) {
        const std::string name = type == Type::f32 ? "f32" : "bf16";
        const Row copies = tokens * top_k;
        PermuteShape shape;
        shape.tokens = tokens, shape.cols = cols, shape.top_k = top_k;
        std::vector<std::int32_t> index(static_cast<std::size_t>(copies));
        std::mt19937 engine(3);
        std::vector<std::int32_t> all(static_cast<std::size_t>(experts));
        std::iota(all.begin(), all.end(), 0);
        for (Row t = 0; t < tokens; ++t) { // top_k distinct experts
            for (int i = 0; i < top_k; ++i)
                std::swap(all[static_cast<std::size_t>(i)],
                          all[static_cast<std::size_t>(std::uniform_int_distribution<int>(i, experts - 1)(engine))]);
            std::copy(all.begin(), all.begin() + top_k, index.begin() + t * top_k);
        }
        const std::int32_t* const chosen = pool_.ints(index);
        auto* const counts = const_cast<std::int32_t*>(pool_.ints(all));
        auto* const row_of = const_cast<std::int32_t*>(pool_.ints(index));
        k_.permute_map(chosen, counts, row_of, nullptr, tokens, top_k, experts, 0, nullptr);
        const Dst x = pool_.take(type, tokens * cols), rows = pool_.take(type, copies * cols),
                  each = pool_.take(type, copies * cols);
        const double moved = of(type, static_cast<double>(tokens * cols)), bytes = (1 + top_k) * moved,
                     twice = 2 * top_k * moved;
        const auto moving = [&](const std::string& op, double both, const Call& call) {
            add(fmt::format("{} top {} of {} x{} {}", op, top_k, experts, cols, name), both, call);
        };
        PermuteShape single = shape;
        single.per_copy = true;
        moving("permute", bytes, [=, this](void* s) { k_.permute(shape, x, row_of, rows, s); });
        moving("unpermute", bytes, [=, this](void* s) { k_.unpermute(shape, rows, row_of, x, s); });
        moving("permute per copy", twice, [=, this](void* s) { k_.permute(single, each, row_of, rows, s); });
        moving("unpermute per copy", twice, [=, this](void* s) { k_.unpermute(single, rows, row_of, each, s); });
        if (type == Type::bf16)
            moving("permute_map", 8.0 * static_cast<double>(copies), [=, this](void* s) {
                k_.permute_map(chosen, counts, row_of, nullptr, tokens, top_k, experts, 0, s);
            });
        pool_.reset();
    }

    void ropes() {
        for (const Type type : {Type::bf16, Type::f32})
            for (const bool norm : {false, true}) {
                RopeShape shape;
                shape.tokens = tokens, shape.heads = 32, shape.kv_heads = 4, shape.head_dim = shape.rotary_dim = 128;
                shape.theta = 1e6, shape.norm = norm;
                const Row n = tokens * 40 * 128;
                const auto each = of(type, static_cast<double>(n));
                const auto* positions = pool_.ints(random_ints(tokens, 4096));
                const Dst x = pool_.take(type, n), y = pool_.take(type, n), z = pool_.take(type, n);
                const Dst wq = pool_.take(type, 128), wk = pool_.take(type, 128);
                float *const rstd = pool_.floats(tokens * 36), *const dwq = pool_.floats(128),
                             *const dwk = pool_.floats(128);
                const std::string name = fmt::format("{}x(32+4+4)x128{} {}", tokens, norm ? " norm" : "",
                                                     type == Type::f32 ? "f32" : "bf16");
                const auto forward = [=, this](void* s) { k_.rope(shape, x, positions, wq, wk, y, rstd, s); };
                const auto backward = [=, this](void* s) {
                    k_.rope_grad(shape, z, positions, x, wq, wk, rstd, y, dwq, dwk, s);
                };
                add("rope " + name, 2 * each, forward);
                // The values of qkv need not be read with norm.
                time("rope_grad " + name, (norm ? 2.9 : 2.0) * each, backward);
            }
        latent_heads(4096, 128);
        latent_heads(16384, 16);
    }

    void latent_heads(Row n, int heads) { // DeepSeek-V3's, all or an eighth of them
        MlaRopeShape mla;
        mla.tokens = n, mla.heads = heads, mla.nope = 128, mla.rope = 64, mla.v = 128, mla.kv_lora = 512;
        const Type type = Type::bf16;
        const auto* positions = pool_.ints(random_ints(n, 4096));
        const Row all = n * heads;
        const Dst q = pool_.take(type, all * 192), q_out = pool_.take(type, all * 192), k = pool_.take(type, all * 192),
                  v = pool_.take(type, all * 128), kv = pool_.take(type, all * 256), down = pool_.take(type, n * 576);
        const double bytes = of(type, static_cast<double>(all) * (3 * 192 + 256 + 128) + 64.0 * static_cast<double>(n));
        const std::string name = fmt::format(" {}x{}x(128+64) bf16", n, heads);
        const auto forward = [=, this](void* s) { k_.mla_rope(mla, q, kv, down, positions, q_out, k, v, s); };
        add("mla_rope" + name, bytes, forward);
        time("mla_rope_grad" + name, bytes,
             [=, this](void* s) { k_.mla_rope_grad(mla, q_out, k, v, positions, q, kv, down, s); });
    }

    void losses() {
        for (const Type type : {Type::bf16, Type::f32}) {
            const Row n = 4096, vocab = 151936;
            const LossShape shape{n, vocab, vocab, 0, 1.0 / 4096};
            const auto each = of(type, static_cast<double>(n * vocab));
            const Dst x = pool_.take(type, n * vocab), dx = pool_.take(type, n * vocab);
            float *const max = pool_.floats(n), *const stat = pool_.floats(2 * n);
            const std::int32_t* const labels = pool_.ints(random_ints(n, static_cast<int>(vocab)));
            const std::string name = fmt::format(" {}x{} {}", n, vocab, type == Type::f32 ? "f32" : "bf16");
            const auto sweep = [&](const char* op, double bytes, const Call& call) { add(op + name, bytes, call); };
            sweep("ce_max", each, [=, this](void* s) { k_.ce_max(shape, x, max, s); });
            sweep("ce_sum", each, [=, this](void* s) { k_.ce_sum(shape, x, max, labels, stat, s); });
            sweep("ce_grad", 2 * each, [=, this](void* s) { k_.ce_grad(shape, x, max, stat, labels, dx, s); });
            float* const loss = pool_.floats(1);
            sweep("cross_entropy", 2 * each,
                  [=, this](void* s) { k_.cross_entropy(shape, 1e-4, x, labels, max, stat, loss, dx, s); });
            pool_.reset();
        }
    }

    void embeddings() {
        const Row vocab = 151936, cols = 2048;
        const Type type = Type::bf16;
        const auto each = static_cast<double>(tokens * cols);
        const std::int32_t* const ids = pool_.ints(random_ints(tokens, static_cast<int>(vocab)));
        const Dst table = pool_.take(type, vocab * cols), x = pool_.take(type, tokens * cols);
        time("embedding 16384x2048 bf16", of(type, 2 * each),
             [=, this](void* s) { k_.embedding(ids, table, x, tokens, cols, 0, vocab, s); });
        const std::int32_t* const again = pool_.ints(random_ints(tokens, static_cast<int>(vocab)));
        const Dst dx = pool_.take(type, tokens * cols);
        float* const dtable = pool_.floats(vocab * cols);
        time("embedding_grad 16384x2048 bf16", 10 * each,
             [=, this](void* s) { k_.embedding_grad(again, dx, dtable, tokens, cols, 0, vocab, s); });
    }

    void optimizer() {
        for (const Type type : {Type::f32, Type::bf16}) {
            const Row n = Row{48} << 20;
            const std::string name = type == Type::f32 ? "f32" : "bf16";
            const AdamShape shape{n, 0, n};
            const float* const hyper = pool_.floats_of({1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 0.1f, 0.05f, 0.0f});
            const float* const squares = pool_.floats_of({9.0f});
            const float* const overflow = pool_.floats_of({0.0f});
            float *const g = pool_.floats(n), *const master = pool_.floats(n);
            const Dst m = pool_.take(type, n), v = pool_.take(type, n), w = pool_.take(Type::bf16, n);
            CUDA_CHECK(cudaMemset(v.data, 0, static_cast<std::size_t>(n) * size_of(type))); // no root of a negative
            time("adamw moments " + name + " weights bf16", static_cast<double>(n) * 14 + of(type, 4.0 * n),
                 [=, this](void* s) { k_.adamw(shape, g, squares, hyper, overflow, master, m, v, w, s); });
            const Dst x = pool_.take(type, 4 * n);
            float* const sum = pool_.floats(1);
            time("sum_squares " + name, of(type, 4.0 * n), [=, this](void* s) { k_.sum_squares(x, sum, 4 * n, s); });
        }
    }

    void routers() {
        struct Size {
            Row tokens;
            int experts, top_k, groups;
            Score score;
        };
        for (const auto& [n, experts, top_k, groups, score] :
             {Size{65536, 128, 8, 1, Score::softmax}, Size{262144, 128, 8, 1, Score::softmax},
              Size{65536, 256, 8, 8, Score::sigmoid}, Size{65536, 160, 6, 8, Score::softmax},
              Size{65536, 160, 8, 1, Score::sigmoid}, Size{65536, 384, 8, 1, Score::sigmoid},
              Size{4096, 8, 2, 1, Score::softmax}}) {
            RouterShape shape;
            shape.tokens = n, shape.experts = experts, shape.top_k = top_k, shape.normalize = true;
            const bool biased = score == Score::sigmoid; // as DeepSeek-V3's, GLM-4.5's and Kimi-K2's; DeepSeek-V2's not
            shape.score = score, shape.groups = groups;
            if (groups > 1) shape.groups_kept = biased ? 4 : 3, shape.group_score_top = biased ? 2 : 1;
            const Dst logits = pool_.take(Type::f32, n * experts), out = pool_.take(Type::f32, n * experts);
            const Dst bias = biased ? pool_.take(Type::f32, experts) : Dst{};
            auto* const index = static_cast<std::int32_t*>(pool_.take(Type::f32, n * top_k).data);
            float *const weight = pool_.floats(n * top_k), *const dweight = pool_.floats(n * top_k);
            const std::string name = fmt::format(" {} tokens, {} experts{}", n, experts, groups > 1 ? ", groups" : "");
            const double bytes = static_cast<double>(n) * (4.0 * experts + 8.0 * top_k);
            const auto forward = [=, this](void* s) { k_.router(shape, logits, bias, {}, index, weight, s); };
            add("router" + name, bytes, forward);
            time("router_grad" + name, bytes + 4.0 * static_cast<double>(n) * experts,
                 [=, this](void* s) { k_.router_grad(shape, dweight, logits, index, out, s); });
        }
    }
};

} // namespace

std::vector<Moved> bandwidth_of_kernels(const std::string& part) {
    std::vector<Moved> all = Cases(part).run();
    for (const auto more : {bandwidth_of_quantization, bandwidth_of_states}) {
        const std::vector<Moved> others = more(part);
        all.insert(all.end(), others.begin(), others.end());
    }
    return all;
}

} // namespace moe::test
