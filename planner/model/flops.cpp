// Parameter counts and model FLOPs per token, both summed over layer kinds.
//
// The FLOPs follow what Megatron-Bridge prints as "Model TFLOP/s/GPU" (flop_utils.py, releases v0.5.0 and later): 6
// FLOPs per multiply-accumulate (forward, dgrad, wgrad), causal attention at half, latent norms counted, router and
// embedding lookup not. Counts are held in doubles, exact below 2^53.
#include "planner/model/document_lengths.hpp"
#include "planner/model/indexer_flops.hpp"
#include "planner/model/model.hpp"

#include <algorithm>
#include <cmath>

namespace moe::model {
namespace {

// Weights and multiply-accumulates per token of one attention block.
struct Count {
    double weights = 0.0; // number of all parameters
    double macs = 0.0;    // multiply-accumulates per token
};

// The tokens that attention goes over.
struct Sequence {
    double length = 1.0;
    const DocumentLengths* documents = nullptr;
    double keys(const Attention& a) const { return keys_seen(a, static_cast<std::int64_t>(length), documents); }
};

Count gqa(const Attention& a, double h, const Sequence& seq) {
    const double query = static_cast<double>(a.heads) * a.qk_dim;
    const double keys = static_cast<double>(a.kv_heads) * a.qk_dim;
    const double values = static_cast<double>(a.kv_heads) * a.v_dim;
    const double out = static_cast<double>(a.heads) * a.v_dim;
    const double queries = a.q_lora > 0 ? a.q_lora * (h + query + 1.0) : h * query;
    const double matrices = queries + h * (keys + (a.k_eq_v ? 0.0 : values)) + out * h +
                            (a.output_gate ? h * out : 0.0) + (a.head_gate ? h * a.heads : 0.0);
    double vectors = a.qkv_bias ? query + keys + values : 0.0;
    if (a.out_bias) vectors += h;
    if (a.sinks) vectors += a.heads;
    if (a.qk_norm && !a.plain_qk_norm) vectors += static_cast<double>(a.q_norm() + a.k_norm());
    return {matrices + vectors, matrices + seq.keys(a) * (query + out)};
}

// Multiply-accumulates per token of an indexer's projections.
double index_projections(const Attention& a, double h) {
    const double width = static_cast<double>(a.indexer_heads) * a.indexer_dim;
    return (a.q_lora > 0 ? a.q_lora : h) * width + h * (a.indexer_dim + a.indexer_heads);
}

// FLOPs per token of the gradients of its projections' weights, and of its queries and keys at `keys` scores.
double index_gradients(const Attention& a, double h, double keys) {
    return 2.0 * (index_projections(a, h) + 2.0 * keys * a.indexer_heads * a.indexer_dim);
}

// Lightning indexer: queries of the query latent, one key and a weight per head of the token, a LayerNorm of the key.
// It is trained by a loss of its own over the keys that it picked: the projections have no gradient of their input, the
// scores of all keys before a token are made once and have gradients at those picked (Megatron-LM pull requests 6753
// and 7157). One multiply-accumulate here stands for three.
Count indexer(const Attention& a, double h, const Sequence& seq) {
    const double width = static_cast<double>(a.indexer_heads) * a.indexer_dim;
    const double matrices = index_projections(a, h), forward = matrices + width * seq.length / 2.0;
    return {matrices + 2.0 * a.indexer_dim, (forward + index_gradients(a, h, seq.keys(a)) / 2.0) / 3.0};
}

// Over picked keys the core works on the latent itself, for all heads the same, with the up projections of keys and
// values moved to its query and output side, where they cost as much (Megatron-LM pull request 6753).
Count mla(const Attention& a, double h, const Sequence& seq) {
    const double heads = a.heads;
    const double query = a.q_lora > 0 ? a.q_lora * (h + heads * a.qk_dim + 1.0) : h * heads * a.qk_dim;
    const double up = heads * (a.qk_dim - a.rope_dim + a.v_dim);
    const double projections = query + a.kv_lora * (h + up + 1.0) + h * a.rope_dim + heads * a.v_dim * h;
    const double per_key = heads * (a.sparse() ? 2.0 * a.kv_lora + a.rope_dim : 1.0 * a.qk_dim + a.v_dim);
    const double core = seq.keys(a) * per_key;
    double bias = 0.0; // biases of the two down projections and the output projection
    if (a.qkv_bias) bias += a.q_lora + a.kv_lora + a.rope_dim;
    if (a.out_bias) bias += h;
    const Count picks = a.indexes() ? indexer(a, h, seq) : Count{};
    return {projections + bias + picks.weights, projections + core + picks.macs};
}

// Projections with their two gates per value head, the short convolution, and four d x d state products per value head.
Count gated_delta(const Attention& a, double h) {
    const double keys = static_cast<double>(a.key_heads) * a.key_dim;
    const double values = static_cast<double>(a.value_heads) * a.value_dim;
    const double matrices =
        h * (2.0 * keys + 2.0 * values + 2.0 * a.value_heads) + a.conv_kernel * (2.0 * keys + values) + values * h;
    const double state = 4.0 * a.value_heads * a.value_dim * a.value_dim;
    return {matrices + 2.0 * a.value_heads + a.value_dim, matrices + state};
}

// Megatron counts the scan with an inner width of twice the model's, whatever heads there are (training.py,
// mamba_layer_flops), and 3.5 multiply-accumulates per element of the state.
Count mamba(const Attention& a, double h) {
    const double inner = static_cast<double>(a.value_heads) * a.value_dim, counted = 2.0 * h;
    const double groups = static_cast<double>(a.key_heads) * a.key_dim;
    const double convolved = inner + 2.0 * groups;
    const double vectors = (a.conv_kernel + 1.0) * convolved + 3.0 * a.value_heads + inner;
    const auto projections = [&](double width) { return h * (2.0 * width + 2.0 * groups + a.value_heads) + width * h; };
    return {projections(inner) + vectors, projections(counted) + 3.5 * counted * a.key_dim};
}

// Keys compressed 4:1 (overlapping, so two projections wide) are selected by an indexer; 128:1 all take part.
Count compressor(const Attention& a, double h, const Sequence& seq) {
    const double width = a.v_dim;
    const double ratio = a.compress_ratio;
    const double core = 2.0 * a.heads * width; // score and value products per key seen
    if (a.compress_ratio == 0) return {0.0, core * static_cast<double>(a.window)};
    const double blocks = std::floor(seq.length / ratio);
    if (a.compress_ratio != 4) {
        const double matrices = 2.0 * h * width;
        return {matrices + width + ratio * width, matrices + core * (static_cast<double>(a.window) + blocks / 2.0)};
    }
    const double kept = std::min(static_cast<double>(a.indexer_top_k), blocks);
    const double seen = static_cast<double>(a.window) + kept * (1.0 - kept * ratio / (2.0 * seq.length));
    const double index = static_cast<double>(a.indexer_heads) * a.indexer_dim;
    const double matrices = 4.0 * h * width + 4.0 * h * a.indexer_dim + a.q_lora * index + h * a.indexer_heads;
    const double vectors = width + a.indexer_dim + 2.0 * ratio * (width + a.indexer_dim);
    return {matrices + vectors, matrices + core * seen + index * blocks};
}

Count compressed(const Attention& a, double h, const Sequence& seq) {
    const double wide = static_cast<double>(a.heads) * a.v_dim;
    const double query = a.q_lora * (h + static_cast<double>(a.heads) * a.qk_dim + 1.0);
    const double projections =
        query + h * a.v_dim + a.v_dim + wide * a.out_lora + static_cast<double>(a.out_groups) * a.out_lora * h;
    const Count sparse = compressor(a, h, seq);
    return {projections + sparse.weights + (a.sinks ? a.heads : 0.0), projections + sparse.macs};
}

Count kind_count(const Attention& a, double h, const Sequence& seq) {
    switch (a.kind) {
    case AttentionKind::gqa:
        return gqa(a, h, seq);
    case AttentionKind::mla:
        return mla(a, h, seq);
    case AttentionKind::gated_delta:
        return gated_delta(a, h);
    case AttentionKind::compressed:
        return compressed(a, h, seq);
    case AttentionKind::mamba:
        return mamba(a, h);
    case AttentionKind::opaque:
    case AttentionKind::none:
        return {};
    }
    return {};
}

Count attention(const Attention& a, double h, const Sequence& seq) {
    const Count core = kind_count(a, h, seq);
    return {core.weights + static_cast<double>(a.opaque.weights),
            core.macs + a.opaque.macs + a.opaque.macs_per_key * seq.length / 2.0};
}

// Maps of n residual streams around attention and around the MLP: n pre, n post and n x n mixing weights, each a linear
// function of all streams, with biases and three scales.
double hyper_connections(const Model& model) {
    const auto streams = static_cast<double>(model.residual_streams), h = static_cast<double>(model.hidden);
    if (streams <= 1.0) return 0.0;
    const double outputs = (model.unmixed_streams ? 0.0 : streams * streams) + 2.0 * streams;
    return 2.0 * (outputs * streams * h + outputs + (model.unmixed_streams ? 2.0 : 3.0));
}

// Of a group of experts, that a token chooses none of them.
double chance_of_none(const Moe& moe) {
    double chance = 1.0;
    for (int chosen = 0; chosen < moe.top_k; ++chosen)
        chance *= std::max(0.0, 1.0 - moe.group_size / static_cast<double>(moe.experts - chosen));
    return chance;
}

struct LayerCount {
    double total = 0.0, active = 0.0, macs = 0.0;
};

LayerCount layer(const Model& model, const LayerKind& kind, const Sequence& seq) {
    const auto h = static_cast<double>(model.hidden);
    const double matrices = kind.gated ? 3.0 : 2.0;
    const Count core = attention(kind.attention, h, seq);
    const bool mixes = kind.attention.kind != AttentionKind::none, transforms = kind.moe || kind.dense();
    const double parts = kind.parallel ? 1.0 : (mixes ? 1.0 : 0.0) + (transforms ? 1.0 : 0.0);
    const double norms = parts * h * (model.layer_norm_bias ? 2.0 : 1.0) * (model.post_norms ? 2.0 : 1.0);
    const auto idle = static_cast<double>(kind.attention.opaque.idle);
    const double outside = core.weights + norms + (kind.output_scale ? 1.0 : 0.0) + hyper_connections(model);
    if (!kind.moe) {
        const auto width = static_cast<double>(kind.dense_ffn);
        const double weights = matrices * h * width;
        const double bias = kind.mlp_bias && kind.dense() ? (matrices - 1.0) * width + h : 0.0;
        return {outside + weights + bias, outside + weights + bias - idle, core.macs + weights};
    }
    const Moe& moe = *kind.moe;
    const double width = moe.latent > 0 ? static_cast<double>(moe.latent) : h; // width of an expert's tokens
    const double latent = moe.latent > 0 ? 2.0 * h * width : 0.0;
    const double routed = matrices * width * static_cast<double>(moe.ffn);
    const double bias = moe.expert_bias ? (matrices - 1.0) * static_cast<double>(moe.ffn) + width : 0.0;
    const auto wide = static_cast<double>(moe.shared_ffn);
    const double shared = matrices * h * wide,
                 shared_bias = moe.shared_bias && wide > 0.0 ? (matrices - 1.0) * wide + h : 0.0;
    const double vectors = (moe.router.linear_bias ? 1.0 : 0.0) + (moe.router.expert_bias ? 1.0 : 0.0);
    // Vectors are those of inputs of router and experts, of outputs of both branches, and a factor for each expert.
    const double branches = moe.branch_norms ? 4.0 * h + moe.experts : 0.0;
    // Of small experts a token passes those of the groups that it reaches, as many as are expected where all experts
    // are chosen alike; the shares of them in its routed experts are fewer.
    const double reached = moe.experts * (1.0 - chance_of_none(moe)) - moe.top_k;
    const double small = reached / moe.group_size * matrices * width * static_cast<double>(moe.group_ffn);
    const double always =
        outside + shared + shared_bias + latent + branches + moe.experts * (h + vectors) + (moe.shared_gate ? h : 0.0);
    return {always + moe.experts * (routed + bias), always + moe.top_k * (routed + bias) + small - idle,
            core.macs + moe.top_k * routed + small + shared + latent};
}

// Projection of [hidden, embedding] to the hidden width, with the norms of both and the one behind the layer.
double mtp_projection(double h) { return 2.0 * h * h + 3.0 * h; }

} // namespace

double keys_seen(const Attention& attention, std::int64_t seq, const DocumentLengths* documents) {
    if (documents != nullptr && !documents->bins.empty()) {
        const std::int64_t most = attention.picks() ? attention.indexer_top_k : attention.window;
        if (attention.chunk == 0) return documents->keys_seen(seq, most);
        DocumentLengths cut = *documents; // A chunk is a document that ends no later.
        for (DocumentLengths::Bin& bin : cut.bins) {
            const std::int64_t whole = bin.length;
            bin.length = std::min(whole, attention.chunk);
            bin.documents *= static_cast<double>(whole) / static_cast<double>(bin.length);
        }
        return cut.keys_seen(seq, most);
    }
    const auto s = static_cast<double>(seq), window = static_cast<double>(attention.window);
    if (attention.chunk > 0 && attention.chunk < seq) {
        const auto chunk = static_cast<double>(attention.chunk), rest = static_cast<double>(seq % attention.chunk);
        return ((s - rest) * chunk + rest * rest) / (2.0 * s);
    }
    if (attention.picks()) {
        const double picked = std::min(static_cast<double>(attention.indexer_top_k), s);
        return picked * (1.0 - picked / (2.0 * s));
    }
    if (attention.window <= 0 || attention.window >= seq) return s / 2.0;
    return window - window * (window - 1.0) / (2.0 * s);
}

ParameterCount count_parameters(const Model& model) {
    const auto h = static_cast<double>(model.hidden);
    const double table = static_cast<double>(model.vocab) * h;
    double total = table * (model.tied_embeddings ? 1.0 : 2.0) + h * (model.layer_norm_bias ? 2.0 : 1.0) +
                   (model.head_bias ? static_cast<double>(model.vocab) : 0.0) +
                   static_cast<double>(model.other_weights);
    // Hyper-connections end in one more map, of all streams to the one that the head reads.
    if (const double streams = model.residual_streams; streams > 1.0) total += streams * streams * h + streams + 1.0;
    double active = total;
    std::vector<LayerCount> kinds;
    for (const LayerKind& kind : model.kinds) kinds.push_back(layer(model, kind, {}));
    for (const int kind : model.layers) {
        total += kinds[static_cast<std::size_t>(kind)].total;
        active += kinds[static_cast<std::size_t>(kind)].active;
    }
    double mtp = 0.0;
    for (const int kind : model.mtp) mtp += kinds[static_cast<std::size_t>(kind)].total + mtp_projection(h);
    const auto whole = [](double count) {
        constexpr double most = 9.2e18; // largest count: one beyond 64 bits is reported as this
        return count < most ? static_cast<std::int64_t>(count) : static_cast<std::int64_t>(most);
    };
    return {whole(total + mtp), whole(total), whole(active), whole(active - (model.tied_embeddings ? 0.0 : table))};
}

double indexer_gradient_flops(const Model& model, std::int64_t seq, bool all_keys, const DocumentLengths* documents) {
    double sum = 0.0;
    const auto add = [&](int index) {
        const Attention& a = model.kinds[static_cast<std::size_t>(index)].attention;
        if (!a.indexes()) return;
        Attention seen = a;
        if (all_keys) seen.indexer_top_k = 0;
        sum += index_gradients(a, static_cast<double>(model.hidden), keys_seen(seen, seq, documents));
    };
    for (const int kind : model.layers) add(kind);
    for (const int kind : model.mtp) add(kind);
    return sum;
}

double model_flops_per_token(const Model& model, std::int64_t seq, int tp, const DocumentLengths* documents) {
    const auto h = static_cast<double>(model.hidden);
    std::vector<double> macs;
    for (const LayerKind& kind : model.kinds)
        macs.push_back(layer(model, kind, {static_cast<double>(seq), documents}).macs);
    const double head = h * static_cast<double>(model.padded_vocab(tp));
    double sum = head;
    for (const int kind : model.layers) sum += macs[static_cast<std::size_t>(kind)];
    // Megatron counts, of hybrids, the layers of an MTP depth and its head alone.
    const double projection = model.hybrid ? 0.0 : mtp_projection(h);
    for (const int kind : model.mtp) sum += macs[static_cast<std::size_t>(kind)] + projection + head;
    constexpr double flops_per_mac = 6.0;
    return flops_per_mac * sum;
}

} // namespace moe::model
