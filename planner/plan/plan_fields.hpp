// The fields of a plan by the names of --fix, as text.
#pragma once

#include "planner/plan/fwd.hpp"

#include <string>
#include <vector>

namespace moe::plan {

// All names of fields, in the order of the contract.
std::vector<std::string> field_names();
// The text of a field as set_field() reads it. Throws Error (bad_input) for an unknown name.
std::string field_text(const Plan& plan, const std::string& field);

struct FieldChange {
    std::string field, from, to;
};
// The fields in which two plans differ: model, hardware, stack and workload first, then in the order of field_names(),
// with "edp", which follows from the others, among them.
std::vector<FieldChange> differences(const Plan& from, const Plan& to);

} // namespace moe::plan
