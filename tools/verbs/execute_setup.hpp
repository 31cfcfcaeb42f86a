// What execute makes of its options before the first step: plan, data, training options and first weights.
#pragma once

#include "engine/data/data.hpp"
#include "engine/data/in_order.hpp"
#include "engine/train/trainer.hpp"
#include "planner/plan/plan.hpp"
#include "tools/print/console.hpp"
#include "tools/verbs/verbs.hpp"

#include <memory>
#include <string>

namespace moe::tools {

// Refuses what --lr and its neighbours cannot be, by the option.
train::TrainOptions train_options(const ExecuteOptions& options);
// The data of --data; a loss mask needs a plan that keeps documents apart.
data::SampleData open_data(const ExecuteOptions& options, const plan::Plan& plan);
// The plan; where it masks documents and says no lengths, with those of the data, which FLOPs and prices follow.
plan::Plan with_lengths(plan::Plan plan, data::SampleData& data);
// The data of --valid-data, nullptr without.
std::unique_ptr<data::InOrder> open_valid_data(const ExecuteOptions& options, const plan::Plan& plan);
// Initial weights, or those of the newest checkpoint.
void set_weights(const ExecuteOptions& options, train::Trainer& trainer, data::SampleData& data, Console& console);
// The plan of the file with what the command line sets in its place, and the model's own balance where neither chooses
// one; `balance`: what to say of that.
plan::Plan plan_to_run(const ExecuteOptions& options, std::string& balance);
// Refuses a folder of checkpoints that nobody asked to go on from.
void check_checkpoints(const ExecuteOptions& options);

} // namespace moe::tools
