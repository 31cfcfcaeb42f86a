// Dispatch in two levels: a token goes once to each NVLink domain that has some of its experts, to the rank of its own
// rank's place there, and on from there within the domain. Sums over a domain's experts come back the same way.
#include "planner/lower/layers/layers.hpp"

#include "planner/machine/hardware.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/routing.hpp"
#include "planner/program/slot_chunks.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace moe::layers {

bool MoeLayer::two_levels(const emit::Builder& b) const {
    return over_peers(b) && plan::expert_inner(b.plan()) < b.plan().ep;
}

MoeLayer::Level MoeLayer::level(const emit::Builder& b) const {
    const plan::Plan& plan = b.plan();
    if (!two_levels(b)) return {b.local_tokens(), moe_.experts, plan.ep, 1, emit::groups::dispatch};
    const int inner = plan::expert_inner(plan), domains = plan.ep / inner;
    return {slot_rows(b, domains) * domains, moe_.experts / domains, inner, domains, emit::groups::expert_inner};
}

// Tokens of this rank that go to some domain, summed over the domains: expected ones.
double MoeLayer::tokens_sent(const emit::Builder& b, int domains) const {
    return static_cast<double>(b.local_tokens()) *
           plan::distinct_destinations(moe_.experts, moe_.top_k, domains, moe_.router);
}

// Planned rows of what goes to one domain: those of all tokens, or the planned capacity over what is expected.
std::int64_t MoeLayer::slot_rows(const emit::Builder& b, int domains) const {
    const double capacity = b.plan().capacity;
    if (capacity <= 0.0) return b.local_tokens();
    const auto planned = static_cast<std::int64_t>(std::ceil(capacity * tokens_sent(b, domains) / domains / 128.0));
    return std::min(b.local_tokens(), planned * 128);
}

program::RowsAttr MoeLayer::slots_attr(const emit::Builder& b, std::int64_t cols, bool back) const {
    const int domains = level(b).domains;
    return {cols, slot_rows(b, domains), moe_.experts, domains, 1, back};
}

// x[T, C] -> [D*S, C]: every token in the slot of each domain that it goes to.
program::TensorId MoeLayer::into_slots(emit::Builder& b, program::TensorId x, const std::string& name) {
    const int domains = level(b).domains;
    const program::Tensor own = b.at(x);
    const program::TensorId slots =
        b.tensor(name + ".leaving", own.dtype, level(b).tokens, own.cols, tokens_sent(b, domains));
    b.emit(program::OpKind::permute, {x, slot_of_}, {slots},
           program::PermuteAttr{own.rows, own.cols, domains, domains, false, true});
    return slots;
}

// CPUs send the rows that there are. GPUs of one host send chunks where that gains, by kernels that count the rows.
// Across hosts they do so too where NCCL drives the network from the device, which has not run: whole slots are priced
// there.
program::TensorId MoeLayer::exchange_slots(emit::Builder& b, program::TensorId slots, bool back,
                                           const std::string& name) {
    const program::Tensor own = b.at(slots);
    const int domains = level(b).domains;
    const program::TensorId out = b.tensor(name, own.dtype, own.rows, own.cols, tokens_sent(b, domains));
    const machine::Hardware& hardware = *b.plan().hardware;
    const double each = tokens_sent(b, domains) / domains;
    const std::int64_t slot = slot_rows(b, domains);
    const bool chunks = b.plan().gpus <= hardware.gpus_per_node && program::chunks_gain(each, slot);
    const std::int64_t moved =
        chunks ? domains * program::rows_in_chunks(static_cast<std::int64_t>(std::ceil(each)), slot) : own.rows;
    b.communicate(program::OpKind::all_to_all_slots, emit::groups::expert_outer, program::Stream::expert,
                  {slots, domain_counts_}, {out}, slots_attr(b, own.cols, back))
        .bytes =
        hardware.cpu ? b.at(out).expected_bytes() : static_cast<double>(moved * program::bytes_of(own.dtype, own.cols));
    return out;
}

// [D*S, C] -> y[T, C]: sums of what came back, over the domains in their order.
void MoeLayer::out_of_slots(emit::Builder& b, program::TensorId slots, program::TensorId y) {
    const int domains = level(b).domains;
    b.emit(program::OpKind::unpermute, {slots, slot_of_}, {y},
           program::PermuteAttr{b.at(y).rows, b.at(y).cols, domains, domains, false, true});
}

// Counts and choices go first: what a domain's ranks then exchange among themselves is known before the tokens come.
void MoeLayer::route_domains(emit::Builder& b) {
    const Level inner = level(b);
    const program::RowsAttr attr = slots_attr(b, 1, false);
    const auto behind = [&b](program::OpKind kind, program::Operands in, program::Operands out,
                             const program::Attr& of) {
        b.emit(kind, std::move(in), std::move(out), of).stream = program::Stream::expert;
    };
    const program::TensorId counts = b.tensor("domain_counts", program::Dtype::i32, inner.domains, 1);
    slot_of_ = b.tensor("slot_of", program::Dtype::i32, b.local_tokens() * inner.domains, 1);
    program::Operands places{counts, slot_of_};
    if (attr.capacity < b.local_tokens()) places.push_back(b.program().io.overflow);
    b.emit(program::OpKind::token_domains, {kept_}, places, attr);
    domain_counts_ = b.tensor("all_domain_counts", program::Dtype::i32, inner.domains, inner.domains);
    b.communicate(program::OpKind::all_gather, emit::groups::expert_outer, program::Stream::expert, {counts},
                  {domain_counts_});
    const program::TensorId chosen =
        exchange_slots(b, into_slots(b, kept_, "expert_index"), false, "expert_index.arrived");
    const program::TensorId index = b.tensor("expert_index.domain", program::Dtype::i32, inner.tokens, moe_.top_k);
    behind(program::OpKind::domain_experts, {chosen, domain_counts_}, {index}, attr);
    counts_ = b.tensor("expert_counts.domain", program::Dtype::i32, inner.experts, 1);
    row_of_ = b.tensor("row_of.domain", program::Dtype::i32, inner.tokens * moe_.top_k, 1);
    behind(program::OpKind::permute_map, {index}, {counts_, row_of_},
           program::PermuteAttr{inner.tokens, width(), moe_.top_k, inner.experts, false, true});
    const program::RowsAttr rows{1, capacity(b), inner.experts, inner.ep, 1, false};
    if (inner.ep == 1) return fit_rows(b, counts_, rows);
    all_counts_ = b.tensor("all_counts", program::Dtype::i32, inner.ep, inner.experts);
    b.communicate(program::OpKind::all_gather, inner.group, program::Stream::expert, {counts_}, {all_counts_});
    fit_rows(b, all_counts_, rows);
    counts_ = b.tensor("local_counts", program::Dtype::i32, inner.experts / inner.ep, 1);
    behind(program::OpKind::expert_counts, {all_counts_}, {counts_}, rows);
}

MoeLayer::Rows MoeLayer::dispatch_domains(emit::Builder& b, program::TensorId x, program::TensorId weight,
                                          const std::string& name) {
    const Level inner = level(b);
    const bool forward = weight != program::no_tensor;
    const program::TensorId leaving = into_slots(b, x, name + ".tokens"),
                            weights = forward ? into_slots(b, weight, name + ".weights") : program::no_tensor;
    const program::TensorId tokens = exchange_slots(b, leaving, false, name + ".tokens.arrived");
    const program::TensorId arrived =
        forward ? exchange_slots(b, weights, false, name + ".weights.arrived") : program::no_tensor;
    if (inner.ep > 1) return dispatch_over_peers(b, tokens, arrived, name);
    const std::int64_t cap = capacity(b);
    const double expected = routed_rows(b);
    // Copies that other domains have are not read.
    const auto pick = [&](program::TensorId from, program::TensorId rows, std::int64_t cols, bool per_copy) {
        program::Op& op = b.emit(program::OpKind::permute, {from, row_of_}, {rows},
                                 program::PermuteAttr{inner.tokens, cols, moe_.top_k, inner.experts, per_copy, true});
        op.bytes = 2.0 * b.at(rows).expected_bytes();
        op.stream = program::Stream::expert;
    };
    Rows out{b.activation(name, cap, width(), expected)};
    pick(tokens, out.rows, width(), false);
    if (!forward) return out;
    out.probs = b.tensor(name + ".probs", program::Dtype::f32, cap, 1, expected);
    pick(arrived, out.probs, 1, true);
    return out;
}

MoeLayer::Rows MoeLayer::combine_domains(emit::Builder& b, Rows rows, const std::string& name) {
    const Level inner = level(b);
    const bool values = rows.probs != program::no_tensor;
    Rows sums;
    if (inner.ep > 1) {
        sums = combine_over_peers(b, rows, name + ".domain");
    } else {
        const auto sum = [&](program::TensorId from, program::TensorId to, std::int64_t cols, bool per_copy) {
            b.emit(program::OpKind::unpermute, {from, row_of_}, {to},
                   program::PermuteAttr{inner.tokens, cols, moe_.top_k, inner.experts, per_copy, true})
                .stream = program::Stream::expert;
        };
        sums.rows = b.activation(name + ".domain", inner.tokens, width());
        sum(rows.rows, sums.rows, width(), false);
        if (values) sums.probs = b.tensor("dweight.domain", program::Dtype::f32, inner.tokens, moe_.top_k);
        if (values) sum(rows.probs, sums.probs, 1, true);
    }
    const program::TensorId back = exchange_slots(b, sums.rows, true, name + ".returned"),
                            weights =
                                values ? exchange_slots(b, sums.probs, true, "dweight.returned") : program::no_tensor;
    Rows out{b.activation(name, b.local_tokens(), width())};
    out_of_slots(b, back, out.rows);
    if (!values) return out;
    // A copy has a value in one domain and zero in the others.
    out.probs = b.tensor("dweight", program::Dtype::f32, b.local_tokens(), moe_.top_k);
    out_of_slots(b, weights, out.probs);
    return out;
}

} // namespace moe::layers
