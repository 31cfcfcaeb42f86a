// One table says on which fields of a plan everything depends that is worked out once and kept; keys are made from it.
#pragma once

#include "planner/plan/plan.hpp"

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>

namespace moe::plan {

// The subjects that are worked out once for all plans that agree in the fields that they depend on.
enum class Subject : std::uint8_t {
    size,    // ops and activations of a segment, their bytes and groups
    time,    // seconds of a segment's ops
    weights, // buckets of a segment's parameters, or of a stage's
    dense,   // times of a layer's ops outside of routed rows
    routed,  // times of a layer's ops on routed rows
    cut,     // parts that a stage holds and moves, whatever its layers compute
    place,   // places of the ranks of every group that a layer uses
};

// The ways in which a subject depends on a field.
enum class As : std::uint8_t {
    nothing,
    fixed, // the field is the same wherever anything is kept
    value,
    many,    // only whether it is more than one
    muon,    // of the optimizer only whether it is Muon
    sharded, // the value, where the plan reshards; else nothing
    tokens,  // through tokens_local() alone, as long as the router has neither loss nor noise
    order,   // only whether EP varies faster than TP over the ranks
};

// What a segment may have: fields that concern one of these alone say so.
namespace part {
inline constexpr unsigned experts = 1, attention = 2, head = 4, all = experts | attention | head;
}

struct FieldUse {
    As size{}, time{}, weights{}, dense{}, routed{}, cut{}, place{};
    unsigned parts = 0; // segments depend on it only if they have one of these; 0 = all segments
    constexpr As of(Subject subject) const {
        constexpr As FieldUse::*columns[] = {&FieldUse::size,   &FieldUse::time, &FieldUse::weights, &FieldUse::dense,
                                             &FieldUse::routed, &FieldUse::cut,  &FieldUse::place};
        return this->*columns[static_cast<std::size_t>(subject)];
    }
    constexpr FieldUse in(unsigned having) const {
        FieldUse use = *this;
        use.parts = having;
        return use;
    }
};

template <class T>
struct FieldRow {
    T Plan::*member;
    FieldUse use;
};
template <class T>
FieldRow(T Plan::*, FieldUse) -> FieldRow<T>;

namespace dependence {

constexpr As none = As::nothing, fixed = As::fixed, value = As::value, many = As::many, muon = As::muon,
             sharded = As::sharded, tokens = As::tokens, order = As::order;
constexpr unsigned experts = part::experts;
constexpr FieldUse everywhere{value, value, value, value, value, value, none};

// clang-format off
inline constexpr std::tuple table{
    //                                       size     time     weights  dense    routed   cut      place
    FieldRow{&Plan::model,                  everywhere},
    FieldRow{&Plan::hardware,               {fixed,   fixed,   fixed,   fixed,   fixed,   fixed,   fixed}},
    FieldRow{&Plan::stack,                  {fixed,   fixed,   fixed,   fixed,   fixed,   fixed,   fixed}},
    FieldRow{&Plan::seq,                    {value,   value,   none,    value,   tokens,  value,   none}},
    FieldRow{&Plan::gbs,                    {none,    none,    none,    none,    none,    value,   none}},
    FieldRow{&Plan::routing,                {value,   value,   none,    none,    value,   none,    none,    experts}},
    FieldRow{&Plan::router,                 {value,   value,   value,   sharded, value,   value,   value}},
    FieldRow{&Plan::indexer,                {value,   value,   none,    value,   none,    none,    none,    part::attention}},
    FieldRow{&Plan::documents,              {value,   value,   none,    value,   none,    value,   none}},
    FieldRow{&Plan::lengths,                {value,   value,   none,    value,   none,    value,   none}},
    FieldRow{&Plan::gpus,                   {sharded, value,   none,    value,   value,   value,   value}},
    FieldRow{&Plan::tp,                     {value,   value,   value,   value,   tokens,  value,   value}},
    FieldRow{&Plan::cp,                     {value,   value,   value,   value,   tokens,  value,   value}},
    FieldRow{&Plan::dp,                     {sharded, sharded, value,   sharded, none,    value,   value}},
    FieldRow{&Plan::pp,                     {sharded, many,    many,    sharded, many,    value,   value}},
    FieldRow{&Plan::vpp,                    {none,    none,    none,    none,    none,    value,   none}},
    FieldRow{&Plan::ep,                     {value,   value,   value,   none,    value,   value,   value,   experts}},
    FieldRow{&Plan::etp,                    {value,   value,   value,   none,    value,   value,   value,   experts}},
    FieldRow{&Plan::edp,                    {sharded, sharded, value,   none,    sharded, value,   value,   experts}},
    FieldRow{&Plan::rank_order,             {order,   order,   none,    none,    order,   value,   value,   experts}},
    FieldRow{&Plan::mbs,                    {value,   value,   none,    value,   tokens,  none,    none}},
    FieldRow{&Plan::schedule,               {none,    none,    none,    none,    none,    value,   none}},
    FieldRow{&Plan::layout,                 {none,    none,    none,    none,    none,    value,   none}},
    FieldRow{&Plan::precision,              everywhere},
    FieldRow{&Plan::attention_precision,    everywhere.in(part::attention)},
    FieldRow{&Plan::expert_precision,       everywhere.in(part::experts)},
    FieldRow{&Plan::head_precision,         everywhere}, // An emulated head rounds beside what other parts round.
    FieldRow{&Plan::bf16_first,             everywhere}, // the model says the same layer by layer
    FieldRow{&Plan::bf16_last,              everywhere},
    FieldRow{&Plan::fp8_scaling,            everywhere},
    FieldRow{&Plan::fp8_wgrad,              {value,   value,   none,    value,   value,   value,   none}},
    FieldRow{&Plan::gradients,              everywhere},
    FieldRow{&Plan::recompute,              {value,   value,   none,    none,    none,    none,    none}},
    FieldRow{&Plan::offload,                {value,   value,   none,    value,   value,   value,   none}},
    FieldRow{&Plan::optimizer,              {muon,    muon,    muon,    none,    none,    value,   none}},
    FieldRow{&Plan::lora,                   everywhere},
    FieldRow{&Plan::fsdp,                   {sharded, value,   sharded, value,   value,   value,   value}},
    FieldRow{&Plan::fsdp_replicas,          {sharded, value,   sharded, value,   value,   value,   value}},
    // What is asked of the host decides how much of any layer a partial graph holds.
    FieldRow{&Plan::dispatcher,             {value,   value,   none,    none,    value,   none,    value}},
    FieldRow{&Plan::cp_comm,                {value,   value,   none,    value,   none,    none,    none}},
    FieldRow{&Plan::capacity,               {value,   value,   none,    none,    value,   value,   none}},
    FieldRow{&Plan::paged_stash,            {value,   value,   none,    value,   value,   value,   none,    experts}},
    FieldRow{&Plan::memory_efficient_permutation,
                                            {value,   value,   none,    value,   value,   value,   none,    experts}},
    FieldRow{&Plan::tp_overlap,             {value,   value,   none,    value,   none,    none,    none}},
    FieldRow{&Plan::ep_overlap,             {none,    value,   none,    value,   value,   none,    none}},
    FieldRow{&Plan::delay_wgrad,            {value,   value,   none,    value,   value,   value,   none}},
    FieldRow{&Plan::cuda_graph,             {none,    value,   none,    none,    none,    none,    none}},
    FieldRow{&Plan::deterministic,          {value,   value,   none,    value,   value,   value,   none}},
};
// clang-format on

constexpr std::size_t rows = std::tuple_size_v<decltype(table)>;

// Members of an aggregate: as many as it can be initialized with.
struct Anything {
    template <class T>
    constexpr operator T() const {
        return T();
    }
};
template <class T, class... Given>
consteval std::size_t members() {
    if constexpr (requires { T{Given{}..., Anything{}}; })
        return members<T, Given..., Anything>();
    else
        return sizeof...(Given);
}

template <class T, class U>
constexpr bool same_member(T Plan::*a, U Plan::*b) {
    if constexpr (std::is_same_v<T, U>)
        return a == b;
    else
        return false;
}
constexpr bool no_member_twice = std::apply(
    [](const auto&... row) {
        const auto times = [&](const auto& one) { return (0 + ... + (same_member(one.member, row.member) ? 1 : 0)); };
        return ((times(row) == 1) && ...);
    },
    table);

static_assert(no_member_twice, "the table names a member of Plan twice");
static_assert(rows == members<Plan>(), "a member of Plan has no row: say in the table what depends on it");

} // namespace dependence

} // namespace moe::plan
