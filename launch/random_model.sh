#!/usr/bin/env bash
# A well-known shape with random weights and a dense reward: measures a machine, three steps.
#   bash launch/random_model.sh [SHAPE] [more flags]     shapes: examples/random_model/make_model.py
# GPUS: processes on this node (default: all GPUs). RUN: run folder. LAYERS: fewer layers than the shape has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

SHAPE=${1:-qwen3-8b}; shift || true
GPUS=${GPUS:-$(nvidia-smi -L | wc -l)}
RUN=${RUN:-runs/$SHAPE-random}
MODEL=$RUN/model

MODEL_ARGS=(
    --hf-checkpoint "$MODEL"
    --random-init
    --bf16
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --rollout-tensor-model-parallel-size "$GPUS"
    --max-tokens-per-gpu 8192
    --recompute-granularity full
)
ROLLOUT_ARGS=(
    --prompt-data "$MODEL/prompts.jsonl"
    --custom-rm-path examples/random_model/reward.py:even_share
    --num-rollout 3
    --rollout-batch-size 64
    --n-samples-per-prompt 8
    --rollout-max-prompt-len 128
    --rollout-max-response-len 256
    --rollout-ignore-eos
    --vllm-max-num-seqs 512
)
GRPO_ARGS=(
    --lr 1e-5
    --eps-clip 0.2
)

python3 examples/random_model/make_model.py "$SHAPE" "$MODEL" ${LAYERS:+--num-layers "$LAYERS"}
torchrun --standalone --nproc-per-node "$GPUS" train_grpo.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" --save "$RUN" "$@"
