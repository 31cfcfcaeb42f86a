// Some steps of a plan on the CUDA back end beside the CPU's, tensor by tensor.
#pragma once

#include "tests/engine/train/samples.hpp"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

int gpus_here();
// Says that the case is skipped where there are fewer.
bool has_gpus(int ranks);

struct CudaResult {
    std::vector<double> losses, norms;
    std::map<std::string, std::vector<float>> gradients, weights; // gradients: of the first step
    double seconds = 0.0;                                         // that all of it took
    std::string slots_by;                                         // comm::Joined::slots_by
};

// Several GPUs get communicators of earlier plans (kept_communicators.hpp). windows: whether their library has some.
CudaResult train_on(const moe::plan::Plan& plan, const std::string& backend, int steps = 3, std::uint64_t seed = 1,
                    bool windows = true);

// The number that is farthest off, NaN included, and what it belongs to.
struct Farthest {
    double distance = 0.0;
    std::string name;
};
// smallest: the share of the gradient's norm below which a tensor's gradient is held to that much instead of its own.
Farthest farthest(const CudaResult& got, const CudaResult& expected, double smallest = 0.0);

// Prints the tensor that is farthest off, so that a run's output shows the margin that is left.
void compare(const std::string& what, const CudaResult& got, const CudaResult& expected, double tolerance);

// Compares in a precision whose codes flip where sums are rounded otherwise: `other` is the reference's plan with other
// roundings, and a gradient may be `times` as far off as that one's, or as all of that one's together where it is less.
void compare_beside(const std::string& what, const CudaResult& got, const CudaResult& expected, const CudaResult& other,
                    double times);

// Holds a small model's plan on `ranks` GPUs to the same plan on the CPU. every_expert: tokens go to all experts, so
// that no near tie of two scores can send one elsewhere.
void check_model(const std::string& model, const Fields& fields, double tolerance, bool every_expert = false,
                 int steps = 3, int ranks = 1);

// Holds a small model's plan in a low precision on a GPU to the CPU by compare_beside(), with TP 2 for other roundings;
// tokens go to all experts.
void check_rounding(const std::string& model, const Fields& fields, double times);

// Holds a small model's plan on GPUs, op by op, to the CPU, and the same as one graph per rank to the bits of that.
// Skipped by name where there are fewer. config: of the model.
void check_ranks(int ranks, const std::string& model, const Fields& fields, const Fields& config = {});
