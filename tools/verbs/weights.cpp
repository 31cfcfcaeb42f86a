// Weights by folder: a Hugging Face model, or the newest checkpoint of a run.
#include "tools/verbs/weights.hpp"

#include "engine/backends/backends.hpp"
#include "engine/train/huggingface.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json_object.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"

#include <algorithm>
#include <filesystem>

namespace moe::tools {

UsedWeights::UsedWeights(const WeightsOptions& options) : options_(options) {
    if (options.model.empty() == options.checkpoint.empty())
        refuse("give one of --model DIR and --checkpoint DIR{}",
               options.model.empty() ? "" : ", not both: their weights differ");
    backends::backend_named(options.backend); // refused before any file is read
    if (options.model.empty()) {
        std::vector<std::string> skipped;
        checkpoint_ = weights::newest_checkpoint(options.checkpoint, skipped);
        if (!checkpoint_) refuse("--checkpoint {}: holds no checkpoint of execute --checkpoint", options.checkpoint);
        model_ = std::make_shared<const model::Model>(
            families::model_from_json(checkpoint_->state().config, checkpoint_->path() + ": config"));
    } else {
        const std::string path = (std::filesystem::path(options.model) / "config.json").string();
        model_ = std::make_shared<const model::Model>(families::model_from_json(read_file(path), path));
    }
}

std::int64_t UsedWeights::positions(std::int64_t fallback) const {
    const JsonObject config = JsonObject::parse(model_->config_json, model_->name);
    constexpr std::int64_t most = std::int64_t{1} << 40;
    return config.integer_or("max_position_embeddings", fallback, 1, most);
}

plan::Plan UsedWeights::plan(std::int64_t seq, std::int64_t gbs) const {
    const bool cpu = options_.backend == "cpu";
    const std::string precision = !options_.precision.empty() ? options_.precision : cpu ? "fp32" : "bf16";
    if (precision != "fp32" && precision != "bf16") refuse("--precision {}: must be fp32 or bf16", precision);
    plan::Plan plan;
    plan.model = model_;
    // Of the machine a forward needs no more than whether ranks have devices.
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware(cpu ? "cpu-local" : "h100"));
    plan.stack = "moe-plan";
    plan.seq = seq;
    plan.gbs = gbs;
    plan.precision = machine::precision_from_string(precision);
    plan.deterministic = true;
    if (checkpoint_ && !checkpoint_->state().lora.empty())
        plan.lora = plan::lora_from_string(checkpoint_->state().lora);
    return plan;
}

std::unique_ptr<train::Trainer> UsedWeights::ranks(const plan::Plan& plan, lower::ForwardOnly what,
                                                   Console& console) const {
    train::TrainOptions how;
    how.backend = options_.backend;
    how.forward_only = what;
    auto trainer = std::make_unique<train::Trainer>(plan, how);
    if (checkpoint_) {
        trainer->restore(*checkpoint_);
    } else if (const std::string left = train::describe(train::load_weights(*trainer, options_.model)); !left.empty()) {
        console.warn("{}: {}", options_.model, left);
    }
    return trainer;
}

} // namespace moe::tools
