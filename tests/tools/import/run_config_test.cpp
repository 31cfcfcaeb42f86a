// The verb import on run_config.yaml, the whole configuration that Megatron-Bridge writes beside its checkpoints.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using Json = nlohmann::ordered_json;

namespace {

// Every field has its class's value where nobody set it; names of Python and members of enumerations are maps.
const std::string qwen = R"(_target_: megatron.bridge.training.config.ConfigContainer
checkpoint:
  _target_: megatron.bridge.training.config.CheckpointConfig
  save_interval: 50
  load: null
ddp:
  _target_: megatron.core.distributed.DistributedDataParallelConfig
  grad_reduce_in_fp32: true
  overlap_grad_reduce: true
  overlap_param_gather: true
  use_distributed_optimizer: true
mixed_precision:
  _target_: megatron.bridge.training.mixed_precision.MixedPrecisionConfig
  bf16: true
  fp8: null
  grad_reduce_in_fp32: true
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  add_bias_linear: false
  attention_backend:
    _args_:
    - 5
    _call_: true
    _name_: auto
    _target_: megatron.core.transformer.enums.AttnBackend
  context_parallel_size: 1
  cuda_graph_impl: none
  cuda_graph_modules: full
  cuda_graph_scope: full
  dsa_indexer_skip_topk_offset: 0
  expert_model_parallel_size: 8
  ffn_hidden_size: 6144
  gated_linear_unit: true
  hidden_size: 2048
  kv_channels: 128
  layernorm_epsilon: 1.0e-06
  linear_conv_kernel_dim: 4
  linear_num_value_heads: 32
  moe_ffn_hidden_size: 768
  moe_grouped_gemm: true
  moe_permute_fusion: true
  moe_router_topk: 8
  moe_token_dispatcher_type: alltoall
  multi_latent_attention: false
  normalization: RMSNorm
  num_attention_heads: 32
  num_layers: 48
  num_moe_experts: 128
  num_query_groups: 4
  pipeline_model_parallel_layout:
  - - embedding
    - decoder
  - - decoder
    - loss
  pipeline_model_parallel_size: 2
  position_embedding_type: rope
  qk_layernorm: true
  recompute_granularity: selective
  recompute_modules: null
  rotary_base: 1000000
  seq_length: 4096
  share_embeddings_and_output_weights: false
  tensor_model_parallel_size: 1
  vocab_size: 151936
optimizer:
  _target_: megatron.bridge.training.config.OptimizerConfig
  optimizer: adam
  use_distributed_optimizer: true
train:
  _target_: megatron.bridge.training.config.TrainingConfig
  global_batch_size: 1024
  micro_batch_size: 2
)";

Json imported(const Folder& folder, const std::string& words) {
    return document(folder.run("moe-plan import " + words + " --json"));
}

std::string with(std::string text, const std::string& before, const std::string& after) {
    return text.replace(text.find(before), before.size(), after);
}

// 24 layers in each of both stages.
std::string two_stages() {
    std::string decoders;
    for (int i = 1; i < 24; ++i) decoders += "    - decoder\n";
    return with(
        with(qwen, "    - decoder\n  - - decoder\n", "    - decoder\n" + decoders + "  - - decoder\n" + decoders),
        "  load: null\n", "");
}

} // namespace

TEST_CASE("import: run_config.yaml of Megatron-Bridge becomes the plan of the run") {
    const Folder folder;
    folder.write("run_config.yaml", two_stages());
    const Json read = imported(folder, "run_config.yaml --hardware h100 --gpus 16");
    CHECK(read["engine"] == "megatron-bridge");
    const Json& plan = read["plan"];
    CHECK(plan["model"]["name"] == "Qwen3-30B-A3B");
    CHECK(plan["mesh"]["pp"] == 2);
    CHECK(plan["mesh"]["ep"] == 8);
    CHECK(plan["mesh"]["dp"] == 8);
    CHECK(plan["mbs"] == 2);
    CHECK(plan["workload"]["gbs"] == 1024);
    CHECK(plan["recompute"] == Json::array({"core_attn"})); // What the class makes of no modules.
    CHECK(plan["cuda_graph"] == "none");
    CHECK(read["unknown"].empty());
    for (const Json& finding : read["findings"]) CHECK_MESSAGE(finding["severity"] != "warning", finding.dump());
}

TEST_CASE("import: graphs of run_config.yaml are read by either name of their modules") {
    const Folder folder;
    const std::string graphs = with(two_stages(), "cuda_graph_impl: none", "cuda_graph_impl: transformer_engine");
    folder.write("run_config.yaml",
                 with(graphs, "cuda_graph_scope: full", "cuda_graph_scope:\n  - moe_router\n  - moe_preprocess"));
    CHECK(imported(folder, "run_config.yaml --hardware h100 --gpus 16")["plan"]["cuda_graph"] ==
          "moe_router+moe_preprocess");
}

TEST_CASE("import: run_config.yaml says no number of GPUs") {
    const Folder folder;
    folder.write("run_config.yaml", two_stages());
    check_line(folder.run("moe-plan import run_config.yaml --hardware h100"), 2, "give --gpus");
}
