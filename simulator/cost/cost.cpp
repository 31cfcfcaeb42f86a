// Chooses the formula of an op: measured calls where the hardware has them, else physics.
#include "simulator/cost/cost.hpp"
#include "simulator/cost/alignment.hpp"
#include "simulator/cost/block_scaled.hpp"

#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/routing.hpp"
#include "planner/plan/stack_traits.hpp"
#include "planner/program/communicators.hpp"
#include "planner/program/measured.hpp"
#include "planner/program/peer_blocks.hpp"
#include "planner/program/program.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

namespace moe::cost {

CostModel::CostModel(const plan::Plan& plan, const stack::Stack& stack, const Machine& machine)
    : plan_(plan), stack_(stack), machine_(machine) {
    const plan::Routing routing = plan::routing_from_string(plan.routing);
    if (routing.kind != plan::RoutingKind::balanced && routing.kind != plan::RoutingKind::load)
        fail("routing {}: a distribution has no price, only the loads that it gives (simulator/routing)", plan.routing);
    spread_ = routing.spread;
}

GroupLinks CostModel::links(plan::Group group) const {
    const auto known =
        std::find_if(links_.begin(), links_.end(), [group](const auto& of) { return of.first == group; });
    if (known != links_.end()) return known->second;
    const Placement placement = machine_.routes.placement(plan_, group);
    const GroupLinks found{
        placement,           machine_.routes.of(placement), plan_.hardware->nvlink, plan_.hardware->pcie,
        plan_.hardware->nic, stack_.costs.collective};
    links_.emplace_back(group, found);
    return found;
}

namespace {

struct MeasuredGroup {
    int members = 0;
    const std::vector<machine::MeasuredCall>* calls = nullptr;
};

// The calls of a family of collectives among as many members as were measured, nearest to those asked for.
MeasuredGroup nearest_group(const machine::Hardware& hardware, const std::string& family, int members) {
    MeasuredGroup best;
    const auto apart = [members](int size) { return std::abs(std::log2(static_cast<double>(size) / members)); };
    std::string prefix = program::group_key(family, 0);
    prefix.pop_back();
    for (auto it = hardware.measured.lower_bound(prefix);
         it != hardware.measured.end() && it->first.compare(0, prefix.size(), prefix) == 0; ++it) {
        int size = 0;
        std::from_chars(it->first.data() + prefix.size(), it->first.data() + it->first.size(), size);
        if (size < 2 || it->second.empty()) continue;
        if (best.calls == nullptr || apart(size) < apart(best.members)) best = {size, &it->second};
    }
    return best;
}

bool moves_tokens(const program::Op& op) {
    return op.kind == program::OpKind::dispatch_tokens || op.kind == program::OpKind::combine_tokens;
}

// The family that an op among devices was measured in.
std::string family_of(const plan::Plan& plan, const program::Op& op, bool merged) {
    if (moves_tokens(op)) {
        const bool beside = merged || std::get<program::RowsAttr>(op.attr).beside;
        return program::tokens_key(op, beside        ? program::peer_blocks_beside
                                       : plan.pp > 1 ? program::peer_blocks_in_pipeline
                                                     : program::peer_blocks_alone);
    }
    const bool counts = op.kind == program::OpKind::all_gather && op.stream == program::Stream::expert &&
                        op.group.axes != plan::axis::expert_outer &&
                        op.bytes <= static_cast<double>(program::most_gathered_over_peers);
    return counts && plan.dispatcher == plan::Dispatcher::hybridep ? program::peer_gather_key
                                                                   : program::to_string(op.kind);
}

double expected_rows(const program::Program& program, program::TensorId id) {
    return program.tensors[static_cast<std::size_t>(id)].expected_rows;
}

// A core has neither tiles nor waves: FLOPs at its rate, or bytes at its share of the memory.
double core_seconds(const machine::Hardware& hardware, const stack::StackCosts& costs, const program::Op& op,
                    machine::Precision precision) {
    const double rate = hardware.peak_flops[static_cast<std::size_t>(precision)]; // of one core
    const double compute = rate > 0.0 ? op.flops / rate : 0.0;
    return std::max(compute, op.bytes / (hardware.memory_bandwidth * costs.memory)) + costs.kernel_seconds;
}

double flop_rate(const plan::Plan& plan, double clock, const std::array<double, machine::precision_count>& efficiency,
                 machine::Precision precision) {
    const auto i = static_cast<std::size_t>(precision);
    const double rate = plan.hardware->peak_flops[i] * efficiency[i] * clock;
    if (!(rate > 0.0))
        refuse("precision {}: hardware {} has peak {} FLOP/s and the stack's efficiency there is {}: choose another "
               "precision",
               machine::to_string(precision), plan.hardware->name, plan.hardware->peak_flops[i], efficiency[i]);
    return rate;
}

} // namespace

double CostModel::compute_seconds(const program::Op& op, const program::Program& program) const {
    const machine::Hardware& hardware = *plan_.hardware;
    if (hardware.cpu) {
        const machine::Precision precision =
            op.kind == program::OpKind::gemm || op.kind == program::OpKind::grouped_gemm
                ? gemm_precision(op, program)
                : plan_.computed_in(plan_.precision);
        return core_seconds(hardware, stack_.costs, op, precision);
    }
    const double taken =
        std::max(plan_.ep_overlap ? stack_.costs.overlap_sm_share : 0.0, plan_.fsdp ? stack_.costs.fsdp_sm_share : 0.0);
    Rates rates{&hardware, &stack_.costs, 1.0 - taken, kernels_by_expert(plan_, stack_, op)};
    const bool fused = on_routed_rows(op) && stack::fuses_experts(plan_, stack_);
    rates.quantize_share = stack_.costs.quantize_share * (fused ? stack_.costs.fused_quantize_share : 1.0);
    if (const double s = block_scaled_seconds(rates, plan_, op, program); s > 0.0) return s;
    if (const auto* gemm = std::get_if<program::GemmAttr>(&op.attr)) {
        const double rate = flop_rate(plan_, stack_.costs.clock, stack_.costs.gemm, gemm_precision(op, program)) /
                            alignment_slowdown(stack_.costs, op, program);
        return gemm_seconds(rates, rate, gemm->batch, static_cast<double>(gemm->m), static_cast<double>(gemm->n),
                            static_cast<double>(gemm->k), op.bytes);
    }
    if (const auto* grouped = std::get_if<program::GroupedGemmAttr>(&op.attr)) {
        const machine::Precision precision = gemm_precision(op, program);
        const int experts = std::max(1, grouped->groups);
        // One local expert is a plain product; each further one takes the rate nearer to that of many.
        double rate = flop_rate(plan_, stack_.costs.clock, stack_.costs.gemm, precision);
        if (experts > 1) {
            const double many = flop_rate(plan_, stack_.costs.clock, stack_.costs.grouped_gemm, precision);
            rate *= std::pow(many / rate, 1.0 - 1.0 / experts);
        }
        rate /= alignment_slowdown(stack_.costs, op, program);
        const double rows = expected_rows(program, op.in.front()) / experts;
        const auto n = static_cast<double>(grouped->n), k = static_cast<double>(grouped->k),
                   groups = static_cast<double>(grouped->groups);
        const double apart = rates.own_kernels > 1.0 ? rates.own_kernels * stack_.costs.expert_seconds : 0.0;
        switch (grouped->mode) {
        case program::GroupedMode::forward:
            return apart + gemm_seconds(rates, rate, groups, rows, n, k, op.bytes, spread_);
        case program::GroupedMode::dgrad:
            return apart + gemm_seconds(rates, rate, groups, rows, k, n, op.bytes, spread_);
        case program::GroupedMode::wgrad:
            return apart + gemm_seconds(rates, rate, groups, n, k, rows, op.bytes);
        }
    }
    if (const auto* muon = std::get_if<program::MuonAttr>(&op.attr);
        muon != nullptr && op.kind == program::OpKind::newton_schulz)
        return newton_schulz_seconds(rates, *muon, op);
    if (std::holds_alternative<program::GroupedBiasAttr>(op.attr) && stack_.costs.weighted_bias_bytes >= 0.0)
        return expert_bias_seconds(rates, op, program, fused);
    const auto* attention = std::get_if<program::AttentionAttr>(&op.attr);
    const bool own = attention != nullptr &&
                     (attention->documents || attention->picked > 0 || op.kind == program::OpKind::pick_keys);
    if (own && plan::stack_traits(plan_).takes_attention_scratch)
        return own_attention_seconds(rates, op, gemm_precision(op, program));
    if (attention != nullptr) return attention_seconds(rates, op, gemm_precision(op, program));
    switch (op.kind) {
    case program::OpKind::delta_rule:
    case program::OpKind::delta_rule_grad:
    case program::OpKind::ssd:
    case program::OpKind::ssd_grad:
        return plan::stack_traits(plan_).takes_attention_scratch
                   ? own_state_seconds(rates, op, gemm_precision(op, program))
                   : attention_seconds(rates, op, gemm_precision(op, program));
    default:
        return memory_bound_seconds(rates, op);
    }
}

// Five iterations on every matrix, each three products in the precision of activations: X X^T, its square, and its
// product with X; beside them three flat kernels, and around the iterations five. Products wait for no others.
double CostModel::newton_schulz_seconds(const Rates& rates, const program::MuonAttr& muon,
                                        const program::Op& op) const {
    const double rate = flop_rate(plan_, stack_.costs.clock, stack_.costs.gemm, plan_.activations());
    const double s = muon.short_side, l = muon.long_side,
                 bytes = plan_.activations() == machine::Precision::fp32 ? 4.0 : 2.0;
    const auto product = [&](double m, double n, double k) {
        return gemm_seconds(rates, rate, 1.0, m, n, k, bytes * (m * k + k * n + m * n));
    };
    const double flat = bytes * (4.0 * s * s + 2.0 * s * l) / (rates.hardware->memory_bandwidth * stack_.costs.memory) +
                        3.0 * stack_.costs.kernel_seconds;
    const double iteration = product(s, s, l) + product(s, s, s) + product(s, l, s) + flat;
    return muon.matrices * (5.0 * iteration + 5.0 * stack_.costs.kernel_seconds) + memory_bound_seconds(rates, op);
}

// The bias of the experts' first product is added as the product is written out. The last one is multiplied by routing
// weights, in framework calls of each expert.
double CostModel::expert_bias_seconds(const Rates& rates, const program::Op& op, const program::Program& program,
                                      bool fused) const {
    const bool adds = op.kind == program::OpKind::grouped_bias_add;
    const bool weighted = op.in.size() > 3 && op.in[3] != program::no_tensor;
    if (adds && (fused || !weighted)) return 0.0;
    if (fused || !weighted) return memory_bound_seconds(rates, op);
    const program::Tensor& rows = program.tensors[static_cast<std::size_t>(op.in.front())];
    const double bytes = rows.expected_rows * static_cast<double>(rows.cols) *
                         (adds ? stack_.costs.weighted_bias_bytes : stack_.costs.weighted_bias_grad_bytes);
    return bytes / (rates.hardware->memory_bandwidth * stack_.costs.memory) +
           rates.own_kernels * stack_.costs.expert_seconds + stack_.costs.kernel_seconds;
}

namespace {

// Bytes of routing weights over those of a token that HybridEP sends: FP32 for every expert of the NVLink domain, with
// tokens on their way to the experts and with the gradients on their way back (DeepEP, branch hybrid-ep,
// hybrid_ep_backend.cuh: intra_node_prob_buffer; Megatron-LM, fused_a2a.py). Our own engine sends the weights of a
// token's choices alone.
double weights_beside(const program::Op& op, const program::RowsAttr& rows, const GroupLinks& group) {
    const bool backward = op.phase == program::Phase::dgrad || op.phase == program::Phase::wgrad;
    const bool apart = rows.cols == 1; // gradients of the weights, which the same kernel sends
    if (op.kind != program::OpKind::all_to_all_rows || apart || rows.combine != backward) return 0.0;
    const double experts = static_cast<double>(rows.experts) * group.placement.per_domain / group.placement.size;
    return 4.0 * experts / static_cast<double>(program::bytes_of(program::Dtype::bf16, rows.cols));
}

} // namespace

double CostModel::dispatch_seconds(const program::Op& op, const program::RowsAttr& rows, GroupLinks group) const {
    const char* name = plan::to_string(plan_.dispatcher);
    const auto found = stack_.costs.dispatcher.find(name);
    if (found == stack_.costs.dispatcher.end())
        refuse("dispatcher {}: stack {} states no efficiency for it: use one that it offers", name, stack_.name);
    group.efficiency = group.placement.domains > 1 ? found->second.nic : found->second.nvlink;
    if (plan_.dispatcher == plan::Dispatcher::alltoall) return all_to_all_seconds(group, op.bytes);
    // Two levels: what is left for this op is the way within one of so many domains.
    const int domains = std::max(1, plan_.ep / rows.ep);
    const model::Moe* moe = nullptr;
    for (const model::LayerKind& kind : plan_.model->kinds)
        if (kind.moe && kind.moe->experts == rows.experts * domains) moe = &*kind.moe;
    if (moe == nullptr) fail("op {}: no layer kind has {} experts", program::to_string(op.kind), rows.experts);
    const double copy = op.bytes / (moe->top_k * std::max(1, rows.etp));
    const double beside = plan_.dispatcher == plan::Dispatcher::hybridep ? weights_beside(op, rows, group) : 0.0;
    stack::LinkShares shares = found->second;
    if (rows.cols > 1 && shares.row > 0.0) { // the multiprocessors that send take so long for a row, however narrow
        const double per_byte = shares.row / stack_.costs.exchange_sms /
                                static_cast<double>(program::bytes_of(program::Dtype::bf16, rows.cols));
        shares.nvlink /= 1.0 + shares.nvlink * group.nvlink.bandwidth * per_byte;
    }
    return token_exchange_seconds(group, shares, copy * (1.0 + beside), *moe, domains);
}

double CostModel::communication_seconds(const program::Op& op, GroupLinks group) const {
    const bool dispatches = op.kind == program::OpKind::all_to_all_rows ||
                            op.kind == program::OpKind::dispatch_tokens || op.kind == program::OpKind::combine_tokens;
    if (const auto* rows = std::get_if<program::RowsAttr>(&op.attr); rows != nullptr && dispatches)
        return dispatch_seconds(op, *rows, group);
    switch (op.kind) {
    case program::OpKind::all_gather:
    case program::OpKind::all_gather_rows:
        return all_gather_seconds(group, op.bytes);
    case program::OpKind::reduce_scatter:
    case program::OpKind::reduce_scatter_rows:
        return reduce_scatter_seconds(group, op.bytes);
    case program::OpKind::all_reduce:
        return all_reduce_seconds(group, op.bytes);
    case program::OpKind::all_to_all:
    case program::OpKind::all_to_all_slots:
        return all_to_all_seconds(group, op.bytes);
    case program::OpKind::ring_exchange:
        return ring_step_seconds(group, op.bytes);
    case program::OpKind::send:
        return pair_seconds(group, op.bytes);
    default:
        return 0.0; // recv: the message's time is the sender's
    }
}

// A group of a measured size costs what was measured. Another one costs what the formula says, times what the group of
// the nearest size took of its formula's time. Negative: nothing was measured, or the group spans NVLink domains.
double CostModel::measured_among_devices(const program::Op& op, const program::CostPoint& at, bool merged) const {
    const GroupLinks group = links(op.group);
    const int members = group.placement.size;
    if (members <= 1 || group.placement.domains > 1) return -1.0;
    const std::string family = family_of(plan_, op, merged);
    const MeasuredGroup known = nearest_group(*plan_.hardware, family, members);
    if (known.calls == nullptr) return -1.0;
    const MeasuredGroup waits = nearest_group(*plan_.hardware, program::waits_key, members);
    const double wait = waits.calls == nullptr ? 0.0 : waits.calls->front().seconds;
    const double seconds =
        machine_.measured.find(program::group_key(family, known.members))->seconds(at.work, at.sides);
    if (known.members == members) return seconds + wait;
    GroupLinks other = group;
    other.placement = {known.members, 1, known.members};
    other.routes = machine_.routes.of(other.placement);
    return seconds * communication_seconds(op, group) / communication_seconds(op, other) + wait;
}

// Ranks wait for each other, so that a step has the pace of the slowest GPU.
double CostModel::among_others(const program::Op& op, double seconds) const {
    if (plan_.hardware->cpu || plan_.gpus == 1 || !program::is_large_product(op, seconds, *plan_.hardware))
        return seconds;
    const MeasuredGroup known =
        nearest_group(*plan_.hardware, program::products_key, std::min(plan_.gpus, plan_.hardware->nvlink_domain));
    if (known.calls == nullptr) return seconds;
    const machine::MeasuredCall& all = known.calls->front();
    return all.work > 0.0 ? seconds * std::max(1.0, all.seconds / all.work) : seconds;
}

// Part of its rate that what computes loses to communication of a group beside it: what was measured within an NVLink
// domain, else as many multiprocessors as our own exchanges take.
double CostModel::lost_to(const char* key, plan::Group group) const {
    const machine::Hardware& hardware = *plan_.hardware;
    const Placement placement = links(group).placement;
    if (placement.size == 1) return 0.0;
    const MeasuredGroup known = nearest_group(hardware, key, placement.size);
    if (placement.domains > 1 || known.calls == nullptr || known.calls->front().work <= 0.0)
        return static_cast<double>(program::peer_blocks_beside) / hardware.sm_count;
    constexpr double most = 0.9; // the rest goes on
    return std::clamp(known.calls->front().seconds / known.calls->front().work, 1e-9, most);
}

// Published stacks state shares of their own (StackCosts::overlap_sm_share).
ContentionPrice CostModel::contention_price() const {
    if (plan_.hardware->cpu || !plan::stack_traits(plan_).measures_contention) return {};
    ContentionPrice price;
    if (plan_.ep > 1) {
        price.lost = lost_to(program::losses_key, {plan::Domain::expert, plan::axis::expert});
        // The multiprocessors that a product leaves to messages are among them, and in its price already.
        const int messages = program::reserved_sms_of(plan_);
        price.reserved_slowdown =
            reserved_slowdown(std::max(messages, program::peer_blocks_beside)) / reserved_slowdown(messages);
    }
    price.to_collectives =
        std::max(lost_to(program::collectives_key, {plan::Domain::dense, plan::axis::data | plan::axis::context}),
                 lost_to(program::collectives_key, {plan::Domain::expert, plan::axis::data}));
    if (plan_.cuda_graph == plan::CudaGraph::full)
        price.to_copies = static_cast<double>(program::host_copy_blocks) / plan_.hardware->sm_count;
    return price;
}

double CostModel::device_seconds(const program::Op& op, const program::Program& program, bool merged) const {
    const machine::Hardware& hardware = *plan_.hardware;
    if (const std::optional<program::Op> other = measured_as(op)) return device_seconds(*other, program, merged);
    const program::PeerAttr* peer = std::get_if<program::PeerAttr>(&op.attr);
    const bool to_myself =
        op.kind == program::OpKind::send && peer != nullptr && peer->delta % plan_.pp == 0; // where a V turns
    if (!hardware.measured.empty() && !block_scaled(stack_.costs, plan_, op, program)) {
        const program::CostPoint at = program::cost_point(op, program);
        if (const MeasuredFamily* family = machine_.measured.find(at); family != nullptr) // measured on whole rows
            return among_others(op, family->seconds(at.work, at.sides) *
                                        (hardware.cpu ? 1.0 : alignment_slowdown(stack_.costs, op, program)));
        if (op.kind == program::OpKind::permute && op.out.size() > 1) return columns_apart(op, program);
        if (!hardware.cpu && program::is_communication(op.kind) && !to_myself)
            if (const double seconds = measured_among_devices(op, at, merged); seconds > 0.0) return seconds;
    }
    // A host's memory serves each of its GPUs with about what the link takes: 77 GB/s where eight share two sockets of
    // eight DDR5-4800 channels, 256 of a Grace (512 GB/s) that serves two.
    const bool copies = op.kind == program::OpKind::copy_to_host || op.kind == program::OpKind::copy_from_host ||
                        op.kind == program::OpKind::adamw_on_host;
    if (copies && !hardware.cpu) return hardware.host.latency + op.bytes / std::max(1.0, hardware.host.bandwidth);
    if (!program::is_communication(op.kind) && !copies) return compute_seconds(op, program);
    if (hardware.cpu || to_myself) // ranks of one process copy through memory, offloading included
        return 2.0 * op.bytes / (hardware.memory_bandwidth * stack_.costs.memory) + stack_.costs.kernel_seconds;
    return communication_seconds(op, links(op.group)) + stack_.costs.kernel_seconds;
}

double CostModel::reserved_slowdown(int multiprocessors) const {
    if (plan_.hardware->cpu || !plan::stack_traits(plan_).reserves_multiprocessors) return 1.0;
    return 1.0 / (1.0 - static_cast<double>(multiprocessors) / plan_.hardware->sm_count);
}

OpCost CostModel::operator()(const program::Op& op, const program::Program& program) const {
    OpCost cost;
    cost.host = host_seconds(plan_, stack_, op);
    cost.waits_for_counts = host_waits(plan_, stack_, op);
    cost.device = device_seconds(op, program, false);
    if (const auto* product = std::get_if<program::GroupedGemmAttr>(&op.attr))
        cost.device *= reserved_slowdown(std::max(product->reserved_sms, program::reserved_sms_of(plan_)));
    cost.merged = plan_.ep_overlap && moves_tokens(op) ? device_seconds(op, program, true) : cost.device;
    return cost;
}

ProgramCosts price(const CostModel& model, const program::Program& program) {
    ProgramCosts costs(program.templates.size());
    for (std::size_t t = 0; t < program.templates.size(); ++t) {
        costs[t].reserve(program.templates[t].ops.size());
        for (const program::Op& op : program.templates[t].ops) costs[t].push_back(model(op, program));
    }
    return costs;
}

} // namespace moe::cost
