// A tensor of a Program by its number, as passes read it.
#pragma once

#include "planner/program/program.hpp"

namespace moe::passes {

inline const program::Tensor& tensor(const program::Program& program, program::TensorId id) {
    return program.tensors[static_cast<std::size_t>(id)];
}

} // namespace moe::passes
