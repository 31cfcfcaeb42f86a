// The JSON documents that the verbs print with --json and keep in run directories; one function each.
#pragma once

#include "engine/comm/queued.hpp"
#include "engine/device/device.hpp"
#include "planner/search/search.hpp"
#include "simulator/pricing/skewed_estimator.hpp"
#include "simulator/published/improve.hpp"
#include "simulator/replay/document_steps.hpp"
#include "simulator/replay/simulate.hpp"
#include "tools/import/import_plan.hpp"
#include "tools/launch/engine_launch.hpp"
#include "tools/report/comparison.hpp"
#include "tools/report/ranking.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moe::tools {

// `ranking` holds a note for each plan; `gpus`: of the first.
std::string search_document(const search::SearchResult& result, int gpus, const Ranking& ranking);

// `memory` holds the figures of the pipeline rank that needs most, by class; trace, report: paths written, "" = none.
// skew: figures at the mean, p50 and p99 of the plan's routing.
// documents: steps over drawn lengths, none where the plan masks no documents of known lengths.
// interval: of tflops_per_gpu at its nominal coverage, null with a reason where nothing was measured.
// correction: that is in the step's time, nullptr for none.
std::string replay_document(const replay::Simulation& simulation, const pricing::Skew& skew,
                            const std::optional<replay::DocumentSteps>& documents,
                            const published::IntervalResult& interval, const published::Correction* correction,
                            const std::string& trace, const std::string& report);

struct RouterRecord {
    int layer = 0;
    double aux_loss = 0.0, z_loss = 0.0;
    double load_max_over_mean = 1.0, load_entropy = 1.0; // of the tokens sent to its experts, as train::RouterStep
    std::optional<double> bias_spread = {}; // largest selection bias less the smallest, where the plan moves them
    std::optional<double> dropped = {};     // share of the choices beyond expert_capacity, where the plan has one
};
struct IndexerRecord {
    int layer = 0;
    double loss = 0.0; // as train::IndexerStep
};
struct StepRecord {
    std::int64_t step = 0; // from 1
    double loss = 0.0;     // nats per token
    double mtp_loss = 0.0; // mean over MTP layers, 0 without any
    double grad_norm = 0.0;
    double lr = 0.0;
    double seconds = 0.0;
    double tflops_per_gpu = 0.0;
    std::int64_t tokens = 0;
    double overflow = 0.0;             // routed rows too many for the planned capacity; above 0 the step was run again
    std::vector<RouterRecord> routers; // by MoE layer
    std::optional<double> valid_loss = {};    // behind the step, where there was an evaluation
    bool skipped = false;                     // a bad step, which changed no weight
    std::optional<double> max_logit = {};     // attention's largest over all heads, with --qk-clip
    int clipped_heads = 0;                    // likewise, query heads whose weights were scaled
    std::vector<IndexerRecord> indexers = {}; // by layer, where the plan trains indexers

    std::optional<double> indexer_loss() const; // mean over the layers with an indexer, as Megatron's `indexer loss`
};
struct EvaluationRecord {
    std::int64_t step = 0; // behind which it was made
    double loss = 0.0;     // nats per token
    std::int64_t tokens = 0;
};
struct RunRecord {
    std::vector<StepRecord> steps;
    std::vector<EvaluationRecord> evaluations;
    double peak_memory_gib = 0.0; // of the rank that holds most
    std::string backend;
    int ranks = 0;
    double unigram_entropy = 0.0;                                     // of the data, nats per token
    double predicted_step_seconds = 0.0, measured_step_seconds = 0.0; // measured: median without the first step
    device::QueuedStep queued;                                        // of plans with cuda_graph = full on a GPU
    comm::Joined joined;                                              // of ranks on devices
    device::MeanPower draw;                                           // of the devices of this process
    std::string command;                                              // run.json: how the run was started
};
nlohmann::ordered_json step_json(const StepRecord& step); // figures that are no numbers are null in its text
std::string run_document(const RunRecord& run);

// seq: tokens per sequence.
std::string evaluate_document(const EvaluationRecord& evaluation, std::int64_t seq);
// text, tokens: without the prompt, which had so many tokens.
std::string generate_document(const std::string& text, const std::vector<std::int32_t>& tokens, std::size_t prompt,
                              double seconds);

std::string comparison_document(const Comparison& comparison);
// improvements: nullptr where none were asked for. coverage: of fitted runs that were left out; empty where none is
// known.
std::string validation_document(const std::vector<published::Prediction>& predictions,
                                const std::vector<published::Improvement>* improvements,
                                const std::vector<published::LeftOutCoverage>& coverage);
std::string export_document(std::int64_t step, std::size_t parameters, const std::string& out);
// A launch file read as a plan; out: path written, empty for none.
std::string import_document(const Import& import, const std::string& out);
// A plan in another engine's words; `text`: the file's, empty where it is the document itself.
std::string launch_engine_document(const EngineLaunch& launch, const Nodes& nodes, const std::string& out);
std::string launch_document(int nodes, int per_node, const std::string& out, const std::string& text);
std::string tokenize_document(std::int64_t documents, std::int64_t tokens, const std::string& prefix);

} // namespace moe::tools
