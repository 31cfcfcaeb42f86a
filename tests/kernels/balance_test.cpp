// Loads, balancing losses and their gradient, the selection bias and dropped copies against plain code in double.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moe::test {
namespace {

const char* name_of(Score score) {
    const char* names[] = {"softmax", "sigmoid", "sqrt_softplus"};
    return names[static_cast<int>(score)];
}

Vec raw_scores(Score score, const Vec& logits) {
    Vec out;
    for (const double x : logits)
        out.push_back(score == Score::softmax   ? std::exp(x)
                      : score == Score::sigmoid ? 1.0 / (1.0 + std::exp(-x))
                                                : std::sqrt(std::log1p(std::exp(x))));
    return out;
}

// P of one token.
Vec shares(Score score, const Vec& logits) {
    Vec p = raw_scores(score, logits);
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& v : p) v /= sum;
    return p;
}

double log_sum_exp(const Vec& x) {
    double sum = 0.0;
    for (const double v : x) sum += std::exp(v);
    return std::log(sum);
}

struct Data {
    BalanceShape s;
    Tensor logits, load, loss, dlogits, out;
    std::int64_t experts() const { return s.router.experts; }
    Vec row(std::int64_t t) const { return logits.values(t * experts(), experts()); }
    Vec reference_load() const {
        Vec n(static_cast<std::size_t>(s.sequences * experts()), 0.0);
        for (std::int64_t t = 0; t < s.router.tokens; ++t) {
            const Vec x = row(t);
            for (std::int64_t e = 0; e < experts(); ++e) {
                int better = 0; // experts chosen before e, ties by lower number
                for (std::int64_t o = 0; o < experts(); ++o) {
                    const double a = x[static_cast<std::size_t>(o)], b = x[static_cast<std::size_t>(e)];
                    better += a > b || (a == b && o < e) ? 1 : 0;
                }
                if (better < s.router.top_k) n[static_cast<std::size_t>(t % s.sequences * experts() + e)] += 1.0;
            }
        }
        return n;
    }
    // Both losses of token t at other logits.
    Vec token_losses(std::int64_t t, const Vec& x) const {
        const Vec p = shares(s.router.score, x), n = load.values(t % s.sequences * experts(), experts());
        return {s.aux * std::inner_product(p.begin(), p.end(), n.begin(), 0.0), s.z * std::pow(log_sum_exp(x), 2.0)};
    }
};

std::shared_ptr<Data> make(Random& random, Score score, std::int64_t tokens, std::int64_t sequences, int experts,
                           int top_k, Type type) {
    BalanceShape s;
    s.router.tokens = tokens, s.router.experts = experts, s.router.top_k = top_k, s.router.score = score;
    s.sequences = sequences, s.aux = 0.3, s.z = 0.7;
    Vec logits = random.normal(tokens * experts);
    for (double& x : logits) x = std::round(x * 8.0) / 8.0; // with ties, exact in BF16
    Vec load;
    for (std::int64_t i = 0; i < sequences * experts; ++i) load.push_back(random.below(9));
    return std::make_shared<Data>(Data{s, Tensor(type, logits), Tensor(Type::f32, load),
                                       Tensor(Type::f32, Vec{0.25, 0.5}), random.tensor(Type::f32, tokens * experts),
                                       Tensor(Type::f32, tokens * experts)});
}

std::string described(const char* op, const Data& d) {
    return fmt::format("{} {} tokens {} sequences {} experts {} top {} {}", op, name_of(d.s.router.score),
                       d.s.router.tokens, d.s.sequences, d.s.router.experts, d.s.router.top_k,
                       test::name_of(d.logits.type()));
}

template <class Visit>
void for_each_shape(Visit visit) {
    for (const Score score : {Score::softmax, Score::sigmoid, Score::sqrt_softplus})
        for (const Type type : {Type::f32, Type::bf16}) {
            Random random(fmt::format("balance {} {}", name_of(score), test::name_of(type)));
            visit(make(random, score, 12, 1, 8, 2, type));
            visit(make(random, score, 12, 3, 13, 4, type));
            visit(make(random, score, 7, 2, 4, 1, type)); // sequences of unequal shares of the rows
        }
}

} // namespace

TEST_CASE("balance: tokens of each sequence by their best scores") {
    for_each_shape([](const std::shared_ptr<Data>& d) {
        Case c;
        c.name = described("router_load", *d);
        c.tolerance = 0.0;
        c.call = [d] { table().router_load(d->s, d->logits.src(), d->load.f32(), nullptr); };
        c.error = [d] { return relative_error(d->load, d->reference_load()); };
        check(c);
    });
}

TEST_CASE("balance: auxiliary and z-loss are added to what is there") {
    for_each_shape([](const std::shared_ptr<Data>& d) {
        Case c;
        c.name = described("router_loss", *d);
        c.call = [d] { table().router_loss(d->s, d->logits.src(), d->load.f32(), d->loss.f32(), nullptr); };
        c.error = [d] {
            Vec want{0.25, 0.5};
            for (std::int64_t t = 0; t < d->s.router.tokens; ++t) want = plus(want, d->token_losses(t, d->row(t)));
            return worst({relative_error({d->loss.at(0)}, {want[0]}), relative_error({d->loss.at(1)}, {want[1]})});
        };
        check(c);
    });
}

TEST_CASE("balance: without a load only the z-loss counts") {
    Random random("z");
    const auto d = make(random, Score::softmax, 5, 1, 6, 2, Type::f32);
    table().router_loss(d->s, d->logits.src(), nullptr, d->loss.f32(), nullptr);
    CHECK(d->loss.at(0) == 0.25);
    CHECK(d->loss.at(1) > 0.5);
    d->s.z = 0.0;
    table().router_loss_grad(d->s, d->logits.src(), nullptr, d->dlogits.src(), d->out.dst(), nullptr);
    CHECK(d->out.values() == d->dlogits.values());
}

TEST_CASE("balance: the gradient of both losses is added to that of the weights") {
    for_each_shape([](const std::shared_ptr<Data>& d) {
        Case c;
        c.name = described("router_loss_grad", *d);
        c.call = [d] {
            table().router_loss_grad(d->s, d->logits.src(), d->load.f32(), d->dlogits.src(), d->out.dst(), nullptr);
        };
        c.error = [d] {
            Vec want;
            for (std::int64_t t = 0; t < d->s.router.tokens; ++t) {
                const Vec g = plus(gradient([&](const Vec& x) { return d->token_losses(t, x); }, d->row(t), {1.0, 1.0}),
                                   d->dlogits.values(t * d->experts(), d->experts()));
                want.insert(want.end(), g.begin(), g.end());
            }
            return relative_error(d->out, want);
        };
        check(c);
    });
}

TEST_CASE("balance: counts add up, the bias moves towards the mean in every shard alike") {
    Index counts{3, 0, 5, 4};
    Tensor sum(Type::f32, Vec{1.0, 2.0, 3.0, 4.0});
    table().add_counts(counts.data(), sum.f32(), 4, nullptr);
    CHECK(sum.values() == Vec{4.0, 2.0, 8.0, 8.0});
    const Tensor squares(Type::f32, Vec{1.0}), hyper(Type::f32, Vec(9, 0.0));
    const Tensor load(Type::f32, Vec{6.0, 2.0, 4.0, 4.0});                 // mean 4
    for (const std::int64_t offset : {std::int64_t{0}, std::int64_t{4}}) { // the bias lies at 3 to 6 of 8 elements
        Tensor master(Type::f32, Vec(4, 1.0)), w(Type::bf16, Vec(4, 1.0));
        table().expert_bias({4, 3, offset, 4, 0.25}, load.f32(), nullptr, squares.f32(), hyper.f32(), master.f32(),
                            w.dst(), nullptr);
        const Vec want = offset == 0 ? Vec{1.0, 1.0, 1.0, 0.75} : Vec{1.25, 1.0, 1.0, 1.0};
        CHECK(master.values() == want);
        if (offset == 0) CHECK(w.at(3) == 0.75);
    }
}

TEST_CASE("balance: an expert keeps its heaviest or its first copies") {
    Random random("drop");
    for (const bool by_weight : {true, false})
        for (const std::int64_t capacity : {1, 3, 20}) {
            const DropShape s{14, 14, 0, 1, capacity, 4, 2, by_weight};
            Index index, kept(28, -7);
            for (int t = 0; t < 14; ++t) {
                const std::int32_t first = random.below(4);
                index.push_back(first);
                index.push_back((first + 1 + random.below(3)) % 4);
            }
            Vec heavy;
            for (int i = 0; i < 28; ++i) heavy.push_back((1 + random.below(6)) / 8.0); // with ties
            const Tensor weight(Type::f32, heavy);
            Tensor kept_weight(Type::f32, 28);
            table().drop_copies(s, index.data(), weight.f32(), nullptr, kept.data(), kept_weight.f32(), nullptr);
            for (int e = 0; e < 4; ++e) {
                std::vector<std::size_t> copies;
                for (std::size_t i = 0; i < 28; ++i)
                    if (index[i] == e) copies.push_back(i);
                if (by_weight)
                    std::stable_sort(copies.begin(), copies.end(),
                                     [&](std::size_t a, std::size_t b) { return heavy[a] > heavy[b]; });
                for (std::size_t place = 0; place < copies.size(); ++place) {
                    const bool stays = place < static_cast<std::size_t>(capacity);
                    INFO("expert ", e, " place ", place, " by weight ", by_weight);
                    CHECK(kept[copies[place]] == (stays ? e : -1));
                    CHECK(kept_weight.at(static_cast<std::int64_t>(copies[place])) ==
                          (stays ? heavy[copies[place]] : 0.0));
                }
            }
        }
}

TEST_CASE("balance: a rank drops of whole sequences what one that has all of them drops") {
    constexpr std::int64_t length = 12, sequences = 2, top_k = 2, ranks = 4, own = length * sequences / ranks;
    constexpr int experts = 4;
    // Two CP ranks of the first and last, and of the middle quarters; two TP ranks of each.
    const Index order{0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8};
    Random random("drop of sequences");
    Index whole;
    Vec heavy;
    for (std::int64_t t = 0; t < length * sequences; ++t) {
        const std::int32_t first = random.below(experts);
        whole.push_back(first);
        whole.push_back((first + 1 + random.below(experts - 1)) % experts);
        for (int k = 0; k < 2; ++k) heavy.push_back((1 + random.below(6)) / 8.0); // with ties
    }
    const auto row_of = [&](std::int64_t row) { // of the whole, where the ranks' row `row` lies
        return static_cast<std::size_t>(order[static_cast<std::size_t>(row / sequences)] * sequences + row % sequences);
    };
    Index gathered;
    Vec gathered_weight;
    for (std::int64_t row = 0; row < length * sequences; ++row)
        for (std::size_t k = 0; k < 2; ++k) {
            gathered.push_back(whole[row_of(row) * 2 + k]);
            gathered_weight.push_back(heavy[row_of(row) * 2 + k]);
        }
    const Tensor weight(Type::f32, heavy), all_weight(Type::f32, gathered_weight);
    for (const bool by_weight : {true, false})
        for (const std::int64_t capacity : {1, 4, 6, 20}) {
            const DropShape s{length * sequences, length * sequences, 0, sequences, capacity, experts, 2, by_weight};
            Index want(whole.size(), -7);
            Tensor want_weight(Type::f32, static_cast<std::int64_t>(whole.size()));
            table().drop_copies(s, whole.data(), weight.f32(), nullptr, want.data(), want_weight.f32(), nullptr);
            for (std::size_t b = 0; b < sequences; ++b) // as if the other sequence were not there
                for (int e = 0; e < experts; ++e) {
                    std::int64_t chosen = 0, kept = 0;
                    for (std::size_t i = 0; i < whole.size(); ++i) {
                        if (i / 2 % sequences != b || whole[i] != e) continue;
                        ++chosen;
                        kept += want[i] == e ? 1 : 0;
                    }
                    CHECK(kept == std::min(chosen, capacity));
                }
            for (std::int64_t rank = 0; rank < ranks; ++rank) {
                DropShape part = s;
                part.tokens = own;
                part.first = rank * own;
                Index got(own * top_k, -7);
                Tensor got_weight(Type::f32, own * top_k);
                table().drop_copies(part, gathered.data(), all_weight.f32(), order.data(), got.data(), got_weight.f32(),
                                    nullptr);
                for (std::int64_t i = 0; i < own * top_k; ++i) {
                    const std::size_t at = row_of(part.first + i / top_k) * 2 + static_cast<std::size_t>(i % top_k);
                    INFO("rank ", rank, " copy ", i, " by weight ", by_weight, " capacity ", capacity);
                    CHECK(got[static_cast<std::size_t>(i)] == want[at]);
                    CHECK(got_weight.at(i) == want_weight.at(static_cast<std::int64_t>(at)));
                }
            }
        }
}

TEST_CASE("balance: a forced choice loads all experts alike, whatever rank holds which positions") {
    RouterShape s;
    s.tokens = 24, s.experts = 12, s.top_k = 5, s.batch = 2;
    Random random("forced");
    const Tensor logits = random.tensor(Type::f32, 24 * 12);
    Index positions(12), index(24 * 5, -1);
    std::iota(positions.begin(), positions.end(), 0);
    Tensor weight(Type::f32, 24 * 5);
    table().router(s, logits.src(), {}, {positions.data()}, index.data(), weight.f32(), nullptr);
    for (int e = 0; e < 12; ++e) CHECK(std::count(index.begin(), index.end(), e) == 10);
    for (std::int64_t t = 0; t < 24; ++t)
        for (std::size_t k = 1; k < 5; ++k)
            CHECK(std::count(index.begin() + t * 5, index.begin() + t * 5 + 5,
                             index[static_cast<std::size_t>(t * 5) + k]) == 1);
    // The second half of the rows on a rank of its own.
    RouterShape half = s;
    half.tokens = 12, half.first = 12;
    const Tensor rest(Type::f32, logits.values(12 * 12, 12 * 12));
    Index other(12 * 5, -1);
    Tensor other_weight(Type::f32, 12 * 5);
    table().router(half, rest.src(), {}, {positions.data()}, other.data(), other_weight.f32(), nullptr);
    CHECK(std::equal(other.begin(), other.end(), index.begin() + 60));
    CHECK(other_weight.values() == weight.values(60, 60));
}

TEST_CASE("balance: experts of one rank are counted from its first") {
    const Index index{5, -1, 4, 3, 6, 7};
    Index local(6, -7);
    table().local_experts(index.data(), local.data(), 6, 4, 2, nullptr);
    CHECK(local == Index{1, -1, 0, -1, -1, -1});
}

TEST_CASE("balance: tokens go once to each domain that has some of their experts, as far as its slot has room") {
    // Six experts in three domains; the third token has two of domain 1, the fourth was dropped.
    const Index index{0, 5, 2, 1, 2, 3, -1, -1, 4, -1};
    for (const std::int64_t slot : {5, 2}) {
        const DomainShape s{5, slot, 2, 6, 3, 1};
        Index counts(3, -7), slot_of(15, -7);
        Tensor overflow(Type::f32, Vec{1.0});
        table().token_domains(s, index.data(), counts.data(), slot_of.data(), overflow.f32(), nullptr);
        const auto at = [slot](int domain, int row) { return static_cast<std::int32_t>(domain * slot + row); };
        CHECK(counts == Index{2, 2, 2});
        CHECK(slot_of ==
              Index{at(0, 0), -1, at(2, 0), at(0, 1), at(1, 0), -1, -1, at(1, 1), -1, -1, -1, -1, -1, -1, at(2, 1)});
        CHECK(overflow.at(0) == 1.0);
    }
    const DomainShape tight{5, 1, 2, 6, 3, 1};
    Index counts(3, -7), slot_of(15, -7);
    Tensor overflow(Type::f32, Vec{1.0});
    table().token_domains(tight, index.data(), counts.data(), slot_of.data(), overflow.f32(), nullptr);
    CHECK(counts == Index{1, 1, 1});
    CHECK(slot_of == Index{0, -1, 2, -1, 1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1});
    CHECK(overflow.at(0) == 4.0);
    // More tokens than a block of threads has, in order.
    const std::int64_t many = 2500;
    Index all(many), of_domain(many * 2, -7);
    for (std::int64_t t = 0; t < many; ++t) all[static_cast<std::size_t>(t)] = t % 3 == 0 ? 1 : 0;
    counts.assign(2, -7);
    table().token_domains({many, many, 1, 2, 2, 0}, all.data(), counts.data(), of_domain.data(), nullptr, nullptr);
    CHECK(counts == Index{1666, 834});
    bool right = true;
    for (std::int64_t t = 0; t < many; ++t) {
        const auto third = static_cast<std::int32_t>(t / 3), row = static_cast<std::int32_t>(t - third - 1);
        right = right && of_domain[static_cast<std::size_t>(2 * t)] == (t % 3 == 0 ? -1 : row) &&
                of_domain[static_cast<std::size_t>(2 * t + 1)] == (t % 3 == 0 ? many + third : -1);
    }
    CHECK(right);
}

TEST_CASE("balance: choices that come to a domain are counted from its first expert, where a token came") {
    // Slots of two rows from three domains, which sent one, none and two to domain 1 (experts 2 and 3).
    const Index index{2, 5, 3, 3, 2, 2, 3, 3, 3, -1, 0, 2}, counts{9, 1, 9, 9, 0, 9, 9, 2, 9};
    Index local(12, -7);
    table().domain_experts({0, 2, 2, 6, 3, 1}, index.data(), counts.data(), local.data(), nullptr);
    CHECK(local == Index{0, -1, -1, -1, -1, -1, -1, -1, 1, -1, -1, 0});
}

TEST_CASE("balance: dropped copies take no row and give nothing") {
    const Index index{1, -1, -1, 0, -1, -1};
    Index counts(2, -1), row_of(6, -7);
    table().permute_map(index.data(), counts.data(), row_of.data(), nullptr, 3, 2, 2, 0, nullptr);
    CHECK(counts == Index{1, 1});
    CHECK(row_of == Index{1, -1, -1, 0, -1, -1});
    for (const std::int64_t cols : {1, 40}) {
        const PermuteShape s{3, cols, 2, false};
        Random random("dropped");
        const Tensor x = random.tensor(Type::f32, 3 * cols);
        Tensor rows(Type::f32, 6 * cols), y(Type::f32, 3 * cols);
        table().permute(s, x.src(), row_of.data(), rows.dst(), nullptr);
        CHECK(rows.values(cols, cols) == x.values(0, cols));
        CHECK(rows.values(0, cols) == x.values(cols, cols));
        CHECK(rows.untouched(2 * cols, 4 * cols));
        table().unpermute(s, rows.src(), row_of.data(), y.dst(), nullptr);
        CHECK(y.values(0, 2 * cols) == x.values(0, 2 * cols));
        CHECK(y.values(2 * cols, cols) == Vec(static_cast<std::size_t>(cols), 0.0));
        Tensor copies(Type::f32, 6 * cols);
        table().unpermute({3, cols, 2, true}, rows.src(), row_of.data(), copies.dst(), nullptr);
        CHECK(copies.values(0, cols) == x.values(0, cols));
        CHECK(copies.values(cols, cols) == Vec(static_cast<std::size_t>(cols), 0.0));
    }
}

TEST_CASE("balance: experts filled up to their capacity start at its multiples, and rows without a token are zero") {
    const Index index{2, 0, 2, -1, 0, 2};
    Index counts(3, -1), row_of(6, -7), filled(3, -1);
    table().permute_map(index.data(), counts.data(), row_of.data(), filled.data(), 3, 2, 3, 4, nullptr);
    CHECK(counts == Index{2, 0, 3});
    CHECK(filled == Index{4, 4, 4});
    CHECK(row_of == Index{8, 0, 9, -1, 1, 10});
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const std::int64_t cols : {1, 40}) {
            Random random("filled up");
            const Tensor x = random.tensor(type, 3 * cols);
            Tensor rows(type, 13 * cols);
            PermuteShape s;
            s.tokens = 3, s.cols = cols, s.top_k = 2, s.padded_rows = 12;
            table().permute(s, x.src(), row_of.data(), rows.dst(), nullptr);
            Vec want(static_cast<std::size_t>(12 * cols), 0.0);
            for (std::size_t copy = 0; copy < 6; ++copy)
                for (std::int64_t c = 0; row_of[copy] >= 0 && c < cols; ++c)
                    want[static_cast<std::size_t>(row_of[copy] * cols + c)] =
                        x.at(static_cast<std::int64_t>(copy / 2) * cols + c);
            CHECK(rows.values(0, 12 * cols) == want);
            CHECK(rows.untouched(12 * cols, cols));
        }
    }
}

} // namespace moe::test
