// A stack from the JSON of its file, all bases and differences of one machine being in it.
#pragma once

#include "planner/stack/stack.hpp"

#include <nlohmann/json_fwd.hpp>

#include <string>

namespace moe::stack {

// place: the file, for messages. Coefficients have values for the names in costs. Refuses fields that are missing,
// unknown or out of range, and figures without a source, with their names.
Stack read_stack(const nlohmann::json& json, const std::string& place, const machine::Coefficients& coefficients);

} // namespace moe::stack
