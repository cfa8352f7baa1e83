"""Memory of a rank while it reads a checkpoint; figures for test_load_memory.py.

    load_memory.py OUT.json FOLDER

FOLDER comes from made_checkpoint.py.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from harness import record

from moebius import runtime
from moebius.models.build import build_model, transformer_config
from moebius.models.families import read_shape, weights
from moebius.models.hf_io import load_hf, local_weights
from parallel_state.groups import make_parallel_state
from parallel_state.layout import ParallelLayout


def memory(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (most since the last reset): mapped file pages count too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    out, folder = sys.argv[1], sys.argv[2]
    runtime.start(5)
    state = make_parallel_state(ParallelLayout(dist.get_world_size(), dist.get_world_size()))
    shape = read_shape(folder)
    config = transformer_config(shape, state, torch.bfloat16, on_cpu=True)
    config.perform_initialization = False  # pages of the weights are first touched by the load
    model = build_model(shape, state, config, seed=0)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    load_hf(model, shape, state, folder)
    peak = memory("VmHWM") - before
    shard = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(weight.num_elements // len(weight.hf) for weight in weights(shape)) * 2
    number, wrong = 0, []
    for weight, parameter in local_weights(model, shape, state):
        wanted = {((number + part) % 256) / 256 for part in range(len(weight.hf))} | ({0.0} if weight.padded else set())
        number += len(weight.hf)
        if not set(parameter.flatten()[::997].unique().tolist()) <= wanted:
            wrong.append(weight.trainer)
    record({"peak": peak, "shard": shard, "largest": largest, "wrong": wrong}, out)
    runtime.stop()


if __name__ == "__main__":
    main()
