// Some steps of a plan on the CUDA back end beside the CPU's, tensor by tensor.
#pragma once

#include "tests/engine/samples.hpp"

#include <map>
#include <string>
#include <vector>

struct CudaResult {
    std::vector<double> losses, norms;
    std::map<std::string, std::vector<float>> gradients, weights; // gradients: of the first step
};

CudaResult train_on(const moe::Plan& plan, const std::string& backend, int steps = 3);

// Prints the tensor that is farthest off, so that a run's output shows the margin that is left.
void compare(const std::string& what, const CudaResult& got, const CudaResult& expected, double tolerance);

// Holds a small model's plan on `ranks` GPUs to the same plan on the CPU. every_expert: tokens go to all experts, so
// that no near tie of two scores can send one elsewhere.
void check_model(const std::string& model, const Fields& fields, double tolerance, bool every_expert = false,
                 int steps = 3, int ranks = 1);
