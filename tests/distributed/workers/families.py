"""Every model family: trainer against Hugging Face, and vLLM on its tensors; figures for test_families.py.

    families.py OUT.json

World 1: training TP1 -> rollout TP1. World 2: training TP1 x DP2 -> rollout TP2, and the trainer alone in other cuts.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from engine import (
    BATCHING,
    TEMPERATURE,
    gap_to_hf,
    gap_to_trainer,
    loss,
    prompts_of,
    requests_of,
    samples_of,
    shared_folder,
)
from harness import record
from tiny_models import hf_log_probs, make_hf_model

from hybrid_engine.engine import EngineOptions, HybridEngine
from moebius import runtime
from moebius.actor import Actor, build_actor
from moebius.batches import Sample
from moebius.models.binding import engine_parameters
from moebius.models.families import read_shape
from moebius.train_step import compute_log_probs, train_step
from parallel_state.groups import ParallelState, make_parallel_state
from parallel_state.layout import ParallelLayout

# (family, tied embeddings)
MODELS = (
    ("llama", True),
    ("llama-3.1", False),
    ("mistral", False),
    ("qwen2", True),
    ("qwen2", False),
    ("qwen3", False),
    ("opt", True),
    ("opt-350m", True),
)
# training TP, PP, sequence parallelism
CUTS: dict[int, dict[str, tuple[int, int, bool]]] = {
    1: {"tp1": (1, 1, False)},
    2: {"tp2": (2, 1, False), "pp2": (1, 2, False), "tp2_sp": (2, 1, True)},
}


def build(folder: str, state: ParallelState) -> Actor:
    shape = read_shape(folder)
    return build_actor(
        shape, state, folder, torch.float32, torch.device("cpu"), lr=1e-2, lr_decay_iters=10, adam_eps=1e-5
    )


def trainer_gap(actor: Actor, hf: Any) -> list[float]:
    """Largest difference to Hugging Face for each of three samples; nothing on stages before the last."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for prompt, response in ((5, 4), (90, 7), (3, 1)):
        ids = torch.randint(3, 150, (prompt + response,), generator=generator).tolist()
        samples.append(Sample(ids[:prompt], ids[prompt:]))
    scored = compute_log_probs(actor, samples, BATCHING)
    pairs = zip(samples, scored or (), strict=False)
    wanted = [(hf_log_probs(hf, list(s.prompt_ids), list(s.response_ids), TEMPERATURE), found) for s, found in pairs]
    return [(want - found).abs().max().item() for want, found in wanted]


def engine_gaps(name: str, folder: str, hf: Any, state: ParallelState) -> dict[str, Any]:
    """vLLM against Hugging Face, and against the trainer before and after two updates."""
    actor = build(folder, state)
    metas, trainer = engine_parameters(actor.model, actor.shape, state)
    options = EngineOptions(max_model_len=128, max_num_seqs=16, kv_cache_bytes=64 << 20)
    engine = HybridEngine(folder, state, metas, trainer, actor.sync_parameters, options, torch.device("cpu"))
    figures: dict[str, Any] = {f"{name}/gaps": []}
    samples: list[Sample] = []
    for step in range(3):
        requests = requests_of(prompts_of(state), 2, 1000 * step)
        with engine.rollout():
            samples = samples_of(requests, engine.generate(requests))
        figures[f"{name}/gaps"].append(gap_to_trainer(actor, samples))
        if step == 0:
            figures[f"{name}/hf_gap"] = gap_to_hf(hf, samples)
        train_step(actor, samples, loss, BATCHING)
    figures[f"{name}/moved"] = gap_to_hf(hf, samples)
    record_ = engine.records[-1]
    figures[f"{name}/bytes"] = [record_.bytes_moved, record_.bytes_aliased, record_.bytes_copied]
    engine.close()
    return figures


def main() -> None:
    runtime.start(2)
    world = dist.get_world_size()
    figures: dict[str, Any] = {}
    for family, tied in MODELS:
        name = f"{world}/{family}-{'tied' if tied else 'untied'}"
        folder = shared_folder()
        hf = make_hf_model(family, folder if dist.get_rank() == 0 else None, tied=tied, kv_heads=4)
        dist.barrier()
        for cut, (tp, pp, sp) in CUTS[world].items():
            state = make_parallel_state(ParallelLayout(world, tp, pp, None, sp))
            figures[f"{name}/{cut}"] = trainer_gap(build(folder, state), hf)
        rollout = make_parallel_state(ParallelLayout(world, rollout_tensor_model_parallel_size=world))
        figures |= engine_gaps(name, folder, hf, rollout)
    record(figures, sys.argv[1])
    runtime.stop()


if __name__ == "__main__":
    main()
