"""The control experiment: the demo, cut short, learns from its rewards and from nothing else."""

import json
from pathlib import Path

import pytest
from harness import run_demo

pytestmark = pytest.mark.slow

STEPS = 15


def accuracies(run: Path, *flags: str) -> list[float]:
    """Accuracy at each evaluation of a short demo: one warm-up, the same to the bit, then `STEPS` steps."""
    run_demo(run, "--num-rollout", str(STEPS), *flags)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]


def test_nothing_is_learned_from_permuted_rewards(tmp_path: Path) -> None:
    true = accuracies(tmp_path / "true")
    permuted = accuracies(tmp_path / "permuted", "--debug-permute-rewards")
    assert permuted[0] == true[0], "both must start from the same model"
    assert true[-1] >= true[0] + 0.2
    assert permuted[-1] < permuted[0] + 0.05
