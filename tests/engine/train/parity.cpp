// Runs three steps and compares tensor by tensor.
#include "tests/engine/train/parity.hpp"

#include "engine/train/merge_adapters.hpp"
#include "planner/model/model.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

using namespace moe;

namespace {

bool moved(const std::vector<float>& gradient) {
    return std::any_of(gradient.begin(), gradient.end(), [](float g) { return g != 0.0f; });
}

double norm(const std::vector<float>& x) {
    double sum = 0.0;
    for (const float v : x) sum += static_cast<double>(v) * static_cast<double>(v);
    return std::sqrt(sum);
}

double largest(const std::map<std::string, std::vector<float>>& gradients) {
    float most = 0.0f;
    for (const auto& [name, values] : gradients)
        for (const float v : values) most = std::max(most, std::abs(v));
    return static_cast<double>(most);
}

std::string tensor_disagreement(const char* what, const std::map<std::string, std::vector<float>>& got,
                                const std::map<std::string, std::vector<float>>& want, double tolerance,
                                double smallest, double of_element = 0.0) {
    if (got.size() != want.size()) return fmt::format("{} tensors of {}, not {}", got.size(), what, want.size());
    for (const auto& [name, values] : want) {
        const auto found = got.find(name);
        if (found == got.end() || found->second.size() != values.size())
            return fmt::format("{} of {} is missing or has another size", what, name);
        const double size = norm(values), off = relative_distance(found->second, values) * (size > 0.0 ? size : 1.0);
        const double elements = of_element * std::sqrt(static_cast<double>(values.size()));
        if (!(off <= std::max(tolerance * std::max(size, smallest), elements)))
            return fmt::format("{} of {} is off by {:.2e} of {:.2e}", what, name, off, size);
    }
    return {};
}

} // namespace

double total_distance(const std::map<std::string, std::vector<float>>& got,
                      const std::map<std::string, std::vector<float>>& want) {
    double off = 0.0, size = 0.0;
    for (const auto& [name, values] : want) {
        const float* other = got.at(name).data();
        for (const float value : values) {
            const double apart = static_cast<double>(*other++) - static_cast<double>(value);
            off += apart * apart;
            size += static_cast<double>(value) * static_cast<double>(value);
        }
    }
    return std::sqrt(off / size);
}

train::TrainOptions three_steps(std::uint64_t seed) {
    train::TrainOptions options;
    options.steps = 3;
    options.lr = 1e-3;
    options.seed = seed;
    options.permits = 2;
    // Adam divides by the root of the squared gradient: an epsilon of the gradients' own size keeps the update from
    // turning rounding errors of vanishing gradients into full-size steps.
    options.eps = 1e-3;
    return options;
}

Trained train_three(const plan::Plan& plan, std::uint64_t seed, const ops::Backend* table,
                    const train::WeightRules& rules) {
    train::TrainOptions options = three_steps(seed);
    options.table = table;
    options.rules = rules;
    return train_three(plan, options);
}

Trained train_three(const plan::Plan& plan, const train::TrainOptions& options,
                    const std::function<void(train::Trainer&)>& prepare) {
    train::Trainer trainer(plan, options);
    if (prepare) prepare(trainer);
    const train::SampleSource source = made_up_samples(plan);
    Trained result;
    for (int step = 0; step < 3; ++step) {
        const train::StepResult r = trainer.step(source);
        result.losses.push_back(r.loss);
        result.overflow.push_back(r.overflow);
        result.aux_losses.push_back(r.aux_loss() + r.mtp_loss);
        for (const train::IndexerStep& indexer : r.indexers) result.indexer_losses.push_back(indexer.loss);
        if (r.logits) result.logits.push_back(*r.logits);
        if (step > 0) continue;
        result.grad_norm = r.grad_norm;
        for (const auto& [name, shape] : trainer.parameters())
            if (!plan.lora.on() || train::is_adapter(name)) result.gradients[name] = trainer.read_gradient(name);
    }
    for (const auto& [name, shape] : trainer.parameters()) result.weights[name] = trainer.read_weight(name);
    result.routed = trainer.routed_tokens();
    return result;
}

std::string disagreement(const Trained& got, const Trained& want, double tolerance, double of_weights,
                         double underflow) {
    const auto close = [tolerance](double a, double b) { return std::abs(a / b - 1.0) < tolerance; };
    if (got.losses.size() != want.losses.size()) return "another number of steps";
    for (std::size_t i = 0; i < want.losses.size(); ++i)
        if (!close(got.losses[i], want.losses[i]))
            return fmt::format("loss of step {} is {:.9f}, not {:.9f}", i + 1, got.losses[i], want.losses[i]);
    if (got.indexer_losses.size() != want.indexer_losses.size()) return "another number of indexers' losses";
    // A difference of sums that are rounded as a few nats are.
    const double rounding = 0.05 * tolerance;
    for (std::size_t i = 0; i < want.indexer_losses.size(); ++i)
        if (!(std::abs(got.indexer_losses[i] - want.indexer_losses[i]) <=
              tolerance * want.indexer_losses[i] + rounding))
            return fmt::format("loss {} of indexers is {:.9f}, not {:.9f}", i, got.indexer_losses[i],
                               want.indexer_losses[i]);
    for (std::size_t i = 0; i < want.aux_losses.size(); ++i)
        if (!(std::abs(got.aux_losses[i] - want.aux_losses[i]) <= tolerance * want.aux_losses[i]))
            return fmt::format("auxiliary loss of step {} is {:.9f}, not {:.9f}", i + 1, got.aux_losses[i],
                               want.aux_losses[i]);
    if (!close(got.grad_norm, want.grad_norm))
        return fmt::format("gradient norm is {:.9f}, not {:.9f}", got.grad_norm, want.grad_norm);
    std::string text = tensor_disagreement("gradient", got.gradients, want.gradients, tolerance, 1e-3 * want.grad_norm);
    if (text.empty())
        text = tensor_disagreement("weight", got.weights, want.weights, of_weights, 1e-5,
                                   underflow * largest(want.gradients));
    return text;
}

void check_bits(const Trained& got, const Trained& want) {
    CHECK(got.losses == want.losses);
    CHECK(got.aux_losses == want.aux_losses);
    CHECK(got.indexer_losses == want.indexer_losses);
    CHECK(got.grad_norm == want.grad_norm);
    CHECK(got.gradients == want.gradients);
    CHECK(got.weights == want.weights);
}

std::string words_of(const Fields& fields) {
    std::string out;
    for (const auto& [field, value] : fields) out.append(field).append("=").append(value).append(" ");
    return out;
}

void check_plans(const std::string& model, const std::vector<Fields>& plans, const Fields& common) {
    const Trained expected = train_three(small_plan(model, 1, common));
    CHECK(expected.losses[0] == nearly(std::log(61.0)).epsilon(0.05));
    CHECK(expected.losses[2] < expected.losses[0]);
    // The selection bias has no gradient: it moves to balance the load, not to lower the loss. Nor have factors of
    // layers.
    for (const auto& [name, gradient] : expected.gradients) {
        const bool stays = name.find("e_score_correction_bias") != std::string::npos || name.ends_with("layer_scalar");
        CHECK(moved(gradient) == !stays);
    }
    for (Fields fields : plans) {
        fields.insert(fields.begin(), common.begin(), common.end());
        INFO(model, " ", words_of(fields));
        const Trained got = train_three(small_plan(model, 8, fields));
        CHECK(disagreement(got, expected, parity_tolerance, parity_tolerance) == "");
        CHECK(got.routed == expected.routed);
    }
}
