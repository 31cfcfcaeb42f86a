// DeepSeek-V4's attention over a window of keys and over blocks of them that are pooled into one. Priced, not executed.
//
// Queries come from a latent, as in MLA, and each head of them is normed. All heads see one key, which is the value as
// well. Behind attention the output turns back, and groups of its heads are projected to a narrow width each. Layers of
// blocks of 4 pick theirs by an indexer, which has blocks of its own. Sources: Megatron-LM, branch dev,
// experimental_attention_variant: deepseek_v4_hybrid_attention.py, csa.py, csa_utils/fused_sparse_attention.py.
#include "planner/lower/layers/heads.hpp"
#include "planner/lower/layers/layers.hpp"

#include <algorithm>
#include <cmath>

namespace moe::layers {
namespace {

constexpr int overlapping = 4; // blocks of so many tokens take the tokens of the block before as well

// Widths of a block that projected tokens have: for values and for weights each one, or two of blocks that overlap.
std::int64_t widths_of(const model::Attention& a) { return a.compress_ratio == overlapping ? 2 : 1; }

// What PyTorch's ops move that pool blocks (csa.py, Compressor._forward_sbhd), in bytes of a token and a column of one
// width. Blocks that overlap: scores and a position's bias in FP32 12, copies of values 12 and of scores 24, the
// softmax in FP32 16, its cast 12, the product 12 and the sum 4. Others have half of each and no copies.
double pooled_bytes(const model::Attention& a, bool backward) {
    if (a.compress_ratio == overlapping) return backward ? 114.0 : 92.0;
    return backward ? 36.0 : 28.0;
}

// Ops on the indices of picked keys, in bytes of one: places behind the window's, joined, made global in 64 bits and
// back, packed (fused_sparse_attention.py, steps 3 and 4).
constexpr double index_bytes = 112.0;
// The loss of the indexer and its two distributions, of a picked block: gathered by 64-bit indices, a softmax, clamps
// and logarithms in FP32 (steps 5 and 6).
constexpr double loss_bytes = 130.0;

double rows_of(const program::AttentionAttr& a) { return static_cast<double>(a.batch) * static_cast<double>(a.seq_q); }

// Rotation in place of some columns of every head: read and written again.
double turned_bytes(const program::Tensor& x, int turned, int head) { return 2.0 * x.expected_bytes() * turned / head; }

} // namespace

std::int64_t AttentionLayer::blocks(const emit::Builder& b) const {
    return a_.compress_ratio > 0 ? b.plan().seq / a_.compress_ratio : 0;
}

void AttentionLayer::declare_compressed(emit::ParameterSet& set) const {
    const std::int64_t h = model_.hidden, heads = a_.heads, pooled = 2 * widths_of(a_);
    const std::string at = hf_ + "self_attn.";
    const auto dense = [](std::string name, std::int64_t rows, std::int64_t cols, int dim) {
        return matrix(std::move(name), plan::Domain::dense, rows, cols, dim, 0.02);
    };
    set.declare(key_ + ".q_down", {dense(at + "q_a_proj.weight", a_.q_lora, h, -1)}, true);
    Norm::declare(set, model_, key_ + ".q_norm", at + "q_a_layernorm.weight", a_.q_lora);
    set.declare(key_ + ".q_up", {dense(at + "q_b_proj.weight", heads * a_.qk_dim, a_.q_lora, 0)}, true);
    set.declare(key_ + ".kv_down", {dense(at + "kv_proj.weight", a_.qk_dim, h, -1)}, true);
    Norm::declare(set, model_, key_ + ".kv_norm", at + "kv_layernorm.weight", a_.qk_dim);
    if (a_.compress_ratio > 0) {
        set.declare(key_ + ".blocks", {dense(at + "compressor.weight", pooled * a_.v_dim, h, -1)}, false);
        Norm::declare(set, model_, key_ + ".blocks_norm", at + "compressor.norm.weight", a_.v_dim);
    }
    if (picks_blocks()) {
        const std::int64_t width = static_cast<std::int64_t>(a_.indexer_heads) * a_.indexer_dim;
        set.declare(key_ + ".index_q", {dense(at + "indexer.wq_b.weight", width, a_.q_lora, -1)}, true);
        set.declare(key_ + ".index_w", {dense(at + "indexer.weights_proj.weight", a_.indexer_heads, h, -1)}, false);
        set.declare(key_ + ".index_blocks", {dense(at + "indexer.compressor.weight", pooled * a_.indexer_dim, h, -1)},
                    false);
        Norm::declare(set, model_, key_ + ".index_blocks_norm", at + "indexer.compressor.norm.weight", a_.indexer_dim);
    }
    set.declare(key_ + ".group_out",
                {dense(at + "o_a_proj.weight", static_cast<std::int64_t>(a_.out_groups) * a_.out_lora,
                       heads * a_.v_dim / a_.out_groups, 0)},
                false); // An einsum in BF16.
    set.declare(key_ + ".out",
                {dense(at + "o_b_proj.weight", h, static_cast<std::int64_t>(a_.out_groups) * a_.out_lora, 1)}, true);
}

program::TensorId AttentionLayer::pool(emit::Builder& b, Pooling& pooling, program::TensorId normed, const char* name,
                                       std::int64_t width) {
    const std::string key = key_ + "." + name;
    pooling.width = width;
    emit::bind(b, pooling.projection, key, 2 * widths_of(a_) * width, model_.hidden);
    pooling.projection.name = name;
    pooling.projection.quantize = false; // Its products stay in BF16 under FP8.
    const program::TensorId projected = b.gather_tokens(
        emit::linear_forward(b, pooling.projection, normed, b.activation_dtype()), std::string(name) + "_full");
    const std::int64_t tokens = b.at(projected).rows, rows = std::max<std::int64_t>(1, tokens / a_.compress_ratio);
    const program::TensorId pooled = b.activation(std::string(name) + "_pooled", rows, width);
    pooling.norm.key = key + "_norm";
    pooling.norm.x = projected;
    pooling.norm.y = pooled;
    pooling.norm.rstd = b.tensor(std::string(name) + ".rstd", program::Dtype::f32, rows, 1);
    b.emit(program::OpKind::rmsnorm, {projected, b.weight(pooling.norm.key, width, 1).value},
           {pooled, pooling.norm.rstd}, program::NormAttr{rows, width, width, model_.norm_eps})
        .bytes = pooled_bytes(a_, false) * static_cast<double>(tokens * width);
    return pooled;
}

program::TensorId AttentionLayer::pool_backward(emit::Builder& b, const Pooling& pooling, program::TensorId dpooled) {
    const program::Tensor projected = b.at(pooling.norm.x);
    const std::string name = pooling.projection.name;
    const program::TensorId dprojected = b.activation("d" + name, projected.rows, projected.cols);
    const emit::Weight weight = b.weight(pooling.norm.key, pooling.width, 1);
    b.emit(program::OpKind::rmsnorm_grad,
           {dpooled, pooling.norm.x, weight.value, pooling.norm.rstd, program::no_tensor},
           {dprojected, weight.gradient},
           program::NormAttr{b.at(pooling.norm.y).rows, pooling.width, pooling.width, model_.norm_eps})
        .bytes = pooled_bytes(a_, true) * static_cast<double>(projected.rows * pooling.width);
    return b.scatter_tokens(dprojected, "d" + name + "_local");
}

// Reads the layer's input and the query latent without a gradient to either.
void AttentionLayer::pick_blocks(emit::Builder& b, program::TensorId normed, program::TensorId q_in) {
    const std::int64_t width = static_cast<std::int64_t>(a_.indexer_heads) * a_.indexer_dim;
    const std::int64_t tokens = b.gathered_tokens();
    b.module = program::Module::attn_in;
    emit::bind(b, index_q_, key_ + ".index_q", width, a_.q_lora);
    index_q_.name = "index_q";
    const program::TensorId raw =
        b.gather_tokens(emit::linear_forward(b, index_q_, q_in, b.activation_dtype()), "index_q_full");
    index_rope_ = rope_;
    index_rope_.norm = false;
    index_rope_.heads = a_.indexer_heads, index_rope_.head_dim = a_.indexer_dim;
    index_queries_ = b.activation("index_q_rope", tokens, width);
    // A Hadamard transform reads and writes all columns behind the rotation.
    b.emit(program::OpKind::rope, {raw, rope_positions(b)}, {index_queries_}, index_rope_).bytes +=
        turned_bytes(b.at(raw), a_.rope_dim, a_.indexer_dim);
    index_keys_ = gather_context(b, pool(b, index_blocks_, normed, "index_blocks", a_.indexer_dim), "index_k_all");
    index_weights_.weight = b.weight(key_ + ".index_w", a_.indexer_heads, model_.hidden);
    index_weights_.name = "index_w";
    index_weights_.quantize = false;
    head_weights_ =
        b.gather_tokens(emit::linear_forward(b, index_weights_, normed, b.activation_dtype()), "index_w_full");
    b.module = program::Module::core_attn;
    picked_ = b.tensor("picked_keys", program::Dtype::i32, tokens, attr_.picked);
    index_attr_ = attr_;
    index_attr_.heads = a_.indexer_heads;
    index_attr_.qk_dim = index_attr_.v_dim = a_.indexer_dim;
    index_attr_.seq_k = blocks(b);
    index_attr_.picked = 0; // All blocks before a query are compared.
    program::Op& op =
        b.emit(program::OpKind::pick_keys, {index_queries_, index_keys_, head_weights_}, {picked_}, index_attr_);
    const double compared = static_cast<double>(tokens) * static_cast<double>(index_attr_.seq_k) / 2.0;
    op.flops = 2.0 * compared * static_cast<double>(width);
    op.bytes += 2.0 * sizeof(float) * 2.0 * compared + // Scores of all blocks are written, and read by the choice.
                index_bytes * static_cast<double>(tokens * attr_.picked);
}

// The attention's probabilities of the picked blocks once more, and the indexer's scores forward and backward.
void AttentionLayer::pick_blocks_backward(emit::Builder& b) {
    const std::int64_t width = static_cast<std::int64_t>(a_.indexer_heads) * a_.indexer_dim;
    b.module = program::Module::core_attn;
    b.phase = program::Phase::wgrad; // Nothing else waits for it.
    const auto like = [&b](program::TensorId x, const char* name) {
        return b.activation(name, b.at(x).rows, b.at(x).cols);
    };
    const program::TensorId dqueries = like(index_queries_, "dindex_q_rope"), dkeys = like(index_keys_, "dindex_k_all");
    const program::TensorId dweights = like(head_weights_, "dindex_w");
    program::AttentionAttr attr = attr_;
    attr.picked = std::min<std::int64_t>(a_.indexer_top_k, index_attr_.seq_k);
    const double pairs = rows_of(attr) * static_cast<double>(attr.picked);
    program::Op& op =
        b.emit(program::OpKind::pick_keys_grad, {q_, k_, index_queries_, index_keys_, head_weights_, picked_},
               {dqueries, dkeys, dweights}, attr);
    op.flops = 2.0 * pairs * (static_cast<double>(attr.heads) * attr.qk_dim + 3.0 * static_cast<double>(width));
    op.bytes += loss_bytes * pairs;
    b.module = program::Module::attn_in;
    const program::TensorId dq = like(index_queries_, "dindex_q");
    b.emit(program::OpKind::rope_grad, {dqueries, rope_positions(b)}, {dq}, index_rope_).bytes +=
        turned_bytes(b.at(dq), a_.rope_dim, a_.indexer_dim);
    emit::linear_wgrad(b, index_q_, b.scatter_tokens(dq, "dindex_q_local"));
    emit::linear_wgrad(b, index_weights_, b.scatter_tokens(dweights, "dindex_w_local"));
    emit::linear_wgrad(b, index_blocks_.projection,
                       pool_backward(b, index_blocks_, scatter_context(b, dkeys, "dindex_k")));
    b.phase = program::Phase::dgrad;
}

program::TensorId AttentionLayer::compressed_core(emit::Builder& b, program::TensorId normed) {
    const std::int64_t tokens = b.gathered_tokens(), heads = a_.heads / b.plan().tp;
    b.module = program::Module::attn_in;
    emit::bind(b, q_down_, key_ + ".q_down", a_.q_lora, model_.hidden);
    q_down_.name = "q_down";
    q_norm_.key = key_ + ".q_norm";
    const program::TensorId q_in =
        q_norm_.forward(b, emit::linear_forward(b, q_down_, normed, b.activation_dtype()), a_.q_lora, "q_norm");
    qkv_raw_ = mla_queries(b, q_in);
    rope_.tokens = tokens, rope_.batch = rope_batch(b);
    rope_.heads = static_cast<int>(heads), rope_.head_dim = a_.qk_dim, rope_.rotary_dim = a_.rope_dim;
    rope_.theta = model_.rope_of(a_).theta, rope_.eps = model_.norm_eps;
    rope_.norm = true;
    q_ = b.activation("q", tokens, heads * a_.qk_dim);
    head_rstd_ = b.tensor("q_rstd", program::Dtype::f32, tokens, heads);
    b.emit(program::OpKind::rope, {qkv_raw_, rope_positions(b)}, {q_, head_rstd_}, rope_).bytes +=
        turned_bytes(b.at(q_), a_.rope_dim, a_.qk_dim);

    b.module = program::Module::attn_in;
    emit::bind(b, kv_down_, key_ + ".kv_down", a_.qk_dim, model_.hidden);
    kv_down_.name = "kv_down";
    kv_down_full_ = b.gather_tokens(emit::linear_forward(b, kv_down_, normed, b.activation_dtype()), "kv_down_full");
    kv_norm_.key = key_ + ".kv_norm";
    const program::TensorId keys = kv_norm_.forward(b, kv_down_full_, a_.qk_dim, "kv_norm");
    b.module = program::Module::core_attn;
    program::Operands in{keys, rope_positions(b)};
    std::int64_t rows = tokens;
    if (a_.compress_ratio > 0) {
        const program::TensorId pooled = pool(b, blocks_, normed, "blocks", a_.v_dim);
        in.push_back(pooled);
        rows += b.at(pooled).rows;
    }
    program::RopeAttr one_head = rope_;
    one_head.heads = 1, one_head.norm = false;
    const program::TensorId k = b.activation("k", rows, a_.qk_dim);
    b.emit(program::OpKind::rope, in, {k}, one_head);
    k_ = gather_context(b, k, "k_all");

    const std::int64_t all = blocks(b), window = std::min<std::int64_t>(a_.window, b.plan().seq);
    attr_ = {};
    attr_.batch = b.plan().mbs;
    attr_.seq_q = b.plan().seq / b.plan().cp;
    attr_.seq_k = b.plan().seq + all;
    attr_.heads = static_cast<int>(heads);
    attr_.kv_heads = 1;
    attr_.qk_dim = a_.qk_dim, attr_.v_dim = a_.v_dim;
    attr_.q_stride = heads * a_.qk_dim;
    attr_.k_stride = attr_.v_stride = a_.qk_dim;
    attr_.scale = 1.0 / std::sqrt(static_cast<double>(a_.qk_dim));
    const std::int64_t taken = picks_blocks() ? std::min<std::int64_t>(a_.indexer_top_k, all) : all;
    attr_.picked = window + taken;
    attr_.parts = b.plan().cp;
    attr_.deterministic = b.plan().deterministic;
    picked_ = program::no_tensor;
    if (picks_blocks()) pick_blocks(b, normed, q_in);
    // Picked keys are packed: a query works through those that lie before it. Others come with places left empty.
    const double seen = static_cast<double>(window) +
                        (picks_blocks() ? static_cast<double>(taken) *
                                              (1.0 - static_cast<double>(taken) / (2.0 * static_cast<double>(all)))
                                        : static_cast<double>(taken));
    attr_.visible = seen / static_cast<double>(attr_.seq_k);
    o_ = b.activation("attn_turned", tokens, heads * a_.v_dim);
    lse_ = b.tensor("attn_lse", program::Dtype::f32, tokens, heads);
    b.emit(program::OpKind::attention, {q_, k_, k_, picked_}, {o_, lse_}, attr_).flops =
        2.0 * rows_of(attr_) * seen * a_.qk_dim * 2.0 * static_cast<double>(heads);

    b.module = program::Module::attn_out;
    turned_back_ = b.activation("attn_out", tokens, heads * a_.v_dim); // A copy: attention's backward reads its own.
    program::RopeAttr back = rope_;
    back.norm = false;
    b.emit(program::OpKind::rope, {o_, rope_positions(b)}, {turned_back_}, back);
    const std::int64_t groups = a_.out_groups / b.plan().tp, each = heads * a_.v_dim / groups;
    group_out_ = b.weight(key_ + ".group_out", groups * a_.out_lora, each);
    const program::TensorId grouped = b.activation("group_out", tokens, groups * a_.out_lora);
    program::GemmAttr product = by_heads(groups, tokens, a_.out_lora, each, columns_of(groups, each),
                                         {each, a_.out_lora * each, 0}, columns_of(groups, a_.out_lora));
    product.transpose_b = true;
    b.gemm(turned_back_, group_out_.value, grouped, product);
    return grouped;
}

program::TensorId AttentionLayer::compressed_core_backward(emit::Builder& b, program::TensorId doutput) {
    const std::int64_t tokens = b.gathered_tokens(), heads = attr_.heads;
    const std::int64_t groups = a_.out_groups / b.plan().tp, each = heads * a_.v_dim / groups;
    b.module = program::Module::attn_out;
    const program::TensorId dturned = b.activation("dattn_out", tokens, heads * a_.v_dim);
    b.gemm(doutput, group_out_.value, dturned,
           by_heads(groups, tokens, each, a_.out_lora, columns_of(groups, a_.out_lora), {each, a_.out_lora * each, 0},
                    columns_of(groups, each)));
    program::GemmAttr wgrad = by_heads(groups, a_.out_lora, each, tokens, columns_of(groups, a_.out_lora),
                                       columns_of(groups, each), {each, a_.out_lora * each, 0});
    wgrad.transpose_a = true;
    wgrad.accumulate = b.at(group_out_.gradient).storage == program::Storage::gradient;
    b.phase = program::Phase::wgrad;
    b.gemm(doutput, turned_back_, group_out_.gradient, wgrad);
    b.phase = program::Phase::dgrad;
    program::RopeAttr back = rope_;
    back.norm = false;
    const program::TensorId do_ = b.activation("dattn_turned", tokens, heads * a_.v_dim);
    b.emit(program::OpKind::rope_grad, {dturned, rope_positions(b)}, {do_}, back);

    b.module = program::Module::core_attn;
    const program::TensorId dq_turned = b.activation("dq_turned", tokens, b.at(q_).cols);
    const program::TensorId dk_all = b.activation("dk_all", b.at(k_).rows, b.at(k_).cols);
    b.emit(program::OpKind::attention_grad, {do_, q_, k_, k_, o_, lse_, picked_}, {dq_turned, dk_all, dk_all}, attr_)
        .flops = 2.5 * 4.0 * rows_of(attr_) * attr_.visible * static_cast<double>(attr_.seq_k) * a_.qk_dim *
                 static_cast<double>(heads);
    const program::TensorId dk = scatter_context(b, dk_all, "dk");
    program::RopeAttr one_head = rope_;
    one_head.heads = 1, one_head.norm = false;
    const program::TensorId dkeys = b.activation("dkv_norm", tokens, a_.qk_dim);
    program::Operands out{dkeys};
    program::TensorId dpooled = program::no_tensor;
    if (a_.compress_ratio > 0) {
        dpooled = b.activation("dblocks_pooled", b.at(blocks_.norm.y).rows, a_.v_dim);
        out.push_back(dpooled);
    }
    b.emit(program::OpKind::rope_grad, {dk, rope_positions(b)}, out, one_head);

    b.module = program::Module::mla_up_proj;
    const program::TensorId dq = b.activation("dq", tokens, b.at(q_).cols);
    b.emit(program::OpKind::rope_grad,
           {dq_turned, rope_positions(b), qkv_raw_, program::no_tensor, program::no_tensor, head_rstd_}, {dq}, rope_)
        .bytes += turned_bytes(b.at(dq), a_.rope_dim, a_.qk_dim);
    const program::TensorId dq_in = emit::linear_backward(b, q_up_, dq);
    b.module = program::Module::attn_in;
    program::TensorId dnormed = emit::linear_backward(b, q_down_, q_norm_.backward(b, dq_in));
    const program::TensorId dkv = b.scatter_tokens(kv_norm_.backward(b, dkeys), "dkv_down");
    dnormed = b.add(dnormed, emit::linear_backward(b, kv_down_, dkv), "dattn_norm_keys");
    if (dpooled != program::no_tensor) {
        b.module = program::Module::core_attn;
        const program::TensorId dblocks =
            emit::linear_backward(b, blocks_.projection, pool_backward(b, blocks_, dpooled));
        dnormed = b.add(dnormed, dblocks, "dattn_norm_blocks");
    }
    if (picks_blocks() && b.plan().indexer.loss > 0.0) pick_blocks_backward(b);
    return dnormed;
}

} // namespace moe::layers
