// Names and places of parameters in Megatron-Core's GPT models (megatron/core/transformer of 0.16 to 0.19).
#include "engine/train/megatron_weights.hpp"

#include "engine/train/initial_weights.hpp"
#include "engine/train/merge_adapters.hpp"
#include "engine/weights/torch_dist.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/model/model.hpp"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <string_view>

namespace moe::train {

namespace {

// Where a parameter may lie: row r of it is row first + r / run * stride + r % run of a tensor of so many rows.
struct Place {
    std::string name; // below its layer
    std::int64_t rows = 0, first = 0, run = 0, stride = 0;
    std::int64_t expert = -1, experts = 0; // of a tensor with an axis of experts in front
    bool half = false;                     // columns: the parameter is this half of them
    std::int64_t first_column = 0;
};

// A parameter's layer, "" for what is outside of layers, and its name there.
struct InLayer {
    std::int64_t layer = -1;
    std::string rest;
};

InLayer in_layer(const std::string& name) {
    constexpr std::string_view prefix = "model.layers.";
    if (!name.starts_with(prefix)) return {-1, name};
    std::int64_t layer = -1;
    const char* begin = name.data() + prefix.size();
    const auto [end, error] = std::from_chars(begin, name.data() + name.size(), layer);
    if (error != std::errc() || *end != '.') return {-1, name};
    return {layer, name.substr(static_cast<std::size_t>(end - name.data()) + 1)};
}

struct Renamed {
    const char *ours, *theirs, *also;
};
// Whole tensors: our name below a layer, and theirs. A norm lies alone or in the product behind it.
constexpr Renamed whole_tensors[] = {
    {"input_layernorm.weight", "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"},
    {"post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"},
    {"self_attn.o_proj.weight", "self_attention.linear_proj.weight", nullptr},
    {"self_attn.o_proj.bias", "self_attention.linear_proj.bias", nullptr},
    {"self_attn.q_norm.weight", "self_attention.q_layernorm.weight", nullptr},
    {"self_attn.k_norm.weight", "self_attention.k_layernorm.weight", nullptr},
    {"self_attn.q_a_proj.weight", "self_attention.linear_q_down_proj.weight", nullptr},
    {"self_attn.q_a_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight",
     "self_attention.q_layernorm.weight"},
    {"self_attn.q_b_proj.weight", "self_attention.linear_q_up_proj.weight", nullptr},
    {"self_attn.kv_a_proj_with_mqa.weight", "self_attention.linear_kv_down_proj.weight", nullptr},
    {"self_attn.kv_a_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight",
     "self_attention.kv_layernorm.weight"},
    {"self_attn.kv_b_proj.weight", "self_attention.linear_kv_up_proj.weight", nullptr},
    {"mlp.down_proj.weight", "mlp.linear_fc2.weight", nullptr},
    {"mlp.gate.weight", "mlp.router.weight", nullptr},
    {"block_sparse_moe.gate.weight", "mlp.router.weight", nullptr},
    {"mlp.gate.e_score_correction_bias", "mlp.router.expert_bias", nullptr},
    {"mlp.shared_experts.down_proj.weight", "mlp.shared_experts.linear_fc2.weight", nullptr},
    {"mlp.shared_expert.down_proj.weight", "mlp.shared_experts.linear_fc2.weight", nullptr},
    {"mlp.shared_expert_gate.weight", "mlp.shared_experts.gate_weight", nullptr},
    {"enorm.weight", "enorm.weight", nullptr},
    {"hnorm.weight", "hnorm.weight", nullptr},
    {"shared_head.norm.weight", "final_layernorm.weight", nullptr},
};

class MegatronNames {
public:
    MegatronNames(const Trainer& trainer, const weights::TorchDist& checkpoint)
        : model_(*trainer.plan().model), parameters_(trainer.parameters()), checkpoint_(checkpoint) {
        for (const auto& [name, shape] : parameters_)
            if (const auto part = expert_name(name))
                experts_[part->prefix] = std::max(experts_[part->prefix], part->expert + 1);
    }

    // A parameter's tensor, its shape there, and the place in it.
    struct Found {
        std::string tensor;
        Place place;
        std::int64_t begin = 0, width = 0; // the first element of its tensor of rows, and columns of that
    };

    Found find(const std::string& name, const Trainer::Shape& shape) const {
        const InLayer at = in_layer(name);
        const auto layers = static_cast<std::int64_t>(model_.layers.size());
        const std::vector<Place> places = at.layer < 0 ? outside(name, shape) : inside(at, shape);
        std::vector<std::string> tried;
        for (const Place& place : places)
            for (const auto& [tensor, stacked] : spelled(at, place, layers)) {
                const auto stored = checkpoint_.tensors().find(tensor);
                tried.push_back(tensor);
                if (stored != checkpoint_.tensors().end())
                    return checked(tensor, stored->second, place, stacked, at.layer, shape);
            }
        if (tried.empty())
            refuse("{}: parameter {} has no counterpart in Megatron-Core's GPT model", checkpoint_.folder(), name);
        refuse("{}: tensor {} is missing, which {} needs{}", checkpoint_.folder(), tried.front(), name,
               tried.size() > 1 ? fmt::format("; nor is there {}", fmt::join(tried.begin() + 1, tried.end(), ", "))
                                : "");
    }

private:
    static std::vector<Place> outside(const std::string& name, const Trainer::Shape& shape) {
        const auto whole = [&](const char* theirs) { return std::vector<Place>{{theirs, shape.rows}}; };
        if (name == "model.embed_tokens.weight") return whole("embedding.word_embeddings.weight");
        if (name == "lm_head.weight") return whole("output_layer.weight");
        if (name == "model.norm.weight") return whole("decoder.final_layernorm.weight");
        return {};
    }

    std::vector<Place> inside(const InLayer& at, const Trainer::Shape& shape) const {
        for (const Renamed& one : whole_tensors) {
            if (at.rest != one.ours) continue;
            std::vector<Place> places{{one.theirs, shape.rows}};
            if (one.also != nullptr) places.push_back({one.also, shape.rows});
            return places;
        }
        for (const bool hidden : {false, true}) {
            if (at.rest != (hidden ? "eh_proj.weight.hidden" : "eh_proj.weight.embedding")) continue;
            Place place{"eh_proj.weight", shape.rows};
            place.half = true;
            place.first_column = hidden ? shape.cols : 0;
            return {place};
        }
        if (const auto part = expert_name("." + at.rest)) return of_expert(at, *part, shape);
        for (const char* leaf : {"q_proj", "k_proj", "v_proj"})
            for (const char* kind : {"weight", "bias"})
                if (at.rest == fmt::format("self_attn.{}.{}", leaf, kind)) return of_attention(at, leaf, kind, shape);
        for (const std::string prefix : {"mlp.", "mlp.shared_experts.", "mlp.shared_expert."}) {
            const std::string theirs = prefix == "mlp." ? prefix : "mlp.shared_experts.";
            for (const bool up : {false, true})
                if (at.rest == prefix + (up ? "up_proj.weight" : "gate_proj.weight"))
                    return halves(theirs + "linear_fc1.weight", up, has(at, prefix + "gate_proj.weight"), shape.rows);
        }
        return {};
    }

    bool has(const InLayer& at, const std::string& rest) const {
        return parameters_.count(fmt::format("model.layers.{}.{}", at.layer, rest)) > 0;
    }

    // Gate above value in one tensor, or each in its own; without a gate the value alone.
    static std::vector<Place> halves(const std::string& name, bool up, bool gated, std::int64_t rows) {
        if (!gated) return {{name, rows}};
        return {{name, 2 * rows, up ? rows : 0}, {name + (up ? "_v" : "_w"), rows}};
    }

    std::vector<Place> of_expert(const InLayer& at, const ExpertName& part, const Trainer::Shape& shape) const {
        const std::string prefix = at.rest.substr(0, part.prefix.size() - 1);
        const std::int64_t experts = experts_.at(fmt::format("model.layers.{}.{}", at.layer, prefix));
        const bool gate = part.leaf == "gate_proj.weight" || part.leaf == "w1.weight",
                   up = part.leaf == "up_proj.weight" || part.leaf == "w3.weight",
                   down = part.leaf == "down_proj.weight" || part.leaf == "w2.weight";
        if (!gate && !up && !down) return {};
        const bool gated = has(at, fmt::format("{}{}.gate_proj.weight", prefix, part.expert)) ||
                           has(at, fmt::format("{}{}.w1.weight", prefix, part.expert));
        std::vector<Place> places;
        const auto add = [&](const std::string& name, bool joined) {
            for (Place place : down ? std::vector<Place>{{name, shape.rows}} : halves(name, up, gated, shape.rows)) {
                if (joined) place.expert = part.expert, place.experts = experts;
                places.push_back(std::move(place));
            }
        };
        const char* leaf = down ? "linear_fc2.weight" : "linear_fc1.weight";
        add(fmt::format("mlp.experts.experts.{}", leaf), true);
        add(fmt::format("mlp.experts.experts.{}.{}", part.expert, leaf), false);
        add(fmt::format("mlp.experts.experts.{}{}", leaf, part.expert), false);
        return places;
    }

    // A group is its queries' heads, its key's and its value's.
    std::vector<Place> of_attention(const InLayer& at, const std::string& leaf, const std::string& kind,
                                    const Trainer::Shape& shape) const {
        const model::Attention& attention = attention_of(at.layer);
        if (attention.kind == model::AttentionKind::mla)
            return leaf == "q_proj" && kind == "weight"
                       ? std::vector<Place>{{"self_attention.linear_q_proj.weight", shape.rows}}
                       : std::vector<Place>{};
        if (attention.kind != model::AttentionKind::gqa || attention.qk_dim != attention.v_dim || attention.k_eq_v ||
            attention.output_gate || attention.head_gate)
            return {};
        const std::int64_t heads = attention.heads, groups = attention.kv_heads, width = attention.qk_dim,
                           queries = heads / groups * width, group = queries + 2 * width;
        Place place{"self_attention.linear_qkv." + kind, groups * group, 0, queries, group};
        if (leaf != "q_proj") {
            place.first = queries + (leaf == "v_proj" ? width : 0);
            place.run = width;
        }
        return {place};
    }

    const model::Attention& attention_of(std::int64_t layer) const {
        const auto n = static_cast<std::int64_t>(model_.layers.size());
        const int kind = layer < n ? model_.layers[static_cast<std::size_t>(layer)]
                                   : model_.mtp[static_cast<std::size_t>(layer - n)];
        return model_.kinds[static_cast<std::size_t>(kind)].attention;
    }

    // A place's names, and whether the tensor has an axis of layers in front.
    static std::vector<std::pair<std::string, bool>> spelled(const InLayer& at, const Place& place,
                                                             std::int64_t layers) {
        if (at.layer < 0) return {{place.name, false}};
        if (at.layer < layers)
            return {{"decoder.layers." + place.name, true},
                    {fmt::format("decoder.layers.{}.{}", at.layer, place.name), false}};
        const std::string prefix = fmt::format("mtp.layers.{}.", at.layer - layers);
        const bool own = place.name.starts_with("enorm") || place.name.starts_with("hnorm") ||
                         place.name.starts_with("eh_proj") || place.name.starts_with("final_layernorm");
        if (own) return {{prefix + place.name, false}};
        return {{prefix + "transformer_layer." + place.name, false}, {prefix + "mtp_model_layer." + place.name, false}};
    }

    Found checked(const std::string& tensor, const weights::DistTensor& stored, const Place& place, bool stacked,
                  std::int64_t layer, const Trainer::Shape& shape) const {
        constexpr std::int64_t most_padding = 8192; // rows: vocabularies are padded to a multiple of 128 TP
        const std::int64_t width = place.half ? 2 * shape.cols : shape.cols;
        std::vector<std::int64_t> wanted;
        if (stacked) wanted.push_back(static_cast<std::int64_t>(model_.layers.size()));
        if (place.expert >= 0) wanted.push_back(place.experts);
        const std::size_t rows_axis = wanted.size();
        wanted.push_back(place.rows);
        if (stored.shape.size() > wanted.size()) wanted.push_back(width);
        const bool padded = layer < 0 && stored.shape.size() == 2 && stored.shape[0] > place.rows &&
                            stored.shape[0] < place.rows + most_padding &&
                            (tensor == "embedding.word_embeddings.weight" || tensor == "output_layer.weight");
        if (padded) wanted[rows_axis] = stored.shape[0];
        // A gate of one row is a matrix there and here, a norm or bias a vector.
        const bool vector = wanted.size() == rows_axis + 1;
        if (stored.shape != wanted || (vector && width != 1))
            refuse("{}: {} has shape [{}], the plan's model needs [{}]", checkpoint_.folder(), shown(tensor),
                   fmt::join(stored.shape, ", "), fmt::join(wanted, ", "));
        Found found{tensor, place, 0, width};
        if (stacked) found.begin = layer * (place.expert >= 0 ? place.experts : 1);
        if (place.expert >= 0) found.begin += place.expert;
        found.begin *= wanted[rows_axis] * width;
        return found;
    }

    const model::Model& model_;
    const std::map<std::string, Trainer::Shape>& parameters_;
    const weights::TorchDist& checkpoint_;
    std::map<std::string, std::int64_t> experts_; // of a layer, by their prefix
};

// Elements [first, first + out.size()) of a parameter with so many columns.
void read_place(const weights::TorchDist& checkpoint, const MegatronNames::Found& found, std::int64_t cols,
                std::int64_t first, std::span<float> out) {
    const Place& place = found.place;
    const std::int64_t run = place.run > 0 ? place.run : place.rows, stride = place.run > 0 ? place.stride : place.rows;
    const bool whole_rows = found.width == cols;
    for (std::size_t done = 0; done < out.size();) {
        const std::int64_t at = first + static_cast<std::int64_t>(done), row = at / cols, col = at % cols;
        const std::int64_t there = place.first + row / run * stride + row % run;
        const std::int64_t count = std::min((whole_rows ? (run - row % run) * cols : cols) - col,
                                            static_cast<std::int64_t>(out.size() - done));
        checkpoint.read_floats(found.tensor, found.begin + there * found.width + place.first_column + col,
                               out.subspan(done, static_cast<std::size_t>(count)));
        done += static_cast<std::size_t>(count);
    }
    check_finite(checkpoint.folder(), found.tensor, first, out);
}

// Moments and masters; the state of a run beside its model.
bool is_of_optimizer(const std::string& tensor) {
    return tensor.starts_with("optimizer") || tensor.starts_with("chained_") || tensor.starts_with("rng_state") ||
           tensor.starts_with("rerun_state") || tensor.find("_extra_state") != std::string::npos;
}

} // namespace

LoadReport load_megatron_weights(Trainer& trainer, const std::string& folder) {
    const model::Model& model = *trainer.plan().model;
    if (model.norms_from_one || model.post_norms || model.hybrid)
        refuse("{}: {} is no GPT model of Megatron-Core: only models with plain norms before each part are read",
               folder, model.name);
    weights::TorchDist checkpoint(folder);
    const MegatronNames names(trainer, checkpoint);
    std::map<std::string, MegatronNames::Found> places;
    std::set<std::string> used;
    for (const auto& [name, shape] : trainer.parameters()) {
        if (is_adapter(name)) continue; // It begins as it was drawn.
        const MegatronNames::Found found = names.find(name, shape);
        used.insert(found.tensor);
        places.emplace(name, found);
    }
    for (const auto& [tensor, stored] : checkpoint.tensors())
        if (!used.contains(tensor) && !is_of_optimizer(tensor))
            refuse("{}: {} belongs to no parameter of {}: the plan is of another model", folder, shown(tensor),
                   model.name);
    for (const std::string& tensor : used) checkpoint.open(tensor);
    LoadReport report;
    for (const auto& [name, found] : places) {
        const std::int64_t cols = trainer.parameters().at(name).cols;
        trainer.fill_weight(name, [&checkpoint, &found = found, cols](std::int64_t first, std::span<float> out) {
            read_place(checkpoint, found, cols, first, out);
        });
        ++report.loaded;
    }
    return report;
}

} // namespace moe::train
