// Weights from and into Hugging Face checkpoints: found by name and shape, read in parts, gathered and written.
#include "engine/train/huggingface.hpp"

#include "engine/train/initial_weights.hpp"
#include "engine/train/merge_adapters.hpp"
#include "engine/train/stored_places.hpp"
#include "engine/weights/safetensors.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json_object.hpp"
#include "planner/base/names.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/families/names.hpp"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <numeric>
#include <optional>
#include <set>

namespace moe::train {
namespace {

bool is_selection_bias(const std::string& parameter) { return parameter.ends_with("e_score_correction_bias"); }

// Experts of the layer that a parameter belongs to, by the names themselves: one more than the highest number.
template <class Shapes>
std::map<std::string, std::int64_t> expert_counts(const Shapes& parameters) {
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
    const weights::StoredTensor* tensor = nullptr;
    StoredPlace source;
    std::int64_t cols = 1; // columns of the parameter
    std::int64_t rows = 0; // rows that are stored; the parameter may have more
};

// Elements [first, first + out.size()) of a parameter. Rows that lie whole are read at once; where neighbours in a row
// are far apart in the file, so are the rows close together: a column of them is read at once and its elements picked.
void read_stored(const Found& found, std::int64_t first, std::span<float> out) {
    const StoredPlace& s = found.source;
    if (s.col_stride == 1 && s.row_stride == found.cols && s.run == 0)
        return weights::read_floats(*found.tensor, s.name, s.offset + first, out);
    const auto count = static_cast<std::int64_t>(out.size());
    const std::int64_t row0 = first / found.cols, row1 = (first + count - 1) / found.cols;
    if (s.col_stride == 1) {
        for (std::int64_t at = first; at < first + count;) {
            const std::int64_t row = at / found.cols, col = at % found.cols;
            const std::int64_t run = std::min(first + count - at, found.cols - col);
            weights::read_floats(*found.tensor, s.name, s.row(row) + col,
                                 out.subspan(static_cast<std::size_t>(at - first), static_cast<std::size_t>(run)));
            at += run;
        }
        return;
    }
    std::vector<float> column(static_cast<std::size_t>((row1 - row0) * s.row_stride + 1));
    for (std::int64_t c = 0; c < found.cols; ++c) {
        weights::read_floats(*found.tensor, s.name, s.offset + row0 * s.row_stride + c * s.col_stride, column);
        for (std::int64_t r = row0; r <= row1; ++r) {
            const std::int64_t at = r * found.cols + c - first;
            if (at >= 0 && at < count)
                out[static_cast<std::size_t>(at)] = column[static_cast<std::size_t>((r - row0) * s.row_stride)];
        }
    }
}

void read_part(const Found& found, std::int64_t first, std::span<float> out) {
    read_stored(found, first, out);
    if (found.source.shift != 0.0f)
        for (float& value : out) value += found.source.shift;
    check_finite(found.tensor->file->path(), found.source.name, first, out);
}

Found locate(const weights::StoredWeights& weights, const model::Model& model, const std::string& parameter,
             const Trainer::Shape& shape, std::int64_t experts) {
    const std::vector<StoredPlace> list = stored_places(model, parameter, shape, experts);
    for (const StoredPlace& source : list) {
        const weights::StoredTensor* tensor = weights.find(source.name);
        if (tensor == nullptr) continue;
        const bool column = shape.cols == 1 && (tensor->shape == std::vector<std::int64_t>{shape.rows, 1} ||
                                                tensor->shape == std::vector<std::int64_t>{1, shape.rows} ||
                                                tensor->shape == source.shape);
        const bool grows = has_token_rows(parameter) && tensor->shape.size() == 2 && tensor->shape[0] > 0 &&
                           tensor->shape[0] < shape.rows && tensor->shape[1] == shape.cols;
        const bool fits = tensor->shape == source.shape || column || grows;
        const auto takes = [&](const StoredPlace& other) {
            return other.name == source.name && other.shape == tensor->shape;
        };
        if (!fits && std::any_of(list.begin(), list.end(), takes)) continue;
        if (!fits)
            refuse("{}: {} has shape [{}], the plan's model needs [{}]", weights.folder(), shown(source.name),
                   fmt::join(tensor->shape, ", "), fmt::join(source.shape, ", "));
        if (tensor->dtype != "F32" && tensor->dtype != "BF16" && tensor->dtype != "F16")
            refuse("{}: {} is stored as {}; only F32, BF16 and F16 weights can be read: convert the checkpoint",
                   weights.folder(), shown(source.name), tensor->dtype);
        return {tensor, source, shape.cols, grows ? tensor->shape[0] : shape.rows};
    }
    if (weights.find(list.front().name + "_blocks") != nullptr)
        refuse("{}: {} is stored as MXFP4 ({}_blocks); only F32, BF16 and F16 weights can be read: convert the "
               "checkpoint",
               weights.folder(), list.front().name, shown(list.front().name));
    std::string also;
    for (std::size_t i = 1; i < list.size(); ++i) {
        if (also.find(list[i].name) == std::string::npos) also += (i == 1 ? ", nor is " : ", ") + list[i].name;
    }
    refuse("{}: tensor {} is missing{}{}", weights.folder(), parameter, also, did_you_mean(parameter, weights.names()));
}

std::vector<std::string> check_config(const model::Model& model, const std::string& folder) {
    const std::string path = (std::filesystem::path(folder) / "config.json").string();
    std::error_code error;
    if (!std::filesystem::exists(path, error)) return {};
    return differing_fields(model, families::model_from_json(read_file(path), path), path);
}

} // namespace

LoadReport load_weights(Trainer& trainer, const std::string& folder) {
    LoadReport report;
    const model::Model& model = *trainer.plan().model;
    const weights::StoredWeights weights(folder);
    report.difference = check_config(model, folder);
    report.grown_to = model.vocab;
    const std::map<std::string, std::int64_t> experts = expert_counts(trainer.parameters());
    std::map<std::string, Found> found;
    std::set<std::string> used;
    if (model.tied_embeddings) used.insert("lm_head.weight"); // Older files repeat the embedding under this name.
    for (const auto& [copy, original] : repeated_tensors(model)) used.insert(copy);
    for (const auto& [name, shape] : trainer.parameters()) {
        if (is_adapter(name)) continue; // It begins as it was drawn.
        const std::optional<ExpertName> part = expert_name(name);
        const Found place = locate(weights, model, name, shape, part ? experts.at(part->prefix) : 0);
        used.insert(place.source.name);
        found.emplace(name, place);
    }
    for (const auto& [name, place] : found) {
        ReadPart read = [&place = place](std::int64_t first, std::span<float> out) { read_part(place, first, out); };
        if (place.rows < trainer.parameters().at(name).rows) {
            report.grown_from = place.rows;
            read = with_more_rows(read, place.rows, place.cols);
        }
        trainer.fill_weight(name, read);
        ++report.loaded;
    }
    for (const std::string& name : weights.names())
        if (!used.count(name)) report.unused.push_back(name);
    return report;
}

namespace {

struct PartOf { // place of a parameter in a stored tensor
    std::string name;
    Trainer::Shape shape;
    StoredPlace source;
};

// The values of a stored tensor from the parameters that lie in it.
std::vector<float> gathered(const std::vector<PartOf>& parts, const WeightReader& read) {
    const std::vector<std::int64_t>& stored = parts.front().source.shape;
    if (parts.size() == 1 && parts.front().source.col_stride == 1) {
        std::vector<float> values = read(parts.front().name);
        for (float& value : values) value -= parts.front().source.shift;
        return values;
    }
    std::vector<float> all(
        static_cast<std::size_t>(std::accumulate(stored.begin(), stored.end(), std::int64_t{1}, std::multiplies<>())));
    for (const auto& [name, shape, source] : parts) {
        const std::vector<float> values = read(name);
        for (std::int64_t r = 0; r < shape.rows; ++r)
            for (std::int64_t c = 0; c < shape.cols; ++c)
                all[static_cast<std::size_t>(source.row(r) + c * source.col_stride)] =
                    values[static_cast<std::size_t>(r * shape.cols + c)];
    }
    return all;
}

void write_folder(const model::Model& model, const std::map<std::string, Trainer::Shape>& shapes,
                  const WeightReader& read, const std::string& folder, const ExportOptions& options) {
    const std::map<std::string, std::int64_t> experts = expert_counts(shapes);
    std::map<std::string, std::vector<PartOf>> stored;
    for (const auto& [name, shape] : shapes) {
        const std::optional<ExpertName> part = expert_name(name);
        const StoredPlace source = stored_places(model, name, shape, part ? experts.at(part->prefix) : 0).front();
        stored[source.name].push_back({name, shape, source});
    }
    for (const auto& [copy, original] : repeated_tensors(model)) stored[copy] = stored.at(original);
    std::vector<weights::TensorToWrite> tensors;
    // BF16 would lose what bias_update adds to a selection bias; the models' own checkpoints keep FP32, too.
    for (const auto& [name, parts] : stored)
        tensors.push_back({name, parts.front().source.shape, is_selection_bias(parts.front().name)});
    weights::write_weights(
        folder, tensors, options.dtype, options.shard_bytes,
        [&](const weights::TensorToWrite& tensor) { return gathered(stored.at(tensor.name), read); });
    const std::string path = (std::filesystem::path(folder) / "config.json").string();
    const char* dtype = options.dtype == program::Dtype::bf16 ? "bfloat16" : "float32";
    const JsonObject config =
        JsonObject::parse(model.config_json, path).with_string("dtype", dtype).with_string("torch_dtype", dtype);
    const std::string type = families::model_type_of(model.config_json, path); // transformers finds a class by it
    write_file(path, (type.empty() ? config : config.with_string("model_type", type)).dump() + "\n");
}

} // namespace

void export_weights(const Trainer& trainer, const std::string& folder, const ExportOptions& options) {
    std::map<std::string, Trainer::Shape> shapes = trainer.parameters();
    const WeightReader read = with_adapters_merged(trainer.plan().lora, shapes,
                                                   [&](const std::string& name) { return trainer.read_weight(name); });
    write_folder(*trainer.plan().model, shapes, read, folder, options);
}

void export_weights(const weights::StoredCheckpoint& checkpoint, const std::string& folder,
                    const ExportOptions& options) {
    if (options.average && !checkpoint.state().averages())
        refuse("{}: holds no average of the weights: train with --ema DECAY", checkpoint.path());
    std::map<std::string, Trainer::Shape> shapes;
    for (const auto& [name, shape] : checkpoint.shapes()) shapes[name] = {shape.rows, shape.cols};
    const model::Model model = families::model_from_json(checkpoint.state().config, checkpoint.path() + ": config");
    const auto stored = [&](const std::string& name) {
        const weights::StoredCheckpoint::Shape& shape = checkpoint.shapes().at(name);
        std::vector<float> values(static_cast<std::size_t>(shape.rows * shape.cols));
        checkpoint.read(name, options.average ? weights::StateKind::average : weights::StateKind::weight, 0, values);
        return values;
    };
    const std::string& lora = checkpoint.state().lora;
    const WeightReader read =
        with_adapters_merged(lora.empty() ? plan::Lora{} : plan::lora_from_string(lora), shapes, stored);
    write_folder(model, shapes, read, folder, options);
}

} // namespace moe::train
