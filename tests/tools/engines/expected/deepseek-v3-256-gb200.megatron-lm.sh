#!/bin/bash
#SBATCH --job-name=job
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
# Trains DeepSeek-V3 on 256 GPUs with Megatron-LM, release core_v0.19.0 with Transformer Engine 2.17.
# Submit it with sbatch, or run it on every node: NODE_RANK=0 MASTER_ADDR=FIRST_NODE bash THIS_FILE.
set -euo pipefail

# What a site sets, in the environment or here. Without DATA the run reads made-up tokens; without CHECKPOINTS it saves
# nothing. DATA: a prefix of .bin and .idx files, or weights and prefixes. TOKENIZER: of Hugging Face, goes with DATA.
MEGATRON_LM=${MEGATRON_LM:-Megatron-LM}
DATA=${DATA:-}
TOKENIZER=${TOKENIZER:-}
CHECKPOINTS=${CHECKPOINTS:-}
SAVE_INTERVAL=${SAVE_INTERVAL:-500}
STEPS=${STEPS:-50}
LR=${LR:-1e-4}
MIN_LR=${MIN_LR:-1e-5}
NNODES=${NNODES:-64}
GPUS_PER_NODE=${GPUS_PER_NODE:-4}
MASTER_PORT=${MASTER_PORT:-29500}

export CUDA_DEVICE_MAX_CONNECTIONS=32
export NCCL_GRAPH_REGISTER=0
export NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN=64
export NVLINK_DOMAIN_SIZE=72
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TORCH_NCCL_AVOID_RECORD_STREAMS=1
export USE_MNNVL=1

MODEL_ARGS=(
    --num-layers 61
    --hidden-size 7168
    --num-attention-heads 128
    --ffn-hidden-size 18432
    --normalization RMSNorm
    --norm-epsilon 1e-06
    --disable-bias-linear
    --swiglu
    --untie-embeddings-and-output-weights
    --vocab-size 129280
    --make-vocab-size-divisible-by 1280
    --position-embedding-type rope
    --rotary-base 10000
    --multi-latent-attention
    --qk-layernorm
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --kv-channels 128
    --rope-type rope
    --no-rope-fusion
    --num-experts 256
    --moe-ffn-hidden-size 2048
    --moe-router-topk 8
    --moe-layer-freq '([0]*3+[1]*58)'
    --moe-shared-expert-intermediate-size 2048
    --moe-router-score-function sigmoid
    --moe-router-topk-scaling-factor 2.5
    --moe-router-num-groups 8
    --moe-router-group-topk 4
    --mtp-num-layers 1
)
PLAN_ARGS=(
    --seq-length 4096
    --max-position-embeddings 4096
    --global-batch-size 4096
    --micro-batch-size 1
    --tensor-model-parallel-size 1
    --context-parallel-size 1
    --pipeline-model-parallel-size 4
    --pipeline-model-parallel-layout 'Ettt|ttt|(tttt|)*13tttmL'
    --expert-model-parallel-size 64
    --expert-tensor-parallel-size 1
    --bf16
    --fp8-format e4m3
    --fp8-recipe mxfp8
    --grad-reduce-in-bf16
    --recompute-granularity selective
    --recompute-modules mla_up_proj
    --optimizer adam
    --use-distributed-optimizer
    --use-precision-aware-optimizer
    --exp-avg-dtype bf16
    --exp-avg-sq-dtype bf16
    --main-grads-dtype bf16
    --moe-token-dispatcher-type flex
    --moe-flex-dispatcher-backend hybridep
    --overlap-moe-expert-parallel-comm
    --cuda-graph-impl transformer_engine
    --cuda-graph-modules attn moe_router
    --moe-router-force-load-balancing
    --moe-router-load-balancing-type none
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0.001
)
ENGINE_ARGS=(
    --moe-grouped-gemm
    --moe-permute-fusion
    --moe-router-fusion
    --moe-router-dtype fp32
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --cross-entropy-loss-fusion
    --overlap-grad-reduce
    --overlap-param-gather
    --use-mcore-models
    --transformer-impl transformer_engine
    --manual-gc
    --manual-gc-interval 10
)
RUN_ARGS=(
    --train-iters "$STEPS"
    --lr "$LR"
    --min-lr "$MIN_LR"
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --init-method-std 0.02
    --seed 1234
    --eval-iters 0
    --log-interval 1
    --log-throughput
    --num-workers 2
)
DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer)
if [ -n "$DATA" ]; then
    # shellcheck disable=SC2206 # weights and prefixes are words of their own
    DATA_ARGS=(--data-path $DATA --split '99,1,0' --tokenizer-type HuggingFaceTokenizer
               --tokenizer-model "${TOKENIZER:?DATA needs TOKENIZER}")
fi
if [ -n "$CHECKPOINTS" ]; then
    RUN_ARGS+=(--save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval "$SAVE_INTERVAL")
fi
WORDS=("$MEGATRON_LM/pretrain_gpt.py" "${MODEL_ARGS[@]}" "${PLAN_ARGS[@]}" "${ENGINE_ARGS[@]}" "${RUN_ARGS[@]}"
       "${DATA_ARGS[@]}" "$@")

# Slurm: one task per node, which starts that node's processes; node ranks are Slurm's, whose order is the plan's.
if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${NODE_RANK:-}" ]; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    MASTER_ADDR=${MASTER_ADDR:-${hosts%%[[:space:]]*}}
    # shellcheck disable=SC2016 # SLURM_NODEID is each task's own
    exec srun --kill-on-bad-exit=1 bash -c 'exec torchrun --node-rank "$SLURM_NODEID" "$@"' torchrun \
        --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" --master-addr "$MASTER_ADDR" \
        --master-port "$MASTER_PORT" "${WORDS[@]}"
fi
if [ "$NNODES" -gt 1 ]; then : "${MASTER_ADDR:?set MASTER_ADDR to the first node}"; fi
exec torchrun --node-rank "${NODE_RANK:-0}" --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "$MASTER_PORT" "${WORDS[@]}"
