"""Forward and backward passes over micro-batches: scoring samples, and one optimizer step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moebius.actor import Actor
from moebius.batches import MicroBatch, Sample, bins_needed, make_micro_batch, plan_micro_batches
from moebius.log_probs import vocab_parallel_log_probs
from moebius.metrics import progress
from parallel_state.groups import ParallelState

# (log_probs [n], entropy [n], fields of [n]) -> (loss summed over tokens, sums over tokens for metrics)
LossFunction = Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


WARN_LOGPROB_GAP = 0.1  # nats a token: bf16 stays below 0.06 at 8B


@dataclass(frozen=True)
class Batching:
    """How samples become micro-batches, and the temperature that log-probs are taken at."""

    micro_batch_size: int | None = 1
    max_tokens_per_gpu: int | None = None
    packed: bool = True
    log_probs_chunk_size: int = 1024
    temperature: float = 1.0


def _plan(samples: Sequence[Sample], batching: Batching, state: ParallelState, device: torch.device) -> list[list[int]]:
    """Sample indices of each micro-batch, the same number of them on every data-parallel rank. Collective over DP."""
    lengths = [s.num_tokens for s in samples]
    if batching.max_tokens_per_gpu is not None:
        wanted = bins_needed(lengths, batching.max_tokens_per_gpu)
    else:
        wanted = len(plan_micro_batches(lengths, batching.micro_batch_size, None))
    count = torch.tensor(wanted, device=device)
    dist.all_reduce(count, dist.ReduceOp.MAX, group=state.dp)
    return plan_micro_batches(lengths, batching.micro_batch_size, batching.max_tokens_per_gpu, int(count))


def _log_probs(actor: Actor, batching: Batching, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
    group = actor.state.tp if actor.state.layout.tensor_model_parallel_size > 1 else None
    return vocab_parallel_log_probs(
        hidden.flatten(0, 1)[batch.rows],
        actor.model.head_weight,
        batch.targets,
        group,
        actor.shape.vocab_size,
        batching.temperature,
        batching.log_probs_chunk_size,
    )


def _run(
    actor: Actor,
    samples: Sequence[Sample],
    batching: Batching,
    on_last_stage: Callable[[MicroBatch, Tensor], Any],
    forward_only: bool,
) -> list[Any]:
    """Runs mcore's schedule over the samples' micro-batches; results come back on the last stage, in order."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    layout = actor.state.layout
    stages = layout.pipeline_model_parallel_size
    multiple = layout.tensor_model_parallel_size if layout.sequence_parallel else 1
    plan = _plan(samples, batching, actor.state, actor.device)
    batches = (
        make_micro_batch([samples[i] for i in group], actor.device, batching.packed, multiple)
        for group in progress(plan, len(plan), "log-probs" if forward_only else "update")
    )

    def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Any]:
        batch: MicroBatch = next(iterator)
        hidden = model(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed)

        def loss_func(out: Tensor, non_loss_data: bool = False) -> Any:
            return on_last_stage(batch, out)

        return hidden, loss_func

    extra = {"p2p_communicator": P2PCommunicator(actor.state.pp, actor.config)} if stages > 1 else {}
    schedule: Any = get_forward_backward_func(pp_size=stages, vp_size=None)
    results = schedule(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=actor.ddp,
        num_microbatches=len(plan),
        seq_length=1,  # every stage learns the real one from the stage before it (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        pg_collection=actor.state.train,
        **extra,
    )
    return list(zip(plan, results, strict=True)) if actor.state.is_last_stage else []


@torch.no_grad()
def compute_log_probs(actor: Actor, samples: Sequence[Sample], batching: Batching) -> list[Tensor] | None:
    """Log-probs of the response tokens, forward only. Collective over the training grid.

    Returns:
        for each sample a [response] fp32 tensor on the host; None on pipeline stages before the last.
    """

    def score(batch: MicroBatch, hidden: Tensor) -> tuple[list[int], Tensor]:
        return batch.lengths, _log_probs(actor, batching, batch, hidden)[0].cpu()

    found: dict[int, Tensor] = {}
    for group, (lengths, log_probs) in _run(actor, samples, batching, score, forward_only=True):
        found.update(zip(group, log_probs.split(lengths), strict=True))
    return [found[i] for i in range(len(samples))] if actor.state.is_last_stage else None


def train_step(
    actor: Actor, samples: Sequence[Sample], loss_function: LossFunction, batching: Batching
) -> dict[str, float]:
    """One optimizer step over this rank's samples. Collective over the training grid.

    The loss is the sum over all response tokens of the whole world divided by their number (token-mean), so it does not
    depend on micro-batches, data parallelism or packing.

    Returns:
        on every rank: `loss`, `grad_norm`, `lr`, `tokens` (trained on, whole world) and the means over those tokens of
        what `loss_function` summed. With no token to train on the step is skipped: weights, moments and schedule stay
        as they are, and `skipped` is 1.
    Raises:
        RuntimeError: on every rank, when the gradient norm is not finite.
    """
    tokens = torch.tensor(sum(s.num_loss_tokens for s in samples), device=actor.device)
    dist.all_reduce(tokens, group=actor.state.dp)
    total = int(tokens)
    if total == 0:
        return {"skipped": 1.0, "tokens": 0.0}
    actor.ddp.zero_grad_buffer()
    actor.optimizer.zero_grad()
    results = _run(actor, samples, batching, partial(_normalised, actor, loss_function, batching, total), False)
    _, grad_norm, _ = actor.optimizer.step()
    if not math.isfinite(grad_norm):
        raise RuntimeError(
            f"the gradient norm is {float(grad_norm)}: a loss or a weight is not finite, nothing is saved"
        )
    lr = actor.scheduler.get_lr(actor.optimizer.param_groups[0])
    actor.scheduler.step(1)
    sums = _world_sums([sums for _, sums in results], actor)
    means = {name: value / total for name, value in sums.items()}
    return {**means, "grad_norm": float(grad_norm), "lr": lr, "tokens": float(total), "skipped": 0.0}


def _normalised(
    actor: Actor, loss_function: LossFunction, batching: Batching, total: int, batch: MicroBatch, hidden: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss of one micro-batch over the global token count; the zero stands for mcore's own token count, not used."""
    log_probs, entropy = _log_probs(actor, batching, batch, hidden)
    loss, sums = loss_function(log_probs, entropy, batch.fields)
    return loss / total, torch.zeros((), dtype=torch.int, device=loss.device), {"loss": loss.detach(), **sums}


def _world_sums(parts: list[dict[str, Tensor]], actor: Actor) -> dict[str, float]:
    """Adds metrics up over micro-batches and data parallelism, and tells every rank."""
    names = sorted(parts[0]) if parts else []
    box: list[Any] = [names]
    last_rank = actor.state.layout.rank(0, actor.state.layout.pipeline_model_parallel_size - 1, 0)
    dist.broadcast_object_list(box, src=last_rank)
    names = box[0]
    local = torch.zeros(len(names), dtype=torch.float64, device=actor.device)
    if actor.state.is_last_stage and actor.state.at.tp == 0:
        for part in parts:
            local += torch.stack([part[name].double() for name in names])
    dist.all_reduce(local)
    return dict(zip(names, local.tolist(), strict=True))


def check_mismatch(metrics: Mapping[str, float], limit: float | None) -> str:
    """Looks at the first step's trainer-engine gap, before anything is trained on it.

    Args:
        metrics: of `mismatch_metrics`.
        limit: --max-logprob-gap.
    Returns:
        a warning, or "" where there is nothing to say.
    Raises:
        ValueError: the mean gap is above the limit, or not a number.
    """
    mean, largest = metrics["mismatch/logprob_abs_mean"], metrics["mismatch/logprob_abs_max"]
    said = f"log-probs of trainer and engine differ by {mean:.2g} a token on average, {largest:.2g} at most"
    if limit is not None and not mean <= limit:
        raise ValueError(f"--max-logprob-gap {limit}: {said}")
    return said if limit is None and not mean <= WARN_LOGPROB_GAP else ""


def mismatch_metrics(samples: Sequence[Sample], actor: Actor) -> dict[str, float]:
    """How far trainer and engine are apart on the sampled tokens, before the update. Collective over the world.

    Returns:
        mean and largest |old_log_probs - rollout_log_probs| over the world's tokens, in nats, and the tokens (prompts
        included) that the step trains on.
    """
    counts = torch.zeros(3, dtype=torch.float64, device=actor.device)
    largest = torch.zeros((), dtype=torch.float64, device=actor.device)
    if actor.state.is_last_stage and actor.state.at.tp == 0 and samples:
        old = torch.cat([s.old_log_probs for s in samples if s.old_log_probs is not None]).double()
        engine = torch.tensor([x for s in samples for x in s.rollout_log_probs], dtype=torch.float64)
        gaps = (old - engine).abs()
        sums = [gaps.sum(), gaps.numel(), sum(s.num_tokens for s in samples)]
        counts += torch.tensor(sums, dtype=torch.float64, device=actor.device)
        largest += gaps.max().to(actor.device)
    dist.all_reduce(counts)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return {
        "mismatch/logprob_abs_mean": float(counts[0] / counts[1].clamp(min=1)),
        "mismatch/logprob_abs_max": float(largest),
        "policy/batch_tokens": float(counts[2]),
    }
