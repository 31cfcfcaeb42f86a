// One training step from a Hugging Face folder under any plan: loss and gradients go to a safetensors file, with the
// loss that an evaluation finds and the tokens that one rank goes on with behind the first ones of the data.
#include "engine/data/data.hpp"
#include "engine/train/huggingface.hpp"
#include "engine/train/sampling.hpp"
#include "engine/weights/safetensors.hpp"
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"

#include <cstdio>
#include <span>

using namespace moe;

namespace {

plan::Plan plan_of(const std::string& folder, std::span<char*> fields, std::int64_t seq = 0, std::int64_t gbs = 0) {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model(folder));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("cpu-local"));
    plan.stack = "moe-plan";
    plan.precision = machine::Precision::fp32;
    plan.seq = seq;
    plan.gbs = gbs;
    for (const std::string field : fields) {
        const std::size_t equal = field.find('=');
        if (equal == std::string::npos) refuse("{}: must be FIELD=VALUE", field);
        const std::string key = field.substr(0, equal), value = field.substr(equal + 1);
        if (key == "gpus")
            plan.gpus = std::stoi(value);
        else if (key == "seq")
            plan.seq = std::stoll(value);
        else if (key == "gbs")
            plan.gbs = std::stoll(value);
        else
            plan::set_field(plan, key, value);
    }
    plan.dp = plan.gpus / (plan.tp * plan.cp * plan.pp);
    plan.edp = plan.gpus / (plan.ep * plan.etp * plan.pp);
    if (const plan::PlanFault fault = plan::check_plan(plan)) refuse("plan: {}", fault.message);
    return plan;
}

// Behind so many tokens of the first sample.
std::vector<float> greedy_tokens(const std::string& folder, data::SampleData& data) {
    constexpr std::int64_t prompt = 16, tokens = 24;
    const plan::Plan plan = plan_of(folder, {}, 1, 1);
    train::TrainOptions options;
    options.forward_only = lower::ForwardOnly{true, prompt + tokens};
    train::Trainer trainer(plan, options);
    train::load_weights(trainer, folder);
    std::vector<std::int32_t> sample(static_cast<std::size_t>(data.seq()) + 1);
    data.read(0, sample);
    std::vector<float> logits, chosen;
    for (std::int64_t i = 0; i < prompt; ++i) logits = trainer.decode(sample[static_cast<std::size_t>(i)], i);
    while (static_cast<std::int64_t>(chosen.size()) < tokens) {
        const std::int32_t next = train::choose_token(logits, {}, 0);
        chosen.push_back(static_cast<float>(next));
        logits = trainer.decode(next, prompt + static_cast<std::int64_t>(chosen.size()) - 1);
    }
    return chosen;
}

void write_step(std::span<char*> arguments) {
    if (arguments.size() < 4) refuse("usage: hf_step HF_DIR DATA_PREFIX OUT.safetensors [FIELD=VALUE ...]");
    const plan::Plan plan = plan_of(arguments[1], arguments.subspan(4));
    train::TrainOptions options;
    options.lr = 0.0;
    options.evaluates = true;
    train::Trainer trainer(plan, options);
    const train::LoadReport report = train::load_weights(trainer, arguments[1]);
    if (const std::string text = train::describe(report); !text.empty()) std::fprintf(stderr, "%s\n", text.c_str());
    data::SampleData data({{arguments[2], 1.0}}, plan.seq, plan.gbs, plan.model->vocab, false, 1);
    const train::StepResult step =
        trainer.step([&](std::int64_t sample, std::span<std::int32_t> out) { data.read(sample, out); });

    const train::Evaluation evaluation =
        trainer.evaluate([&](std::int64_t sample, std::span<std::int32_t> out) { data.read(sample, out); }, plan.gbs);
    const std::vector<float> greedy = greedy_tokens(arguments[1], data);

    std::vector<weights::TensorToWrite> tensors{
        {"loss", {1}}, {"evaluated", {1}}, {"greedy", {static_cast<std::int64_t>(greedy.size())}}};
    for (const auto& [name, shape] : trainer.parameters()) tensors.push_back({name, {shape.rows, shape.cols}});
    weights::write_safetensors(arguments[3], tensors, program::Dtype::f32, [&](const weights::TensorToWrite& tensor) {
        if (tensor.name == "loss") return std::vector{static_cast<float>(step.loss)};
        if (tensor.name == "evaluated") return std::vector{static_cast<float>(evaluation.loss)};
        if (tensor.name == "greedy") return greedy;
        return trainer.read_gradient(tensor.name);
    });
}

} // namespace

int main(int count, char** arguments) {
    try {
        write_step({arguments, static_cast<std::size_t>(count)});
    } catch (const Error& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return static_cast<int>(error.fault());
    }
    return 0;
}
