"""Three optimizer steps of the tiny models in one process: their loss and gradient norm.

baselines.py OUT.json FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
from harness import record
from tiny_models import make_hf_model
from workers.training import loss, make_samples

from moebius import runtime
from moebius.actor import build_actor
from moebius.models.families import read_shape
from moebius.train_step import Batching, train_step
from parallel_state.groups import make_parallel_state
from parallel_state.layout import ParallelLayout


def main() -> None:
    out, folder = sys.argv[1], Path(sys.argv[2])
    device = runtime.start(2)
    state = make_parallel_state(ParallelLayout(1))
    figures: dict[str, Any] = {}
    for family, tied in (("qwen3", True), ("llama", False)):
        make_hf_model(family, folder / family, tied=tied)
        actor = build_actor(
            read_shape(folder / family), state, folder / family, torch.float32, device, lr=1e-3, lr_decay_iters=3
        )
        steps = [train_step(actor, make_samples(), loss, Batching(None, 24)) for _ in range(3)]
        figures[family] = {name: [step[name] for step in steps] for name in ("loss", "grad_norm")}
    record(figures, out)
    runtime.stop()


if __name__ == "__main__":
    main()
