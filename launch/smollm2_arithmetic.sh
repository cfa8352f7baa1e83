#!/usr/bin/env bash
# GRPO on additions with SmolLM2-135M-Instruct, real weights of a small model: 60 steps, minutes on one GPU.
#   bash launch/smollm2_arithmetic.sh [more flags]
# Prompts are plain text with three solved additions before the question. MODEL: another model folder. RUN: run folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

RUN=${RUN:-runs/smollm2_arithmetic}
DATA=$RUN/data
if [ -z "${MODEL:-}" ]; then
    MODEL=runs/models/SmolLM2-135M-Instruct
    python3 examples/smollm2/make_model.py "$MODEL"
fi

MODEL_ARGS=(
    --hf-checkpoint "$MODEL"
    --bf16
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --rollout-tensor-model-parallel-size 1
    --max-tokens-per-gpu 32768
)
ROLLOUT_ARGS=(
    --prompt-data "$DATA/rl.jsonl"
    --rollout-shuffle
    --rm-type math
    --num-rollout 60
    --rollout-batch-size 128
    --n-samples-per-prompt 8
    --rollout-max-prompt-len 64
    --rollout-max-response-len 6
    --rollout-stop-token-ids 198
    --vllm-max-num-seqs 512
)
EVAL_ARGS=(
    --eval-prompt-data "$DATA/eval.jsonl"
    --eval-interval 10
    --eval-temperature 1
)
GRPO_ARGS=(
    --global-batch-size 512
    --eps-clip 0.2
    --lr 1e-5
    --lr-warmup-iters 5
)

python3 examples/arithmetic/make_data.py "$DATA" --min-number 1 --max-number 30 --shots 3 \
    --warmup-rows 50 --rl-rows 600 --eval-rows 200
torchrun --standalone --nproc-per-node "${GPUS:-1}" train_grpo.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${GRPO_ARGS[@]}" --save "$RUN" "$@"
