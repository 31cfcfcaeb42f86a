// The capabilities of each stack.
#include "planner/model/model.hpp"
#include "planner/plan/stack_traits.hpp"

#include <doctest/doctest.h>

using namespace moe;

TEST_CASE("the engine's own stack, Megatron Core and other software have capabilities of their own") {
    const plan::StackTraits &own = plan::stack_traits("moe-plan"), &megatron = plan::stack_traits("bridge-26.08"),
                            &torch = plan::stack_traits("torchtitan");
    CHECK(own.engine == plan::StackEngine::own);
    CHECK(megatron.engine == plan::StackEngine::megatron);
    CHECK(torch.engine == plan::StackEngine::other);
    // Our stack alone has these.
    for (const plan::StackTraits* traits : {&own, &megatron, &torch}) {
        const bool ours = traits == &own;
        CHECK(traits->runs_in_arena == ours);
        CHECK(traits->retries_overflow == ours);
        CHECK(traits->sets_first_gradients == ours);
        CHECK(traits->peer_memory_dispatch == ours);
        CHECK(traits->holds_dispatcher_buffers != ours);
    }
    // Megatron's alone.
    for (const plan::StackTraits* traits : {&own, &megatron, &torch}) {
        CHECK(traits->optimizer_copies == (traits == &megatron));
        CHECK(traits->recompute_keeps_core == (traits == &megatron));
        CHECK(traits->holds_deep_ep_buffers == (traits == &megatron));
    }
}

TEST_CASE("features behind a stack's name leave a published stack what it is") {
    CHECK(plan::stack_traits("bridge-26.08,no-fused_router").engine == plan::StackEngine::megatron);
    CHECK(plan::stack_traits("torchtitan,no-fused_router").engine == plan::StackEngine::other);
    CHECK(plan::stack_traits("somebody's").engine == plan::StackEngine::megatron);
}

TEST_CASE("our stack fills each rank's vocabulary up to 128 rows beyond what the model asks") {
    plan::Plan plan;
    model::Model model;
    model.vocab = 32000, model.vocab_divisor = 1187;
    plan.model = std::make_shared<const model::Model>(model);
    plan.stack = "bridge-26.08";
    CHECK(plan.padded_vocab() == 27 * 1187);
    plan.stack = "moe-plan";
    CHECK(plan.padded_vocab() == 251 * 128);
    plan.tp = 4;
    CHECK(plan.padded_vocab() == 65 * 128 * 4); // 7 * 1187 * 4 = 33,236 asked
    model.vocab_divisor = 128;
    plan.model = std::make_shared<const model::Model>(model);
    CHECK(plan.padded_vocab() == model.padded_vocab(4));
}
