"""The only file that makes process groups: mcore's for training, and a second, separate set for rollouts.

Both are passed on explicitly; nothing reads a global one. vLLM builds its own groups inside the engine from the same
consecutive ranks (`hybrid_engine.vllm_adapter` checks that they agree).
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_state.layout import Coordinates, ParallelLayout


@dataclass(frozen=True)
class RolloutGroups:
    """Groups of the rollout grid: `tp` is this rank's engine, `dp` the ranks with its index in every engine."""

    tp: ProcessGroup
    dp: ProcessGroup


@dataclass(frozen=True)
class ParallelState:
    """This rank's place and its groups in both grids.

    `train` is mcore's ProcessGroupCollection (untyped: mcore has no types); `tp`, `pp`, `dp` are the same groups typed.
    """

    layout: ParallelLayout
    rank: int
    at: Coordinates
    train: Any
    tp: ProcessGroup
    pp: ProcessGroup
    dp: ProcessGroup
    model_parallel: ProcessGroup
    rollout: RolloutGroups

    @property
    def is_first_stage(self) -> bool:
        return self.at.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.at.pp == self.layout.pipeline_model_parallel_size - 1


def _mine(ranks: list[list[int]], timeout: timedelta | None) -> ProcessGroup:
    """Makes every group of a partition of the world (collective) and returns the one that holds this rank."""
    me, found = dist.get_rank(), None
    for group in ranks:
        made = dist.new_group(group, timeout=timeout)
        if me in group:
            found = made
    assert found is not None, f"rank {me} is in none of {ranks}"
    assert isinstance(found, ProcessGroup)
    return found


def make_parallel_state(layout: ParallelLayout, timeout: timedelta | None = None) -> ParallelState:
    """Makes the groups of both grids. Collective over the initialised default process group.

    Args:
        timeout: how long a collective of these groups may take; torch's default where None.
    Raises:
        ValueError: when the layout was made for another world size.
    """
    from megatron.core import parallel_state as mcore
    from megatron.core.process_groups_config import ProcessGroupCollection

    if dist.get_world_size() != layout.world_size:
        raise ValueError(
            f"the layout is for {layout.world_size} ranks, but the launcher started {dist.get_world_size()}"
        )
    rank = dist.get_rank()
    tp = _mine(layout.tensor_parallel_ranks(), timeout)
    pp = _mine(layout.pipeline_parallel_ranks(), timeout)
    dp = _mine(layout.data_parallel_ranks(), timeout)
    mp = _mine(layout.model_parallel_ranks(), timeout) if layout.pipeline_model_parallel_size > 1 else tp
    one = _mine([[r] for r in range(layout.world_size)], timeout)
    world = dist.group.WORLD
    assert world is not None
    embd, pos_embd = _embedding_groups(layout, one, timeout)
    train = ProcessGroupCollection(
        tp=tp,
        pp=pp,
        mp=mp,
        dp=dp,
        dp_cp=dp,
        intra_dp_cp=dp,
        embd=embd,
        pos_embd=pos_embd,
        cp=one,
        tp_cp=tp,
        tp_dp_cp=world,
        ep=one,
        expt_tp=tp,
        expt_dp=dp,
        intra_expt_dp=dp,
        tp_ep=tp,
        tp_ep_pp=mp,
        inter_dist_opt=None,
        intra_dist_opt=world,
    )
    if mcore._GLOBAL_MEMORY_BUFFER is None:
        # sequence parallelism takes its scratch space from here; nothing else of mcore's globals is used
        mcore._set_global_memory_buffer()
    rollout = RolloutGroups(
        tp=_mine(layout.rollout_tensor_parallel_ranks(), timeout),
        dp=_mine(layout.rollout_data_parallel_ranks(), timeout),
    )
    return ParallelState(
        layout=layout,
        rank=rank,
        at=layout.coordinates(rank),
        train=train,
        tp=tp,
        pp=pp,
        dp=dp,
        model_parallel=mp,
        rollout=rollout,
    )


def _embedding_groups(
    layout: ParallelLayout, one: ProcessGroup, timeout: timedelta | None
) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Groups over which tied embeddings sum their gradients: first and last stage of a pipeline, None in between."""
    if layout.pipeline_model_parallel_size == 1:
        return None, None
    me, embd = dist.get_rank(), None
    for stages in layout.pipeline_parallel_ranks():
        ends = [stages[0], stages[-1]]
        made = dist.new_group(ends, timeout=timeout)
        if me in ends:
            assert isinstance(made, ProcessGroup)
            embd = made
    return embd, one if layout.coordinates(me).pp == 0 else None
