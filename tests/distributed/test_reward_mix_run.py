"""A run on two ranks of one engine with two weighted rewards, of which one judges whole groups and sometimes fails."""

import json
from pathlib import Path

import pytest
from harness import torchrun
from tiny_models import make_hf_model

from examples.arithmetic.make_data import make_data
from examples.arithmetic.make_tokenizer import make_tokenizer

GROUPS = 3
SAMPLES = 4
REWARD = f"""
calls = 0


def spread(prompts, responses, labels, metadata):
    assert len(prompts) in ({SAMPLES}, 1) and len(set(zip(prompts, labels))) == 1, prompts
    if len(prompts) == 1:
        return [0.5]  # an evaluation: groups of one
    global calls
    calls += 1
    if calls == 2:
        raise KeyError("the second group of the rank whose share has two")
    return [float(number) for number in range(len(prompts))]


def one(prompts, responses, labels, metadata):
    return [1.0] * len(prompts)
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    made = tmp_path_factory.mktemp("mix")
    make_data(made / "data")
    make_tokenizer(made / "data" / "warmup.jsonl", made / "model")
    make_hf_model("qwen3", made / "model", tied=True, layers=2, vocab=52, heads=4, kv_heads=4)
    (made / "own.py").write_text(REWARD)
    lines = (made / "data" / "eval.jsonl").read_text().splitlines(keepends=True)
    (made / "eval.jsonl").write_text("".join(lines[:5]))
    sizes = f"--rollout-batch-size {GROUPS} --n-samples-per-prompt {SAMPLES} --num-rollout 1 --global-batch-size 12"
    lengths = "--rollout-max-prompt-len 16 --rollout-max-response-len 8 --vllm-kv-cache-gb 0.05 --vllm-max-num-seqs 32"
    done = torchrun(
        2,
        [
            *(
                "train_grpo.py",
                "--hf-checkpoint",
                str(made / "model"),
                "--prompt-data",
                str(made / "data" / "rl.jsonl"),
            ),
            *("--eval-prompt-data", str(made / "eval.jsonl"), "--eval-interval", "1", "--save", str(made / "run")),
            *("--rollout-tensor-model-parallel-size", "2", *sizes.split(), *lengths.split()),
            *("--rm-type", "math", "--custom-rm-path", f"{made / 'own.py'}:spread", f"{made / 'own.py'}:one"),
            *("--rm-weights", "100", "2", "-1", "--group-rm"),
        ],
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout, made / "run"


def test_groups_stay_whole_and_rewards_are_weighted(output: tuple[str, Path]) -> None:
    """Rank 0 scores two groups and rank 1 one; the function itself refuses groups that are cut."""
    printed, folder = output
    first, last = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert first["reward/spread/mean"] == 2 * sum(range(SAMPLES)) / (GROUPS * SAMPLES)
    assert (first["reward/spread/errors"], first["reward/errors"], first["reward/timeouts"]) == (SAMPLES, SAMPLES, 0)
    assert (first["reward/one/mean"], first["reward/one/errors"]) == (1.0, 0)
    total = 100 * first["reward/math/mean"] + 2 * first["reward/spread/mean"] - 1
    assert abs(first["reward/mean"] - total) < 1e-9
    assert printed.count("reward spread: 4 of 8 samples failed and count 0") == 1
    assert "the second group of the rank whose share has two" in printed
    for line in (first, last):
        assert line["eval/reward_spread/mean"] == 0.5 and line["eval/reward_errors"] == 0
        assert abs(line["eval/accuracy"] - 100 * line["eval/reward_math/mean"]) < 1e-9


def test_weights_are_saved(output: tuple[str, Path]) -> None:
    saved = json.loads((output[1] / "arguments.json").read_text())["arguments"]
    assert (saved["rm_weights"], saved["group_rm"], saved["on_reward_error"]) == ([100, 2, -1], True, "zero")
