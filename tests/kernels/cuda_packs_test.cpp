// Kernels that move whole packs of 16 bytes, at widths that the finite differences of the other tests are too slow for:
// norms, flat vectors, rotary heads, losses, embeddings and the optimizer.
#include "tests/kernels/cuda_packs.hpp"

namespace moe::test {
namespace {

void norms(std::int64_t rows, std::int64_t cols, std::int64_t stride, Type type, Type weights, Type results,
           std::int64_t skipped) {
    const std::string name = named("rmsnorm", rows, cols, {type, weights, results}) + fmt::format(" +{}", skipped);
    Random random(name);
    const Shifted x(random.tensor(type, rows * stride + skipped), skipped),
        dy(random.tensor(type, rows * cols + skipped), skipped),
        residual(random.tensor(type, rows * cols + skipped), skipped);
    const Tensor w = random.tensor(weights, cols), before = random.tensor(Type::f32, cols);
    compare(name, [&](const Kernels& k) {
        Tensor y(results, rows * cols), rstd(Type::f32, rows);
        Shifted dx(Tensor(results, Vec(static_cast<std::size_t>(rows * stride + skipped), 0.0)), skipped), plain = dx;
        Tensor dw = before, dw2 = before;
        k.rmsnorm(x.src(), w.src(), y.dst(), rstd.f32(), rows, cols, stride, 1e-6, nullptr);
        k.rmsnorm_grad(dy.src(), x.src(), w.src(), rstd.f32(), residual.src(), dx.dst(), dw.f32(), rows, cols, stride,
                       nullptr);
        k.rmsnorm_grad(dy.src(), x.src(), w.src(), rstd.f32(), {}, plain.dst(), dw2.f32(), rows, cols, stride, nullptr);
        return Outputs{y, rstd, dx.tensor, plain.tensor, dw, dw2};
    });
}

// Elementwise ops and casts; n is no multiple of a pack, so that some elements are left over.
void flat(std::int64_t n, Type a_type, Type b_type, Type y_type, std::int64_t skipped) {
    const std::string name = named("flat", 1, n, {a_type, b_type, y_type}) + fmt::format(" +{}", skipped);
    Random random(name);
    const Shifted a(random.tensor(a_type, n + skipped), skipped), b(random.tensor(b_type, n + skipped), skipped);
    compare(name, [&](const Kernels& k) {
        Tensor sum(y_type, n), cast(y_type, n), squares(Type::f32, Vec{2.0}), reduced(y_type, n), largest(y_type, n);
        k.add(a.src(), b.src(), sum.dst(), n, nullptr);
        k.cast(a.src(), cast.dst(), n, nullptr);
        k.sum_squares(a.src(), squares.f32(), n, nullptr);
        const void* const from[] = {a.src().data, a.src().data, a.src().data, a.src().data, a.src().data};
        k.reduce_sum(reduced.dst(), from, 5, n, a_type, nullptr);
        k.reduce_max(largest.dst(), from, 5, n, a_type, nullptr);
        return Outputs{sum, cast, squares, reduced, largest};
    });
}

void ropes(const RopeShape& s, Type type, Type weights, Type results, std::int64_t skipped) {
    const std::string name = named("rope", s.tokens, s.head_dim, {type, weights, results}) +
                             fmt::format(" rotary {}{}{} +{}", s.rotary_dim, s.interleaved ? " interleaved" : "",
                                         s.norm ? " norm" : "", skipped);
    const std::int64_t n = s.tokens * (s.heads + 2 * s.kv_heads) * s.head_dim;
    Random random(name);
    const Index positions = random.indices(s.tokens / s.batch, 5000);
    const Shifted qkv(random.tensor(type, n + skipped), skipped), dout(random.tensor(type, n + skipped), skipped);
    const Tensor wq = random.tensor(weights, s.head_dim), wk = random.tensor(weights, s.head_dim);
    const Tensor before = random.tensor(Type::f32, s.head_dim);
    compare(name, [&](const Kernels& k) {
        Tensor out(results, n), dqkv(results, n), dwq = before, dwk = before;
        Tensor rstd(Type::f32, Vec(static_cast<std::size_t>(s.tokens * (s.heads + s.kv_heads)), 0.0));
        k.rope(s, qkv.src(), positions.data(), wq.src(), wk.src(), out.dst(), rstd.f32(), nullptr);
        k.rope_grad(s, dout.src(), positions.data(), qkv.src(), wq.src(), wk.src(), rstd.f32(), dqkv.dst(), dwq.f32(),
                    dwk.f32(), nullptr);
        return Outputs{out, rstd, dqkv, dwq, dwk};
    });
}

void latent(const MlaRopeShape& s, Type type, Type results, std::int64_t skipped) {
    const std::string name = named("mla_rope", s.heads, s.rope, {type, results}) +
                             fmt::format("{} +{}", s.interleaved ? " interleaved" : "", skipped);
    const std::int64_t q = s.tokens * s.heads * (s.nope + s.rope), kv = s.tokens * s.heads * (s.nope + s.v),
                       down = s.tokens * (s.kv_lora + s.rope), v = s.tokens * s.heads * s.v;
    Random random(name);
    const Index positions = random.indices(s.tokens / s.batch, 5000);
    const Shifted x(random.tensor(type, q + skipped), skipped), pair(random.tensor(type, kv + skipped), skipped),
        low(random.tensor(type, down + skipped), skipped), values(random.tensor(type, v + skipped), skipped);
    compare(name, [&](const Kernels& k) {
        Tensor query(results, q), key(results, q), value(results, v), dq(results, q), dkv(results, kv);
        Tensor ddown(results, Vec(static_cast<std::size_t>(down), 0.0));
        Shifted in_place = x, key2(Tensor(type, Vec(static_cast<std::size_t>(q + skipped), 0.0)), skipped),
                value2(Tensor(type, Vec(static_cast<std::size_t>(v + skipped), 0.0)), skipped), turned = x;
        k.mla_rope(s, x.src(), pair.src(), low.src(), positions.data(), query.dst(), key.dst(), value.dst(), nullptr);
        k.mla_rope_grad(s, x.src(), x.src(), values.src(), positions.data(), dq.dst(), dkv.dst(), ddown.dst(), nullptr);
        k.mla_rope(s, in_place.src(), pair.src(), low.src(), positions.data(), in_place.dst(), key2.dst(), value2.dst(),
                   nullptr);
        k.mla_rope_grad(s, turned.src(), x.src(), values.src(), positions.data(), turned.dst(), dkv.dst(), ddown.dst(),
                        nullptr);
        return Outputs{query, key, value, dq, dkv, ddown, in_place.tensor, key2.tensor, value2.tensor, turned.tensor};
    });
}

void losses(std::int64_t vocab, std::int64_t local, Type type, Type results, std::int64_t skipped,
            std::int64_t rows = 19) {
    const std::string name =
        named("cross-entropy", rows, local, {type, results}) + fmt::format(" of {} +{}", vocab, skipped);
    Random random(name);
    const Shifted logits(random.tensor(type, rows * local + skipped, 3.0), skipped);
    Index labels = random.indices(rows, static_cast<std::int32_t>(vocab));
    labels[3] = -1;
    compare(name, [&](const Kernels& k) {
        const LossShape s{rows, local, vocab, 0, 0.25};
        Tensor max(Type::f32, rows), stat(Type::f32, 2 * rows), dx(results, rows * local), loss(Type::f32, Vec{1.0});
        k.ce_max(s, logits.src(), max.f32(), nullptr);
        k.ce_sum(s, logits.src(), max.f32(), labels.data(), stat.f32(), nullptr);
        k.ce_loss(s, max.f32(), stat.f32(), loss.f32(), nullptr);
        k.ce_grad(s, logits.src(), max.f32(), stat.f32(), labels.data(), dx.dst(), nullptr);
        Tensor max2(Type::f32, rows), stat2(Type::f32, 2 * rows), dx2(results, rows * local),
            loss2(Type::f32, Vec{1.0});
        k.cross_entropy(s, 0.5, logits.src(), labels.data(), max2.f32(), stat2.f32(), loss2.f32(), dx2.dst(), nullptr);
        Shifted in_place = logits;
        k.cross_entropy(s, 0.5, in_place.src(), labels.data(), max2.f32(), stat2.f32(), loss2.f32(), in_place.dst(),
                        nullptr);
        return Outputs{max, stat, loss, dx, max2, stat2, loss2, dx2, in_place.tensor};
    });
}

} // namespace

TEST_CASE("packs: rmsnorm at widths of one pack per thread and several, strided, residual") {
    for (const Type type : storages) {
        for (const Type weights : storages) {
            norms(9, 264, 264, type, weights, type, 0);
            norms(3, 2048, 2560, type, weights, type, 0);
            norms(5, 264, 264, type, weights, type, 1);
        }
        norms(300, 64, 64, type, type, type, 0);     // more rows than a block's first
        norms(700, 7168, 7168, type, type, type, 0); // blocks in pairs
        norms(2, type == Type::f32 ? 4608 : 9216, 9216, type, type, type, 0);
        norms(2, type == Type::f32 ? 9216 : 17408, 17408, type, type, type, 0); // no block holds a row
        norms(4, 136, 136, type, type, type == Type::f32 ? Type::bf16 : Type::f32, 0);
    }
}

TEST_CASE("packs: sums, casts and reductions of vectors with elements left over") {
    for (const Type a : storages)
        for (const Type b : storages)
            for (const Type y : storages)
                for (const std::int64_t skipped : {0, 1}) flat(8197, a, b, y, skipped);
}

TEST_CASE("packs: rope over heads of several lanes, partial, interleaved, QK-norm") {
    for (const Type type : storages)
        for (const bool interleaved : {false, true})
            for (const bool norm : {false, true}) {
                RopeShape s;
                s.tokens = 22, s.batch = 2, s.interleaved = interleaved, s.norm = norm, s.heads = 9, s.kv_heads = 3;
                for (const auto& size : {std::pair{128, 128}, {64, 64}, {256, 64}, {16, 16}, {80, 80}}) {
                    const int dim = size.first, rotary = size.second;
                    s.head_dim = dim, s.rotary_dim = rotary;
                    ropes(s, type, type, type, 0);
                }
                s.head_dim = s.rotary_dim = 128;
                s.tokens = 2200, s.heads = 2, s.kv_heads = 1; // several tokens per warp
                ropes(s, type, type, type, 0);
                s.tokens = 22, s.heads = 9, s.kv_heads = 3;
                ropes(s, type, type, type, 1);
                const Type other = type == Type::f32 ? Type::bf16 : Type::f32;
                ropes(s, type, other, type, 0);
                ropes(s, type, type, other, 0);
            }
}

TEST_CASE("packs: latent attention's heads, whole and in place, several per warp") {
    for (const Type type : storages)
        for (const Type results : storages)
            for (const bool interleaved : {false, true})
                for (const auto& [heads, rope] :
                     {std::pair{5, 64}, {16, 32}, {3, 16}, {2, 48}, {12, 64}, {17, 64}, {72, 64}}) {
                    MlaRopeShape s;
                    s.tokens = 10, s.batch = 2, s.heads = heads, s.nope = 64, s.rope = rope, s.v = 40, s.kv_lora = 24;
                    s.interleaved = interleaved;
                    latent(s, type, results, 0);
                    latent(s, type, results, 1);
                }
}

TEST_CASE("packs: latent attention's heads, several tokens per block and round after round") {
    for (const Type type : storages)
        for (const auto& size : {std::pair{1, 2202}, {3, 2202}, {20, 602}}) {
            const int heads = size.first, tokens = size.second;
            MlaRopeShape s;
            s.tokens = tokens, s.batch = 2, s.heads = heads, s.nope = 16, s.rope = 64, s.v = 8, s.kv_lora = 8;
            latent(s, type, type, 0);
        }
}

TEST_CASE("packs: cross-entropy over a wide vocabulary, padded within a pack") {
    for (const Type type : storages)
        for (const Type results : storages) {
            losses(9000, 9000, type, results, 0);
            losses(9003, 9016, type, results, 0);
            losses(9003, 9016, type, results, 1);
            losses(2051, 2053, type, results, 0);
            losses(16, 16, type, results, 0);
        }
    for (const Type type : storages) { // clusters of 1 to 8, several packs per thread
        losses(65530, 65536, type, type, 0, 5);
        losses(151936, 151936, type, type, 0, 5);
        losses(201088, 201088, type, type, 0, 5);
        losses(2048, 2048, type, type, 0, 1200); // several rows of a cluster, one after the other
        losses(32000, 32000, type, type, 0, 150);
    }
}

TEST_CASE("packs: embedding gradient of rare and frequent ids, in slices") {
    struct Size {
        std::int64_t rows, cols;
        int ids, first, local;
    };
    for (const Type type : storages)
        for (const Size& at :
             {Size{700, 264, 90, 30, 60}, Size{5000, 64, 3, 1, 2}, Size{300, 520, 1000, 0, 2000}, Size{40, 33, 7, 2, 4},
              Size{400, 1, 90, 0, 600000}}) { // the last has more ids than scratch memory holds
            const std::int64_t rows = at.rows, cols = at.cols;
            const int first = at.first, local = at.local;
            const std::string name = named("embedding", rows, cols, {type}) + fmt::format(" of {}", local);
            Random random(name);
            const Index ids = random.indices(rows, at.ids);
            const Tensor dx = random.tensor(type, rows * cols), before = random.tensor(Type::f32, local * cols),
                         lookup = random.tensor(type, local * cols);
            compare(name, [&](const Kernels& k) {
                Tensor dtable = before, x(type, rows * cols);
                k.embedding_grad(ids.data(), dx.src(), dtable.f32(), rows, cols, first, local, nullptr);
                k.embedding(ids.data(), lookup.src(), x.dst(), rows, cols, first, local, nullptr);
                return Outputs{dtable, x};
            });
        }
}

TEST_CASE("packs: adamw over moments and weights of either storage, elements left over") {
    for (const Type moments : storages)
        for (const Type weights : storages)
            for (const std::int64_t skipped : {0, 1}) {
                const std::int64_t n = 4099;
                const std::string name = named("adamw", 1, n, {moments, weights}) + fmt::format(" +{}", skipped);
                Random random(name);
                const Tensor g = random.tensor(Type::f32, n + skipped), squares(Type::f32, Vec{9.0}),
                             hyper(Type::f32, Vec{0.01, 0.9, 0.95, 1e-8, 0.1, 1.0, 0.271, 0.142625, 0.0});
                const Tensor master = random.tensor(Type::f32, n + skipped),
                             m = random.tensor(moments, n + skipped, 0.1);
                Vec second = random.normal(n + skipped, 0.1);
                for (double& x : second) x *= x;
                compare(name, [&](const Kernels& k) {
                    Tensor updated = master, m2 = m, v(moments, second);
                    Tensor w(weights, Vec(static_cast<std::size_t>(n + skipped), 0.0));
                    k.adamw({n, 10, 2000}, g.f32() + skipped, squares.f32(), hyper.f32(), nullptr,
                            updated.f32() + skipped, m2.dst() + skipped, v.dst() + skipped, w.dst() + skipped, nullptr);
                    return Outputs{updated, m2, v, w};
                });
            }
}

} // namespace moe::test
