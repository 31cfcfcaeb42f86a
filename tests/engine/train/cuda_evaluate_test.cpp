// Evaluation, loads of experts and cached decoding on GPUs, op by op and as a graph; skipped where there is no device.
#include "planner/model/model.hpp"
#include "tests/engine/train/cuda_parity.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

using namespace moe;

namespace {

struct Run {
    std::vector<double> losses, evaluated;
    std::map<std::string, std::vector<float>> weights;
    std::vector<std::vector<std::int64_t>> loads; // of the last step, by layer
    std::vector<std::vector<std::int64_t>> routed;
};

Run run(const plan::Plan& plan, const std::string& backend, bool evaluates) {
    train::TrainOptions options;
    options.backend = backend;
    options.evaluates = evaluates;
    options.steps = 3;
    train::Trainer trainer(plan, options);
    const train::SampleSource tokens = made_up_tokens(plan.model->vocab),
                              others = made_up_tokens(plan.model->vocab, 11);
    Run result;
    for (int step = 0; step < 3; ++step) {
        if (evaluates) result.evaluated.push_back(trainer.evaluate(others, plan.gbs + 1).loss);
        const train::StepResult done = trainer.step(tokens);
        result.losses.push_back(done.loss);
        result.loads.clear();
        for (const train::RouterStep& router : done.routers) result.loads.push_back(router.tokens);
    }
    for (const auto& [name, shape] : trainer.parameters()) result.weights[name] = trainer.read_weight(name);
    result.routed = trainer.routed_tokens();
    return result;
}

void check_evaluation(int ranks, const std::string& model, Fields fields) {
    fields.emplace_back("deterministic", "on");
    const plan::Plan plan = small_plan(model, ranks, fields);
    const std::string what = fmt::format("{} on {} GPUs", model, ranks);
    CAPTURE(what);
    const Run with = run(plan, "cuda", true), without = run(plan, "cuda", false);
    CHECK(with.losses == without.losses);
    CHECK(with.weights == without.weights);
    CHECK(with.loads == without.loads);
    plan::Plan on_cpu = plan;
    on_cpu.cuda_graph = plan::CudaGraph::none;
    const Run cpu = run(on_cpu, "cpu", true);
    const bool bf16 = plan.precision == machine::Precision::bf16;
    for (std::size_t i = 0; i < 3; ++i)
        CHECK(std::abs(with.evaluated[i] / cpu.evaluated[i] - 1.0) < (bf16 ? 2e-2 : 1e-4));
    REQUIRE(with.loads.size() == cpu.loads.size());
    REQUIRE(with.routed.size() == cpu.routed.size());
    for (std::size_t layer = 0; layer < with.loads.size(); ++layer) {
        const std::vector<std::int64_t>&got = with.loads[layer], &want = cpu.loads[layer];
        CHECK(std::accumulate(got.begin(), got.end(), std::int64_t{0}) ==
              std::accumulate(want.begin(), want.end(), std::int64_t{0}));
        // A copy or two may fall to another expert where two scores are equal up to rounding.
        std::int64_t moved = 0;
        for (std::size_t e = 0; e < want.size(); ++e) moved += std::abs(got[e] - want[e]);
        CHECK(moved <= (bf16 ? 40 : 4));
    }
}

} // namespace

TEST_CASE("cuda: evaluation finds the CPU's loss and changes no bit of the training, and steps tell the loads") {
    if (!has_gpus(1)) return;
    for (const char* graph : {"none", "full"}) {
        for (const char* model : {"qwen3", "deepseek3", "gptoss", "deepseek3-mtp"})
            check_evaluation(1, model, {{"mbs", "2"}, {"cuda_graph", graph}});
        check_evaluation(1, "qwen3", {{"precision", "bf16"}, {"cuda_graph", graph}});
        check_evaluation(1, "deepseek3", {{"bias_update", "0.01"}, {"aux_loss", "0.1"}, {"cuda_graph", graph}});
    }
}

TEST_CASE("cuda: evaluation over two GPUs, by stages, experts and tensors") {
    if (!has_gpus(2)) return;
    for (const char* graph : {"none", "full"}) {
        check_evaluation(2, "qwen3", {{"ep", "2"}, {"cuda_graph", graph}});
        check_evaluation(2, "deepseek3", {{"pp", "2"}, {"mbs", "2"}, {"cuda_graph", graph}});
        check_evaluation(2, "qwen3", {{"tp", "2"}, {"etp", "2"}, {"cuda_graph", graph}});
    }
    check_evaluation(2, "qwen3", {{"ep", "2"}, {"capacity", "1.2"}});
}

TEST_CASE("cuda: cached decoding gives the CPU's logits, op by op and as a graph") {
    if (!has_gpus(1)) return;
    constexpr std::int64_t length = 40;
    for (const char* model : {"qwen3", "qwen2", "deepseek3", "deepseek2", "gptoss", "mixtral", "llama"})
        for (const char* graph : {"none", "full"}) {
            CAPTURE(model);
            CAPTURE(graph);
            std::vector<std::int32_t> text(length);
            made_up_tokens(61)(0, text);
            train::TrainOptions options;
            options.forward_only = lower::ForwardOnly{true, length};
            train::Trainer cpu(small_plan(small_model(model), 1, {}, {1, 1}), options);
            options.backend = "cuda";
            train::Trainer cuda(small_plan(small_model(model), 1, {{"cuda_graph", graph}}, {1, 1}), options);
            for (std::int64_t i = 0; i < length; ++i) {
                const std::vector<float> want = cpu.decode(text[static_cast<std::size_t>(i)], i),
                                         got = cuda.decode(text[static_cast<std::size_t>(i)], i);
                CHECK(relative_distance(got, want) < 1e-3);
            }
        }
}
