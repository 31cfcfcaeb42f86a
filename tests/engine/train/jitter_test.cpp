// Noise on the inputs of routers: the gradient goes through it, every step has its own, and only training has it.
#include "planner/lower/lower.hpp"
#include "tests/engine/train/samples.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

using namespace moe;

namespace {

const Fields noisy{{"input_jitter", "0.3"}};

// The same samples in every step.
train::SampleSource repeated() {
    return [source = made_up_tokens(61)](std::int64_t sample, std::span<std::int32_t> tokens) {
        source(sample % 8, tokens);
    };
}

train::TrainOptions still(std::uint64_t seed = 1) {
    train::TrainOptions options;
    options.seed = seed;
    options.lr = 0.0;
    return options;
}

std::vector<double> losses(const Fields& fields, std::uint64_t seed = 1) {
    train::Trainer trainer(small_plan("qwen3", 1, fields), still(seed));
    std::vector<double> list;
    for (int step = 0; step < 3; ++step) list.push_back(trainer.step(repeated()).loss);
    return list;
}

std::vector<const program::Op*> ops_of(const program::Program& program, program::OpKind kind) {
    std::vector<const program::Op*> list;
    for (const program::Template& ops : program.templates)
        for (const program::Op& op : ops.ops)
            if (op.kind == kind) list.push_back(&op);
    return list;
}

} // namespace

TEST_CASE("jitter: every step has noise of its own, the same in every run of a seed") {
    const std::vector<double> first = losses(noisy), quiet = losses({});
    CHECK(quiet[0] == quiet[2]);
    CHECK(first[0] != quiet[0]);
    CHECK(first[0] != first[1]);
    CHECK(first[1] != first[2]);
    CHECK(losses(noisy) == first);
}

TEST_CASE("jitter: an evaluation hears none of it, and the steps go on as without one") {
    train::TrainOptions options = still();
    options.evaluates = true;
    train::Trainer with(small_plan("qwen3", 1, noisy), options), without(small_plan("qwen3", 1), options);
    std::vector<double> list;
    for (int step = 0; step < 3; ++step) {
        CHECK(with.evaluate(repeated(), 8).loss == without.evaluate(repeated(), 8).loss);
        list.push_back(with.step(repeated()).loss);
    }
    CHECK(list == losses(noisy));
}

// Both losses of a difference are of the first step of a run of their own, and so of the same noise.
TEST_CASE("jitter: gradients agree with differences of the loss under the same noise") {
    for (const char* model : {"qwen3", "deepseek3"}) {
        Fields fields = noisy;
        fields.emplace_back("input_jitter", "0.5");
        const plan::Plan plan = small_plan(model, 1, fields);
        const auto run = [&](const std::string& name, const std::vector<double>& direction, double size) {
            auto trainer = std::make_unique<train::Trainer>(plan, still());
            for (const auto& [parameter, shape] : trainer->parameters()) {
                std::vector<float> weights = trainer->read_weight(parameter);
                for (float& w : weights) w *= 3.0f; // so that no gradient drowns in rounding
                if (parameter == name)
                    for (std::size_t i = 0; i < weights.size(); ++i)
                        weights[i] = static_cast<float>(static_cast<double>(weights[i]) + size * direction[i]);
                trainer->write_weight(parameter, weights);
            }
            return trainer;
        };
        const auto base = run("", {}, 0.0);
        const double here = base->step(repeated()).loss;
        int smooth = 0;
        for (const std::string name :
             {"model.layers.1.mlp.gate.weight", "model.layers.1.post_attention_layernorm.weight",
              "model.layers.0.self_attn.o_proj.weight"}) {
            const std::vector<float> gradient = base->read_gradient(name);
            const double norm = std::sqrt(std::inner_product(gradient.begin(), gradient.end(), gradient.begin(), 0.0));
            REQUIRE(norm > 0.0);
            std::vector<double> along(gradient.begin(), gradient.end());
            for (double& x : along) x /= norm;
            double step = std::clamp(1e-3 / norm, 2e-4, 3e-2);
            for (int i = 0; i < 4; ++i, step /= 3.0) { // smaller where a token changes its expert on the way
                const double ahead = run(name, along, step)->step(repeated()).loss,
                             behind = run(name, along, -step)->step(repeated()).loss;
                if (std::abs(ahead + behind - 2.0 * here) > 0.01 * std::abs(ahead - behind) + 2e-6) continue;
                INFO(model, " ", name, ": difference ", (ahead - behind) / (2.0 * step), ", gradient ", norm);
                CHECK(std::abs((ahead - behind) / (2.0 * step) - norm) < 0.02 * norm + 1e-6 / step);
                ++smooth;
                break;
            }
        }
        CHECK(smooth >= 2);
    }
}

TEST_CASE("jitter: the router alone reads the noise, and a plan without it has not one op of it") {
    const program::Program program = lower::lower(small_plan("qwen2", 1, noisy), 0);
    CHECK(program.io.noise != program::no_tensor);
    const std::vector<const program::Op*> jitters = ops_of(program, program::OpKind::jitter);
    std::vector<program::TensorId> forward;
    for (const program::Op* op : jitters)
        if (op->phase == program::Phase::forward) forward.push_back(op->out[0]);
    CHECK(forward.size() == 4); // a layer each; as many for the gradient
    CHECK(jitters.size() >= 8);
    for (const program::Op* op : jitters) CHECK(op->bytes == 2.0 * 32 * 32 * 4); // priced as read and written once
    for (const program::Template& ops : program.templates)
        for (const program::Op& op : ops.ops)
            for (const program::TensorId id : op.in)
                if (std::find(forward.begin(), forward.end(), id) != forward.end()) {
                    CHECK(op.module == program::Module::router);
                    CHECK(op.kind == program::OpKind::gemm); // logits, and the gradient of the gate
                }
    const program::Program plain = lower::lower(small_plan("qwen2", 1), 0);
    CHECK(plain.io.noise == program::no_tensor);
    CHECK(ops_of(plain, program::OpKind::jitter).empty());
    CHECK(ops_of(lower::lower_forward(small_plan("qwen2", 1, noisy), 0, {}), program::OpKind::jitter).empty());
}
