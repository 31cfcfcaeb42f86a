// The names and versions of the JSON documents that the program writes; docs/schemas describes each of them.
#pragma once

#include "planner/base/json_object.hpp"

namespace moe {

// A document carries its name as the field "schema". A version grows when a field changes its meaning or goes away.
namespace schema {
inline constexpr const char* anchor = "moe-plan/anchor/1";
inline constexpr const char* anchored_stack = "moe-plan/anchored-stack/1";
inline constexpr const char* checkpoint = "moe-plan/checkpoint/1";
inline constexpr const char* compare = "moe-plan/compare/1";
inline constexpr const char* compare_log = "moe-plan/compare-log/1";
inline constexpr const char* compare_profile = "moe-plan/compare-profile/1";
inline constexpr const char* completion = "moe-plan/completion/1";
inline constexpr const char* evaluate = "moe-plan/evaluate/1";
inline constexpr const char* execute = "moe-plan/execute/1";
inline constexpr const char* explain = "moe-plan/explain/1";
inline constexpr const char* exported = "moe-plan/export/1";
inline constexpr const char* generate = "moe-plan/generate/1";
inline constexpr const char* hardware = "moe-plan/hardware/1";
inline constexpr const char* imported = "moe-plan/import/1";
inline constexpr const char* launch = "moe-plan/launch/1";
inline constexpr const char* launch_engine = "moe-plan/launch-engine/1";
inline constexpr const char* man = "moe-plan/man/1";
inline constexpr const char* neighbours = "moe-plan/neighbours/1";
inline constexpr const char* plan = "moe-plan/plan/1";
inline constexpr const char* replay = "moe-plan/replay/1";
inline constexpr const char* report = "moe-plan/report/1";
inline constexpr const char* run_report = "moe-plan/run-report/1";
inline constexpr const char* search = "moe-plan/search/1";
inline constexpr const char* show_hardware = "moe-plan/show-hardware/1";
inline constexpr const char* show_hardware_list = "moe-plan/show-hardware-list/1";
inline constexpr const char* show_model = "moe-plan/show-model/1";
inline constexpr const char* show_models = "moe-plan/show-models/1";
inline constexpr const char* show_plan = "moe-plan/show-plan/1";
inline constexpr const char* show_stack = "moe-plan/show-stack/1";
inline constexpr const char* show_stacks = "moe-plan/show-stacks/1";
inline constexpr const char* stack = "moe-plan/stack/1";
inline constexpr const char* tokenize = "moe-plan/tokenize/1";
inline constexpr const char* trace = "moe-plan/trace/1";
inline constexpr const char* ui = "moe-plan/ui/1";
inline constexpr const char* validate = "moe-plan/validate/1";
} // namespace schema

// Throws Error (bad_input) where the document names another schema. One without the field passes: files that were
// written before documents carried it stay readable.
inline void check_schema(const JsonObject& json, const char* name) {
    if (json.has("schema") && json.string("schema") != name)
        json.refuse_value("schema", std::string("must be \"") + name + "\"");
}

} // namespace moe
