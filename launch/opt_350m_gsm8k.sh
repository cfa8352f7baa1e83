#!/usr/bin/env bash
# GRPO on GSM8K with OPT-350m, a base model without a chat template: prompts are plain text.
#   MODEL=FOLDER DATA=FOLDER bash launch/opt_350m_gsm8k.sh [more flags]
# MODEL: a Hugging Face folder of facebook/opt-350m (other sizes: the same script). DATA: folder with train.jsonl and test.jsonl (columns question and answer).
# GPUS: processes on this node (default: all GPUs). RUN: run folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

MODEL=${MODEL:?set MODEL to a folder of opt-350m}
DATA=${DATA:-data/gsm8k}
GPUS=${GPUS:-$(nvidia-smi -L | wc -l)}
RUN=${RUN:-runs/opt_350m_gsm8k}

MODEL_ARGS=(
    --hf-checkpoint "$MODEL"
    --bf16
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --rollout-tensor-model-parallel-size 1
    --max-tokens-per-gpu 32768
)
DATA_ARGS=(
    --prompt-data "$DATA/train.jsonl"
    --input-key question
    --label-key answer
    --rollout-shuffle
    --rm-type math
)
ROLLOUT_ARGS=(
    --num-rollout 100
    --rollout-batch-size 128
    --n-samples-per-prompt 8
    --rollout-max-prompt-len 512
    --rollout-max-response-len 256
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
    --lr 2e-6
    --lr-warmup-iters 10
    --weight-decay 0.01
)

torchrun --standalone --nproc-per-node "$GPUS" train_grpo.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" --save "$RUN" --save-hf "$@"
