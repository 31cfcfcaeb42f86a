// Moves weight gradients behind the start of the communication that they then run beside.
#include "planner/lower/passes/delay_wgrad.hpp"

#include "planner/program/peer_blocks.hpp"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

namespace moe::passes {

namespace {

bool of_attention(program::Module module) {
    return module == program::Module::attn_in || module == program::Module::mla_up_proj ||
           module == program::Module::attn_out;
}

bool of_experts(const program::Op& op) {
    return op.phase == program::Phase::wgrad && op.module == program::Module::experts;
}

// Tokens over peer memory travel by the multiprocessors that the products of [begin, exchange] which move behind their
// departure leave them.
void run_beside(std::vector<program::Op>& ops, std::size_t begin, std::size_t exchange) {
    if (ops[exchange].kind != program::OpKind::combine_tokens) return;
    std::get<program::RowsAttr>(ops[exchange].attr).beside = true;
    for (std::size_t i = begin; i < exchange; ++i)
        if (auto* product = std::get_if<program::GroupedGemmAttr>(&ops[i].attr);
            product != nullptr && of_experts(ops[i]))
            product->reserved_sms = program::peer_blocks_beside;
}

// Moves what `delayed` picks from [begin, until] behind ops[until], in order.
template <class Pick>
void move_behind(std::vector<program::Op>& ops, std::size_t begin, std::size_t until, Pick delayed) {
    const auto first = ops.begin() + static_cast<std::ptrdiff_t>(begin),
               last = ops.begin() + static_cast<std::ptrdiff_t>(until) + 1;
    std::stable_partition(first, last, [&](const program::Op& op) { return !delayed(op); });
}

} // namespace

void delay_wgrad_pass(program::Template& backward) {
    std::vector<program::Op>& ops = backward.ops;
    for (std::size_t begin = 0; begin < ops.size();) {
        const int layer = ops[begin].layer;
        std::size_t end = begin, exchange = ops.size();
        bool weights = false; // whether gradients of experts' weights came; the exchange before brings their inputs
        for (; end < ops.size() && ops[end].layer == layer; ++end) {
            weights =
                weights || (ops[end].phase == program::Phase::wgrad && ops[end].module == program::Module::experts);
            const bool leaves = ops[end].kind == program::OpKind::all_to_all_rows ||
                                ops[end].kind == program::OpKind::all_to_all_slots ||
                                ops[end].kind == program::OpKind::combine_tokens;
            if (weights && exchange == ops.size() && leaves) exchange = end;
        }
        if (exchange < end) {
            run_beside(ops, begin, exchange);
            move_behind(ops, begin, exchange, of_experts);
        }
        begin = end;
    }
    const auto send =
        std::find_if(ops.rbegin(), ops.rend(), [](const program::Op& op) { return op.kind == program::OpKind::send; });
    if (send == ops.rend()) return;
    const std::size_t until = static_cast<std::size_t>(std::distance(send, ops.rend())) - 1;
    std::size_t begin = until;
    while (begin > 0 && ops[begin - 1].layer == ops[until - 1].layer) --begin;
    move_behind(ops, begin, until,
                [](const program::Op& op) { return op.phase == program::Phase::wgrad && of_attention(op.module); });
}

} // namespace moe::passes
