// The capabilities of the engine's own stack, of those on Megatron Core and of the others.
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <array>

namespace moe::plan {
namespace {

constexpr std::string_view own_stack = "moe-plan";
constexpr std::array<std::string_view, 6> without_megatron{own_stack,   "torchtitan",  "torchtitan-0.2",
                                                           "automodel", "deepseek-v3", "llama3-paper"};

constexpr StackTraits own{
    .engine = StackEngine::own,
    .quantizes_by_rows = true,
    .emulates_precisions = true,
    .sets_first_gradients = true,
    .adds_to_shards = true,
    .reduces_bf16_copy = true,
    .adds_up_shards_of_tied_table = true,
    .shares_weights_of_chunks = true,
    .final_norm_with_mtp = true,
    .vocab_alignment = 128,
    .fuses_cross_entropy = true,
    .plans_worst_case_rows = true,
    .counts_load = true,
    .retries_overflow = true,
    .replicates_key_heads = true,
    .peer_memory_dispatch = true,
    .offloads_planned_rows = true,
    .runs_in_arena = true,
    .joins_devices = true,
    .takes_attention_scratch = true,
    .counts_first_copy = true,
    .measures_contention = true,
    .reserves_multiprocessors = true,
};

constexpr StackTraits megatron{
    .engine = StackEngine::megatron,
    .replicates_key_heads = true,
    .keeps_norm_with_product = true,
    .scans_in_one_op = true,
    .recompute_keeps_core = true,
    .holds_dispatcher_buffers = true,
    .holds_deep_ep_buffers = true,
    .optimizer_copies = true,
};

constexpr StackTraits other{
    .engine = StackEngine::other,
    .scans_in_one_op = true,
    .holds_dispatcher_buffers = true,
};

} // namespace

const StackTraits& stack_traits(std::string_view stack) {
    if (stack == own_stack) return own;
    const bool others = std::any_of(without_megatron.begin(), without_megatron.end(), [stack](std::string_view name) {
        return stack.starts_with(name) && (stack.size() == name.size() || stack[name.size()] == ',');
    });
    return others ? other : megatron;
}

} // namespace moe::plan
