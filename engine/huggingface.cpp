// How the model's parameters are called and shaped in Hugging Face checkpoints.
#include "engine/huggingface.hpp"

#include "engine/safetensors.hpp"
#include "planner/error.hpp"
#include "planner/files.hpp"
#include "planner/json_object.hpp"
#include "planner/names.hpp"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>

namespace moe {

namespace {

// Where a parameter lies in a checkpoint: `offset` elements into a stored tensor of the given shape.
struct Source {
    std::string name;
    std::vector<std::int64_t> shape;
    std::int64_t offset = 0;
};

// "model.layers.2.mlp.experts.5.up_proj.weight" taken apart.
struct ExpertName {
    std::string prefix; // "model.layers.2.mlp.experts."
    std::int64_t expert = 0;
    std::string leaf; // "up_proj.weight"
};

std::optional<ExpertName> expert_name(const std::string& name) {
    const std::string marker = ".experts.";
    const std::size_t at = name.find(marker);
    if (at == std::string::npos) return std::nullopt;
    const std::size_t number = at + marker.size(), end = name.find('.', number);
    if (end == std::string::npos || end == number || end - number > 9) return std::nullopt;
    std::int64_t expert = 0;
    for (std::size_t i = number; i < end; ++i) {
        if (name[i] < '0' || name[i] > '9') return std::nullopt;
        expert = 10 * expert + (name[i] - '0');
    }
    return ExpertName{name.substr(0, number), expert, name.substr(end + 1)};
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
    const std::size_t at = text.find(from);
    return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

// The places where a parameter may lie, the usual one first.
std::vector<Source> sources(const std::string& name, const Trainer::Shape& shape, std::int64_t experts) {
    std::vector<Source> list;
    const std::vector<std::int64_t> own =
        shape.cols == 1 ? std::vector{shape.rows} : std::vector{shape.rows, shape.cols};
    list.push_back({name, own, 0});
    // Mixtral's block is called "mlp" inside transformers 5, which may save it so.
    const std::string renamed = replaced(name, ".block_sparse_moe.", ".mlp.");
    if (renamed != name) list.push_back({renamed, own, 0});
    const std::optional<ExpertName> part = expert_name(name);
    if (!part) return list;
    const bool gate = part->leaf == "gate_proj.weight" || part->leaf == "w1.weight",
               up = part->leaf == "up_proj.weight" || part->leaf == "w3.weight",
               down = part->leaf == "down_proj.weight" || part->leaf == "w2.weight";
    const std::int64_t matrix = shape.rows * shape.cols;
    for (const std::string& prefix : {part->prefix, replaced(part->prefix, ".block_sparse_moe.", ".mlp.")}) {
        if (gate || up)
            list.push_back({prefix + "gate_up_proj",
                            {experts, 2 * shape.rows, shape.cols},
                            (2 * part->expert + (up ? 1 : 0)) * matrix});
        if (down) list.push_back({prefix + "down_proj", {experts, shape.rows, shape.cols}, part->expert * matrix});
    }
    return list;
}

// Experts of the layer that a parameter belongs to, by the names themselves: one more than the highest number.
std::map<std::string, std::int64_t> expert_counts(const std::map<std::string, Trainer::Shape>& parameters) {
    std::map<std::string, std::int64_t> counts;
    for (const auto& [name, shape] : parameters) {
        if (const std::optional<ExpertName> part = expert_name(name)) {
            std::int64_t& count = counts[part->prefix];
            count = std::max(count, part->expert + 1);
        }
    }
    return counts;
}

struct Found {
    const StoredTensor* tensor = nullptr;
    std::string name;
    std::int64_t offset = 0;
};

Found locate(const StoredWeights& weights, const std::string& parameter, const Trainer::Shape& shape,
             std::int64_t experts) {
    const std::vector<Source> list = sources(parameter, shape, experts);
    for (const Source& source : list) {
        const StoredTensor* tensor = weights.find(source.name);
        if (tensor == nullptr) continue;
        const bool column = shape.cols == 1 && tensor->shape == std::vector<std::int64_t>{shape.rows, 1};
        if (tensor->shape != source.shape && !column)
            refuse("{}: {} has shape [{}], the plan's model needs [{}]", weights.folder(), shown(source.name),
                   fmt::join(tensor->shape, ", "), fmt::join(source.shape, ", "));
        if (tensor->dtype != "F32" && tensor->dtype != "BF16" && tensor->dtype != "F16")
            refuse("{}: {} is stored as {}; only F32, BF16 and F16 weights can be read: convert the checkpoint",
                   weights.folder(), shown(source.name), tensor->dtype);
        return {tensor, source.name, source.offset};
    }
    std::string also;
    for (std::size_t i = 1; i < list.size(); ++i) {
        if (also.find(list[i].name) == std::string::npos) also += (i == 1 ? ", nor is " : ", ") + list[i].name;
    }
    refuse("{}: tensor {} is missing{}{}", weights.folder(), parameter, also, did_you_mean(parameter, weights.names()));
}

// Fields of two models that change what is computed.
std::vector<std::string> differences(const Model& plan, const Model& stored) {
    std::vector<std::string> list;
    const auto compare = [&](const char* field, auto ours, auto theirs) {
        if (ours != theirs)
            list.push_back(fmt::format("{} ({} in the plan, {} in the checkpoint)", field, ours, theirs));
    };
    compare("rms_norm_eps", plan.norm_eps, stored.norm_eps);
    compare("rope_theta", plan.rope_theta, stored.rope_theta);
    compare("rope_scaling", plan.rope_scaling.type, stored.rope_scaling.type);
    compare("rope_scaling.factor", plan.rope_scaling.factor, stored.rope_scaling.factor);
    compare("tie_word_embeddings", plan.tied_embeddings, stored.tied_embeddings);
    compare("num_hidden_layers", plan.layers.size(), stored.layers.size());
    compare("num_nextn_predict_layers", plan.mtp.size(), stored.mtp.size());
    for (std::size_t layer = 0; layer < std::min(plan.layers.size(), stored.layers.size()); ++layer) {
        const int index = static_cast<int>(layer);
        if (plan.kind_of(index) == stored.kind_of(index)) continue;
        list.push_back(fmt::format("attention, MLP or router of layer {}", layer));
        break;
    }
    return list;
}

std::vector<std::string> check_config(const Model& model, const std::string& folder) {
    const std::string path = (std::filesystem::path(folder) / "config.json").string();
    std::error_code error;
    if (!std::filesystem::exists(path, error)) return {};
    const Model stored = model_from_json(read_file(path), path);
    if (stored.architecture != model.architecture)
        refuse("{}: architectures = {}, but the plan's model is {}", path, stored.architecture, model.architecture);
    return differences(model, stored);
}

} // namespace

LoadReport load_weights(Trainer& trainer, const std::string& folder) {
    LoadReport report;
    const Model& model = *trainer.plan().model;
    const StoredWeights weights(folder);
    report.difference = check_config(model, folder);
    const std::map<std::string, std::int64_t> experts = expert_counts(trainer.parameters());
    std::map<std::string, Found> found;
    std::set<std::string> used;
    if (model.tied_embeddings) used.insert("lm_head.weight"); // older files repeat the embedding under this name
    for (const auto& [name, shape] : trainer.parameters()) {
        const std::optional<ExpertName> part = expert_name(name);
        const Found place = locate(weights, name, shape, part ? experts.at(part->prefix) : 0);
        used.insert(place.name);
        found.emplace(name, place);
    }
    for (const auto& [name, place] : found) {
        trainer.fill_weight(name, [&place = place](std::int64_t first, std::span<float> out) {
            read_floats(*place.tensor, place.name, place.offset + first, out);
        });
        ++report.loaded;
    }
    for (const std::string& name : weights.names())
        if (!used.count(name)) report.unused.push_back(name);
    return report;
}

std::string describe(const LoadReport& report) {
    std::string text;
    if (!report.unused.empty()) {
        constexpr std::size_t named = 8;
        const std::vector<std::string> first(report.unused.begin(),
                                             report.unused.begin() +
                                                 static_cast<std::ptrdiff_t>(std::min(named, report.unused.size())));
        text =
            fmt::format("{} tensors of the checkpoint are not used: {}{}", report.unused.size(),
                        shown(fmt::format("{}", fmt::join(first, ", "))), report.unused.size() > named ? ", ..." : "");
    }
    if (!report.difference.empty())
        text += fmt::format("{}the checkpoint's config.json differs in {}", text.empty() ? "" : "; ",
                            fmt::join(report.difference, ", "));
    return text;
}

void export_weights(const Trainer& trainer, const std::string& folder, const ExportOptions& options) {
    std::vector<TensorToWrite> tensors;
    for (const auto& [name, shape] : trainer.parameters())
        tensors.push_back({name, shape.cols == 1 ? std::vector{shape.rows} : std::vector{shape.rows, shape.cols}});
    write_weights(folder, tensors, options.dtype, options.shard_bytes,
                  [&trainer](const TensorToWrite& tensor) { return trainer.read_weight(tensor.name); });
    const std::string path = (std::filesystem::path(folder) / "config.json").string();
    const JsonObject config = JsonObject::parse(trainer.plan().model->config_json, path);
    write_file(path, config.with_string("dtype", options.dtype == Dtype::bf16 ? "bfloat16" : "float32")
                             .with_string("torch_dtype", options.dtype == Dtype::bf16 ? "bfloat16" : "float32")
                             .dump() +
                         "\n");
}

} // namespace moe
