// Names of weights in the checkpoints of families that call parts otherwise than the Program does.
#pragma once

#include "planner/model/model.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace moe::families {

// The name under which a checkpoint of the model's family keeps the parameter that the Program calls `name`; the name
// itself where the family has none of its own. Sources: the published files' indices and the conversions of
// transformers 5.24 (conversion_mapping.py).
std::string checkpoint_name(const model::Model& model, const std::string& name);

// What a checkpoint of a model beside towers (of vision, of audio) may call the parameter of that name, by the habits
// of transformers' classes and of the files before them.
std::vector<std::string> names_beside_towers(const std::string& name);

// The matrix that holds a projection beside others, queries, keys and values or a shared expert's gate and up, in this
// order: its rows, and those before this projection. Empty name: the projection is a matrix of its own. Where heads
// have their parts side by side, the projection's rows are runs of `run` rows, `stride` rows from start to start.
struct JoinedRows {
    std::string name;
    std::int64_t first = 0, rows = 0;
    std::int64_t run = 0, stride = 0; // 0: one run
    bool middle = false;              // its shape is [rows, 1, columns]: a convolution
};
JoinedRows joined_rows(const model::Model& model, const std::string& name);

// Experts of a layer in one tensor.
enum class ExpertLayout {
    each,       // a tensor for every expert, as the Program names them
    gated,      // Granite: [E, 2 f, h] and [E, h, f], gate before up
    fused,      // Mistral 4, Qwen3.5: the same under the names of transformers 5
    transposed, // Llama 4: [E, h, 2 f] and [E, f, h]
    stacked,    // Step-3.5: [E, f, h] of gate, of up, and [E, h, f] of down
    rows,       // DBRX: gate and up [E f, h] each, and down [E f, h]
};
ExpertLayout expert_layout(const model::Model& model);

} // namespace moe::families
