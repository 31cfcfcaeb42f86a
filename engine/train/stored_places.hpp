// Where a parameter lies in a Hugging Face checkpoint: the names of its tensors and its rows and columns in them.
#pragma once

#include "engine/train/trainer.hpp"
#include "planner/model/model.hpp"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace moe::train {

// The place of a parameter in a checkpoint: its element (r, c) is `shift` more than element row(r) + c * col_stride of
// a stored tensor of the given shape. Rows lie row_stride apart; of `run` rows each, where that is not 0, run_stride.
struct StoredPlace {
    std::string name;
    std::vector<std::int64_t> shape;
    std::int64_t offset = 0, row_stride = 0, col_stride = 1;
    float shift = 0.0f;
    std::int64_t run = 0, run_stride = 0;
    std::int64_t row(std::int64_t r) const {
        return run == 0 ? offset + r * row_stride : offset + r / run * run_stride + r % run * row_stride;
    }
};

// The places where a parameter of the given shape may lie, the usual one first; `experts` is the number of experts of
// its layer, 0 for a parameter that is no expert's.
std::vector<StoredPlace> stored_places(const model::Model& model, const std::string& name, const Trainer::Shape& shape,
                                       std::int64_t experts);
// Tensors that repeat another under MTP's own names, by the name of the copy: what to write, and what loading need not
// name.
std::map<std::string, std::string> repeated_tensors(const model::Model& model);

} // namespace moe::train
