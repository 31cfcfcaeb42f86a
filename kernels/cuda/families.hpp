// Each family of CUDA kernels enters itself into the table.
#pragma once

#include "kernels/kernels.hpp"

namespace moe::cuda {

void add_activation(Kernels& table);
void add_activation_columns(Kernels& table);
void add_attention(Kernels& table);
void add_attention_cached(Kernels& table);
void add_attention_grad(Kernels& table);
void add_tensor_attention(Kernels& table); // What the table holds before serves what these do not take.
void add_tensor_attention_grad(Kernels& table);
void add_library_attention(Kernels& table); // The library is asked first; what the table holds before serves the rest.
// Behind what attends in the table, or in the one of plain kernels.
void add_largest_logits(Kernels& table, bool plain);
void forget_attention_stream(void* stream);
void add_balance(Kernels& table);
void add_bias(Kernels& table);
void add_elementwise(Kernels& table);
void add_drop(Kernels& table);
void add_short_conv(Kernels& table);
void add_gated_norm(Kernels& table);
void add_state_cached(Kernels& table);
void add_delta_rule(Kernels& table);
void add_deviate(Kernels& table);
void add_domains(Kernels& table);
void add_embedding(Kernels& table);
void add_expert_scale(Kernels& table);
void add_gemm(Kernels& table);
void add_plain_gemm(Kernels& table); // Plain products replace those of a library or one architecture.
void forget_gemm_stream(void* stream);
void add_layer_norm(Kernels& table);
void add_loss(Kernels& table);
void add_mla_rope(Kernels& table);
void add_muon(Kernels& table);
void add_norm(Kernels& table);
void add_optimizer(Kernels& table);
void add_permute(Kernels& table);
void add_places(Kernels& table);
void add_quantize(Kernels& table);
void add_quantize_columns(Kernels& table);
void add_requantize_columns(Kernels& table);
void add_rope(Kernels& table);
void add_round(Kernels& table);
void add_router(Kernels& table);
void add_scale(Kernels& table);
void add_scaled_gemm(Kernels& table);
void add_plain_scaled_gemm(Kernels& table);
void add_scaled_wgrad(Kernels& table);
void add_plain_scaled_wgrad(Kernels& table);
void add_sinkhorn(Kernels& table);
void add_slots(Kernels& table);
void add_ssd(Kernels& table);
void add_ssd_grad(Kernels& table); // add_ssd() calls it.
void add_sort(Kernels& table);
void add_sparse(Kernels& table);
void add_value_norm(Kernels& table);

} // namespace moe::cuda
