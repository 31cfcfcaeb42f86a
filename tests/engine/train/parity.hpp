// The results of three optimizer steps of a plan, and the check whether two such runs are the same training.
#pragma once

#include "planner/plan/plan.hpp"
#include "tests/engine/train/samples.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

// Parity as stated for the project: norm-wise per tensor, FP32.
inline constexpr double parity_tolerance = 1e-5;
// Of weights after three steps. A sum in another order may round an element of a narrow moment to the code beside it,
// in BF16 2^-8 and in E4M3 2^-3 to 2^-4 of it, which is that part of its update. A bias that began as zeros is updates
// alone, of some ten elements: one that falls the other way is a hundredth of all.
inline double weight_tolerance(const moe::plan::Plan& plan) {
    if (plan.optimizer.moments == moe::plan::Moments::fp8) return 1e-2;
    return plan.optimizer.narrow() ? 1e-3 : parity_tolerance;
}
// Of the largest gradient: what an element of a weight may be off by after three steps, whatever its size. In MXFP8 the
// largest neighbour sets the unit of a block, of which E4M3 has no code between multiples of 2^-9, and another plan has
// other weights side by side. The unit is at most 2 / 448 of that neighbour. Both moments that are read again may be a
// code off, 0.1 and 0.19 of a gradient: with their corrections of bias, and updates of lr / eps = 1, 1.2e-5 of it.
inline double moment_underflow(const moe::plan::Plan& plan) {
    return plan.optimizer.moments == moe::plan::Moments::fp8 ? 1.2e-5 : 0.0;
}

struct Trained {
    std::vector<double> losses, aux_losses; // aux_losses: of the routers and of multi-token prediction
    std::vector<double> indexer_losses;     // by step and layer
    double grad_norm = 0.0;                 // of the first step
    std::map<std::string, std::vector<float>> gradients, weights; // of the first step, after the last
    std::vector<std::vector<std::int64_t>> routed;                // tokens by MoE layer and expert, all steps
    std::vector<double> overflow;                                 // rows without a place, by step
    std::vector<moe::train::LogitStep> logits;                    // by step, with QK-clip
};

// seed: of the initial weights; table: a back end other than the CPU's; rules: frozen weights and groups of rates.
Trained train_three(const moe::plan::Plan& plan, std::uint64_t seed = 1, const moe::ops::Backend* table = nullptr,
                    const moe::train::WeightRules& rules = {});

// The options of those steps, and the same with other ones and what `prepare` does before the first step.
moe::train::TrainOptions three_steps(std::uint64_t seed = 1);
Trained train_three(const moe::plan::Plan& plan, const moe::train::TrainOptions& options,
                    const std::function<void(moe::train::Trainer&)>& prepare = {});

// Losses, auxiliary losses, gradient norm, every gradient and every weight: the first that differs by more than
// `tolerance` (weights: `of_weights`), as a sentence; empty if none does. A gradient that cancels to less than a
// thousandth of the whole one is held to that thousandth, and a weight that began at zero and is still below 1e-5 to
// that. underflow: as moment_underflow().
std::string disagreement(const Trained& got, const Trained& want, double tolerance, double of_weights,
                         double underflow = 0.0);

// |got - want| / |want| over all tensors together.
double total_distance(const std::map<std::string, std::vector<float>>& got,
                      const std::map<std::string, std::vector<float>>& want);

// Checks that both have the same bits: losses, auxiliary losses, gradient norm, gradients and weights.
void check_bits(const Trained& got, const Trained& want);

// "field=value ..." for messages.
std::string words_of(const Fields& fields);

// Checks that plans over 8 ranks train what one rank trains, whose plan has the fields `common` as well.
void check_plans(const std::string& model, const std::vector<Fields>& plans, const Fields& common = {});
