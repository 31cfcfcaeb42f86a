// Sparse attention against its formulas in double: the choice of keys, attention over them and its gradients, the
// gradient of the indexer's loss by central differences.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moe::test {
namespace {

constexpr int index_heads = 3, index_dim = 5, qk_dim = 7, v_dim = 4;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// A layer's queries and keys, those of its indexer, and all of it in double.
struct Layer {
    PickedKeys z;
    int heads = 2;
    double scale = 0.4, index_scale = 0.3, factor = 0.7;
    Index starts, list; // list: positions for each row, then -1
    Tensor q, k, index_q, index_k, w;

    Layer(const PickedKeys& keys, int attention_heads, bool documents, Type type, const std::string& name)
        : Layer(keys, attention_heads, type, Random(name)) {
        if (documents) {
            for (std::int64_t i = 0; i < z.seq_q; ++i)
                for (std::int64_t b = 0; b < z.batch; ++b)
                    starts.push_back(static_cast<std::int32_t>(z.position(i) / (3 + b) * (3 + b)));
            z.document_start = starts.data();
        }
        for (std::int64_t row = 0; row < z.rows(); ++row) choose(row);
    }

    IndexShape index() const { return {z, index_heads, index_dim, index_scale}; }
    LatentShape core() const { // The list says where documents begin.
        LatentShape s{z, heads, qk_dim, v_dim, scale};
        s.keys.document_start = nullptr;
        return s;
    }
    std::int64_t first(std::int64_t row) const { return starts.empty() ? 0 : starts[at(row)]; }
    std::int64_t last(std::int64_t row) const { return z.position(row / z.batch); }
    std::int64_t key_row(std::int64_t row, std::int64_t position) const {
        return z.place(position) * z.batch + row % z.batch;
    }

    // The indexer's score of the key at a position.
    double score(const Vec& of_q, const Vec& of_k, const Vec& of_w, std::int64_t row, std::int64_t position) const {
        double sum = 0.0;
        for (int h = 0; h < index_heads; ++h) {
            double product = 0.0;
            for (int c = 0; c < index_dim; ++c)
                product += of_q[at((row * index_heads + h) * index_dim + c)] *
                           of_k[at(key_row(row, position) * index_dim + c)];
            sum += of_w[at(row * index_heads + h)] * std::max(product, 0.0);
        }
        return index_scale * sum;
    }

    void choose(std::int64_t row) {
        std::vector<std::int32_t> seen(at(last(row) + 1 - first(row)));
        std::iota(seen.begin(), seen.end(), static_cast<std::int32_t>(first(row)));
        const Vec of_q = index_q.values(), of_k = index_k.values(), of_w = w.values();
        std::stable_sort(seen.begin(), seen.end(), [&](std::int32_t a, std::int32_t b) {
            return score(of_q, of_k, of_w, row, a) > score(of_q, of_k, of_w, row, b);
        });
        seen.resize(std::min(seen.size(), at(z.top_k)));
        std::sort(seen.begin(), seen.end());
        seen.resize(at(z.top_k), -1);
        list.insert(list.end(), seen.begin(), seen.end());
    }

    std::vector<std::int64_t> keys_of(std::int64_t row, bool all) const {
        std::vector<std::int64_t> keys;
        for (std::int64_t j = first(row); all && j <= last(row); ++j) keys.push_back(j);
        for (std::int64_t j = 0; !all && j < z.top_k; ++j)
            if (list[at(row * z.top_k + j)] >= 0) keys.push_back(list[at(row * z.top_k + j)]);
        return keys;
    }

    // The softmax of a head over the keys; the log of its sum.
    Vec probabilities(const Vec& of_q, const Vec& of_k, std::int64_t row, int head,
                      const std::vector<std::int64_t>& keys, double& lse) const {
        Vec p;
        for (const std::int64_t key : keys) {
            double logit = 0.0;
            for (int c = 0; c < qk_dim; ++c)
                logit += of_q[at((row * heads + head) * qk_dim + c)] * of_k[at(key_row(row, key) * qk_dim + c)];
            p.push_back(scale * logit);
        }
        double sum = 0.0;
        for (const double logit : p) sum += std::exp(logit);
        lse = std::log(sum);
        for (double& x : p) x = std::exp(x - lse);
        return p;
    }

    // o, and behind it lse.
    Vec attend(const Vec& of_q, const Vec& of_k, bool with_lse) const {
        Vec out(at(z.rows() * heads * v_dim), 0.0), logs(at(z.rows() * heads));
        for (std::int64_t row = 0; row < z.rows(); ++row)
            for (int h = 0; h < heads; ++h) {
                const std::vector<std::int64_t> keys = keys_of(row, false);
                const Vec p = probabilities(of_q, of_k, row, h, keys, logs[at(h * z.rows() + row)]);
                for (std::size_t j = 0; j < keys.size(); ++j)
                    for (int c = 0; c < v_dim; ++c)
                        out[at((row * heads + h) * v_dim + c)] += p[j] * of_k[at(key_row(row, keys[j]) * qk_dim + c)];
            }
        if (with_lse) out.insert(out.end(), logs.begin(), logs.end());
        return out;
    }

    // The indexer's loss.
    Vec loss(const Vec& of_q, const Vec& of_k, const Vec& of_w, bool all) const {
        double sum = 0.0, unused = 0.0;
        const Vec main_q = q.values(), main_k = k.values();
        for (std::int64_t row = 0; row < z.rows(); ++row) {
            const std::vector<std::int64_t> keys = keys_of(row, all);
            Vec target(keys.size(), 0.0);
            for (int h = 0; h < heads; ++h) {
                const Vec p = probabilities(main_q, main_k, row, h, keys, unused);
                for (std::size_t j = 0; j < keys.size(); ++j) target[j] += p[j] / heads;
            }
            double total = 0.0;
            for (const std::int64_t key : keys) total += std::exp(score(of_q, of_k, of_w, row, key));
            for (std::size_t j = 0; j < keys.size(); ++j)
                sum += target[j] * (std::log(target[j]) - score(of_q, of_k, of_w, row, keys[j]) + std::log(total));
        }
        return {factor * sum};
    }

private:
    Layer(const PickedKeys& keys, int attention_heads, Type type, Random random)
        : z(keys),
          heads(attention_heads),
          q(random.tensor(type, z.rows() * heads * qk_dim)),
          k(random.tensor(type, z.batch * z.seq_k * qk_dim)),
          index_q(random.tensor(type, z.rows() * index_heads * index_dim)),
          index_k(random.tensor(type, z.batch * z.seq_k * index_dim)),
          w(random.tensor(type, z.rows() * index_heads)) {}
};

std::string describe(const char* name, const PickedKeys& z, bool documents, Type type) {
    return fmt::format("{} batch={} seq={} keys={} top_k={} part={}/{} documents={} {}", name, z.batch, z.seq_q,
                       z.seq_k, z.top_k, z.part, z.parts, documents, name_of(type));
}

Case pick_case(const PickedKeys& z, bool documents, Type type) {
    Case out;
    out.name = describe("pick_keys", z, documents, type);
    auto d = std::make_shared<Layer>(z, 2, documents, type, out.name);
    auto keys = std::make_shared<Index>(at(z.rows() * z.top_k), -7);
    out.call = [d, keys] {
        table().pick_keys(d->index(), d->index_q.src(), d->index_k.src(), d->w.src(), keys->data(), nullptr);
    };
    out.error = [d, keys] { return demand(*keys == d->list); };
    return out;
}

Case attention_case(const PickedKeys& z, bool documents, Type type) {
    Case out;
    out.name = describe("attention_picked", z, documents, type);
    out.tolerance = tolerance(type);
    auto d = std::make_shared<Layer>(z, 2, documents, type, out.name);
    auto o = std::make_shared<Tensor>(type, z.rows() * d->heads * v_dim);
    auto lse = std::make_shared<Tensor>(Type::f32, z.rows() * d->heads);
    out.call = [d, o, lse] {
        table().attention_picked(d->core(), d->q.src(), d->k.src(), d->list.data(), o->dst(), lse->f32(), nullptr);
    };
    out.error = [d, o, lse] {
        const Vec want = d->attend(d->q.values(), d->k.values(), true);
        const auto middle = want.begin() + static_cast<std::ptrdiff_t>(o->size());
        return worst({relative_error(*o, Vec(want.begin(), middle)), relative_error(*lse, Vec(middle, want.end()))});
    };
    return out;
}

Case attention_grad_case(const PickedKeys& z, bool documents, Type type) {
    Case out;
    out.name = describe("attention_picked_grad", z, documents, type);
    out.tolerance = 3.0 * tolerance(type);
    auto d = std::make_shared<Layer>(z, 2, documents, type, out.name);
    const Vec forward = d->attend(d->q.values(), d->k.values(), true);
    const auto middle = forward.begin() + static_cast<std::ptrdiff_t>(z.rows() * d->heads * v_dim);
    auto o = std::make_shared<Tensor>(type, Vec(forward.begin(), middle));
    auto lse = std::make_shared<Tensor>(Type::f32, Vec(middle, forward.end()));
    auto dout = std::make_shared<Tensor>(Random(out.name + " dout").tensor(type, o->size()));
    auto dq = std::make_shared<Tensor>(type, d->q.size());
    auto dk = std::make_shared<Tensor>(type, d->k.size());
    out.call = [=] {
        table().attention_picked_grad(d->core(), dout->src(), d->q.src(), d->k.src(), o->src(), lse->f32(),
                                      d->list.data(), dq->dst(), dk->dst(), nullptr);
    };
    out.error = [=] {
        const Vec q = d->q.values(), k = d->k.values(), dy = dout->values();
        return worst({relative_error(*dq, gradient([&](const Vec& x) { return d->attend(x, k, false); }, q, dy)),
                      relative_error(*dk, gradient([&](const Vec& x) { return d->attend(q, x, false); }, k, dy))});
    };
    return out;
}

// Of a part of the heads.
IndexLossShape loss_shape(const Layer& d, int heads, bool all) {
    IndexLossShape s{d.index(), d.core(), d.heads, all, d.factor};
    s.core.heads = heads;
    return s;
}

// All heads at once, and halves of them, whose gradients add up, and whose loss needs what both see together.
Case loss_case(const PickedKeys& z, bool documents, bool all, Type type) {
    Case out;
    out.name = describe(all ? "pick_keys_grad over all keys" : "pick_keys_grad", z, documents, type);
    out.tolerance = 3.0 * tolerance(type);
    auto d = std::make_shared<Layer>(z, 4, documents, type, out.name);
    struct Part {
        int heads;
        Tensor q, dq, dk, dw, work, p;
    };
    const std::int64_t keys = z.rows() * (all ? z.seq_k : z.top_k);
    const auto part_of = [&](int first, int heads) {
        const Vec q = d->q.values();
        Vec part;
        for (std::int64_t row = 0; row < z.rows(); ++row)
            part.insert(part.end(), q.begin() + (row * d->heads + first) * qk_dim,
                        q.begin() + (row * d->heads + first + heads) * qk_dim);
        return Part{heads,
                    Tensor(type, part),
                    Tensor(type, d->index_q.size()),
                    Tensor(type, d->index_k.size()),
                    Tensor(type, d->w.size()),
                    Tensor(Type::f32, loss_shape(*d, heads, all).work()),
                    Tensor(Type::f32, Vec(at(keys), -1.0))};
    };
    auto parts = std::make_shared<std::vector<Part>>(
        std::vector<Part>{part_of(0, d->heads), part_of(0, d->heads / 2), part_of(d->heads / 2, d->heads / 2)});
    auto p = std::make_shared<Tensor>(Type::f32, keys);
    auto whole = std::make_shared<Tensor>(Type::f32, Vec{0.0}), joined = std::make_shared<Tensor>(Type::f32, Vec{0.0});
    out.call = [=] {
        whole->set(0, 2.0); // Losses are added to what is there.
        joined->set(0, 0.0);
        for (Part& part : *parts) {
            const IndexLossShape s = loss_shape(*d, part.heads, all);
            const bool one = part.heads == d->heads;
            table().pick_keys_grad(s, part.q.src(), d->k.src(), d->index_q.src(), d->index_k.src(), d->w.src(),
                                   all ? nullptr : d->list.data(), part.dq.dst(), part.dk.dst(), part.dw.dst(),
                                   part.work.f32(), (one ? *whole : *joined).f32(), one ? nullptr : part.p.f32(),
                                   nullptr);
        }
        const Vec both = plus((*parts)[1].p.values(), (*parts)[2].p.values());
        for (std::int64_t i = 0; i < keys; ++i) p->set(i, both[at(i)]);
        table().xlogx(p->f32(), d->factor, joined->f32(), keys, nullptr);
    };
    out.error = [=] {
        const Vec q = d->index_q.values(), k = d->index_k.values(), w = d->w.values(), one{1.0};
        const double loss = d->loss(q, k, w, all)[0];
        double error = worst({relative_error(*whole, {2.0 + loss}), relative_error(*joined, {loss})});
        const auto gradients = [&](auto got) {
            const auto of = [&](Tensor Part::*gradient, auto loss_of, const Vec& x) {
                return relative_error(got(gradient), moe::test::gradient(loss_of, x, one));
            };
            error = worst({error,
                           of(
                               &Part::dq, [&](const Vec& x) { return d->loss(x, k, w, all); }, q),
                           of(
                               &Part::dk, [&](const Vec& x) { return d->loss(q, x, w, all); }, k),
                           of(
                               &Part::dw, [&](const Vec& x) { return d->loss(q, k, x, all); }, w)});
        };
        gradients([&](Tensor Part::*of) { return ((*parts)[0].*of).values(); });
        gradients([&](Tensor Part::*of) { return plus(((*parts)[1].*of).values(), ((*parts)[2].*of).values()); });
        return error;
    };
    return out;
}

// Fewer keys than are picked, more, several sequences, runs of members of CP, and more keys than a block of a GPU
// takes.
const std::vector<PickedKeys>& layouts() {
    static const std::vector<PickedKeys> all{
        {1, 6, 6, 9}, {2, 12, 12, 4}, {2, 8, 16, 5, 0, 2}, {1, 8, 24, 6, 2, 3}, {1, 9, 9, 2}};
    return all;
}

} // namespace

TEST_CASE("pick_keys: the keys of the largest scores, in order") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const PickedKeys& z : layouts())
            for (const bool documents : {false, true}) check(pick_case(z, documents, type));
    check(pick_case({1, 9, 9, 1}, false, Type::f32));
    check(pick_case({1, 300, 300, 40}, false, Type::f32));
}

TEST_CASE("pick_keys: of equal scores the keys at lower positions; scores that are no numbers are the smallest") {
    const PickedKeys z{1, 7, 7, 3};
    Random random("ties");
    const Tensor q = random.tensor(Type::f32, 7 * index_heads * index_dim), k = random.tensor(Type::f32, 7 * index_dim),
                 none(Type::f32, Vec(7 * index_heads, 0.0));
    Index keys(21, -7);
    table().pick_keys({z, index_heads, index_dim, 1.0}, q.src(), k.src(), none.src(), keys.data(), nullptr);
    CHECK(keys == Index{0, -1, -1, 0, 1, -1, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2});
    const Tensor ones(Type::f32, Vec(7 * index_heads, 1.0));
    Tensor q_up(Type::f32, Vec(7 * index_heads * index_dim, 1.0)), k_down(Type::f32, Vec(7 * index_dim, -1.0));
    for (int c = 0; c < index_dim; ++c) k_down.set(4 * index_dim + c, 1.0); // Only the key at position 4 has a score.
    table().pick_keys({z, index_heads, index_dim, 1.0}, q_up.src(), k_down.src(), ones.src(), keys.data(), nullptr);
    CHECK(Index(keys.begin() + 15, keys.end()) == Index{0, 1, 4, 0, 1, 4});
    const Tensor broken(Type::f32, Vec(7 * index_heads, std::nan("")));
    table().pick_keys({z, index_heads, index_dim, 1.0}, q.src(), k.src(), broken.src(), keys.data(), nullptr);
    CHECK(Index(keys.begin() + 15, keys.end()) == Index{0, 1, 2, 0, 1, 2});
}

TEST_CASE("pick_keys: rows that come later see the cache up to their positions") {
    const PickedKeys whole{1, 9, 9, 4};
    const Layer d(whole, 2, false, Type::f32, "later rows");
    Tensor cache(Type::f32, 12 * index_dim);
    const Index positions{6, 7, 8}, first{0, 1, 2, 3, 4, 5};
    table().cache_rows(d.index_k.src(), first.data(), cache.dst(), 6, index_dim, nullptr);
    table().cache_rows(d.index_k.src() + 6 * index_dim, positions.data(), cache.dst(), 3, index_dim, nullptr);
    CHECK(cache.values(0, 9 * index_dim) == d.index_k.values());
    CHECK(cache.untouched(9 * index_dim, 3 * index_dim));
    PickedKeys later{1, 3, 12, 4};
    later.positions = positions.data();
    Index keys(12, -7);
    table().pick_keys({later, index_heads, index_dim, d.index_scale}, d.index_q.src() + 6 * index_heads * index_dim,
                      cache.src(), d.w.src() + 6 * index_heads, keys.data(), nullptr);
    CHECK(keys == Index(d.list.begin() + 24, d.list.end()));
}

TEST_CASE("attention_picked: softmax over the picked keys, whose first columns are the values") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const PickedKeys& z : layouts())
            for (const bool documents : {false, true}) {
                check(attention_case(z, documents, type));
                check(attention_grad_case(z, documents, type));
            }
}

TEST_CASE(
    "pick_keys_grad: the divergence and its gradient, over picked keys and over all, whole and by parts of the heads") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const PickedKeys& z : layouts())
            for (const bool documents : {false, true})
                for (const bool all : {false, true}) check(loss_case(z, documents, all, type));
}

} // namespace moe::test
