"""Pairs of layouts that are not views alone: figures for test_layouts.py.

layouts.py OUT.json
"""

import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from engine import BATCHING, gap_to_hf, loss, requests_of, samples_of, shared_folder
from harness import record
from tiny_models import make_hf_model

from hybrid_engine.engine import EngineOptions, HybridEngine
from hybrid_engine.reshard_plan import lower_bound
from moebius import runtime
from moebius.actor import Actor, build_actor
from moebius.batches import Sample
from moebius.models.binding import engine_parameters
from moebius.models.families import read_shape
from moebius.models.metas import engine_metas
from moebius.train_step import compute_log_probs, train_step
from parallel_state.groups import make_parallel_state
from parallel_state.layout import ParallelLayout


class Pair(NamedTuple):
    """Training TP and PP, rollout TP, and the model."""

    tp: int
    pp: int
    rollout_tp: int
    family: str = "qwen3"
    tied: bool = True
    kv_heads: int = 4
    sequence_parallel: bool = False
    layers: int = 4


PAIRS: dict[int, dict[str, Pair]] = {
    2: {
        "pp2 to tp2": Pair(1, 2, 2),
        "pp2 to tp1, 5 layers": Pair(1, 2, 1, "qwen2", False, layers=5),
        "tp2 to tp1": Pair(2, 1, 1, "opt-350m"),
    },
    4: {
        "pp2 dp2 to tp4": Pair(1, 2, 4),
        "tp2 pp2 to tp4": Pair(2, 2, 4, "llama", False),
        "tp2 to 4 x tp1": Pair(2, 1, 1),
        "tp4 to 2 x tp2": Pair(4, 1, 2, "qwen2"),
        "pp4 to tp4": Pair(1, 4, 4),
        "tp2 to tp4, 2 kv heads": Pair(2, 1, 4, "qwen3", True, 2),
        "pp4 to tp4, projections": Pair(1, 4, 4, "opt-350m"),
        "tp4 with 2 kv heads to 2 x tp2": Pair(4, 1, 2, "qwen3", True, 2),
        "tp4 sp with 2 kv heads to tp4": Pair(4, 1, 4, "qwen2", False, 2, True),
        "tp2 sp pp2 to 2 x tp2": Pair(2, 2, 2, "qwen2", True, 4, True),
    },
}


def trainer_gap(actor: Actor, samples: list[Sample]) -> float | None:
    """Largest |trainer - engine|; None before the last stage, which alone has log-probs."""
    scored = compute_log_probs(actor, samples, BATCHING)
    for sample, log_probs in zip(samples, scored or (), strict=False):
        sample.old_log_probs = log_probs
    if scored is None:
        return None
    return max((x - torch.tensor(s.rollout_log_probs)).abs().max().item() for x, s in zip(scored, samples, strict=True))


def run_pair(name: str, pair: Pair) -> dict[str, Any]:
    """Every engine generates the same requests, so that every rank trains on the same samples."""
    world = dist.get_world_size()
    state = make_parallel_state(
        ParallelLayout(world, pair.tp, pair.pp, pair.rollout_tp, pair.sequence_parallel, local_world_size=world)
    )
    folder = shared_folder()
    model = make_hf_model(
        pair.family,
        folder if dist.get_rank() == 0 else None,
        tied=pair.tied,
        kv_heads=pair.kv_heads,
        layers=pair.layers,
    )
    dist.barrier()
    shape = read_shape(folder)
    actor = build_actor(
        shape, state, folder, torch.float32, torch.device("cpu"), lr=1e-2, lr_decay_iters=9, adam_eps=1e-5
    )
    metas, trainer = engine_parameters(actor.model, shape, state)
    options = EngineOptions(max_model_len=128, max_num_seqs=16, kv_cache_bytes=64 << 20, reshard_bucket_bytes=100_000)
    engine = HybridEngine(folder, state, metas, trainer, actor.sync_parameters, options, torch.device("cpu"))
    pointers = [p.data_ptr() for p in engine.model.parameters()]
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 150, (n,), generator=generator).tolist() for n in (40, 5, 12)]
    figures: dict[str, Any] = {f"{name}/gaps": [], f"{name}/tokens": []}
    samples: list[Sample] = []
    for step in range(3):
        requests = requests_of(prompts, 2, 1000 * step)
        with engine.rollout():
            samples = samples_of(requests, engine.generate(requests))
        if step == 0:
            figures[f"{name}/hf_gap"] = gap_to_hf(model, samples)
        figures[f"{name}/tokens"].append([list(s.response_ids) for s in samples])
        figures[f"{name}/gaps"].append(trainer_gap(actor, samples))
        train_step(actor, samples, loss, BATCHING)
    figures[f"{name}/changed"] = gap_to_hf(model, samples)
    figures[f"{name}/same_pointers"] = pointers == [p.data_ptr() for p in engine.model.parameters()]
    bound = lower_bound(engine_metas(shape, state.layout, 4), state.layout, state.rank)
    switch = engine.records[-1]
    figures[f"{name}/bytes"] = [switch.bytes_moved, bound, switch.bytes_aliased, switch.bytes_copied]
    figures[f"{name}/caught"] = spoil(engine)
    engine.close()
    return figures


def spoil(engine: HybridEngine) -> str:
    """What the verification says when one element of one buffer of rank 0 is off by the smallest step."""
    with engine.rollout():
        if dist.get_rank() == 0 and engine.plan.buffers:
            name = engine.plan.buffers[-1].meta.engine
            element = dict(engine.model.named_parameters())[name].detach().view(-1)[3:4]
            element.copy_(torch.nextafter(element, element + 1))
        try:
            engine.verify()
        except RuntimeError as error:
            return str(error)
    return ""


def main() -> None:
    runtime.start(2)
    figures: dict[str, Any] = {}
    for name, pair in PAIRS[dist.get_world_size()].items():
        figures |= run_pair(f"{dist.get_world_size()}/{name}", pair)
    record(figures, sys.argv[1])
    runtime.stop()


if __name__ == "__main__":
    main()
