"""The hybrid engine beside a real trainer: figures for test_engine.py.

    engine.py OUT.json [NAME]

NAME picks one model: with sleep mode a process can have one engine only.
fp32 over gloo on a CPU; bf16 with CUDA graphs and sleep mode on GPUs (tests/gpu).

World 2: training TP1 x DP2 -> rollout TP2. World 4: training TP2 x DP2 -> rollout TP4 (more ranks than KV heads: the
qkv copy), and two independent engines of TP2.
"""

import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import record
from tiny_models import hf_log_probs, make_hf_model
from torch import Tensor

from hybrid_engine.engine import EngineOptions, Generation, HybridEngine, Request
from moebius import runtime
from moebius.actor import Actor, build_actor
from moebius.batches import Sample
from moebius.losses import policy_loss
from moebius.models.binding import engine_parameters
from moebius.models.families import read_shape
from moebius.train_step import Batching, compute_log_probs, train_step
from parallel_state.groups import ParallelState, make_parallel_state
from parallel_state.layout import ParallelLayout

TEMPERATURE = 0.7
BATCHING = Batching(None, 128, temperature=TEMPERATURE)
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def shared_folder() -> str:
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box, 0)
    return box[0]


def loss(log_probs: Tensor, _entropy: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return policy_loss(log_probs, fields["old_log_probs"], fields["advantages"], fields["loss_mask"], 0.2, 0.2)


def prompts_of(state: ParallelState, lengths: tuple[int, ...] = (70, 5, 12)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3 + state.at.rollout_dp)
    return [torch.randint(3, 150, (n,), generator=generator).tolist() for n in lengths]


def requests_of(
    prompts: list[list[int]], n: int, seed: int, max_tokens: int = 8, temperature: float = TEMPERATURE
) -> list[Request]:
    return [
        Request(p, seed=seed + i * n + j, max_tokens=max_tokens, temperature=temperature, stop_token_ids=(2,))
        for i, p in enumerate(prompts)
        for j in range(n)
    ]


def samples_of(requests: list[Request], made: list[Generation]) -> list[Sample]:
    return [
        Sample(list(r.prompt_ids), g.token_ids, g.log_probs, advantage=(1.0, -0.7)[i % 2])
        for i, (r, g) in enumerate(zip(requests, made, strict=True))
    ]


def gap_to_trainer(actor: Actor, samples: list[Sample]) -> float:
    scored = compute_log_probs(actor, samples, BATCHING)
    assert scored is not None
    for sample, log_probs in zip(samples, scored, strict=True):
        sample.old_log_probs = log_probs
    return max((x - torch.tensor(s.rollout_log_probs)).abs().max().item() for x, s in zip(scored, samples, strict=True))


def gap_to_hf(hf: Any, samples: list[Sample]) -> float:
    """Largest difference between the engine's log-probs and those of the weights that the run started from."""
    scored = [hf_log_probs(hf, list(s.prompt_ids), list(s.response_ids), TEMPERATURE) for s in samples]
    return max((x - torch.tensor(s.rollout_log_probs)).abs().max().item() for x, s in zip(scored, samples, strict=True))


def build(
    family: str, tied: bool, kv_heads: int, state: ParallelState, overlap: bool = False
) -> tuple[Actor, HybridEngine, Any, str]:
    folder = shared_folder()
    hf = make_hf_model(family, folder if dist.get_rank() == 0 else None, tied=tied, kv_heads=kv_heads, dtype=DTYPE)
    if dist.get_rank() == 0:  # must change nothing (case 2.03)
        odd = {"top_k": 2, "top_p": 0.3, "temperature": 0.1, "repetition_penalty": 1.8, "eos_token_id": [2, 5, 6, 7]}
        (Path(folder) / "generation_config.json").write_text(json.dumps(odd))
    dist.barrier()
    shape = read_shape(folder)
    actor = build_actor(
        shape,
        state,
        folder,
        DTYPE,
        current_device(),
        lr=1e-2,
        lr_decay_iters=10,
        adam_eps=1e-5,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        ddp_bucket_size=20000,
    )
    metas, trainer = engine_parameters(actor.model, shape, state)
    options = EngineOptions(max_model_len=128, max_num_seqs=16, kv_cache_bytes=64 << 20)
    engine = HybridEngine(folder, state, metas, trainer, actor.sync_parameters, options, current_device())
    return actor, engine, hf, folder


def host_random_state() -> tuple[Any, ...]:
    numpy_state: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), numpy_state[1].tolist(), random.getstate()


def cycle(name: str, actor: Actor, engine: HybridEngine, hf: Any, state: ParallelState) -> dict[str, Any]:
    """Generate, compare with trainer and Hugging Face, update, generate again."""
    figures: dict[str, Any] = {}
    prompts = prompts_of(state)
    pointers = [p.data_ptr() for p in engine.model.parameters()]
    trainer_storages = {p.untyped_storage().data_ptr() for p in actor.model.parameters()}
    views = {view.meta.engine for view in engine.plan.views}
    outside = [
        n
        for n, p in engine.model.named_parameters()
        if n in views and p.untyped_storage().data_ptr() not in trainer_storages
    ]
    figures[f"{name}/outside"] = outside
    figures[f"{name}/parameters"] = len(pointers)
    figures[f"{name}/strided"] = sum(not p.is_contiguous() for p in engine.model.parameters())
    gaps, before, samples = [], host_random_state(), []
    for step in range(3):
        requests = requests_of(prompts, 2, 1000 * step)
        with engine.rollout():
            made = engine.generate(requests)
        samples = samples_of(requests, made)
        gaps.append(gap_to_trainer(actor, samples))
        if step == 0:
            figures[f"{name}/rng_kept"] = before == host_random_state()
            figures[f"{name}/hf_gap"] = gap_to_hf(hf, samples)
            figures[f"{name}/prompt_tokens"] = [g.prompt_tokens_computed for g in made]
            figures[f"{name}/tokens"] = [g.token_ids for g in made]
        stats = train_step(actor, samples, loss, BATCHING)
        figures.setdefault(f"{name}/ratio", stats["ratio"])
    figures[f"{name}/gaps"] = gaps
    figures[f"{name}/gap_to_first_weights"] = gap_to_hf(hf, samples)
    figures[f"{name}/same_pointers"] = pointers == [p.data_ptr() for p in engine.model.parameters()]
    record_ = engine.records[-1]
    figures[f"{name}/bytes"] = [record_.bytes_moved, record_.bytes_aliased, record_.bytes_copied]
    return figures


def after_update(name: str, actor: Actor, engine: HybridEngine, state: ParallelState) -> dict[str, Any]:
    """The same greedy requests before and after the weights change by a load in place: nothing is copied."""
    figures: dict[str, Any] = {}
    requests = requests_of(prompts_of(state), 1, 5, temperature=0.0)
    with engine.rollout():
        first = engine.generate(requests)
        again = engine.generate(requests)
    figures[f"{name}/greedy_repeats"] = [a.token_ids for a in first] == [a.token_ids for a in again]
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.data.mul_(1.5)
    sampled = requests_of(prompts_of(state), 1, 5)
    with engine.rollout():
        made = engine.generate(sampled)
    figures[f"{name}/gap_after_load"] = gap_to_trainer(actor, samples_of(sampled, made))
    engine.certify()
    return figures


def seeds(engine: HybridEngine, state: ParallelState) -> dict[str, Any]:
    """Cases 9.01, 9.03: the same prompt in every engine, n samples each, twice."""
    from moebius.data import Prompt
    from moebius.rollout import Sampling, generate

    prompt = Prompt(0, tuple(range(10, 20)), "", "", {})
    sampling = Sampling(4, 16, 1.0, (), seed=0)
    runs = []
    for _ in range(2):
        with engine.rollout():
            rollout = generate(engine, state, [prompt] * 4, sampling, 0, "train")
        runs.append({str(i): list(s.response_ids) for i, s in rollout.samples.items()})
    with engine.rollout():
        other = generate(engine, state, [prompt] * 4, replace(sampling, seed=1), 0, "train")
        later = generate(engine, state, [prompt] * 4, sampling, 1, "train")
    return {
        "seeds/responses": runs[0],
        "seeds/repeats": runs[0] == runs[1],
        "seeds/other": {str(i): list(s.response_ids) for i, s in other.samples.items()},
        "seeds/later": {str(i): list(s.response_ids) for i, s in later.samples.items()},
    }


def main() -> None:
    runtime.start(2)
    world = dist.get_world_size()
    figures: dict[str, Any] = {}
    if world == 2:
        state = make_parallel_state(ParallelLayout(2, rollout_tensor_model_parallel_size=2))
        plans = [("qwen3", True, 2, False), ("llama", False, 4, False), ("qwen3", False, 1, True)]
    else:
        state = make_parallel_state(ParallelLayout(4, 2, rollout_tensor_model_parallel_size=4))
        plans = [("qwen3", True, 2, False), ("llama", False, 8, True)]
    for family, tied, kv_heads, overlap in plans:
        name = f"{world}/{family}-kv{kv_heads}" + ("-overlap" if overlap else "")
        if name not in (sys.argv[2:] or [name]):
            continue
        actor, engine, hf, folder = build(family, tied, kv_heads, state, overlap)
        figures |= cycle(name, actor, engine, hf, state)
        figures |= after_update(name, actor, engine, state)
        engine.write_certificate(Path(folder) / "aliasing")
        rows = json.loads((Path(folder) / "aliasing" / f"rank-{dist.get_rank():05}.json").read_text())
        figures[f"{name}/certificate"] = [len(rows), sum(row["kind"] == "buffer" for row in rows)]
        engine.close()
        figures[f"{name}/trains_after_close"] = train_step(
            actor, [Sample([4, 5], [6, 7], advantage=1.0, old_log_probs=torch.zeros(2))], loss, BATCHING
        )["grad_norm"]
    if not sys.argv[2:]:
        figures |= separate_engines(world)
    record(figures, sys.argv[1])
    runtime.stop()


def separate_engines(world: int) -> dict[str, Any]:
    """Two independent engines over one world."""
    engines = make_parallel_state(ParallelLayout(world, rollout_tensor_model_parallel_size=world // 2))
    _, engine, _, _ = build("llama", True, 2, engines)
    figures = seeds(engine, engines)
    engine.close()
    return figures


if __name__ == "__main__":
    main()
