"""Checks that the engine reads the trainer's weights: checksums of every row or column, from both sides.

The two sides are computed apart from the plan: the trainer's from what its shards hold, the engine's from what vLLM's
live parameters should hold. A wrong row, a stale buffer or a swapped shard changes a checksum.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_engine.reshard_plan import Kind, ParameterMeta, Segment, engine_segments, training_segments
from parallel_state.groups import ParallelState

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_BYTES = 64 << 20


def checksums(tensor: Tensor, dim: int) -> Tensor:
    """One int64 for each index of `dim`: the bits along the other dimension, weighted by position, modulo 2^64."""
    rows = tensor.detach() if dim == 0 else tensor.detach().t()
    rows = rows[:, None] if rows.dim() == 1 else rows
    weights = torch.arange(1, 2 * rows.size(1), 2, device=rows.device) * 0x9E3779B97F4A7C1
    step = max(1, _CHUNK_BYTES // (8 * rows.size(1)))
    found = [
        (part.contiguous().view(_BITS[tensor.element_size()]).long() * weights).sum(1) for part in rows.split(step)
    ]
    return torch.cat(found)


def _starts(kind: Kind) -> list[int]:
    return [sum(kind.parts[:part]) for part in range(len(kind.parts))]


def _placed(kind: Kind, segments: Sequence[Segment], device: torch.device) -> Tensor:
    """Index in the whole parameter, parts one after another, of each row or column of a shard."""
    starts = _starts(kind)
    found = [torch.arange(s.length, device=device) + starts[s.part] + s.start for s in segments]
    return torch.cat(found)


def verify_engine(
    parameters: Sequence[ParameterMeta],
    state: ParallelState,
    trainer: Mapping[str, Tensor],
    engine: Mapping[str, Tensor],
) -> None:
    """Compares every engine parameter with the trainer's weights. Collective over the world.

    Args:
        trainer: this rank's training shards by trainer name.
        engine: vLLM's live parameters by name.
    Raises:
        RuntimeError: on every rank, naming the parameters that differ and on how many ranks.
    """
    layout, at = state.layout, state.at
    device = next(iter(engine.values())).device
    wrong = torch.zeros(len(parameters), dtype=torch.long, device=device)
    for number, meta in enumerate(parameters):
        kind, dim = meta.kind, meta.kind.cut or 0
        whole = torch.zeros(sum(kind.parts), dtype=torch.long, device=device)
        # one holder of each shard speaks for it
        speaks = at.dp == 0 and at.pp == meta.stages[0] and (kind.cut is not None or at.tp == 0)
        if speaks:
            held = training_segments(kind, layout.tensor_model_parallel_size, at.tp)
            whole[_placed(kind, held, device)] = checksums(trainer[meta.trainer], dim)
        dist.all_reduce(whole)
        needed = _placed(kind, engine_segments(kind, layout.rollout_tp, at.rollout_tp), device)
        wrong[number] = int(not torch.equal(whole[needed], checksums(engine[meta.engine], dim)))
    dist.all_reduce(wrong)
    names = [f"{meta.engine} ({int(n)} ranks)" for meta, n in zip(parameters, wrong.tolist(), strict=True) if n]
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise RuntimeError(f"the engine's weights are not the trainer's: {', '.join(names[:8])}{more}")
