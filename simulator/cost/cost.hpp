// The cost of one op: seconds of its device (or core), and seconds of the host that issues it.
#pragma once

#include "planner/machine/precision.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/plan/group.hpp"
#include "planner/program/fwd.hpp"
#include "planner/program/op_kind.hpp"
#include "planner/stack/fwd.hpp"
#include "simulator/cost/collective.hpp"
#include "simulator/cost/measured.hpp"

#include <memory>
#include <utility>
#include <vector>

namespace moe::cost {

struct OpCost {
    double device = 0.0;           // seconds from its start to its end on its stream, peers being there
    double merged = 0.0;           // seconds in merged slots, nothing being beside it
    double host = 0.0;             // time of the host until the next op can be issued
    bool waits_for_counts = false; // the host first waits until routed counts are there (dispatchers that read them)
};

// The rate that computing loses to communication beside it.
struct ContentionPrice {
    // Tokens on their way to experts and back: part of its rate, of ops that are no products of experts; times as long
    // that a product takes which leaves them their multiprocessors.
    double lost = 0.0, reserved_slowdown = 1.0;
    double to_collectives = 0.0; // gathers and reductions of data parallelism: part of the rate of any op
    // Copies with the host by kernels, in captured steps: part of the rate of an op that leaves them nothing.
    double to_copies = 0.0;
    bool none() const { return lost == 0.0 && to_collectives == 0.0 && to_copies == 0.0; }
};

// The parts of the model of cost that are worked out once of a machine, which must outlive them. Thread-safe.
struct Machine {
    explicit Machine(const machine::Hardware& hardware) : routes(hardware), measured(hardware) {}
    Routes routes;
    MeasuredFamilies measured;
};

struct Rates;

// Prices ops of one plan. Sound for Programs and segments lowered from the plan alone. For one thread.
class CostModel {
public:
    // `machine` must be of the plan's hardware and outlive the model.
    CostModel(const plan::Plan& plan, const stack::Stack& stack, const Machine& machine);

    OpCost operator()(const program::Op& op, const program::Program& program) const;
    GroupLinks links(plan::Group group) const;
    ContentionPrice contention_price() const;
    const plan::Plan& plan() const { return plan_; }
    const stack::Stack& stack() const { return stack_; }

private:
    double lost_to(const char* key, plan::Group group) const;
    double compute_seconds(const program::Op& op, const program::Program& program) const;
    double communication_seconds(const program::Op& op, GroupLinks group) const;
    double newton_schulz_seconds(const Rates& rates, const program::MuonAttr& muon, const program::Op& op) const;
    double expert_bias_seconds(const Rates& rates, const program::Op& op, const program::Program& program,
                               bool fused) const;
    double dispatch_seconds(const program::Op& op, const program::RowsAttr& rows, GroupLinks group) const;
    double measured_among_devices(const program::Op& op, const program::CostPoint& at, bool merged) const;
    double device_seconds(const program::Op& op, const program::Program& program, bool merged) const;
    // The op whose measured calls price this one, where it is another.
    std::optional<program::Op> measured_as(const program::Op& op) const;
    // Of a permutation that writes columns of FP8, by a profile without calls of it: rows, and columns by a pass of
    // their own.
    double columns_apart(const program::Op& op, const program::Program& program) const;
    double among_others(const program::Op& op, double seconds) const;
    double reserved_slowdown(int multiprocessors) const; // times as long that a product takes which leaves them

    const plan::Plan& plan_;
    const stack::Stack& stack_;
    const Machine& machine_;
    double spread_ = 0.0;                                           // spread of rows over the experts of a rank
    mutable std::vector<std::pair<plan::Group, GroupLinks>> links_; // of the groups that were asked for
};

// Costs of a whole Program: [template][op].
using ProgramCosts = std::vector<std::vector<OpCost>>;
ProgramCosts price(const CostModel& model, const program::Program& program);

// The rates of machine and stack that each family's formula needs.
struct Rates {
    const machine::Hardware* hardware;
    const stack::StackCosts* costs;
    double sm_share = 1.0; // share of the SMs that compute kernels get
    // Of an op on routed rows: local experts that it has kernels of their own for, and the share of a quantization's
    // bytes that are moved.
    double own_kernels = 0.0, quantize_share = 1.0;
};

// Dense product C[m, n] with inner width k, `groups` times; flop_rate: FLOP/s of large products. spread: standard
// deviation of m over the groups, over its mean.
double gemm_seconds(const Rates& rates, double flop_rate, double groups, double m, double n, double k, double bytes,
                    double spread = 0.0);
machine::Precision gemm_precision(const program::Op& op, const program::Program& program);
double attention_seconds(const Rates& rates, const program::Op& op, machine::Precision precision);
// By this project's own kernels: of documents, whose beginnings the library does not take, and sparse attention.
double own_attention_seconds(const Rates& rates, const program::Op& op, machine::Precision precision);
// Rules of layers with a state by our own kernels.
double own_state_seconds(const Rates& rates, const program::Op& op, machine::Precision precision);
double memory_bound_seconds(const Rates& rates, const program::Op& op);
// Kernels behind an op of a kind, over those of most kinds.
double launches(const stack::StackCosts& costs, program::OpKind kind);
// True for ops of dispatch, experts, their activation and combine.
bool on_routed_rows(const program::Op& op);
// Local experts for which an op on routed rows launches kernels of their own; 0 where one kernel serves all.
double kernels_by_expert(const plan::Plan& plan, const stack::Stack& stack, const program::Op& op);
// Host time to issue one op, and whether it makes the host wait for routed counts.
double host_seconds(const plan::Plan& plan, const stack::Stack& stack, const program::Op& op);
bool host_waits(const plan::Plan& plan, const stack::Stack& stack, const program::Op& op);

} // namespace moe::cost
