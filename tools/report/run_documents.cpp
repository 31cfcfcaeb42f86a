// Builds the JSON documents of trainings: a run, its steps, an evaluation.
#include "tools/report/documents.hpp"

#include "planner/base/json.hpp"
#include "planner/base/schema.hpp"
#include "tools/report/stamp.hpp"

#include <nlohmann/json.hpp>

namespace moe::tools {

namespace {

using Json = nlohmann::ordered_json;

Json joined_json(const comm::Joined& joined) {
    Json document = {{"bytes", joined.bytes}, {"buffer_bytes", joined.buffer_bytes}, {"each", Json::array()}};
    for (const auto& [group, bytes] : joined.each)
        document["each"].push_back(
            {{"members", group.ranks.size()},
             {"for", group.messages() ? "messages" : program::to_string(static_cast<program::Stream>(group.channel))},
             {"pairwise", group.pairwise},
             {"bytes", bytes}});
    if (!joined.slots_by.empty()) document["slots_by"] = joined.slots_by;
    return document;
}

} // namespace

std::optional<double> StepRecord::indexer_loss() const {
    if (indexers.empty()) return std::nullopt;
    double sum = 0.0;
    for (const IndexerRecord& indexer : indexers) sum += indexer.loss;
    return sum / static_cast<double>(indexers.size());
}

Json step_json(const StepRecord& step) {
    Json json{{"step", step.step},    {"loss", step.loss},       {"grad_norm", step.grad_norm},
              {"lr", step.lr},        {"seconds", step.seconds}, {"tflops_per_gpu", step.tflops_per_gpu},
              {"tokens", step.tokens}};
    if (step.mtp_loss != 0.0) json["mtp_loss"] = step.mtp_loss;
    if (step.overflow > 0.0) json["overflow"] = step.overflow;
    if (step.skipped) json["skipped"] = true;
    if (step.max_logit) json.update({{"max_logit", *step.max_logit}, {"clipped_heads", step.clipped_heads}});
    for (const RouterRecord& router : step.routers) {
        Json of_layer{{"layer", router.layer},
                      {"aux_loss", router.aux_loss},
                      {"z_loss", router.z_loss},
                      {"load_max_over_mean", router.load_max_over_mean},
                      {"load_entropy", router.load_entropy}};
        if (router.bias_spread) of_layer["bias_spread"] = *router.bias_spread;
        if (router.dropped) of_layer["dropped"] = *router.dropped;
        json["routers"].push_back(std::move(of_layer));
    }
    for (const IndexerRecord& indexer : step.indexers)
        json["indexers"].push_back({{"layer", indexer.layer}, {"loss", indexer.loss}});
    return json;
}

std::string run_document(const RunRecord& run) {
    Json document = Json::object();
    document["steps"] = Json::array();
    for (const StepRecord& step : run.steps) document["steps"].push_back(step_json(step));
    for (const EvaluationRecord& e : run.evaluations)
        document["evaluations"].push_back({{"step", e.step}, {"loss", e.loss}, {"tokens", e.tokens}});
    document["peak_memory_gib"] = run.peak_memory_gib;
    document["backend"] = run.backend;
    document["ranks"] = run.ranks;
    document["unigram_entropy"] = run.unigram_entropy;
    document["predicted_step_seconds"] = run.predicted_step_seconds;
    document["measured_step_seconds"] = run.measured_step_seconds;
    if (run.queued.nodes > 0)
        document["graph"] = {{"graphs", run.queued.records},
                             {"nodes", run.queued.nodes},
                             {"host_copies", run.queued.host_copies},
                             {"fills", run.queued.fills},
                             {"host_seconds", run.queued.host_seconds},
                             {"stamp_seconds", run.queued.event_overhead},
                             {"usual_stamp_seconds", run.queued.usual_stamp_seconds}};
    if (run.draw.seconds > 0.0)
        document["draw"] = {{"seconds", run.draw.seconds},
                            {"watts", run.draw.watts},
                            {"limit_watts", run.draw.limit_watts},
                            {"clock_mhz", run.draw.clock_hz / 1e6},
                            {"top_clock_mhz", run.draw.top_clock_hz / 1e6}};
    if (!run.joined.each.empty()) document["communicators"] = joined_json(run.joined);
    if (!run.command.empty()) document["command"] = run.command;
    return stamped(schema::execute, document);
}

std::string evaluate_document(const EvaluationRecord& evaluation, std::int64_t seq) {
    return stamped(schema::evaluate, Json{{"loss", evaluation.loss},
                                          {"perplexity", std::exp(evaluation.loss)},
                                          {"tokens", evaluation.tokens},
                                          {"seq", seq}});
}

std::string generate_document(const std::string& text, const std::vector<std::int32_t>& tokens, std::size_t prompt,
                              double seconds) {
    return stamped(schema::generate,
                   Json{{"text", text}, {"tokens", tokens}, {"prompt_tokens", prompt}, {"seconds", seconds}});
}

} // namespace moe::tools
