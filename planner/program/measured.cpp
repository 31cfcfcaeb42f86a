// The families of ops that share a kernel, and the lengths that decide how fast it runs.
#include "planner/program/measured.hpp"

#include "planner/machine/hardware.hpp"
#include "planner/program/peer_blocks.hpp"
#include "planner/program/program.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <type_traits>

namespace moe::program {

namespace {

const Tensor* first_tensor(const Operands& ids, const Program& program) {
    for (const TensorId id : ids)
        if (id != no_tensor) return &program.tensors[static_cast<std::size_t>(id)];
    return nullptr;
}

const Tensor* first_tensor(const Op& op, const Program& program) {
    const Tensor* tensor = first_tensor(op.in, program);
    return tensor != nullptr ? tensor : first_tensor(op.out, program);
}

// The attributes that select another kernel of the same op kind.
std::string form(const Op& op) {
    if (const auto* g = std::get_if<GemmAttr>(&op.attr))
        return std::string(".") + (g->transpose_a ? 't' : 'n') + (g->transpose_b ? 't' : 'n') +
               (g->accumulate ? "+" : "") + (g->batch > 1 ? ".heads" : "");
    if (const auto* g = std::get_if<GroupedGemmAttr>(&op.attr)) {
        if (g->mode == GroupedMode::wgrad) return g->accumulate ? ".wgrad" : ".wgrad.set";
        return g->mode == GroupedMode::forward ? ".forward" : ".dgrad";
    }
    if (const auto* a = std::get_if<AttentionAttr>(&op.attr)) {
        const std::size_t sinks = op.kind == OpKind::attention ? 3 : op.kind == OpKind::attention_cached ? 4 : 6;
        const bool sunk = a->picked == 0 && op.in.size() > sinks && op.in[sinks] != no_tensor;
        return std::string(a->picked > 0   ? ".picked"
                           : a->window > 0 ? ".window"
                                           : "") +
               (sunk ? ".sinks" : "") + (a->documents ? ".documents" : "") +
               (op.kind == OpKind::attention_grad && a->deterministic ? ".deterministic" : "");
    }
    if (const auto* a = std::get_if<ActivationAttr>(&op.attr)) return a->gated ? "" : ".plain";
    if (const auto* r = std::get_if<RopeAttr>(&op.attr)) return r->norm ? ".norm" : "";
    if (const auto* p = std::get_if<PermuteAttr>(&op.attr))
        return p->per_copy ? ".copy" : op.out.size() == 1 ? "" : op.out[0] == no_tensor ? ".columns" : ".both";
    if (std::holds_alternative<QuantizeAttr>(op.attr)) return ".weights";
    if (std::holds_alternative<RoundAttr>(op.attr)) return ".rounded";
    if (std::holds_alternative<ColumnBlocksAttr>(op.attr)) return op.out[0] == no_tensor ? ".columns" : ".both";
    return "";
}

bool sets_gradient(const Op& op) {
    if (op.phase != Phase::wgrad) return false;
    if (const auto* g = std::get_if<GemmAttr>(&op.attr)) return g->transpose_a && !g->accumulate;
    const auto* g = std::get_if<GroupedGemmAttr>(&op.attr);
    return g != nullptr && g->mode == GroupedMode::wgrad && !g->accumulate;
}

Op adding(Op op) {
    if (auto* g = std::get_if<GemmAttr>(&op.attr)) g->accumulate = true;
    if (auto* g = std::get_if<GroupedGemmAttr>(&op.attr)) g->accumulate = true;
    return op;
}

// True for kinds whose time depends on how much they move alone; flat buckets and most messages have no shape.
bool shapeless(OpKind kind) {
    switch (kind) {
    case OpKind::add:
    case OpKind::zero:
    case OpKind::sum_squares:
    case OpKind::adamw:
    case OpKind::adamw_on_host:
    case OpKind::momentum:
    case OpKind::collect:
    case OpKind::newton_schulz:
    case OpKind::expert_bias:
    case OpKind::quantize:
    case OpKind::dequantize:
    case OpKind::cast:
    case OpKind::copy_to_host:
    case OpKind::copy_from_host:
        return true;
    default:
        return is_communication(kind) && kind != OpKind::all_to_all_rows && kind != OpKind::dispatch_tokens &&
               kind != OpKind::combine_tokens;
    }
}

double of(std::int64_t length) { return static_cast<double>(std::max<std::int64_t>(length, 1)); }

struct Sides {
    const Op& op;
    const Program& program;

    const Tensor& tensor(TensorId id) const { return program.tensors[static_cast<std::size_t>(id)]; }
    // Rows that hold data and their width.
    std::vector<double> of_first() const {
        const Tensor* t = first_tensor(op, program);
        return t == nullptr ? std::vector<double>{1.0, 1.0}
                            : std::vector<double>{std::max(t->expected_rows, 1.0), of(t->cols)};
    }
    std::vector<double> operator()(const GemmAttr& g) const { return {of(g.m), of(g.n), of(g.k)}; }
    std::vector<double> operator()(const GroupedGemmAttr& g) const {
        const Tensor* rows = first_tensor(op.in, program);
        const double each = rows == nullptr ? 1.0 : rows->expected_rows / std::max(g.groups, 1);
        return {std::max(each, 1.0), of(g.n), of(g.k), of(g.groups)};
    }
    // A longer sequence has more blocks to share out, a longer row of keys amortises what a block costs.
    std::vector<double> operator()(const AttentionAttr& a) const {
        const double keys = static_cast<double>(a.seq_k) * a.visible;
        return {of(a.batch * a.heads), of(a.seq_q), std::max(keys, 1.0), of(a.qk_dim), of(a.v_dim), of(a.kv_heads)};
    }
    std::vector<double> operator()(const StateAttr& d) const {
        return {of(d.batch * d.value_heads), of(d.rows / d.batch), of(d.key_dim), of(d.value_dim)};
    }
    std::vector<double> operator()(const NormAttr& n) const { return {of(n.rows), of(n.cols)}; }
    std::vector<double> operator()(const RopeAttr& r) const {
        return {of(r.tokens), of(r.heads + 2 * r.kv_heads), of(r.head_dim)};
    }
    std::vector<double> operator()(const MlaRopeAttr& r) const {
        return {of(r.tokens), of(r.heads), of(r.nope + r.rope)};
    }
    std::vector<double> operator()(const RouterAttr& r) const { return {of(r.tokens), of(r.experts), of(r.top_k)}; }
    std::vector<double> operator()(const BalanceAttr& b) const { return {of(b.tokens), of(b.experts), of(b.top_k)}; }
    std::vector<double> operator()(const PermuteAttr& p) const {
        return {of(p.tokens), of(p.cols), of(p.top_k), of(p.experts)};
    }
    // Sides of tokens over peers' memory are their number, what each takes and its copies; those of rows are slots,
    // whatever they hold.
    std::vector<double> operator()(const RowsAttr& r) const {
        if (op.kind == OpKind::dispatch_tokens || op.kind == OpKind::combine_tokens) {
            const Tensor &tokens = tensor(r.combine ? op.out[0] : op.in[0]), &row_of = tensor(op.in[2]);
            return {of(tokens.rows), of(bytes_of(tokens.dtype, r.cols)), of(row_of.elements() / tokens.rows)};
        }
        const Tensor &x = tensor(op.in[0]), &y = tensor(op.out[0]);
        return {of(r.ep * bytes_of(x.dtype, std::min(x.rows, y.rows) * r.cols))};
    }
    std::vector<double> operator()(const LossAttr& l) const { return {of(l.rows), of(l.vocab_local)}; }
    template <class Other>
    std::vector<double> operator()(const Other&) const {
        return of_first();
    }
};

// What is added to the key of an op that is no quantization and leaves E4M3 beside, or in place of, its own result.
const char* quantized_results(const Op& op, const Program& program) {
    if ((op.kind != OpKind::activation && op.kind != OpKind::activation_grad) || op.out.back() == no_tensor) return "";
    const Dtype dtype = program.tensors[static_cast<std::size_t>(op.out.back())].dtype;
    return dtype == Dtype::fp8_columns ? ".to-fp8.columns" : dtype == Dtype::fp8_block ? ".to-fp8" : "";
}

} // namespace

std::string measured_key(const Op& op, const Program& program) {
    std::string key = to_string(op.kind) + form(op);
    if (op.kind == OpKind::copy_to_host || op.kind == OpKind::copy_from_host) return key; // All bytes copy alike.
    const Tensor* first = first_tensor(op, program);
    if (first != nullptr && (first->dtype == Dtype::fp8_block || first->dtype == Dtype::fp8_columns)) // By their bytes.
        return key + (is_communication(op.kind) ? ".bf16" : ".fp8-blockwise");
    if (first == nullptr || first->dtype != Dtype::bf16) return key;
    key += ".bf16";
    if (const std::string low = quantized_results(op, program); !low.empty()) return key + low;
    const bool product = op.kind == OpKind::gemm || op.kind == OpKind::grouped_gemm;
    const Tensor* result = first_tensor(op.out, program);
    return product && result != nullptr && result->dtype == Dtype::f32 ? key + ".to-f32" : key;
}

std::string group_key(const std::string& key, int members) { return fmt::format("{}.x{}", key, members); }

std::string tokens_key(const Op& op, int blocks) {
    const std::size_t at = op.kind == OpKind::combine_tokens ? 4 : 3;
    const bool values = op.in.size() > at && op.in[at] != no_tensor;
    return std::string(to_string(op.kind)) + (values ? ".values" : "") + (blocks < peer_blocks_alone ? ".beside" : "");
}

bool is_large_product(const Op& op, double seconds, const machine::Hardware& hardware) {
    return op.flops >= 0.5 * seconds * hardware.peak_flops[static_cast<std::size_t>(machine::Precision::bf16)];
}

double beside_work(const std::string& key, const std::vector<double>& sides) {
    if (key.rfind("attention", 0) == 0) return sides.size() == 6 ? sides[0] * sides[1] : 0.0;
    if (key.rfind("dispatch_tokens", 0) == 0 || key.rfind("combine_tokens", 0) == 0) {
        const std::size_t group = key.rfind(".x");
        if (group == std::string::npos || sides.size() != 3) return 0.0;
        return sides[0] * sides[1] * std::min(sides[2], std::strtod(key.c_str() + group + 2, nullptr));
    }
    const bool grouped = key.rfind("grouped_gemm", 0) == 0;
    if ((!grouped && key.rfind("gemm", 0) != 0) || sides.size() != (grouped ? 4 : 3)) return 0.0;
    const double m = sides[0], n = sides[1], k = sides[2];
    return (grouped ? sides[3] : 1.0) * (m * k + n * k + m * n);
}

CostPoint cost_point(const Op& op, const Program& program) {
    CostPoint point{measured_key(op, program), {}, op.flops > 0.0 ? op.flops : op.bytes, {}};
    if (sets_gradient(op)) {
        const char* const wide = point.key.ends_with(".bf16") ? ".to-f32" : "";
        if (*wide != '\0') point.longer.push_back(point.key + wide);
        point.longer.push_back(measured_key(adding(op), program) + wide);
    }
    if (const std::size_t at = point.key.find(".to-fp8.columns"); at != std::string::npos)
        point.longer.push_back(point.key.substr(0, at) + ".to-fp8");
    if (!shapeless(op.kind)) point.sides = std::visit(Sides{op, program}, op.attr);
    return point;
}

} // namespace moe::program
