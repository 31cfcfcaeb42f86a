// What is particular to Megatron-Bridge: precisions by name or by fields, and recipes that stand for a model.
#pragma once

#include "tools/engines/engine_table.hpp"
#include "tools/import/readers/setting.hpp"

#include <string>

namespace moe::tools {

// Reads mixed_precision as a name where the file has its fields, and the fields that a name stands for beside the name.
// Adds what the classes make of fields that are left to them, and writes a layout of lists as one of letters.
void expand_bridge(SettingsFile& file, const EngineTable& table);

// The profile whose facts are those of the recipe's model: "deepseek_v3_pretrain_config". Empty where none is known.
std::string model_of_recipe(const EngineTable& table, const std::string& recipe);

} // namespace moe::tools
