// Trains on both back ends and compares.
#include "tests/engine/train/cuda_parity.hpp"

#include "engine/backends/backends.hpp"
#include "engine/ops/backend.hpp"
#include "engine/train/merge_adapters.hpp"
#include "planner/model/model.hpp"
#include "tests/engine/comm/kept_communicators.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>

using namespace moe;

namespace {

std::shared_ptr<const model::Model> with_every_expert(model::Model model) {
    for (model::LayerKind& kind : model.kinds) {
        if (!kind.moe) continue;
        kind.moe->top_k = kind.moe->experts;
        kind.moe->router.groups_kept = kind.moe->router.groups;
    }
    return std::make_shared<const model::Model>(std::move(model));
}

} // namespace

int gpus_here() { return backends::backend_named("cuda").devices(); }

bool has_gpus(int ranks) {
    const int devices = gpus_here();
    if (devices < ranks) std::printf("skipped: needs %d GPUs, this machine has %d\n", ranks, devices);
    return devices >= ranks;
}

CudaResult train_on(const plan::Plan& plan, const std::string& backend, int steps, std::uint64_t seed, bool windows) {
    train::TrainOptions options;
    options.seed = seed;
    options.steps = steps;
    options.lr = 1e-3;
    options.eps = 1e-3; // of the gradients' size: rounding errors of vanishing gradients must not become full steps
    options.backend = backend;
    if (backend == "cuda" && plan.gpus > 1) options.table = &cuda_keeping(windows);
    options.hang_timeout = 15.0;
    options.on_hang = [](const std::string& line) { // a queue that hangs cannot be made to unwind
        std::fprintf(stderr, "%s\n", line.c_str());
        std::_Exit(1);
    };
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    train::Trainer trainer(plan, options);
    const train::SampleSource source = made_up_samples(plan);
    CudaResult result;
    result.slots_by = trainer.joined().slots_by;
    for (int step = 0; step < steps; ++step) {
        const train::StepResult r = trainer.step(source);
        result.losses.push_back(r.loss);
        result.norms.push_back(r.grad_norm);
        if (step > 0) continue;
        for (const auto& [name, shape] : trainer.parameters())
            if (!plan.lora.on() || train::is_adapter(name)) result.gradients[name] = trainer.read_gradient(name);
    }
    for (const auto& [name, shape] : trainer.parameters()) result.weights[name] = trainer.read_weight(name);
    result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    return result;
}

Farthest farthest(const CudaResult& got, const CudaResult& expected, double smallest) {
    Farthest worst;
    const auto note = [&](const std::string& name, double distance) {
        if (!std::isnan(worst.distance) && !(distance <= worst.distance)) worst = {distance, name};
    };
    for (std::size_t i = 0; i < expected.losses.size(); ++i) {
        note(fmt::format("loss of step {}", i + 1), std::abs(got.losses[i] / expected.losses[i] - 1.0));
        note(fmt::format("gradient norm of step {}", i + 1), std::abs(got.norms[i] / expected.norms[i] - 1.0));
    }
    REQUIRE(got.gradients.size() == expected.gradients.size());
    for (const auto& [name, gradient] : expected.gradients) {
        double squares = 0.0;
        for (const float g : gradient) squares += static_cast<double>(g) * static_cast<double>(g);
        const double own = std::sqrt(squares), held = std::max(own, smallest * expected.norms.front());
        const double off = relative_distance(got.gradients.at(name), gradient) * (own > 0.0 ? own : 1.0);
        note("gradient of " + name, held > 0.0 ? off / held : off);
        note("weight " + name, relative_distance(got.weights.at(name), expected.weights.at(name)));
    }
    return worst;
}

void compare(const std::string& what, const CudaResult& got, const CudaResult& expected, double tolerance) {
    const Farthest worst = farthest(got, expected);
    INFO(what, " ", worst.name, ": ", worst.distance);
    CHECK(worst.distance < tolerance); // a NaN fails
    std::printf("%-60s worst %.2e of %.0e: %s\n", what.c_str(), worst.distance, tolerance, worst.name.c_str());
}

void compare_beside(const std::string& what, const CudaResult& got, const CudaResult& expected, const CudaResult& other,
                    double times) {
    double off = 0.0, size = 0.0; // of all gradients together
    for (const auto& [name, gradient] : expected.gradients)
        for (std::size_t i = 0; i < gradient.size(); ++i) {
            off += std::pow(static_cast<double>(other.gradients.at(name)[i]) - static_cast<double>(gradient[i]), 2);
            size += std::pow(static_cast<double>(gradient[i]), 2);
        }
    const double whole = std::sqrt(off / size);
    REQUIRE(got.gradients.size() == expected.gradients.size());
    Farthest worst;
    for (const auto& [name, gradient] : expected.gradients) {
        const double noise = std::max(relative_distance(other.gradients.at(name), gradient), whole);
        const double ratio = relative_distance(got.gradients.at(name), gradient) / noise;
        if (!std::isnan(worst.distance) && !(ratio <= worst.distance)) worst = {ratio, name};
    }
    INFO(what, " ", worst.name, ": ", worst.distance, " times what other roundings change");
    CHECK(worst.distance < times); // a NaN fails
    std::printf("%-60s worst %.2f of %.1f times other roundings: gradient of %s\n", what.c_str(), worst.distance, times,
                worst.name.c_str());
}

namespace {

std::string described(const std::string& model, const Fields& fields, int ranks) {
    std::string what = ranks > 1 ? fmt::format("{} on {} GPUs:", model, ranks) : model;
    for (const auto& [field, value] : fields) what.append(" ").append(field).append("=").append(value);
    return what;
}

} // namespace

void check_model(const std::string& model, const Fields& fields, double tolerance, bool every_expert, int steps,
                 int ranks) {
    plan::Plan plan = small_plan(model, ranks, fields);
    if (every_expert) plan.model = with_every_expert(*plan.model);
    const std::string what = described(model, fields, ranks);
    plan::Plan reference = plan;
    reference.cuda_graph = plan::CudaGraph::none;
    compare(what, train_on(plan, "cuda", steps), train_on(reference, "cpu", steps), tolerance);
}

void check_rounding(const std::string& model, const Fields& fields, double times) {
    Fields split_fields = fields;
    split_fields.emplace_back("tp", "2");
    plan::Plan plan = small_plan(model, 1, fields), split = small_plan(model, 2, split_fields);
    plan.model = split.model = with_every_expert(*plan.model);
    compare_beside(described(model, fields, 1), train_on(plan, "cuda"), train_on(plan, "cpu"), train_on(split, "cpu"),
                   times);
}

void check_ranks(int ranks, const std::string& model, const Fields& fields, const Fields& config) {
    if (!has_gpus(ranks)) return;
    plan::Plan plan = small_plan(small_model(model, config), ranks, fields);
    const std::string what = described(model, fields, ranks);
    const CudaResult expected = train_on(plan, "cpu"), queued = train_on(plan, "cuda");
    plan.cuda_graph = plan::CudaGraph::full;
    const CudaResult replayed = train_on(plan, "cuda");
    compare(what, queued, expected, 1e-4);
    INFO(what);
    CHECK(replayed.losses == queued.losses);
    CHECK(replayed.norms == queued.norms);
    CHECK(replayed.gradients == queued.gradients);
    CHECK(replayed.weights == queued.weights);
    std::printf("    %.2f s on the CPU, %.2f and as a graph %.2f on GPUs\n", expected.seconds, queued.seconds,
                replayed.seconds);
}
