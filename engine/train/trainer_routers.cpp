// What layers leave of a step: tokens by expert, losses and loads of routers, losses of indexers, brought together from
// all stages and processes.
#include "engine/train/trainer_processes.hpp"
#include "planner/model/model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace moe::train {

namespace {

// What a rank of the trainer has in its Program's layer_sums. One read for all of it, as each waits for the device.
template <class Rank>
std::vector<float> layer_sums_of(const Rank& rank, const program::Program& program) {
    const program::Tensor& all = program.tensors[static_cast<std::size_t>(program.io.layer_sums)];
    std::vector<float> sums(static_cast<std::size_t>(all.elements()));
    rank.device->read(sums.data(), rank.arena->at(program.io.layer_sums), sums.size() * sizeof(float));
    return sums;
}

// Adds counts to those of a global layer.
void add_tokens(std::vector<std::vector<std::int64_t>>& sum, std::size_t layer, std::span<const std::int64_t> tokens) {
    if (sum.size() <= layer) sum.resize(layer + 1);
    sum[layer].resize(std::max(sum[layer].size(), tokens.size()), 0);
    for (std::size_t e = 0; e < tokens.size(); ++e) sum[layer][e] += tokens[e];
}

} // namespace

double RouterStep::bias_spread() const {
    if (bias.empty()) return 0.0;
    const auto [least, most] = std::minmax_element(bias.begin(), bias.end());
    return *most - *least;
}

double RouterStep::max_over_mean() const {
    if (tokens.empty()) return 1.0;
    const auto sum = static_cast<double>(std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}));
    const auto most = static_cast<double>(*std::max_element(tokens.begin(), tokens.end()));
    return sum > 0.0 ? most * static_cast<double>(tokens.size()) / sum : 1.0;
}

double RouterStep::load_entropy() const {
    const auto sum = static_cast<double>(std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}));
    if (!(sum > 0.0) || tokens.size() < 2) return 1.0;
    double entropy = 0.0;
    for (const std::int64_t sent : tokens)
        if (sent > 0) entropy -= static_cast<double>(sent) / sum * std::log(static_cast<double>(sent) / sum);
    return entropy / std::log(static_cast<double>(tokens.size()));
}

double StepResult::aux_loss() const {
    double sum = 0.0;
    for (const RouterStep& router : routers) sum += router.aux_loss + router.z_loss;
    return sum;
}

bool Trainer::counts_load() const {
    return std::any_of(programs_.begin(), programs_.end(),
                       [](const program::Program& program) { return !program.io.routers.empty(); });
}

// Every rank of a pipeline stage holds the same sums: one speaks for it.
std::vector<RouterStep> Trainer::read_routers(bool again) {
    std::map<int, RouterStep> steps;
    if (counts_load()) {
        for (int stage = 0; stage < plan_.pp; ++stage) {
            const auto speaker =
                std::find_if(ranks_.begin(), ranks_.end(), [&](const Rank& r) { return r.stage == stage; });
            if (speaker != ranks_.end()) read_router_sums(*speaker, steps);
        }
        if (transport() != nullptr) gather_routers(steps);
        for (const auto& [layer, step] : steps) add_tokens(routed_, static_cast<std::size_t>(layer), step.tokens);
    } else {
        const std::vector<std::vector<std::int64_t>> routed = routed_in_step(again);
        for (std::size_t layer = 0; layer < routed.size(); ++layer) add_tokens(routed_, layer, routed[layer]);
        if (transport() == nullptr) count_routed(routed, steps);
    }
    std::vector<RouterStep> list;
    for (auto& [layer, step] : steps) list.push_back(std::move(step));
    return list;
}

void Trainer::count_routed(const std::vector<std::vector<std::int64_t>>& routed,
                           std::map<int, RouterStep>& steps) const {
    for (std::size_t layer = 0; layer < routed.size(); ++layer) {
        if (routed[layer].empty()) continue;
        RouterStep& step = steps[static_cast<int>(layer)];
        step.layer = static_cast<int>(layer);
        step.tokens = routed[layer];
    }
}

// Process 0, which reports and writes the index of checkpoints, gets those of all stages.
void Trainer::gather_routers(std::map<int, RouterStep>& steps) {
    // Each layer, losses, number of experts, their tokens, whether loads follow, loads, number of biases, biases.
    std::vector<double> flat;
    for (const auto& [layer, step] : steps) {
        const auto load = last_load_.find(layer);
        flat.insert(flat.end(),
                    {static_cast<double>(layer), step.aux_loss, step.z_loss, static_cast<double>(step.tokens.size())});
        flat.insert(flat.end(), step.tokens.begin(), step.tokens.end());
        flat.push_back(load != last_load_.end() ? 1.0 : 0.0);
        if (load != last_load_.end()) flat.insert(flat.end(), load->second.begin(), load->second.end());
        flat.push_back(static_cast<double>(step.bias.size()));
        flat.insert(flat.end(), step.bias.begin(), step.bias.end());
    }
    for (const std::vector<double>& part : gathered(flat))
        for (auto at = part.begin(); at != part.end();) {
            RouterStep step;
            step.layer = static_cast<int>(at[0]);
            step.aux_loss = at[1];
            step.z_loss = at[2];
            const auto experts = static_cast<std::ptrdiff_t>(at[3]);
            step.tokens.assign(at + 4, at + 4 + experts);
            at += 4 + experts;
            const bool loads = *at++ != 0.0;
            if (loads) last_load_[step.layer].assign(at, at + experts);
            if (loads) at += experts;
            const auto biases = static_cast<std::ptrdiff_t>(*at++);
            step.bias.assign(at, at + biases);
            at += biases;
            const std::vector<double> known = steps[step.layer].bias;
            for (std::size_t e = 0; e < step.bias.size() && e < known.size(); ++e)
                if (std::isnan(step.bias[e])) step.bias[e] = known[e]; // another process holds it
            steps[step.layer] = std::move(step);
        }
}

void Trainer::read_router_sums(const Rank& rank, std::map<int, RouterStep>& steps) {
    const program::Program& program = program_of(rank);
    if (program.io.routers.empty()) return;
    const std::vector<float> sums = layer_sums_of(rank, program);
    const auto part = [&](program::TensorId id) {
        const program::Tensor& tensor = program.tensors[static_cast<std::size_t>(id)];
        const auto first = sums.begin() + tensor.offset;
        return std::vector<float>(first, first + tensor.elements());
    };
    for (const program::RouterIo& io : program.io.routers) {
        RouterStep& step = steps[io.layer];
        step.layer = io.layer;
        const std::vector<float> loss = part(io.loss), load = part(io.load);
        step.aux_loss = static_cast<double>(loss[0]);
        step.z_loss = static_cast<double>(loss[1]);
        step.tokens.assign(load.begin(), load.end());
        if (io.score_load != program::no_tensor) last_load_[io.layer] = part(io.score_load);
        if (io.bias != program::no_tensor) step.bias = read_bias(io.layer, load.size());
    }
}

// Every rank of a pipeline stage holds the same sums, as of routers.
std::vector<IndexerStep> Trainer::read_indexers() const {
    if (plan_.indexer.loss == 0.0) return {};
    std::map<int, double> losses;
    for (int stage = 0; stage < plan_.pp; ++stage) {
        const auto speaker =
            std::find_if(ranks_.begin(), ranks_.end(), [stage](const Rank& r) { return r.stage == stage; });
        if (speaker == ranks_.end()) continue;
        const program::Program& program = program_of(*speaker);
        if (program.io.indexers.empty()) continue;
        const std::vector<float> sums = layer_sums_of(*speaker, program);
        for (const program::IndexerIo& io : program.io.indexers) {
            const std::int64_t at = program.tensors[static_cast<std::size_t>(io.loss)].offset;
            losses[io.layer] = static_cast<double>(sums[static_cast<std::size_t>(at)]);
        }
    }
    if (transport() != nullptr && any_indexer()) {
        std::vector<double> flat; // layers, each before its loss
        for (const auto& [layer, loss] : losses) flat.insert(flat.end(), {static_cast<double>(layer), loss});
        for (const std::vector<double>& part : gathered(flat))
            for (std::size_t at = 0; at + 1 < part.size(); at += 2) losses[static_cast<int>(part[at])] = part[at + 1];
    }
    std::vector<IndexerStep> list;
    for (const auto& [layer, loss] : losses) list.push_back({layer, loss});
    return list;
}

// Whether any process may have one: all of them ask the model alike.
bool Trainer::any_indexer() const {
    return std::any_of(plan_.model->kinds.begin(), plan_.model->kinds.end(),
                       [](const model::LayerKind& kind) { return kind.attention.indexes(); });
}

// The biases that ranks of this process hold, as they are behind the step; NaN for others.
std::vector<double> Trainer::read_bias(int layer, std::size_t experts) const {
    std::vector<double> bias(experts, std::numeric_limits<double>::quiet_NaN());
    const std::string of_layer = fmt::format("model.layers.{}.", layer);
    auto name = shapes_.lower_bound(of_layer);
    while (name != shapes_.end() && name->first.rfind("e_score_correction_bias") == std::string::npos) ++name;
    if (name == shapes_.end() || name->first.rfind(of_layer, 0) != 0) return {};
    for_each_piece(name->first, [&](const Rank& r, const program::Bucket& bucket, const weights::Piece& piece) {
        std::vector<float> values(static_cast<std::size_t>(piece.count));
        r.device->read(values.data(), r.arena->as<float>(bucket.kept_master()) + piece.shard,
                       values.size() * sizeof(float));
        std::copy(values.begin(), values.end(), bias.begin() + piece.global);
    });
    return bias;
}

std::vector<std::vector<std::int64_t>> Trainer::routed_tokens() const {
    std::vector<std::vector<std::int64_t>> sum = routed_;
    if (transport() != nullptr && !counts_load()) { // Each layer's counts follow its number.
        std::vector<std::int64_t> flat;
        for (const std::vector<std::int64_t>& layer : sum) {
            flat.push_back(static_cast<std::int64_t>(layer.size()));
            flat.insert(flat.end(), layer.begin(), layer.end());
        }
        sum.clear();
        for (const std::vector<std::int64_t>& part : gathered(flat))
            for (std::size_t at = 0, layer = 0; at < part.size(); ++layer) {
                const auto count = static_cast<std::size_t>(part[at]);
                add_tokens(sum, layer, std::span(part).subspan(at + 1, count));
                at += 1 + count;
            }
    }
    std::erase_if(sum, [](const auto& layer) { return layer.empty(); }); // Dense layers have empty counts.
    return sum;
}

// What ran the step just done.
const run::Executor& Trainer::executor_of_step(const Rank& rank, bool again) const {
    if (batch_ < plan_.gbs) return *rank.smaller.at(batch_).executor;
    return again ? *rank.rerun.executor : *rank.executor;
}

std::vector<std::vector<std::int64_t>> Trainer::routed_in_step(bool again) const {
    std::vector<std::vector<std::int64_t>> sum;
    for (const Rank& rank : ranks_) {
        const auto& routed = executor_of_step(rank, again).routed_tokens();
        for (std::size_t layer = 0; layer < routed.size(); ++layer) add_tokens(sum, layer, routed[layer]);
    }
    return sum;
}

} // namespace moe::train
