// Names and keys of the Program's vocabulary.
#include "planner/program/program.hpp"

#include "planner/model/model.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace moe::program {

TensorId repeat_tensor(Program& program, TensorId id) {
    Tensor copy = program.tensors[static_cast<std::size_t>(id)];
    if (!copy.name.empty()) copy.name += ".again";
    copy.again_of = id;
    program.tensors.push_back(std::move(copy));
    return static_cast<TensorId>(program.tensors.size() - 1);
}

int OpWalk::reserved_sms() const {
    const auto* product = std::get_if<GroupedGemmAttr>(&op().attr);
    return std::max(product != nullptr ? product->reserved_sms : 0,
                    merged() ? merge().reserved_sms[at_[0] + at_[1]] : 0);
}

void OpWalk::settle() {
    for (; !done(); ++first_, at_[0] = at_[1] = 0) {
        const Slot& slot = program_->slots[first_];
        if (slot.merge < 0) {
            if (at_[0] < program_->templates[static_cast<std::size_t>(slot.index)].ops.size()) return;
            continue;
        }
        const std::vector<bool>& order = merge().from_backward;
        if (at_[0] + at_[1] < order.size()) {
            backward_ = order[at_[0] + at_[1]];
            return;
        }
        ++first_;
        backward_ = false;
    }
}

const char* to_string(OpKind kind) {
    switch (kind) {
    case OpKind::embedding:
        return "embedding";
    case OpKind::embedding_grad:
        return "embedding_grad";
    case OpKind::rmsnorm:
        return "rmsnorm";
    case OpKind::rmsnorm_grad:
        return "rmsnorm_grad";
    case OpKind::heads_squares:
        return "heads_squares";
    case OpKind::heads_norm:
        return "heads_norm";
    case OpKind::heads_along:
        return "heads_along";
    case OpKind::heads_norm_grad:
        return "heads_norm_grad";
    case OpKind::value_norm:
        return "value_norm";
    case OpKind::value_norm_grad:
        return "value_norm_grad";
    case OpKind::scale:
        return "scale";
    case OpKind::clip:
        return "clip";
    case OpKind::clip_grad:
        return "clip_grad";
    case OpKind::add:
        return "add";
    case OpKind::bias_add:
        return "bias_add";
    case OpKind::copy_columns:
        return "copy_columns";
    case OpKind::bias_grad:
        return "bias_grad";
    case OpKind::gemm:
        return "gemm";
    case OpKind::rope:
        return "rope";
    case OpKind::rope_grad:
        return "rope_grad";
    case OpKind::mla_rope:
        return "mla_rope";
    case OpKind::mla_rope_grad:
        return "mla_rope_grad";
    case OpKind::latent_rope:
        return "latent_rope";
    case OpKind::latent_rope_grad:
        return "latent_rope_grad";
    case OpKind::attention:
        return "attention";
    case OpKind::attention_grad:
        return "attention_grad";
    case OpKind::attention_cached:
        return "attention_cached";
    case OpKind::pick_keys:
        return "pick_keys";
    case OpKind::pick_keys_grad:
        return "pick_keys_grad";
    case OpKind::xlogx:
        return "xlogx";
    case OpKind::cache_rows:
        return "cache_rows";
    case OpKind::scan:
        return "scan";
    case OpKind::scan_grad:
        return "scan_grad";
    case OpKind::short_conv:
        return "short_conv";
    case OpKind::short_conv_grad:
        return "short_conv_grad";
    case OpKind::delta_rule:
        return "delta_rule";
    case OpKind::delta_rule_grad:
        return "delta_rule_grad";
    case OpKind::gated_norm:
        return "gated_norm";
    case OpKind::gated_norm_grad:
        return "gated_norm_grad";
    case OpKind::delta_cached:
        return "delta_cached";
    case OpKind::ssd:
        return "ssd";
    case OpKind::ssd_grad:
        return "ssd_grad";
    case OpKind::ssd_cached:
        return "ssd_cached";
    case OpKind::activation:
        return "activation";
    case OpKind::activation_grad:
        return "activation_grad";
    case OpKind::sigmoid_scale:
        return "sigmoid_scale";
    case OpKind::sigmoid_scale_grad:
        return "sigmoid_scale_grad";
    case OpKind::scale_rows:
        return "scale_rows";
    case OpKind::scale_rows_grad:
        return "scale_rows_grad";
    case OpKind::sinkhorn:
        return "sinkhorn";
    case OpKind::jitter:
        return "jitter";
    case OpKind::router:
        return "router";
    case OpKind::router_grad:
        return "router_grad";
    case OpKind::expert_scale:
        return "expert_scale";
    case OpKind::expert_scale_grad:
        return "expert_scale_grad";
    case OpKind::router_load:
        return "router_load";
    case OpKind::router_loss:
        return "router_loss";
    case OpKind::router_loss_grad:
        return "router_loss_grad";
    case OpKind::add_counts:
        return "add_counts";
    case OpKind::drop_copies:
        return "drop_copies";
    case OpKind::local_experts:
        return "local_experts";
    case OpKind::token_domains:
        return "token_domains";
    case OpKind::domain_experts:
        return "domain_experts";
    case OpKind::expert_bias:
        return "expert_bias";
    case OpKind::permute_map:
        return "permute_map";
    case OpKind::permute:
        return "permute";
    case OpKind::unpermute:
        return "unpermute";
    case OpKind::expert_counts:
        return "expert_counts";
    case OpKind::fit_rows:
        return "fit_rows";
    case OpKind::sort_rows:
        return "sort_rows";
    case OpKind::unsort_rows:
        return "unsort_rows";
    case OpKind::grouped_gemm:
        return "grouped_gemm";
    case OpKind::grouped_bias_add:
        return "grouped_bias_add";
    case OpKind::grouped_bias_grad:
        return "grouped_bias_grad";
    case OpKind::quantize:
        return "quantize";
    case OpKind::dequantize:
        return "dequantize";
    case OpKind::cast:
        return "cast";
    case OpKind::ce_max:
        return "ce_max";
    case OpKind::ce_sum:
        return "ce_sum";
    case OpKind::ce_loss:
        return "ce_loss";
    case OpKind::ce_grad:
        return "ce_grad";
    case OpKind::cross_entropy:
        return "cross_entropy";
    case OpKind::zero:
        return "zero";
    case OpKind::sum_squares:
        return "sum_squares";
    case OpKind::adamw:
        return "adamw";
    case OpKind::adamw_on_host:
        return "adamw_on_host";
    case OpKind::momentum:
        return "momentum";
    case OpKind::collect:
        return "collect";
    case OpKind::newton_schulz:
        return "newton_schulz";
    case OpKind::all_gather:
        return "all_gather";
    case OpKind::reduce_scatter:
        return "reduce_scatter";
    case OpKind::all_reduce:
        return "all_reduce";
    case OpKind::all_to_all_rows:
        return "all_to_all_rows";
    case OpKind::dispatch_tokens:
        return "dispatch_tokens";
    case OpKind::combine_tokens:
        return "combine_tokens";
    case OpKind::all_gather_rows:
        return "all_gather_rows";
    case OpKind::reduce_scatter_rows:
        return "reduce_scatter_rows";
    case OpKind::all_to_all:
        return "all_to_all";
    case OpKind::all_to_all_slots:
        return "all_to_all_slots";
    case OpKind::ring_exchange:
        return "ring_exchange";
    case OpKind::send:
        return "send";
    case OpKind::recv:
        return "recv";
    case OpKind::stash_rows:
        return "stash_rows";
    case OpKind::unstash_rows:
        return "unstash_rows";
    case OpKind::copy_to_host:
        return "copy_to_host";
    case OpKind::copy_from_host:
        return "copy_from_host";
    }
    return "?";
}

bool is_communication(OpKind kind) { return kind >= OpKind::all_gather && kind <= OpKind::recv; }

const char* to_string(Stream stream) {
    switch (stream) {
    case Stream::compute:
        return "compute";
    case Stream::tensor:
        return "tensor";
    case Stream::expert:
        return "expert";
    case Stream::data:
        return "data";
    case Stream::pipeline_in:
        return "pipeline_in";
    case Stream::pipeline_out:
        return "pipeline_out";
    case Stream::host:
        return "host";
    }
    return "?";
}

const char* to_string(Module module) {
    switch (module) {
    case Module::embedding:
        return "embedding";
    case Module::layernorm:
        return "layernorm";
    case Module::attn_in:
        return "attn_in";
    case Module::mla_up_proj:
        return "mla_up_proj";
    case Module::core_attn:
        return "core_attn";
    case Module::attn_out:
        return "attn_out";
    case Module::mlp:
        return "mlp";
    case Module::moe_act_dense:
        return "mlp_act";
    case Module::router:
        return "router";
    case Module::dispatch:
        return "dispatch";
    case Module::experts:
        return "experts";
    case Module::moe_act:
        return "moe_act";
    case Module::combine:
        return "combine";
    case Module::shared_experts:
        return "shared_experts";
    case Module::residual:
        return "residual";
    case Module::head:
        return "head";
    case Module::mtp:
        return "mtp";
    case Module::pipeline:
        return "pipeline";
    case Module::data_parallel:
        return "data_parallel";
    case Module::optimizer:
        return "optimizer";
    }
    return "?";
}

const char* to_string(Phase phase) {
    switch (phase) {
    case Phase::forward:
        return "forward";
    case Phase::dgrad:
        return "dgrad";
    case Phase::wgrad:
        return "wgrad";
    case Phase::recompute:
        return "recompute";
    case Phase::step:
        return "step";
    }
    return "?";
}

int first_table_tag(const model::Model& model) { return 2 + 2 * static_cast<int>(model.mtp.size()); }

} // namespace moe::program
