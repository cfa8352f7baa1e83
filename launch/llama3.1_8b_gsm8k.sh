#!/usr/bin/env bash
# GRPO on GSM8K with Llama-3.1-8B-Instruct.
#   MODEL=FOLDER DATA=FOLDER bash launch/llama3.1_8b_gsm8k.sh [more flags]
# MODEL: a Hugging Face folder of meta-llama/Llama-3.1-8B-Instruct. DATA: folder with train.jsonl and test.jsonl (columns question and answer).
# GPUS: processes on this node (default: all GPUs). RUN: run folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

MODEL=${MODEL:?set MODEL to a folder of Llama-3.1-8B-Instruct}
DATA=${DATA:-data/gsm8k}
GPUS=${GPUS:-$(nvidia-smi -L | wc -l)}
RUN=${RUN:-runs/llama3.1_8b_gsm8k}

MODEL_ARGS=(
    --hf-checkpoint "$MODEL"
    --bf16
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --rollout-tensor-model-parallel-size 2
    --max-tokens-per-gpu 16384
    --recompute-granularity full
)
DATA_ARGS=(
    --prompt-data "$DATA/train.jsonl"
    --input-key question
    --label-key answer
    --apply-chat-template
    --rollout-shuffle
    --rm-type math
)
ROLLOUT_ARGS=(
    --num-rollout 200
    --rollout-batch-size 128
    --n-samples-per-prompt 8
    --rollout-max-prompt-len 512
    --rollout-max-response-len 1024
    --vllm-max-num-seqs 512
)
EVAL_ARGS=(
    --eval-prompt-data "$DATA/test.jsonl"
    --eval-interval 20
)
GRPO_ARGS=(
    --global-batch-size 512
    --eps-clip 0.2
    --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(
    --lr 1e-6
    --lr-warmup-iters 10
    --weight-decay 0.01
)

torchrun --standalone --nproc-per-node "$GPUS" train_grpo.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" --save "$RUN" --save-hf "$@"
