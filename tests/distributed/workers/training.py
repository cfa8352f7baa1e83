"""One SGD step and one Adam step of the same model and samples in every cut that this world size allows.

    training.py OUT.json TENSORS_DIR [FAMILY,FAMILY CUT,CUT]

Loss and gradient norm go to OUT.json; gradients, weights and moments, whole and in canonical form, to TENSORS_DIR.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import record
from safetensors.torch import save_file
from tiny_models import TRAINED_LAYERS, hf_log_probs, make_hf_model
from torch import Tensor

from moebius import runtime
from moebius.actor import Actor, build_actor
from moebius.batches import Sample
from moebius.losses import policy_loss
from moebius.models.families import read_shape
from moebius.models.hf_io import export_tensors, local_weights, save_hf
from moebius.train_step import Batching, compute_log_probs, train_step
from parallel_state.groups import make_parallel_state
from parallel_state.layout import ParallelLayout

LENGTHS = ((5, 4), (9, 7), (3, 1), (12, 6), (4, 9), (7, 2), (2, 5), (6, 3))
DP, TP, PP, SP = (1, 1, False), (2, 1, False), (1, 2, False), (2, 1, True)
FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
CUTS: dict[int, dict[str, tuple[tuple[int, int, bool], Batching, dict[str, Any]]]] = {
    1: {
        "one": (DP, Batching(8), {}),
        "micro2": (DP, Batching(4), {}),
        "micro4": (DP, Batching(2), {}),
        "micro8": (DP, Batching(1), {}),
        "tokens": (DP, Batching(None, 24), {}),
        "padded": (DP, Batching(4, packed=False), {}),
        "chunked": (DP, Batching(8, log_probs_chunk_size=5), {}),
        "recompute_full": (DP, Batching(4), FULL),
        "recompute_selective": (DP, Batching(4), SELECTIVE),
    },
    2: {
        "dp2": (DP, Batching(2), {}),
        "dp2_tokens": (DP, Batching(None, 24), {}),
        "tp2": (TP, Batching(4), {}),
        "pp2": (PP, Batching(2), {}),
        "pp2_micro8": (PP, Batching(1), {}),
        "pp2_padded": (PP, Batching(2, packed=False), {}),
        "tp2_sp": (SP, Batching(4), {}),
        "tp2_sp_recompute": (SP, Batching(4), FULL),
        "dp2_overlap": (DP, Batching(1), OVERLAP),
    },
    4: {
        "tp4": ((4, 1, False), Batching(8), {}),
        "tp2_pp2": ((2, 2, False), Batching(2), {}),
        "pp2_dp2": (PP, Batching(1), {}),
        "tp2_sp_dp2": (SP, Batching(2), {}),
    },
}


def make_samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    samples = []
    for number, (prompt, response) in enumerate(LENGTHS):
        ids = torch.randint(3, 150, (prompt + response,), generator=generator).tolist()
        sample = Sample(ids[:prompt], ids[prompt:], advantage=(1.0, -0.5, 0.3, -1.2)[number % 4])
        if number == 3:
            sample.loss_mask = [1, 0, 1, 1, 0, 1]
        samples.append(sample)
    return samples


def loss(log_probs: Tensor, _entropy: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    # old log-probs away from the new ones, so that ratio and clipping take part
    old = log_probs.detach() - 0.1 * torch.sin(7 * log_probs.detach())
    return policy_loss(log_probs, old, fields["advantages"], fields["loss_mask"], 0.05, 0.08)


def whole(actor: Actor, per_parameter: dict[int, Tensor]) -> dict[str, Tensor]:
    """Gathers one tensor for each parameter into canonical form on rank 0."""
    return dict(export_tensors(actor.model, actor.shape, actor.state, lambda parameter: per_parameter[id(parameter)]))


def moments(actor: Actor, name: str) -> dict[int, Tensor]:
    """Adam's `name` for every parameter, put together from the distributed optimizer's shards."""
    found = {}
    optimizer: Any = actor.optimizer
    for sub in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter, (group, index) in sub.model_param_group_index_map.items():
            shard = sub.optimizer.param_groups[group]["params"][index]
            span = sub._get_model_param_range_map(parameter)["param"]
            flat = torch.zeros(parameter.numel())
            flat[span.start : span.end] = sub.optimizer.state[shard][name].flatten()
            found[id(parameter)] = flat.view_as(parameter)
    for _, parameter in local_weights(actor.model, actor.shape, actor.state):
        value = found.setdefault(id(parameter), torch.zeros(parameter.shape))
        dist.all_reduce(value, group=actor.state.dp)
    return found


def run_cut(cut: str, family: str, tied: bool, folder: str, hf: Any, tensors: Path) -> dict[str, Any]:
    (tp, pp, sp), batching, options = CUTS[dist.get_world_size()][cut]
    state = make_parallel_state(ParallelLayout(dist.get_world_size(), tp, pp, None, sp))
    shape = read_shape(folder)
    samples = make_samples()[state.at.dp :: state.layout.data_parallel_size]
    figures: dict[str, Any] = {}
    for optimizer, lr in (("sgd", 0.1), ("adam", 1e-3)):
        if optimizer == "sgd" and options is OVERLAP:
            continue  # parameters are gathered by the distributed optimizer only
        actor = build_actor(
            shape,
            state,
            folder,
            torch.float32,
            torch.device("cpu"),
            lr=lr,
            lr_decay_iters=4,
            optimizer=optimizer,
            clip_grad=0.7,
            ddp_bucket_size=20000,
            **options,
        )
        prefix = f"{family}/{cut}/{optimizer}"
        if optimizer == "sgd":
            log_probs = compute_log_probs(actor, samples, batching)
            if log_probs is not None:
                pairs = zip(samples, log_probs, strict=True)
                gaps = [
                    (hf_log_probs(hf, list(s.prompt_ids), list(s.response_ids)) - x).abs().max().item()
                    for s, x in pairs
                ]
                figures[f"{family}/{cut}/hf_gap"] = max(gaps)
            save_hf(actor.model, shape, state, folder, tensors / "hf" / family / cut, max_bytes=60_000)
        step = train_step(actor, samples, loss, batching)
        figures[f"{prefix}/loss"], figures[f"{prefix}/grad_norm"] = step["loss"], step["grad_norm"]
        figures[f"{prefix}/clipfrac"] = step["clipfrac"]
        kinds: dict[str, dict[int, Tensor]] = {}
        parameters = [p for _, p in local_weights(actor.model, shape, state)]
        if optimizer == "sgd":
            kinds["grad"] = {id(p): p.main_grad for p in parameters}  # pyright: ignore[reportAttributeAccessIssue]
            kinds["weight"] = {id(p): p.data for p in parameters}
        else:
            kinds["exp_avg"], kinds["exp_avg_sq"] = moments(actor, "exp_avg"), moments(actor, "exp_avg_sq")
        for kind, per_parameter in kinds.items():
            gathered = whole(actor, per_parameter)
            if dist.get_rank() == 0:
                save_file(gathered, tensors / f"{family}-{cut}-{kind}.safetensors")
    return figures


def schedules(folder: str) -> dict[str, Any]:
    """Learning rates of six updates: warm-up 2, then constant, linear and cosine until update 6; and a bf16 actor."""
    state = make_parallel_state(ParallelLayout(1))
    figures: dict[str, Any] = {}
    for style in ("constant", "linear", "cosine"):
        actor = build_actor(
            read_shape(folder),
            state,
            folder,
            torch.float32,
            torch.device("cpu"),
            lr=1e-3,
            lr_decay_iters=6,
            min_lr=1e-4,
            lr_warmup_iters=2,
            lr_decay_style=style,
        )
        samples = make_samples()[:2]
        figures[f"lr/{style}"] = [train_step(actor, samples, loss, Batching(2))["lr"] for _ in range(6)]
    actor = build_actor(
        read_shape(folder), state, folder, torch.bfloat16, torch.device("cpu"), lr=1e-3, lr_decay_iters=3
    )
    before = [p.clone() for p in actor.model.parameters()]
    steps = [train_step(actor, make_samples(), loss, Batching(4)) for _ in range(2)]
    figures["bf16/loss"] = [step["loss"] for step in steps]
    figures["bf16/grad_norm"] = [step["grad_norm"] for step in steps]
    figures["bf16/changed"] = sum(
        not torch.equal(a, b) for a, b in zip(before, actor.model.parameters(), strict=True)
    ) / len(before)
    return figures


def main() -> None:
    out, tensors = sys.argv[1], Path(sys.argv[2])
    runtime.start(2)
    figures: dict[str, Any] = {}
    families = sys.argv[3].split(",") if sys.argv[3:] else ["qwen3", "llama"]
    cuts = CUTS[dist.get_world_size()]
    cuts = [cut for cut in cuts if not sys.argv[4:] or cut in sys.argv[4].split(",")]
    for family in families:
        tied, layers = family != "llama", TRAINED_LAYERS.get(family, 4)
        box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(box, 0)
        hf = make_hf_model(family, box[0] if dist.get_rank() == 0 else None, tied=tied, kv_heads=4, layers=layers)
        dist.barrier()
        for cut in cuts:
            figures |= run_cut(cut, family, tied, box[0], hf, tensors)
        if dist.get_world_size() == 1 and family == "llama":
            figures |= schedules(box[0])
    record(figures, out)
    runtime.stop()


if __name__ == "__main__":
    main()
