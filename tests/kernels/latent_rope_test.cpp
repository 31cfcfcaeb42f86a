// The rotation of latent queries and keys beside that of whole heads, and its gradient as the transposed map.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

namespace moe::test {
namespace {

Tensor wide(Random& random, std::int64_t elements) { return random.tensor(Type::f32, elements); }

} // namespace

TEST_CASE("latent_rope: the columns that turn are those of mla_rope, and its gradient is the transposed map") {
    MlaRopeShape s{4, 2, 3, 5, 4, 6, 7};
    Random random("latent_rope");
    const std::int64_t wide_row = s.kv_lora + s.rope, qk = s.nope + s.rope;
    const Tensor q = wide(random, s.tokens * s.heads * qk), absorbed = wide(random, s.tokens * s.heads * s.kv_lora),
                 latent = wide(random, s.tokens * s.kv_lora), down = wide(random, s.tokens * wide_row),
                 kv = wide(random, s.tokens * s.heads * (s.nope + s.v));
    const Index positions{3, 11};
    Tensor q_out(Type::f32, s.tokens * s.heads * wide_row), k(Type::f32, s.tokens * wide_row);
    table().latent_rope(s, q.src(), absorbed.src(), latent.src(), down.src(), positions.data(), q_out.dst(), k.dst(),
                        nullptr);
    Tensor turned(Type::f32, q.size()), keys(Type::f32, q.size()), values(Type::f32, s.tokens * s.heads * s.v);
    table().mla_rope(s, q.src(), kv.src(), down.src(), positions.data(), turned.dst(), keys.dst(), values.dst(),
                     nullptr);
    for (std::int64_t row = 0; row < s.tokens * s.heads; ++row) {
        CHECK(q_out.values(row * wide_row, s.kv_lora) == absorbed.values(row * s.kv_lora, s.kv_lora));
        CHECK(relative_error(q_out.values(row * wide_row + s.kv_lora, s.rope),
                             turned.values(row * qk + s.nope, s.rope)) < 1e-6);
        const std::int64_t token = row / s.heads;
        CHECK(k.values(token * wide_row, s.kv_lora) == latent.values(token * s.kv_lora, s.kv_lora));
        CHECK(relative_error(k.values(token * wide_row + s.kv_lora, s.rope), keys.values(row * qk + s.nope, s.rope)) <
              1e-6);
    }
    const Tensor dq_out = wide(random, q_out.size()), dk = wide(random, k.size()),
                 dq_nope = wide(random, s.tokens * s.heads * s.nope);
    Tensor dq(Type::f32, q.size()), dlatent(Type::f32, latent.size()), ddown(Type::f32, down.size());
    table().latent_rope_grad(s, dq_out.src(), dk.src(), dq_nope.src(), positions.data(), dq.dst(), dlatent.dst(),
                             ddown.dst(), nullptr);
    // Of columns that turn, products with the gradient before and behind the map are the same.
    double before = 0.0, behind = 0.0;
    for (std::int64_t row = 0; row < s.tokens * s.heads; ++row) {
        CHECK(dq.values(row * qk, s.nope) == dq_nope.values(row * s.nope, s.nope));
        for (std::int64_t c = 0; c < s.rope; ++c) {
            before += q.at(row * qk + s.nope + c) * dq.at(row * qk + s.nope + c);
            behind += q_out.at(row * wide_row + s.kv_lora + c) * dq_out.at(row * wide_row + s.kv_lora + c);
        }
    }
    CHECK(before == doctest::Approx(behind).epsilon(1e-5));
    before = behind = 0.0;
    for (std::int64_t token = 0; token < s.tokens; ++token) {
        CHECK(dlatent.values(token * s.kv_lora, s.kv_lora) == dk.values(token * wide_row, s.kv_lora));
        CHECK(ddown.untouched(token * wide_row, s.kv_lora));
        for (std::int64_t c = s.kv_lora; c < wide_row; ++c) {
            before += down.at(token * wide_row + c) * ddown.at(token * wide_row + c);
            behind += k.at(token * wide_row + c) * dk.at(token * wide_row + c);
        }
    }
    CHECK(before == doctest::Approx(behind).epsilon(1e-5));
}

} // namespace moe::test
