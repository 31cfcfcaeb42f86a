// Experts over many ranks and several NVLink domains: what one rank trains, with one copy of a token to each domain.
#include "engine/backends/backends.hpp"
#include "engine/ops/backend.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "tests/engine/train/parity.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <atomic>
#include <set>

using namespace moe;

namespace {

// 64 small experts, of which each token has six.
std::shared_ptr<const model::Model> many_experts() {
    return small_model("qwen3", {{"num_hidden_layers", "2"},
                                 {"num_experts", "64"},
                                 {"num_experts_per_tok", "6"},
                                 {"moe_intermediate_size", "8"}});
}

plan::Plan plan_over(int ranks, const Fields& fields) { return small_plan(many_experts(), ranks, fields, {8, 64}); }

// Rows of tokens that ranks sent to other domains in forward passes; the pairs of a token and another domain that has
// some of its experts; and the copies for experts of other domains.
struct Sent {
    std::atomic<std::int64_t> rows{0}, pairs{0}, copies{0};
};
Sent sent;

void count_slots(const ops::OpContext& c) {
    const auto& attr = std::get<program::RowsAttr>(c.op.attr);
    if (c.op.phase == program::Phase::forward && !attr.combine && attr.cols == c.input(0).cols &&
        c.input(0).dtype == program::Dtype::f32 && attr.cols > 6) // not the weights, six to a token
        for (int to = 0; to < attr.ep; ++to)
            if (to != c.position.expert_domain)
                sent.rows += static_cast<const std::int32_t*>(c.in[1])[c.position.expert_domain * attr.ep + to];
    backends::backend_named("cpu").function(c.op.kind)(c);
}

void count_choices(const ops::OpContext& c) {
    const auto& attr = std::get<program::RowsAttr>(c.op.attr);
    const auto* index = static_cast<const std::int32_t*>(c.in[0]);
    const std::int64_t top_k = c.input(0).cols;
    for (std::int64_t t = 0; c.op.phase == program::Phase::forward && t < c.input(0).rows; ++t) {
        std::set<int> others;
        for (std::int64_t k = 0; k < top_k; ++k) {
            const int domain = index[t * top_k + k] / (attr.experts / attr.ep);
            if (domain == c.position.expert_domain) continue;
            others.insert(domain);
            ++sent.copies;
        }
        sent.pairs += static_cast<std::int64_t>(others.size());
    }
    backends::backend_named("cpu").function(c.op.kind)(c);
}

} // namespace

TEST_CASE("domains: 16 to 64 ranks train what one rank trains") {
    const Trained expected = train_three(plan_over(1, {}));
    struct Case {
        int ranks;
        Fields fields;
        int inner;
    };
    const Case cases[] = {{16, {{"ep", "16"}, {"domain", "4"}}, 4},
                          {16, {{"ep", "8"}, {"pp", "2"}, {"domain", "2"}}, 2},
                          {32, {{"ep", "32"}, {"domain", "32"}}, 8}, // one domain, more ranks than read each other's
                          {64, {{"ep", "64"}, {"domain", "8"}}, 8},
                          {64, {{"ep", "16"}, {"tp", "2"}, {"domain", "8"}, {"capacity", "1.25"}}, 8}};
    for (const auto& [ranks, fields, inner] : cases) {
        Fields all{{"dispatcher", "hybridep"}};
        all.insert(all.end(), fields.begin(), fields.end());
        const plan::Plan plan = plan_over(ranks, all);
        INFO(ranks, " ranks ", words_of(all));
        CHECK(plan::expert_inner(plan) == inner);
        const Trained got = train_three(plan);
        CHECK(disagreement(got, expected, parity_tolerance, parity_tolerance) == "");
        CHECK(got.routed == expected.routed);
    }
}

TEST_CASE("domains: a token crosses once to each other domain that has some of its experts, and comes back the same") {
    ops::Backend counting = backends::backend_named("cpu");
    counting.table[static_cast<std::size_t>(program::OpKind::all_to_all_slots)] = count_slots;
    counting.table[static_cast<std::size_t>(program::OpKind::token_domains)] = count_choices;
    for (const char* domain : {"1", "2", "4"}) {
        CAPTURE(domain);
        const plan::Plan plan = plan_over(16, {{"dispatcher", "hybridep"}, {"ep", "16"}, {"domain", domain}});
        sent.rows = sent.pairs = sent.copies = 0;
        const Trained got = train_three(plan, 1, &counting);
        CHECK(sent.pairs > 0);
        CHECK(sent.rows == sent.pairs);
        CHECK(sent.copies > sent.pairs);
        check_bits(got, train_three(plan)); // whatever the threads' timing was
    }
}
