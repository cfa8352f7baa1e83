#!/usr/bin/env bash
# Teaches a small model to add with GRPO: problems, tokenizer, model and all, in a few minutes on two cores.
#   bash launch/demo.sh [flags of train_grpo.py]
# RUN: run folder (runs/demo). An older one is kept beside it.
#
# The model first learns from a careless teacher, who forgets many a carry: it knows its digits, but less than half of
# its answers are right. GRPO then sees other problems and only whether an answer is right. Accuracy is that of
# answers sampled at temperature 1, as in training, to a third set of problems.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# What `make setup` made comes first, where it is.
if [ -x .venv/bin/torchrun ]; then export PATH="$PWD/.venv/bin:$PATH"; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# One thread a process and the loopback interface suit one host; what libraries say about absent GPUs does not help.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

RUN=${RUN:-runs/demo}
START=$RUN/start
GPUS=$(python -c 'import torch; print(torch.cuda.device_count())')
PROCESSES=2
DEVICE_ARGS=()
if [ "$GPUS" -gt 0 ]; then DEVICE_ARGS=(--bf16); fi
if [ "$GPUS" -eq 1 ]; then PROCESSES=1; fi

DATA_ARGS=(
    --min-number 10
    --max-number 99
    --slip-rate 0.6
    --warmup-rows 4000
    --rl-rows 3000
    --eval-rows 1000
)
MODEL_ARGS=(
    --num-layers 3
    --hidden-size 128
)
WARM_UP_ARGS=(
    --steps 500
    --batch-size 128
    --lr 2e-3
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --rollout-tensor-model-parallel-size "$PROCESSES"
    --max-tokens-per-gpu 8192
)
ROLLOUT_ARGS=(
    --prompt-data "$START/data/rl.jsonl"
    --rm-type math
    --num-rollout 80
    --rollout-batch-size 128
    --n-samples-per-prompt 8
    --rollout-shuffle
    --rollout-max-prompt-len 16
    --rollout-max-response-len 8
    --vllm-kv-cache-gb 0.125
    --vllm-max-num-seqs 512
    --vllm-enforce-eager
)
EVAL_ARGS=(
    --eval-prompt-data "$START/data/eval.jsonl"
    --eval-interval 10
    --eval-temperature 1
)
GRPO_ARGS=(
    --global-batch-size 256
    --eps-clip 0.2
    --lr 3e-4
    --lr-warmup-iters 5
    --lr-decay-style linear
    --adam-beta2 0.99
)

if [ -e "$RUN" ]; then
    number=1
    while [ -e "$RUN.previous-$number" ]; do number=$((number + 1)); done
    mv "$RUN" "$RUN.previous-$number"
    echo "demo: $RUN of an earlier start is now $RUN.previous-$number"
fi

echo "demo: problems and tokenizer in $START"
python examples/arithmetic/make_data.py "$START/data" "${DATA_ARGS[@]}"
python examples/arithmetic/make_tokenizer.py "$START/data/warmup.jsonl" "$START/tokenizer"

echo "demo: warm-up of a small model by supervised steps, $PROCESSES processes"
torchrun --standalone --nproc-per-node "$PROCESSES" examples/arithmetic/warm_up.py \
    "$START/data" "$START/tokenizer" "$START/model" "${MODEL_ARGS[@]}" "${WARM_UP_ARGS[@]}" "${DEVICE_ARGS[@]}"

echo "demo: GRPO, training TP=1 x DP=$PROCESSES, rollout TP=$PROCESSES"
began=$SECONDS
torchrun --standalone --nproc-per-node "$PROCESSES" train_grpo.py --hf-checkpoint "$START/model" \
    "${PARALLEL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${GRPO_ARGS[@]}" "${DEVICE_ARGS[@]}" \
    --save "$RUN" --save-hf "$@"
python examples/arithmetic/summary.py "$RUN" $((SECONDS - began))
