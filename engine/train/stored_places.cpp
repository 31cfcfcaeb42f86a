// The names by which families of models store their parameters, and the layouts of experts that lie in one tensor.
#include "engine/train/stored_places.hpp"

#include "engine/train/initial_weights.hpp"
#include "planner/model/families/names.hpp"

#include <fmt/format.h>

#include <optional>

namespace moe::train {
namespace {

std::string replaced(std::string text, const std::string& from, const std::string& to) {
    const std::size_t at = text.find(from);
    return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

// GPT-OSS keeps the experts of a layer in one tensor per matrix, transposed, gate and up in turns: "gate_up_proj"
// [E, h, 2f], "gate_up_proj_bias" [E, 2f], "down_proj" [E, f, h], "down_proj_bias" [E, h].
StoredPlace gpt_oss_source(const ExpertName& part, const Trainer::Shape& shape, std::int64_t experts) {
    const bool bias = part.leaf.ends_with(".bias"), down = part.leaf.starts_with("down_proj");
    const std::int64_t turns = down ? 1 : 2, row = turns * shape.rows;
    StoredPlace source{
        part.prefix + (down ? "down_proj" : "gate_up_proj") + (bias ? "_bias" : ""), {experts}, 0, turns, row};
    if (!bias) source.shape.push_back(shape.cols);
    source.shape.push_back(row);
    source.offset = part.expert * row * (bias ? 1 : shape.cols) + (part.leaf.starts_with("up_proj") ? 1 : 0);
    return source;
}

// The place of an expert's matrix where the family keeps all experts of a layer in one tensor; see ExpertLayout.
StoredPlace joined_expert(families::ExpertLayout layout, const std::string& prefix, const ExpertName& part,
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
std::vector<StoredPlace> named_sources(const model::Model& model, const std::string& name, const Trainer::Shape& shape,
                                       std::int64_t experts) {
    std::vector<StoredPlace> list;
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
        return StoredPlace{std::move(at), std::move(stored), offset, shape.cols, 1, shift};
    };
    if (const families::JoinedRows joined = families::joined_rows(model, name); !joined.name.empty()) {
        StoredPlace source = plain(joined.name, {joined.rows, shape.cols}, joined.first * shape.cols);
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

} // namespace

std::vector<StoredPlace> stored_places(const model::Model& model, const std::string& name, const Trainer::Shape& shape,
                                       std::int64_t experts) {
    std::vector<StoredPlace> list = named_sources(model, name, shape, experts);
    for (std::size_t i = 0, own = model.left_out.empty() ? 0 : list.size(); i < own; ++i) {
        for (const std::string& other : families::names_beside_towers(list[i].name)) {
            list.push_back(list[i]);
            list.back().name = other;
        }
    }
    if (!model.hybrid) return list;
    // Nemotron-H's names in classes of transformers 5.
    for (std::size_t i = 0, own = list.size(); i < own; ++i) {
        StoredPlace other = list[i];
        other.name = replaced(other.name, "backbone.", "model.");
        if (other.name != list[i].name) list.push_back(std::move(other));
    }
    return list;
}

std::map<std::string, std::string> repeated_tensors(const model::Model& model) {
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

} // namespace moe::train
