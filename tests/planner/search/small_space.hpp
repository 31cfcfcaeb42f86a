// A small space to search: a model of seven layers on a box of two precisions, with an analytic estimator.
#pragma once

#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/search/search.hpp"
#include "planner/stack/stack.hpp"
#include "tests/planner/plan/sample_plans.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

namespace small_space {

using namespace moe;

inline constexpr double gib = 1024.0 * 1024.0 * 1024.0;

inline std::shared_ptr<model::Model> small_model() {
    std::shared_ptr<model::Model> model = small_moe_model(7);
    model->mtp = {0};
    return model;
}

inline std::shared_ptr<machine::Hardware> small_hardware(double memory = 1.0 * gib) {
    auto hardware = std::make_shared<machine::Hardware>();
    hardware->name = "box";
    hardware->peak_flops[static_cast<std::size_t>(machine::Precision::fp32)] = 1e12;
    hardware->peak_flops[static_cast<std::size_t>(machine::Precision::bf16)] = 2e12;
    hardware->memory_bytes = memory;
    return hardware;
}

inline stack::Stack small_stack() {
    stack::Stack stack;
    stack.name = "test";
    stack.precisions = {machine::Precision::fp32, machine::Precision::bf16};
    stack.dispatchers = {plan::Dispatcher::alltoall};
    stack.cuda_graphs = {plan::CudaGraph::none};
    stack.executable = true; // only what is named here
    stack.recompute_modules =
        plan::recompute::full | plan::recompute::layernorm | plan::recompute::moe_act | plan::recompute::core_attn;
    for (const unsigned norm : {0U, plan::recompute::layernorm})
        for (const unsigned act : {0U, plan::recompute::moe_act})
            for (const unsigned attn : {0U, plan::recompute::core_attn})
                stack.recompute_sets.push_back(norm | act | attn);
    stack.recompute_sets.push_back(plan::recompute::full);
    stack.bf16_moments = true;
    return stack;
}

inline search::SearchRequest small_request(int gpus = 8, std::int64_t gbs = 32) {
    search::SearchRequest request;
    request.base.model = small_model();
    request.base.hardware = small_hardware();
    request.base.stack = "test";
    request.base.gpus = gpus;
    request.base.gbs = gbs;
    request.base.seq = 1024;
    request.threads = 1;
    return request;
}

// Additive costs with every tendency of the real ones: parallelism costs communication, small micro-batches waste the
// device, recompute trades time for memory, stages wait for the heaviest one.
class Analytic : public search::Estimator {
public:
    double memory_bytes(const plan::Plan& plan) override {
        const std::vector<plan::Stage> all = plan::stages(plan);
        std::vector<double> bytes(static_cast<std::size_t>(plan.pp), 0.0);
        const double flight = plan.pp == 1 ? 1.0 : 1.0 + (plan.vpp > 1 ? (plan.pp - 1.0) / (plan.pp * plan.vpp) : 0.0);
        const double per_parameter = 6.0 + (plan.optimizer.narrow() ? 8.0 : 12.0) / (plan.dp * plan.cp);
        const double tokens = static_cast<double>(plan.tokens_local());
        for (std::size_t k = 0; k < all.size(); ++k) {
            const double layers = all[k].layers + all[k].mtp;
            const double weights = layers * (2e6 / plan.tp + 24e6 / (plan.ep * plan.etp)) + (all[k].loss ? 1e6 : 0.0);
            double saved = layers * tokens * 4e3 * flight * std::min(plan.pp, plan.micro_batches());
            if (plan.recompute == plan::recompute::full)
                saved *= 0.1;
            else if (plan.recompute != 0)
                saved *= 0.6;
            bytes[k % bytes.size()] += weights * per_parameter + saved;
        }
        return *std::max_element(bytes.begin(), bytes.end());
    }

    search::Estimate estimate(const plan::Plan& plan) override {
        ++calls;
        const std::vector<plan::Stage> all = plan::stages(plan);
        const std::vector<std::int64_t> weights = plan::stage_weights(*plan.model, plan.seq, all);
        std::vector<double> ranks(static_cast<std::size_t>(plan.pp), 0.0);
        for (std::size_t k = 0; k < all.size(); ++k)
            ranks[k % ranks.size()] += static_cast<double>(weights[k]) / 1000.0;
        const double tokens = static_cast<double>(plan.tokens_local());
        const double m = plan.micro_batches();
        const double heaviest = *std::max_element(ranks.begin(), ranks.end());
        search::Estimate e;
        search::Breakdown& b = e.breakdown;
        b.compute =
            m * heaviest * (tokens * 1e-6 / (plan.precision == machine::Precision::bf16 ? 2.0 : 1.0) + 1e-4 * plan.etp);
        b.tensor = m * heaviest * tokens * 1e-7 * (plan.tp - 1);
        b.context = m * heaviest * tokens * 3e-7 * (plan.cp - 1);
        b.expert = m * heaviest * tokens * 2e-7 * (1.0 - 1.0 / (plan.ep * plan.etp));
        const double share = plan.recompute == plan::recompute::full ? 0.33 : plan.recompute != 0 ? 0.05 : 0.0;
        b.recompute = b.compute * share;
        b.bubble = (b.compute + b.tensor + b.context + b.expert + b.recompute) * (plan.pp - 1) / (m * plan.vpp);
        b.pipeline = 1e-5 * m * plan.vpp * (plan.pp - 1);
        b.data = 1e-3 * (1.0 - 1.0 / plan.dp);
        b.optimizer = (plan.optimizer.narrow() ? 1e-3 : 2e-3) / plan.dp;
        e.step_seconds =
            b.compute + b.tensor + b.context + b.expert + b.recompute + b.bubble + b.pipeline + b.data + b.optimizer;
        e.memory_bytes = memory_bytes(plan);
        return e;
    }

    std::atomic<int> calls{0};
};

} // namespace small_space
