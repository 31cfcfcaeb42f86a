// How layers are cut where settings say it by numbers of layers and not by a layout.
#pragma once

#include "planner/plan/plan.hpp"
#include "tools/import/reading.hpp"

#include <string>
#include <vector>

namespace moe::tools {

// Sets vpp and layout from the reader's settings of stages, where the file has them; the settings that were used. A
// setting that does not fit the model's layers is left for the report. Source: Megatron-LM, arguments.py and
// transformer_block.py (get_num_layers_to_build).
std::vector<std::string> set_stages(plan::Plan& plan, const Reading& reading, const ReaderTable& reader);

// The layout of stages that are lists of names of modules, as torchtitan and AutoModel have them: "layers.3" is a
// layer, a name with "embed" the embedding, "output" or "lm_head" the loss. Empty where they are not the model's layers
// in order.
std::string layout_of_parts(const std::vector<std::string>& parts, const plan::Plan& plan);

} // namespace moe::tools
