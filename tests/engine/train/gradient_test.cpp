// Gradients of one rank against central differences of the loss, for every parameter of every kind of model.
#include "tests/engine/train/samples.hpp"
#include "tests/support/draws.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

using namespace moe;

namespace {

// The loss and its gradients at the current weights: a step with learning rate 0 changes nothing.
class Probe {
public:
    Probe(const std::string& model, const Fields& fields)
        : trainer_(plan(model, fields), options()), source_(made_up_tokens(61)) {}

    // All that gradients are taken of. All steps see the same samples.
    double loss() {
        const train::StepResult step =
            trainer_.step([&](std::int64_t sample, std::span<std::int32_t> tokens) { source_(sample % 4, tokens); });
        return step.loss + step.aux_loss() + 0.1 * step.mtp_loss;
    }
    train::Trainer& trainer() { return trainer_; }

    struct Slope {
        double value = 0.0; // (loss(w + step d) - loss(w - step d)) / (2 step) for a direction d of length 1
        double noise = 0.0; // what the rounding of an FP32 loss leaves open
        bool smooth = false;
    };
    // The loss jumps on one side of w where a token changes its expert within the step, and there is no slope to
    // compare.
    Slope slope(const std::string& name, const std::vector<float>& weights, const std::vector<double>& direction,
                double step, double here) {
        const auto at = [&](double shift) {
            std::vector<float> moved(weights.size());
            for (std::size_t i = 0; i < moved.size(); ++i)
                moved[i] = static_cast<float>(weights[i] + shift * direction[i]);
            trainer_.write_weight(name, moved);
            return loss();
        };
        const double ahead = at(step), behind = at(-step);
        trainer_.write_weight(name, weights);
        const double bend = std::abs(ahead + behind - 2.0 * here);
        return {(ahead - behind) / (2.0 * step), rounding / step,
                bend < 0.01 * std::abs(ahead - behind) + 2.0 * rounding};
    }

private:
    static constexpr double rounding = 1e-6; // of a loss of about 5
    // Few tokens: few of them stand near the boundary between two experts.
    static plan::Plan plan(const std::string& model, Fields fields) {
        fields.emplace_back("mbs", "2");
        plan::Plan plan = small_plan(model, 1, fields);
        plan.seq = 8;
        plan.gbs = 4;
        return plan;
    }
    static train::TrainOptions options() {
        train::TrainOptions options;
        options.lr = 0.0;
        options.permits = 1;
        return options;
    }
    train::Trainer trainer_;
    train::SampleSource source_;
};

std::vector<double> normalized(std::vector<double> v) {
    const double norm = std::sqrt(std::inner_product(v.begin(), v.end(), v.begin(), 0.0));
    if (norm > 0.0) // zero for an expert that no token chose
        for (double& x : v) x /= norm;
    return v;
}

std::vector<float> normal(std::uint64_t key, std::size_t count) {
    std::vector<float> values(count);
    cpu_kernels().draw_normal(key, 0, 1.0, values.data(), static_cast<std::int64_t>(count), nullptr);
    return values;
}

// Along the gradient itself (a wrong scale or sign), along its largest entry (a wrong place), and along a random
// direction (a part that is missing).
std::vector<std::vector<double>> directions(const std::vector<float>& gradient, std::uint64_t seed) {
    std::vector<double> along(gradient.begin(), gradient.end()), entry(gradient.size()), random(gradient.size());
    const auto largest =
        std::max_element(gradient.begin(), gradient.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
    entry[static_cast<std::size_t>(largest - gradient.begin())] = 1.0;
    const std::vector<float> deviates = normal(seed, gradient.size());
    for (std::size_t i = 0; i < random.size(); ++i)
        random[i] = static_cast<double>(deviates[i]) + 2.0 * (gradient[i] > 0.0f ? 1.0 : -1.0);
    return {normalized(along), entry, normalized(random)};
}

void check_model(const std::string& model, const Fields& fields = {}) {
    Probe probe(model, fields);
    // Weights of a model in the middle of training, so that no gradient drowns in the rounding of an FP32 loss.
    for (const auto& [name, shape] : probe.trainer().parameters()) {
        std::vector<float> weights = probe.trainer().read_weight(name);
        const float scale = name == "model.embed_tokens.weight" ? 1.0f : 0.12f;
        const std::vector<float> deviates = normal(weights::random_stream(12, name), weights.size());
        for (std::size_t i = 0; i < weights.size(); ++i) weights[i] += scale * deviates[i];
        probe.trainer().write_weight(name, weights);
    }
    probe.loss(); // the next step's global_aux_loss balances the load of this one
    const double here = probe.loss();
    std::map<std::string, std::vector<float>> gradients;
    for (const auto& [name, shape] : probe.trainer().parameters())
        gradients[name] = probe.trainer().read_gradient(name);
    int checks = 0, jumps = 0;
    for (const auto& [name, gradient] : thinned(std::vector(gradients.begin(), gradients.end()))) {
        if (name.find("e_score_correction_bias") != std::string::npos) continue; // chooses, and has no gradient
        const std::vector<float> weights = probe.trainer().read_weight(name);
        for (const std::vector<double>& direction : directions(gradient, weights::random_stream(5, name))) {
            const double expected = std::inner_product(gradient.begin(), gradient.end(), direction.begin(), 0.0);
            // The largest smooth step of these, which change the loss by at most 0.002 or so, gives the sharpest
            // answer.
            double step = std::clamp(1e-3 / (std::abs(expected) + 1e-6), 2e-4, 3e-2);
            Probe::Slope seen;
            for (int i = 0; i < 4 && !seen.smooth; ++i, step /= 3.0)
                seen = probe.slope(name, weights, direction, step, here);
            ++checks;
            if (!seen.smooth || seen.noise > 0.05 * std::abs(expected) + 1e-4) {
                ++jumps;
                continue;
            }
            INFO(model, " ", name, ": difference ", seen.value, ", gradient ", expected);
            CHECK(std::abs(seen.value - expected) < 0.02 * std::abs(expected) + seen.noise);
        }
    }
    INFO(model, ": ", jumps, " of ", checks, " directions cross a jump");
    CHECK((draw_share() > 1 || jumps < 0.15 * checks)); // of a few directions all may cross one
}

} // namespace

TEST_CASE("gradients agree with differences of the loss: qwen3") { check_model("qwen3"); }
TEST_CASE("gradients agree with differences of the loss: qwen2") { check_model("qwen2"); }
TEST_CASE("gradients agree with differences of the loss: deepseek3") { check_model("deepseek3"); }
TEST_CASE("gradients agree with differences of the loss: deepseek2") { check_model("deepseek2"); }
TEST_CASE("gradients agree with differences of the loss: mixtral") { check_model("mixtral"); }
TEST_CASE("gradients agree with differences of the loss: llama") { check_model("llama"); }
TEST_CASE("gradients agree with differences of the loss: gptoss") { check_model("gptoss"); }
// Indexers have a loss of their own, which is not a part of this one.
TEST_CASE("gradients agree with differences of the loss: deepseek32") {
    check_model("deepseek32", {{"indexer_loss", "none"}});
}
TEST_CASE("gradients agree with differences of the loss: glm5") { check_model("glm5", {{"indexer_loss", "none"}}); }
TEST_CASE("gradients agree with differences of the loss: deepseek3-mtp") { check_model("deepseek3-mtp"); }
TEST_CASE("gradients agree with differences of the loss: factors, gates, norms and rotations of other families") {
    for (const char* model : {"olmoe", "afmoe", "mimo", "nemotron", "llama4"}) check_model(model);
}
TEST_CASE("gradients agree with differences of the loss: balancing losses") {
    for (const char* kind : {"aux_loss", "seq_aux_loss", "global_aux_loss"})
        check_model("qwen3", {{"load_balancing", kind}, {"aux_loss", "3"}, {"z_loss", "0.1"}});
    check_model("deepseek3", {{"aux_loss", "3"}});
}
