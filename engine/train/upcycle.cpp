// Which part of a dense model every parameter of the mixture begins with.
#include "engine/train/upcycle.hpp"

#include "engine/train/initial_weights.hpp"
#include "engine/weights/safetensors.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/names.hpp"
#include "planner/model/families/load_model.hpp"

#include <algorithm>
#include <filesystem>
#include <optional>

namespace moe::train {

namespace {

struct Cut {
    std::int64_t shards = 1;
    float scale = 1.0f; // of output matrices
};

// The dense model's matrix that an expert's is cut from.
struct Whole {
    std::string name; // "model.layers.2.mlp.up_proj.weight"
    bool down = false;
};

std::optional<Whole> whole_of(const ExpertName& part) {
    static const std::map<std::string, std::string> leaves{
        {"gate_proj.weight", "gate_proj.weight"}, {"w1.weight", "gate_proj.weight"},
        {"up_proj.weight", "up_proj.weight"},     {"w3.weight", "up_proj.weight"},
        {"down_proj.weight", "down_proj.weight"}, {"w2.weight", "down_proj.weight"}};
    const auto leaf = leaves.find(part.leaf);
    if (leaf == leaves.end()) return std::nullopt;
    // "model.layers.2.mlp.experts." or "model.layers.2.block_sparse_moe.experts."
    const std::string layer = part.prefix.substr(0, part.prefix.rfind('.', part.prefix.rfind(".experts.") - 1));
    return Whole{layer + ".mlp." + leaf->second, leaf->second.starts_with("down")};
}

bool gates_experts(const std::string& name, const std::map<std::string, Trainer::Shape>& parameters) {
    static const std::string leaf = "gate.weight";
    return name.ends_with("." + leaf) &&
           parameters.count(name.substr(0, name.size() - leaf.size()) + "experts.0.up_proj.weight") +
                   parameters.count(name.substr(0, name.size() - leaf.size()) + "experts.0.w3.weight") >
               0;
}

// Widths by the configs alone, since a folder may hold other tensors than its config says.
Cut cut_of(const model::Model& model, const model::Model& dense, const std::string& path) {
    const std::string name = model.name + ": --upcycle: ";
    if (model.layers.size() != dense.layers.size())
        refuse("{}num_hidden_layers is {}, {} says {}", name, model.layers.size(), path, dense.layers.size());
    Cut cut;
    bool any = false;
    for (std::size_t layer = 0; layer < model.layers.size(); ++layer) {
        const model::LayerKind &kind = model.kind_of(static_cast<int>(layer)),
                               &from = dense.kind_of(static_cast<int>(layer));
        if (from.moe) refuse("{}{} holds no dense model: layer {} has experts", name, path, layer);
        if (kind.activation != from.activation || kind.gated != from.gated)
            refuse("{}hidden_act of layer {} is not that of {}", name, layer, path);
        if (!kind.moe) continue;
        const model::Moe& moe = *kind.moe;
        if (moe.shared_ffn > 0) refuse("{}shared experts have no part in the dense model", name);
        if (!moe.router.normalize && !moe.router.softmax_after_top_k)
            refuse("{}norm_topk_prob is false: routing weights must sum to one", name);
        if (moe.router.groups > 1)
            refuse("{}n_group is {}: groups would part the shards of an MLP", name, moe.router.groups);
        if (moe.latent > 0 || moe.expert_bias || moe.router.linear_bias || moe.branch_norms || moe.probs_on_input)
            refuse("{}experts of {} are no shards of a dense MLP", name, model.architecture);
        if (from.dense_ffn % moe.ffn != 0)
            refuse("{}an expert's width {} does not divide the dense intermediate_size {}", name, moe.ffn,
                   from.dense_ffn);
        const std::int64_t shards = from.dense_ffn / moe.ffn;
        if (moe.experts % shards != 0 || moe.top_k % shards != 0)
            refuse("{}{} experts of which {} are taken are no whole copies of {} shards", name, moe.experts, moe.top_k,
                   shards);
        cut = {shards, static_cast<float>(static_cast<double>(shards) / moe.router.scale)};
        any = true;
    }
    if (!any) refuse("{}the plan's model has no experts", name);
    return cut;
}

const weights::StoredTensor& tensor_of(const weights::StoredWeights& weights, const std::string& name,
                                       const std::vector<std::int64_t>& shape) {
    const weights::StoredTensor* tensor = weights.find(name);
    if (tensor == nullptr)
        refuse("{}: tensor {} is missing{}", weights.folder(), name, did_you_mean(name, weights.names()));
    const bool more_tokens = has_token_rows(name) && tensor->shape.size() == 2 && tensor->shape[0] > 0 &&
                             tensor->shape[0] < shape[0] && tensor->shape[1] == shape[1];
    if (tensor->shape != shape && !more_tokens)
        refuse("{}: {} has shape [{}], the plan's model needs [{}]", weights.folder(), shown(name),
               fmt::join(tensor->shape, ", "), fmt::join(shape, ", "));
    return *tensor;
}

ReadPart reader_of(const weights::StoredTensor& tensor, const std::string& name, std::int64_t offset = 0) {
    return [&tensor, name, offset](std::int64_t first, std::span<float> out) {
        weights::read_floats(tensor, name, offset + first, out);
        check_finite(tensor.file->path(), name, first, out);
    };
}

// Columns [col, col + cols) of a matrix that is `width` wide, times the scale.
ReadPart columns_of(const weights::StoredTensor& tensor, const std::string& name, std::int64_t col, std::int64_t cols,
                    std::int64_t width, float scale) {
    return [=, &tensor](std::int64_t first, std::span<float> out) {
        const std::int64_t end = first + static_cast<std::int64_t>(out.size());
        for (std::int64_t at = first; at < end;) {
            const std::int64_t run = std::min(end - at, cols - at % cols);
            const std::span<float> part =
                out.subspan(static_cast<std::size_t>(at - first), static_cast<std::size_t>(run));
            weights::read_floats(tensor, name, at / cols * width + col + at % cols, part);
            for (float& value : part) value *= scale;
            at += run;
        }
        check_finite(tensor.file->path(), name, first, out);
    };
}

} // namespace

LoadReport upcycle_weights(Trainer& trainer, const std::string& folder) {
    const model::Model& model = *trainer.plan().model;
    const std::string path = (std::filesystem::path(folder) / "config.json").string();
    const model::Model dense = families::model_from_json(read_file(path), path);
    const Cut cut = cut_of(model, dense, path);
    const weights::StoredWeights weights(folder);
    LoadReport report;
    report.difference = differing_numbers(model, dense);
    report.grown_to = model.vocab;
    std::vector<std::string> left = weights.names();
    std::vector<std::pair<std::string, ReadPart>> readers;
    for (const auto& [name, shape] : trainer.parameters()) {
        if (name.ends_with("e_score_correction_bias")) continue; // begins as zero, as in every model
        if (gates_experts(name, trainer.parameters())) {
            std::vector<float> rows = trainer.read_weight(name); // random, from the trainer's seed
            const auto width = static_cast<std::size_t>(shape.cols), shards = static_cast<std::size_t>(cut.shards);
            for (std::size_t e = 0; e < static_cast<std::size_t>(shape.rows); ++e)
                std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(e / shards * shards * width), width,
                            rows.begin() + static_cast<std::ptrdiff_t>(e * width));
            readers.emplace_back(name, [rows = std::move(rows)](std::int64_t first, std::span<float> out) {
                std::copy_n(rows.begin() + first, out.size(), out.begin());
            });
            continue;
        }
        const std::optional<ExpertName> part = expert_name(name);
        const std::optional<Whole> whole = part ? whole_of(*part) : std::nullopt;
        const std::string& stored = whole ? whole->name : name;
        std::erase(left, stored);
        if (!whole) {
            const std::vector<std::int64_t> all =
                shape.cols == 1 ? std::vector{shape.rows} : std::vector{shape.rows, shape.cols};
            const weights::StoredTensor& tensor = tensor_of(weights, stored, all);
            ReadPart read = reader_of(tensor, stored);
            if (tensor.shape[0] < shape.rows) {
                report.grown_from = tensor.shape[0];
                read = with_more_rows(read, tensor.shape[0], shape.cols);
            }
            readers.emplace_back(name, std::move(read));
            continue;
        }
        const std::int64_t shard = part->expert % cut.shards;
        if (whole->down) {
            const std::int64_t width = cut.shards * shape.cols;
            readers.emplace_back(name, columns_of(tensor_of(weights, stored, {shape.rows, width}), stored,
                                                  shard * shape.cols, shape.cols, width, cut.scale));
        } else {
            readers.emplace_back(name, reader_of(tensor_of(weights, stored, {cut.shards * shape.rows, shape.cols}),
                                                 stored, shard * shape.rows * shape.cols));
        }
    }
    for (const auto& [name, read] : readers) {
        trainer.fill_weight(name, read);
        ++report.loaded;
    }
    if (model.tied_embeddings) std::erase(left, "lm_head.weight"); // Older files repeat the embedding under this name.
    report.unused = std::move(left);
    return report;
}

} // namespace moe::train
