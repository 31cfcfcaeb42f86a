// Sparse attention at the widths that Hopper's tensor cores take, beside the CPU's kernels: latents of 512 and 64
// columns, an indexer's heads of 128.
#include "tests/kernels/cuda_packs.hpp"

#include <algorithm>
#include <cmath>

namespace moe::test {
namespace {

constexpr int latent = 576, value = 512, index_wide = 128;
constexpr double scale = 0.07, index_scale = 0.02;

// Lists as an indexer might leave them: in order, of which every third row lacks one.
Index lists_of(const PickedKeys& z, Random& random) {
    Index all;
    for (std::int64_t row = 0; row < z.rows(); ++row) {
        const std::int64_t seen = z.position(row / z.batch) + 1;
        std::int64_t need = std::min(seen, z.top_k) - (row % 3 == 2 && seen > 1 ? 1 : 0), left = z.top_k;
        for (std::int64_t at = 0; at < seen && need > 0; ++at) {
            if (random.below(static_cast<std::int32_t>(seen - at)) >= need) continue;
            all.push_back(static_cast<std::int32_t>(at));
            --need, --left;
        }
        all.insert(all.end(), static_cast<std::size_t>(left), -1);
    }
    return all;
}

std::string describe(const PickedKeys& z, int heads) {
    return fmt::format("heads={} batch={} seq={} keys={} top_k={} part={}/{}", heads, z.batch, z.seq_q, z.seq_k,
                       z.top_k, z.part, z.parts);
}

// Fewer heads than a tile, more than one; lists that end within a tile, and beyond one; members of CP.
struct Sized {
    PickedKeys z;
    int heads, index_heads;
};
const std::vector<Sized>& sizes() {
    static const std::vector<Sized> all{{{1, 70, 70, 96}, 5, 64},
                                        {{2, 90, 90, 40}, 72, 32},
                                        {{1, 64, 192, 65, 1, 3}, 16, 8},
                                        {{1, 300, 300, 130}, 64, 64}};
    return all;
}

} // namespace

TEST_CASE("attention_picked of latents on tensor cores agrees with the CPU, and its gradients") {
    for (const Sized& size : sizes()) {
        const PickedKeys& z = size.z;
        Random random("picked latents " + describe(z, size.heads));
        const LatentShape s{z, size.heads, latent, value, scale};
        const std::int64_t heads = z.rows() * size.heads;
        const Tensor q = random.tensor(Type::bf16, heads * latent),
                     k = random.tensor(Type::bf16, z.batch * z.seq_k * latent),
                     dout = random.tensor(Type::bf16, heads * value);
        const Index keys = lists_of(z, random);
        Tensor o(Type::bf16, heads * value), lse(Type::f32, heads);
        cpu_kernels().attention_picked(s, q.src(), k.src(), keys.data(), o.dst(), lse.f32(), nullptr);
        compare("attention_picked " + describe(z, size.heads), [&](const Kernels& table) {
            Outputs out{{Type::bf16, heads * value}, {Type::f32, heads}};
            table.attention_picked(s, q.src(), k.src(), keys.data(), out[0].dst(), out[1].f32(), nullptr);
            return out;
        });
        compare("attention_picked_grad " + describe(z, size.heads), [&](const Kernels& table) {
            Outputs out{{Type::bf16, q.size()}, {Type::bf16, k.size()}};
            table.attention_picked_grad(s, dout.src(), q.src(), k.src(), o.src(), lse.f32(), keys.data(), out[0].dst(),
                                        out[1].dst(), nullptr);
            return out;
        });
    }
}

TEST_CASE("gradients of picked latents have the same bits every time") {
    const PickedKeys z{1, 400, 400, 128};
    Random random("picked latents, repeated");
    const LatentShape s{z, 64, latent, value, scale};
    const std::int64_t heads = z.rows() * s.heads;
    const Tensor q = random.tensor(Type::bf16, heads * latent), k = random.tensor(Type::bf16, z.seq_k * latent),
                 dout = random.tensor(Type::bf16, heads * value);
    const Index keys = lists_of(z, random);
    Tensor o(Type::bf16, heads * value), lse(Type::f32, heads);
    table().attention_picked(s, q.src(), k.src(), keys.data(), o.dst(), lse.f32(), nullptr);
    std::vector<Vec> seen;
    for (int repeat = 0; repeat < 3; ++repeat) {
        Tensor dq(Type::bf16, q.size()), dk(Type::bf16, k.size());
        table().attention_picked_grad(s, dout.src(), q.src(), k.src(), o.src(), lse.f32(), keys.data(), dq.dst(),
                                      dk.dst(), nullptr);
        Vec all = dq.values();
        const Vec of_keys = dk.values();
        all.insert(all.end(), of_keys.begin(), of_keys.end());
        seen.push_back(all);
    }
    CHECK(seen[0] == seen[1]);
    CHECK(seen[0] == seen[2]);
}

// Whole numbers, whose scores are exact in any order of sums, and of which many are equal.
TEST_CASE("pick_keys on tensor cores picks what the CPU picks, of equal scores those at lower positions") {
    for (const Sized& size : sizes())
        for (const bool documents : {false, true}) {
            PickedKeys z = size.z;
            Random random("picked on tensor cores " + describe(z, size.index_heads));
            const auto whole = [&](std::int64_t n, std::int32_t most) {
                Vec x(static_cast<std::size_t>(n));
                for (double& one : x) one = random.below(2 * most + 1) - most;
                return Tensor(Type::bf16, x);
            };
            const Tensor q = whole(z.rows() * size.index_heads * index_wide, 1),
                         k = whole(z.batch * z.seq_k * index_wide, 1), w = whole(z.rows() * size.index_heads, 2);
            Index starts;
            for (std::int64_t row = 0; row < z.rows(); ++row)
                starts.push_back(static_cast<std::int32_t>(z.position(row / z.batch) / 50 * 50));
            z.top_k = std::min<std::int64_t>(z.top_k, 40);
            if (documents) z.document_start = starts.data();
            const IndexShape s{z, size.index_heads, index_wide, 1.0 / 64.0};
            Index want(static_cast<std::size_t>(z.rows() * z.top_k), -7), got = want;
            cpu_kernels().pick_keys(s, q.src(), k.src(), w.src(), want.data(), nullptr);
            table().pick_keys(s, q.src(), k.src(), w.src(), got.data(), nullptr);
            INFO(describe(z, size.index_heads), " documents=", documents);
            CHECK(want == got);
        }
}

TEST_CASE("pick_keys_grad on tensor cores agrees with the CPU, over picked keys and over all") {
    for (const Sized& size : sizes())
        for (const bool all : {false, true}) {
            const PickedKeys& z = size.z;
            Random random("indexer's loss on tensor cores " + describe(z, size.heads));
            IndexLossShape s;
            s.index = {z, size.index_heads, index_wide, index_scale};
            s.core = {z, size.heads, latent, value, scale};
            s.all_heads = 2 * size.heads, s.all_keys = all, s.factor = 0.01;
            const Tensor q = random.tensor(Type::bf16, z.rows() * size.heads * latent),
                         k = random.tensor(Type::bf16, z.batch * z.seq_k * latent),
                         index_q = random.tensor(Type::bf16, z.rows() * size.index_heads * index_wide),
                         index_k = random.tensor(Type::bf16, z.batch * z.seq_k * index_wide),
                         w = random.tensor(Type::bf16, z.rows() * size.index_heads);
            const Index keys = lists_of(z, random);
            compare(fmt::format("pick_keys_grad {} all={}", describe(z, size.heads), all), [&](const Kernels& table) {
                Outputs out{{Type::bf16, index_q.size()}, {Type::bf16, index_k.size()},
                            {Type::bf16, w.size()},       {Type::f32, Vec{0.0}},
                            {Type::f32, Vec{0.0}},        {Type::bf16, z.rows() * s.width()}};
                Tensor work(Type::f32, s.work()), p(Type::f32, z.rows() * s.width());
                for (const bool parts : {false, true})
                    table.pick_keys_grad(s, q.src(), k.src(), index_q.src(), index_k.src(), w.src(),
                                         all ? nullptr : keys.data(), out[0].dst(), out[1].dst(), out[2].dst(),
                                         work.f32(), out[parts ? 4 : 3].f32(), parts ? p.f32() : nullptr, nullptr);
                out[3].set(0, 1.0 + out[3].at(0)), out[4].set(0, 1.0 + out[4].at(0)); // Divergences are small.
                for (std::int64_t i = 0; i < p.size(); ++i) out[5].set(i, p.at(i));
                return out;
            });
        }
}

} // namespace moe::test
