"""The control experiment: the demo, cut short, learns from its rewards and from nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT

pytestmark = pytest.mark.slow

STEPS = 15


def accuracies(run: Path, *flags: str) -> list[float]:
    """Accuracy at each evaluation of a short demo: one warm-up, the same to the bit, then `STEPS` steps."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "launch/demo.sh", "--num-rollout", str(STEPS), *flags],
        env={**os.environ, "PATH": path, "RUN": str(run)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]


def test_nothing_is_learned_from_permuted_rewards(tmp_path: Path) -> None:
    true = accuracies(tmp_path / "true")
    permuted = accuracies(tmp_path / "permuted", "--debug-permute-rewards")
    assert permuted[0] == true[0], "both must start from the same model"
    assert true[-1] >= true[0] + 0.2
    assert permuted[-1] < permuted[0] + 0.05
