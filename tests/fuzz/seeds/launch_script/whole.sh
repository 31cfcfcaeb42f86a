#!/bin/bash
#SBATCH --job-name=job
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Trains Qwen3-30B-A3B on 16 GPUs with Megatron-LM, release core_v0.19.0 with Transformer Engine 2.17.
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
NNODES=${NNODES:-2}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MASTER_PORT=${MASTER_PORT:-29500}

export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TORCH_NCCL_AVOID_RECORD_STREAMS=1

MODEL_ARGS=(
    --num-layers 48
    --hidden-size 2048
    --num-attention-heads 32
    --ffn-hidden-size 768
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --normalization RMSNorm
    --norm-epsilon 1e-06
    --qk-layernorm
    --disable-bias-linear
    --swiglu
    --untie-embeddings-and-output-weights
    --vocab-size 151936
    --make-vocab-size-divisible-by 1187
    --position-embedding-type rope
    --rotary-base 1000000
    --num-experts 128
    --moe-ffn-hidden-size 768
    --moe-router-topk 8
    --moe-router-score-function softmax
)
PLAN_ARGS=(
    --seq-length 4096
    --max-position-embeddings 4096
    --global-batch-size 256
    --micro-batch-size 1
    --tensor-model-parallel-size 1
    --context-parallel-size 1
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --bf16
    --accumulate-allreduce-grads-in-fp32
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --optimizer adam
    --use-distributed-optimizer
    --use-megatron-fsdp
    --data-parallel-sharding-strategy optim_grads_params
    --no-gradient-accumulation-fusion
    --ckpt-format fsdp_dtensor
    --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type none
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
