// Keys of what is worked out once and kept: the fields of a plan that the table of plan_dependence.hpp names for it.
#pragma once

#include "planner/plan/mesh.hpp"
#include "planner/plan/plan_dependence.hpp"
#include "planner/plan/routing.hpp"

#include <bit>
#include <compare>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace moe::plan {
namespace dependence {

// The values of a field that a key compares. A member that is added to one of these structs does not compile here until
// it is named.
template <class T>
std::tuple<T> values(const T& field) {
    return {field};
}
inline std::tuple<const model::Model*> values(const std::shared_ptr<const model::Model>& model) {
    return {model.get()};
}
inline std::tuple<Moments, bool> values(const OptimizerChoice& choice) {
    const auto& [moments, muon] = choice;
    return {moments, muon};
}
inline auto values(const Lora& lora) {
    const auto& [rank, alpha, targets] = lora;
    return std::make_tuple(rank, alpha, targets);
}
inline std::tuple<double, IndexerStage> values(const IndexerTraining& indexer) {
    const auto& [loss, stage] = indexer;
    return {loss, stage};
}
inline auto values(const RouterTraining& router) {
    const auto& [load_balancing, aux_loss, z_loss, jitter, bias_update, forced, expert_capacity, drop_policy,
                 drop_scope, pad] = router;
    return std::make_tuple(load_balancing, aux_loss, z_loss, jitter, bias_update, forced, expert_capacity, drop_policy,
                           drop_scope, pad);
}

// The part of a field that goes into a key.
template <Subject subject, std::size_t row>
auto part(const Plan& plan, bool counts) {
    constexpr auto field = std::get<row>(table);
    constexpr As as = field.use.of(subject);
    const auto& value = plan.*field.member;
    if constexpr (as == As::many) {
        return std::tuple<bool>(counts && value > 1);
    } else if constexpr (as == As::muon) {
        return std::tuple<bool>(counts && value.muon);
    } else if constexpr (as == As::order) {
        return std::tuple<bool>(counts && value.find("ep") < value.find("tp"));
    } else if constexpr (as == As::value && same_member(field.member, &Plan::routing)) {
        const Routing routing = counts ? routing_from_string(value) : Routing{};
        return std::tuple<double, double>(routing.load, routing.spread);
    } else if constexpr (as == As::value && same_member(field.member, &Plan::precision)) {
        // And whether fp8-tensor is emulated, which fields of other rows decide (Plan::computed_in()).
        constexpr machine::Precision one_scale = machine::Precision::fp8_tensor;
        const bool asked = value == one_scale || plan.experts() == one_scale || plan.head() == one_scale;
        return std::tuple<machine::Precision, bool>(value, asked && plan.emulates(one_scale));
    } else if constexpr (as == As::value && same_member(field.member, &Plan::dispatcher)) { // and its levels
        const int inner = counts ? expert_inner(plan) : 0;
        return std::tuple<Dispatcher, int>(value, counts && inner < plan.ep ? inner : 0);
    } else if constexpr (as == As::value && same_member(field.member, &Plan::lengths)) { // Its text may be long.
        return std::tuple<std::size_t>(value.empty() ? 0 : std::hash<std::string>()(value));
    } else if constexpr (as == As::value || as == As::sharded) {
        decltype(values(value)) taken{};
        if (counts && (as == As::value || plan.reshards())) taken = values(value);
        return taken;
    } else {
        return std::tuple<>();
    }
}

template <Subject subject, std::size_t... row>
auto parts(const Plan& plan, unsigned having, std::index_sequence<row...>) {
    const auto counts = [having](unsigned parts) { return parts == 0 || (parts & having) != 0; };
    return std::tuple_cat(part<subject, row>(plan, counts(std::get<row>(table).use.parts))...);
}

template <Subject subject>
constexpr bool
    counts_tokens = std::apply([](const auto&... row) { return ((row.use.of(subject) == As::tokens) || ...); }, table);

// A loss of the router is balanced over sequences, or over all ranks of a micro-batch; noise on its input goes by the
// positions of a rank's tokens, and whole sequences drop theirs together.
inline std::tuple<std::int64_t, std::int64_t, int, int> tokens_of(const Plan& plan) {
    const bool cut = plan.router.has_loss() || plan.router.input_jitter > 0.0 || plan.router.drops_in_sequences();
    return {plan.tokens_local(), cut ? plan.mbs : 0, cut ? plan.tp : 0, cut ? plan.cp : 0};
}

template <Subject subject>
auto key_of(const Plan& plan, unsigned having) {
    auto fields = parts<subject>(plan, having, std::make_index_sequence<rows>());
    if constexpr (counts_tokens<subject>)
        return std::tuple_cat(tokens_of(plan), std::move(fields));
    else
        return fields;
}

template <class T>
std::uint64_t bits(const T& value) {
    if constexpr (std::is_same_v<T, double>)
        return std::bit_cast<std::uint64_t>(value);
    else if constexpr (std::is_pointer_v<T>)
        return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(value));
    else if constexpr (std::is_same_v<T, std::optional<machine::Precision>>)
        return value ? 1 + static_cast<std::uint64_t>(*value) : 0;
    else if constexpr (std::is_same_v<T, std::string>)
        return std::hash<std::string>()(value);
    else
        return static_cast<std::uint64_t>(value);
}

} // namespace dependence

// Equal for plans that agree in all fields that the subject depends on. The model goes by its address: whoever keeps
// keys keeps the models alive.
template <Subject subject>
class PlanKey {
public:
    // having: what it has that is kept, and on whose fields it so depends.
    explicit PlanKey(const Plan& plan, unsigned having = part::all)
        : fields_(dependence::key_of<subject>(plan, having)) {}
    bool operator==(const PlanKey&) const = default;
    auto operator<=>(const PlanKey&) const = default;
    std::size_t hash() const {
        std::uint64_t sum = 0;
        const auto take = [&sum](const auto& value) {
            sum = (sum ^ dependence::bits(value)) * 0x9E3779B97F4A7C15U + (sum >> 29);
        };
        std::apply([&](const auto&... value) { (take(value), ...); }, fields_);
        return static_cast<std::size_t>(sum ^ sum >> 32);
    }

private:
    decltype(dependence::key_of<subject>(std::declval<const Plan&>(), part::all)) fields_;
};

struct PlanKeyHash {
    template <Subject subject>
    std::size_t operator()(const PlanKey<subject>& key) const {
        return key.hash();
    }
};

// The plan with the usual values in all fields that the subject does not depend on.
template <Subject subject>
Plan only(Plan plan) {
    static const Plan usual;
    std::apply(
        [&plan](const auto&... row) {
            ((row.use.of(subject) == As::nothing ? void(plan.*row.member = usual.*row.member) : void()), ...);
        },
        dependence::table);
    return plan;
}

} // namespace moe::plan
