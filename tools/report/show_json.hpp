// The JSON documents of show, and the words in which its tables describe layers.
#pragma once

#include "planner/machine/fwd.hpp"
#include "planner/model/fwd.hpp"
#include "planner/model/layer_kind.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/stack/stack.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace moe::tools {

std::string attention_text(const model::Attention& attention);
std::string mlp_text(const model::LayerKind& kind); // its experts, or its dense MLP
std::string rope_text(const model::Model& model);
// "0-2", "3-60", "0, 2, 4 .. 34": the layers of one kind.
std::string layers_text(const std::vector<int>& layers);
// The decoder layers of a kind, ascending, and how many MTP layers are of it.
std::vector<int> layers_of(const model::Model& model, int kind);
int mtp_layers_of(const model::Model& model, int kind);

// The reasons why execute cannot train the model, empty where it can.
std::vector<std::string> why_not(const model::Model& model);

std::string show_models_document(const std::vector<model::Model>& models);
std::string show_hardware_list_document(const std::vector<machine::Hardware>& machines);
std::string show_stacks_document(const std::vector<stack::Stack>& stacks);

std::string show_model_document(const model::Model& model, std::int64_t seq);
std::string show_hardware_document(const machine::Hardware& hardware);
// hardware: the machine that its figures are for.
std::string show_stack_document(const stack::Stack& stack, const machine::Hardware& hardware);

// The facts that plan.json leaves to derive of a run.
struct PlanFacts {
    std::string fault;                // the fault that the plan's own stack finds, empty = none
    std::vector<std::string> why_not; // reasons why execute cannot run it
    std::vector<std::string> changed; // fields that are not at their default
};
PlanFacts facts_of(const plan::Plan& plan);
std::string show_plan_document(const plan::Plan& plan);

} // namespace moe::tools
