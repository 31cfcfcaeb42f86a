// The JSON documents of show.
#include "tools/report/show_json.hpp"

#include "planner/base/schema.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/plan_fields.hpp"
#include "tools/print/table.hpp"
#include "tools/report/stamp.hpp"

#include <nlohmann/json.hpp>

namespace moe::tools {

namespace {

using Json = nlohmann::ordered_json;

const char* kind_name(model::AttentionKind kind) {
    switch (kind) {
    case model::AttentionKind::gqa:
        return "softmax";
    case model::AttentionKind::mla:
        return "latent";
    case model::AttentionKind::gated_delta:
        return "gated_delta";
    case model::AttentionKind::compressed:
        return "compressed";
    case model::AttentionKind::mamba:
        return "mamba";
    case model::AttentionKind::opaque:
        return "opaque";
    case model::AttentionKind::none:
        return "none";
    }
    return "";
}

// The fields that a layer of the kind has; those that are 0 or off are left out.
Json attention_json(const model::Attention& a) {
    Json json = {{"kind", kind_name(a.kind)}, {"text", attention_text(a)}};
    const std::pair<const char*, std::int64_t> numbers[] = {{"heads", a.heads},
                                                            {"kv_heads", a.kv_heads},
                                                            {"qk_dim", a.qk_dim},
                                                            {"v_dim", a.v_dim},
                                                            {"rope_dim", a.rope_dim},
                                                            {"q_lora", a.q_lora},
                                                            {"kv_lora", a.kv_lora},
                                                            {"window", a.window},
                                                            {"chunk", a.chunk},
                                                            {"key_heads", a.key_heads},
                                                            {"value_heads", a.value_heads},
                                                            {"key_dim", a.key_dim},
                                                            {"value_dim", a.value_dim},
                                                            {"conv_kernel", a.conv_kernel},
                                                            {"opaque_weights", a.opaque.weights},
                                                            {"compress_ratio", a.compress_ratio},
                                                            {"indexer_heads", a.indexer_heads},
                                                            {"indexer_top_k", a.indexer_top_k}};
    for (const auto& [name, value] : numbers)
        if (value != 0) json[name] = value;
    const std::pair<const char*, bool> flags[] = {{"qkv_bias", a.qkv_bias},       {"out_bias", a.out_bias},
                                                  {"qk_norm", a.qk_norm},         {"sinks", a.sinks},
                                                  {"output_gate", a.output_gate}, {"head_gate", a.head_gate}};
    for (const auto& [name, on] : flags)
        if (on) json[name] = true;
    return json;
}

Json moe_json(const model::Moe& m) {
    Json json = {{"experts", m.experts}, {"top_k", m.top_k}, {"ffn", m.ffn}, {"shared_ffn", m.shared_ffn}};
    if (m.latent > 0) json["latent"] = m.latent;
    json["groups"] = m.router.groups;
    json["groups_kept"] = m.router.groups_kept;
    return json;
}

Json kinds_json(const model::Model& model) {
    Json list = Json::array();
    for (std::size_t i = 0; i < model.kinds.size(); ++i) {
        const model::LayerKind& kind = model.kinds[i];
        Json json = {{"layers", layers_of(model, static_cast<int>(i))},
                     {"mtp_layers", mtp_layers_of(model, static_cast<int>(i))},
                     {"attention", attention_json(kind.attention)},
                     {"mlp", mlp_text(kind)},
                     {"dense_ffn", kind.dense_ffn}};
        json["moe"] = kind.moe ? moe_json(*kind.moe) : Json(nullptr);
        list.push_back(std::move(json));
    }
    return list;
}

Json names(const std::vector<std::string>& list) {
    Json json = Json::array();
    for (const std::string& name : list) json.push_back(name);
    return json;
}

template <class T>
Json words(const std::vector<T>& list) {
    Json json = Json::array();
    for (const T value : list) json.push_back(to_string(value));
    return json;
}

Json peaks_json(const machine::Hardware& h) {
    Json json = Json::object();
    for (std::size_t i = 0; i < h.peak_flops.size(); ++i)
        if (h.peak_flops[i] > 0.0) json[machine::to_string(static_cast<machine::Precision>(i))] = h.peak_flops[i];
    return json;
}

Json link_json(const machine::Link& link) {
    Json json{{"bytes_per_second", link.bandwidth}, {"latency_seconds", link.latency}};
    if (link.message > 0.0) json["message_seconds"] = link.message;
    return json;
}

} // namespace

std::string show_models_document(const std::vector<model::Model>& models) {
    Json list = Json::array();
    for (const model::Model& model : models) {
        const model::ParameterCount count = model::count_parameters(model);
        list.push_back({{"name", model.name},
                        {"architecture", model.architecture},
                        {"parameters", count.total},
                        {"active_parameters", count.active},
                        {"layers", model.layers.size()},
                        {"executable", why_not(model).empty()}});
    }
    return stamped(schema::show_models, Json{{"models", list}});
}

std::string show_hardware_list_document(const std::vector<machine::Hardware>& machines) {
    Json list = Json::array();
    for (const machine::Hardware& h : machines)
        list.push_back({{"name", h.name},
                        {"peak_flops", peaks_json(h)},
                        {"memory_gib", gib(h.memory_bytes)},
                        {"nvlink_domain", h.nvlink_domain},
                        {"gpus_per_node", h.gpus_per_node},
                        {"default_stack", h.default_stack},
                        {"measured", !h.measured.empty()}});
    return stamped(schema::show_hardware_list, Json{{"hardware", list}});
}

std::string show_stacks_document(const std::vector<stack::Stack>& stacks) {
    Json list = Json::array();
    for (const stack::Stack& s : stacks)
        list.push_back({{"name", s.name}, {"release", s.release}, {"executable", s.executable}});
    return stamped(schema::show_stacks, Json{{"stacks", list}});
}

std::string show_model_document(const model::Model& model, std::int64_t seq) {
    const model::ParameterCount count = model::count_parameters(model);
    Json json = {{"name", model.name},
                 {"architecture", model.architecture},
                 {"parameters", count.total},
                 {"parameters_without_mtp", count.total_no_mtp},
                 {"active_parameters", count.active},
                 {"seq", seq},
                 {"gflop_per_token", model::model_flops_per_token(model, seq) / 1e9},
                 {"layers", model.layers.size()},
                 {"mtp_layers", model.mtp.size()},
                 {"hidden", model.hidden},
                 {"vocab", model.vocab},
                 {"padded_vocab", model.padded_vocab(1)},
                 {"tied_embeddings", model.tied_embeddings}};
    const model::RopeScaling& s = model.rope_scaling;
    json["rope"] = {{"theta", model.rope_theta},
                    {"interleaved", model.rope_interleaved},
                    {"scaling", s.type.empty() ? Json(nullptr) : Json(s.type)},
                    {"factor", s.factor},
                    {"original_positions", s.original_positions}};
    json["executable"] = why_not(model).empty();
    json["why_not"] = names(why_not(model));
    json["left_out"] = names(model.left_out);
    json["not_read"] = names(families::unread_fields(model));
    json["kinds"] = kinds_json(model);
    return stamped(schema::show_model, json);
}

std::string show_hardware_document(const machine::Hardware& h) {
    Json json = {{"name", h.name}, {"cpu", h.cpu}};
    if (h.cpu)
        json["cores"] = h.cores;
    else
        json["sm_count"] = h.sm_count;
    json["vendor"] = h.vendor;
    json["compute_capability"] = h.compute_capability;
    json["peak_flops"] = peaks_json(h);
    json["memory_gib"] = gib(h.memory_bytes);
    json["memory_bytes_per_second"] = h.memory_bandwidth;
    json["context_gib"] = gib(h.context_bytes);
    json["host_memory_gib"] = h.host_memory_bytes > 0.0 ? Json(gib(h.host_memory_bytes)) : Json(nullptr);
    json["nvlink_domain"] = h.nvlink_domain;
    json["nvlink_domain_used"] = h.nvlink_domain_used;
    json["gpus_per_node"] = h.gpus_per_node;
    json["links"] = {{"nvlink", link_json(h.nvlink)},
                     {"pcie", link_json(h.pcie)},
                     {"nic", link_json(h.nic)},
                     {"host", link_json(h.host)}};
    json["default_stack"] = h.default_stack;
    json["measured"] = Json::object();
    for (const auto& [family, calls] : h.measured) json["measured"][family] = calls.size();
    json["measured_by"] = h.measured_by;
    json["source"] = h.source;
    return stamped(schema::show_hardware, json);
}

std::string show_stack_document(const stack::Stack& s, const machine::Hardware& hardware) {
    Json sets = Json::array();
    for (const unsigned set : s.recompute_sets) sets.push_back(plan::recompute::to_string(set));
    Json json = {{"name", s.name},
                 {"release", s.release},
                 {"hardware", hardware.name},
                 {"figures_of", s.figures_of.empty() ? hardware.name : s.figures_of},
                 {"executable", s.executable},
                 {"precisions", words(s.precisions)},
                 {"dispatchers", words(s.dispatchers)},
                 {"cuda_graphs", words(s.cuda_graphs)},
                 {"split_schedules", words(s.split_schedules)},
                 {"tensor", s.tensor},
                 {"context", s.context},
                 {"expert_tensor", s.expert_tensor},
                 {"interleaved", s.interleaved},
                 {"ep_overlap", s.ep_overlap},
                 {"offloads", s.offloads},
                 {"bf16_moments", s.bf16_moments},
                 {"muon", s.muon},
                 {"paged_stash", s.paged_stash},
                 {"recompute_modules", plan::recompute::to_string(s.recompute_modules)},
                 {"recompute_sets", sets}};
    json["recipe_choices"] = Json::object();
    for (const auto& [field, values] : s.recipe_choices) json["recipe_choices"][field] = values;
    const auto known = [](const std::string& version) { return version.empty() ? Json(nullptr) : Json(version); };
    json["engine"] = {{"name", known(s.engine.name)},
                      {"release", known(s.engine.release)},
                      {"transformer_engine", known(s.engine.transformer_engine)},
                      {"bridge", known(s.engine.bridge)}};
    json["usual"] = {{"dispatcher", plan::to_string(s.usual_dispatcher)},
                     {"cuda_graph", plan::to_string(s.usual_cuda_graph)},
                     {"ep_overlap", s.usual_ep_overlap},
                     {"gradients", machine::to_string(s.usual_gradients)}};
    json["features"] = names(s.features);
    json["source"] = s.source;
    return stamped(schema::show_stack, json);
}

std::string show_plan_document(const plan::Plan& plan) {
    const PlanFacts facts = facts_of(plan);
    Json json = {{"model", plan.model->name},
                 {"hardware", plan.hardware->name},
                 {"stack", plan.stack},
                 {"gpus", plan.gpus},
                 {"seq", plan.seq},
                 {"gbs", plan.gbs},
                 {"micro_batches", plan.micro_batches()},
                 {"tokens_per_step", plan.gbs * plan.seq}};
    json["fields"] = Json::object();
    for (const std::string& field : plan::field_names()) json["fields"][field] = plan::field_text(plan, field);
    json["changed"] = names(facts.changed);
    json["fault"] = facts.fault.empty() ? Json(nullptr) : Json(facts.fault);
    json["executable"] = facts.why_not.empty();
    json["why_not"] = names(facts.why_not);
    return stamped(schema::show_plan, json);
}

} // namespace moe::tools
