#!/usr/bin/env bash
# GRPO on the word problems of GSM8K with SmolLM2-135M-Instruct, real weights of a small model.
#   bash launch/smollm2_gsm8k.sh [--gpu] [more flags]
# Without --gpu: two short steps on a CPU, fp32, training TP=1 x DP=3, rollout TP=3: 2 cores, 12 GB of memory, minutes.
# With --gpu: a longer run in bf16, one process for each GPU.
# DATA: folder with GSM8K's train.jsonl and test.jsonl. MODEL: another model folder. RUN: run folder. GPUS: processes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

DEVICE=cpu
if [ "${1:-}" = --gpu ]; then DEVICE=gpu; shift; fi
RUN=${RUN:-runs/smollm2_gsm8k}
DATA=${DATA:-data/gsm8k}

for file in "$DATA/train.jsonl" "$DATA/test.jsonl"; do
    if [ ! -f "$file" ]; then
        cat >&2 <<END
$0: $file is missing. It is a file of GSM8K (MIT licence), with the columns question and answer:
  https://github.com/openai/grade-school-math, folder grade_school_math/data
  or the dataset openai/gsm8k, subset main, written as jsonl
Put train.jsonl and test.jsonl into data/gsm8k, or say where they are: DATA=FOLDER bash $0
END
        exit 2
    fi
done
if [ -z "${MODEL:-}" ]; then
    MODEL=runs/models/SmolLM2-135M-Instruct
    python3 examples/smollm2/make_model.py "$MODEL"
fi
mkdir -p "$RUN"

MODEL_ARGS=(
    --hf-checkpoint "$MODEL"
)
DATA_ARGS=(
    --prompt-data "$DATA/train.jsonl"
    --input-key question
    --label-key answer
    --apply-chat-template
    --rollout-shuffle
    --rm-type math
)
GRPO_ARGS=(
    --advantage-estimator grpo
    --eps-clip 0.2
)

if [ "$DEVICE" = cpu ]; then
    # the loopback interface suits one host; what libraries say about absent GPU packages does not
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
    export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
    export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
    export TORCH_LOGS=${TORCH_LOGS:--torch._library.triton}
    PROCESSES=3
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + 2) / 3))}
    head -n 12 "$DATA/test.jsonl" > "$RUN/eval.jsonl"
    PARALLEL_ARGS=(
        --tensor-model-parallel-size 1
        --rollout-tensor-model-parallel-size 3
        --max-tokens-per-gpu 512
    )
    ROLLOUT_ARGS=(
        --num-rollout 2
        --rollout-batch-size 6
        --n-samples-per-prompt 4
        --rollout-max-prompt-len 256
        --rollout-max-response-len 128
        --vllm-kv-cache-gb 0.25
        --vllm-max-num-seqs 32
    )
    EVAL_ARGS=(
        --eval-prompt-data "$RUN/eval.jsonl"
        --eval-interval 2
    )
    OPTIMIZER_ARGS=(
        --lr 1e-5
    )
else
    PROCESSES=${GPUS:-$(nvidia-smi -L | wc -l)}
    # 9 query heads and 3 KV heads divide over 3 ranks, not over 2 or 4
    if [ $((PROCESSES % 3)) -eq 0 ]; then ROLLOUT_TP=3; else ROLLOUT_TP=1; fi
    MODEL_ARGS+=(--bf16)
    PARALLEL_ARGS=(
        --tensor-model-parallel-size 1
        --rollout-tensor-model-parallel-size "$ROLLOUT_TP"
        --max-tokens-per-gpu 32768
    )
    ROLLOUT_ARGS=(
        --num-rollout 100
        --rollout-batch-size 96
        --n-samples-per-prompt 8
        --rollout-max-prompt-len 256
        --rollout-max-response-len 512
        --vllm-max-num-seqs 512
    )
    EVAL_ARGS=(
        --eval-prompt-data "$DATA/test.jsonl"
        --eval-interval 20
    )
    OPTIMIZER_ARGS=(
        --lr 2e-6
    )
fi

torchrun --standalone --nproc-per-node "$PROCESSES" train_grpo.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" --save "$RUN" --save-hf "$@"
