// The names and shapes of the model's parameters in Hugging Face checkpoints.
#include "engine/train/huggingface.hpp"

#include "engine/train/initial_weights.hpp"
#include "engine/train/merge_adapters.hpp"
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

// The place of a parameter in a checkpoint: its element (r, c) is `shift` more than element row(r) + c * col_stride of
// a stored tensor of the given shape. Rows lie row_stride apart; of `run` rows each, where that is not 0, run_stride.
struct Source {
    std::string name;
    std::vector<std::int64_t> shape;
    std::int64_t offset = 0, row_stride = 0, col_stride = 1;
    float shift = 0.0f;
    std::int64_t run = 0, run_stride = 0;
    std::int64_t row(std::int64_t r) const {
        return run == 0 ? offset + r * row_stride : offset + r / run * run_stride + r % run * row_stride;
    }
};

std::string replaced(std::string text, const std::string& from, const std::string& to) {
    const std::size_t at = text.find(from);
    return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

// GPT-OSS keeps the experts of a layer in one tensor per matrix, transposed, gate and up in turns: "gate_up_proj"
// [E, h, 2f], "gate_up_proj_bias" [E, 2f], "down_proj" [E, f, h], "down_proj_bias" [E, h].
Source gpt_oss_source(const ExpertName& part, const Trainer::Shape& shape, std::int64_t experts) {
    const bool bias = part.leaf.ends_with(".bias"), down = part.leaf.starts_with("down_proj");
    const std::int64_t turns = down ? 1 : 2, row = turns * shape.rows;
    Source source{
        part.prefix + (down ? "down_proj" : "gate_up_proj") + (bias ? "_bias" : ""), {experts}, 0, turns, row};
    if (!bias) source.shape.push_back(shape.cols);
    source.shape.push_back(row);
    source.offset = part.expert * row * (bias ? 1 : shape.cols) + (part.leaf.starts_with("up_proj") ? 1 : 0);
    return source;
}

// The place of an expert's matrix where the family keeps all experts of a layer in one tensor; see ExpertLayout.
Source joined_expert(families::ExpertLayout layout, const std::string& prefix, const ExpertName& part,
                     const Trainer::Shape& shape, std::int64_t experts) {
    const bool down = part.leaf.starts_with("down_proj"), up = part.leaf.starts_with("up_proj");
    const std::int64_t rows = shape.rows, cols = shape.cols, matrix = rows * cols;
    switch (layout) {
    case families::ExpertLayout::gated: {
        const std::string at = prefix.substr(0, prefix.size() - std::string("experts.").size());
        if (down) return {at + "output_linear.weight", {experts, rows, cols}, part.expert * matrix, cols};
        return {at + "input_linear.weight", {experts, 2 * rows, cols}, (2 * part.expert + (up ? 1 : 0)) * matrix, cols};
    }
    case families::ExpertLayout::fused:
        if (down) return {prefix + "down_proj", {experts, rows, cols}, part.expert * matrix, cols};
        return {prefix + "gate_up_proj", {experts, 2 * rows, cols}, (2 * part.expert + (up ? 1 : 0)) * matrix, cols};
    case families::ExpertLayout::stacked:
        return {prefix + part.leaf, {experts, rows, cols}, part.expert * matrix, cols};
    case families::ExpertLayout::transposed:
        if (down) return {prefix + "down_proj", {experts, cols, rows}, part.expert * matrix, 1, rows};
        return {prefix + "gate_up_proj",
                {experts, cols, 2 * rows},
                2 * part.expert * matrix + (up ? rows : 0),
                1,
                2 * rows};
    default:
        if (down) return {prefix + "mlp.w2", {experts * cols, rows}, part.expert * matrix, 1, rows};
        return {prefix + (up ? "mlp.v1" : "mlp.w1"), {experts * rows, cols}, part.expert * matrix, cols};
    }
}

// The places where a parameter may lie by the families' names, the usual one first.
std::vector<Source> named_sources(const model::Model& model, const std::string& name, const Trainer::Shape& shape,
                                  std::int64_t experts) {
    std::vector<Source> list;
    std::vector<std::int64_t> own = shape.cols == 1 ? std::vector{shape.rows} : std::vector{shape.rows, shape.cols};
    const std::optional<ExpertName> part = expert_name(name);
    if (part && model.architecture == "GptOssForCausalLM") return {gpt_oss_source(*part, shape, experts)};
    // MTP's projection of [embedding; hidden state] is one matrix there and two halves here.
    for (const char* half : {".embedding", ".hidden"})
        if (name.ends_with(std::string(".eh_proj.weight") + half))
            return {{families::checkpoint_name(model, name.substr(0, name.size() - std::string(half).size())),
                     {shape.rows, 2 * shape.cols},
                     half == std::string(".hidden") ? shape.cols : 0,
                     2 * shape.cols}};
    const std::string named = families::checkpoint_name(model, name);
    const bool from_one = model.norms_from_one && name.ends_with("norm.weight") && !name.ends_with("attn.norm.weight");
    const float shift = from_one ? 1.0f : 0.0f;
    const auto plain = [&](std::string at, std::vector<std::int64_t> stored, std::int64_t offset) {
        return Source{std::move(at), std::move(stored), offset, shape.cols, 1, shift};
    };
    if (const families::JoinedRows joined = families::joined_rows(model, name); !joined.name.empty()) {
        Source source = plain(joined.name, {joined.rows, shape.cols}, joined.first * shape.cols);
        if (joined.middle)
            source.shape = {joined.rows, 1, shape.cols};
        else if (shape.cols == 1)
            source.shape = {joined.rows};
        source.run = joined.run, source.run_stride = joined.stride * shape.cols;
        return {source};
    }
    const std::string prefix = part ? families::checkpoint_name(model, part->prefix) : "";
    if (const families::ExpertLayout layout = families::expert_layout(model);
        part && layout != families::ExpertLayout::each) {
        list.push_back(joined_expert(layout, prefix, *part, shape, experts));
        if (layout == families::ExpertLayout::fused) list.push_back(plain(named, own, 0)); // as classes save Qwen3.5
        return list;
    }
    // ERNIE-4.5 keeps the selection bias as a row.
    if (named.ends_with("moe_statics.e_score_correction_bias")) own = {1, shape.rows};
    list.push_back(plain(named, own, 0));
    // Classes of transformers 5 may have other names in memory, and save them so: Mixtral's block is "mlp" there.
    for (const std::string& other :
         {name, replaced(named, ".block_sparse_moe.", ".mlp."), replaced(name, "mlp.gate.e_score", "mlp.e_score"),
          replaced(name, "mlp.gate.e_score", "mlp.gate.moe_statics.e_score"),
          replaced(name, ".mlp.gate.weight", ".mlp.router.weight")})
        if (other != named) list.push_back(plain(other, own, 0));
    if (!part) return list;
    const bool gate = part->leaf == "gate_proj.weight" || part->leaf == "w1.weight",
               up = part->leaf == "up_proj.weight" || part->leaf == "w3.weight",
               down = part->leaf == "down_proj.weight" || part->leaf == "w2.weight";
    const std::int64_t matrix = shape.rows * shape.cols;
    for (const std::string& at : {prefix, replaced(prefix, ".block_sparse_moe.", ".mlp.")}) {
        if (gate || up)
            list.push_back(plain(at + "gate_up_proj", {experts, 2 * shape.rows, shape.cols},
                                 (2 * part->expert + (up ? 1 : 0)) * matrix));
        if (up && model.hybrid)
            list.push_back(plain(at + "up_proj", {experts, shape.rows, shape.cols}, part->expert * matrix));
        if (down) list.push_back(plain(at + "down_proj", {experts, shape.rows, shape.cols}, part->expert * matrix));
    }
    // Qwen3-VL's published files have them transposed; where widths are alike nothing would tell.
    const std::int64_t wide = down ? shape.rows : shape.cols, ffn = down ? shape.cols : shape.rows;
    if (!model.left_out.empty() && (gate || up || down) && wide != ffn && wide != 2 * ffn)
        list.push_back(joined_expert(families::ExpertLayout::transposed, prefix, *part, shape, experts));
    return list;
}

// The places where a parameter may lie, the usual one first.
std::vector<Source> sources(const model::Model& model, const std::string& name, const Trainer::Shape& shape,
                            std::int64_t experts) {
    std::vector<Source> list = named_sources(model, name, shape, experts);
    for (std::size_t i = 0, own = model.left_out.empty() ? 0 : list.size(); i < own; ++i) {
        for (const std::string& other : families::names_beside_towers(list[i].name)) {
            list.push_back(list[i]);
            list.back().name = other;
        }
    }
    if (!model.hybrid) return list;
    // Nemotron-H's names in classes of transformers 5.
    for (std::size_t i = 0, own = list.size(); i < own; ++i) {
        Source other = list[i];
        other.name = replaced(other.name, "backbone.", "model.");
        if (other.name != list[i].name) list.push_back(std::move(other));
    }
    return list;
}

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
    Source source;
    std::int64_t cols = 1; // columns of the parameter
    std::int64_t rows = 0; // rows that are stored; the parameter may have more
};

// Elements [first, first + out.size()) of a parameter. Rows that lie whole are read at once; where neighbours in a row
// are far apart in the file, so are the rows close together: a column of them is read at once and its elements picked.
void read_stored(const Found& found, std::int64_t first, std::span<float> out) {
    const Source& s = found.source;
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
    const std::vector<Source> list = sources(model, parameter, shape, experts);
    for (const Source& source : list) {
        const weights::StoredTensor* tensor = weights.find(source.name);
        if (tensor == nullptr) continue;
        const bool column = shape.cols == 1 && (tensor->shape == std::vector<std::int64_t>{shape.rows, 1} ||
                                                tensor->shape == std::vector<std::int64_t>{1, shape.rows} ||
                                                tensor->shape == source.shape);
        const bool grows = has_token_rows(parameter) && tensor->shape.size() == 2 && tensor->shape[0] > 0 &&
                           tensor->shape[0] < shape.rows && tensor->shape[1] == shape.cols;
        const bool fits = tensor->shape == source.shape || column || grows;
        const auto takes = [&](const Source& other) {
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

// Tensors of a checkpoint that repeat another under MTP's own names: what to write, and what loading need not name.
std::map<std::string, std::string> repeated(const model::Model& model) {
    std::map<std::string, std::string> names;
    for (std::size_t i = 0; i < model.mtp.size(); ++i) {
        if (model.norms_from_one || model.hybrid) break; // Qwen3-Next, Qwen3.5 and Nemotron 3 do not repeat them.
        const std::string at = fmt::format("model.layers.{}.", model.layers.size() + i);
        const std::string table = families::checkpoint_name(model, "model.embed_tokens.weight");
        names[at + "embed_tokens.weight"] = table;
        names[at + "shared_head.head.weight"] = model.tied_embeddings ? table : "lm_head.weight";
    }
    return names;
}

} // namespace

namespace {

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
    for (const auto& [copy, original] : repeated(model)) used.insert(copy);
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
    Source source;
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
        const Source source = sources(model, name, shape, part ? experts.at(part->prefix) : 0).front();
        stored[source.name].push_back({name, shape, source});
    }
    for (const auto& [copy, original] : repeated(model)) stored[copy] = stored.at(original);
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
