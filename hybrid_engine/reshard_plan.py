"""How the engine's parameters come out of the trainer's, as pure data: no process group, no tensor.

With rollout TP = k x training TP, every rollout shard lies inside the training shard that the rank already holds. A
column-parallel weight (and the vocabulary) is then a slice of rows, a row-parallel one a strided slice of columns:
views, which cost nothing and never go stale. The one exception is qkv with fewer KV heads than rollout ranks, where
each KV head is needed more than once: its rows are collected into a small copy before each rollout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ParameterMeta:
    """One engine parameter and the trainer's tensor that holds it.

    Attributes:
        engine: name in vLLM's model.
        trainer: name in the trainer's model.
        shape: the trainer's shard.
        element_size: bytes of one element.
        cut: the dimension that tensor parallelism divides; None for replicated weights.
        qkv_rows: rows of q, of k and of v in the trainer's shard, for fused attention weights.
        qkv_blocks: blocks of [q; k; v] in the trainer's shard.
    """

    engine: str
    trainer: str
    shape: tuple[int, ...]
    element_size: int
    cut: Literal[0, 1] | None
    qkv_rows: tuple[int, int, int] | None = None
    qkv_blocks: int = 1


@dataclass(frozen=True)
class View:
    """The engine's parameter is `trainer.narrow(dim, start, length)`; the whole tensor where dim is None."""

    meta: ParameterMeta
    dim: int | None
    start: int
    length: int

    @property
    def num_bytes(self) -> int:
        elements = self.meta.element_size
        for dim, size in enumerate(self.meta.shape):
            elements *= self.length if dim == self.dim else size
        return elements


@dataclass(frozen=True)
class LocalCopy:
    """The engine's parameter is a copy of (start, length) row ranges of the trainer's shard, in this order."""

    meta: ParameterMeta
    rows: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        elements = self.meta.element_size * sum(length for _, length in self.rows)
        for size in self.meta.shape[1:]:
            elements *= size
        return elements


@dataclass(frozen=True)
class ReshardPlan:
    """What one rank does so that its engine shard exists. Nothing in it crosses ranks."""

    views: tuple[View, ...]
    copies: tuple[LocalCopy, ...]

    @property
    def bytes_aliased(self) -> int:
        return sum(view.num_bytes for view in self.views)

    @property
    def bytes_copied(self) -> int:
        return sum(copy.num_bytes for copy in self.copies)


def plan_reshard(parameters: Sequence[ParameterMeta], blocks: int, block: int) -> ReshardPlan:
    """Plans the engine shard of one rank.

    Args:
        parameters: the engine's parameters; column-parallel weights are stored as `blocks` blocks (see ParameterMeta).
        blocks: k, rollout shards in one training shard.
        block: which of them is this rank's.
    Raises:
        ValueError: when a weight cannot be divided, naming it.
    """
    views, copies = [], []
    for meta in parameters:
        if meta.qkv_rows is not None and meta.qkv_blocks < blocks:
            copies.append(_shared_kv(meta, meta.qkv_rows, blocks, block))
        elif meta.cut is None:
            views.append(View(meta, None, 0, 0))
        else:
            size = meta.shape[meta.cut]
            if size % blocks:
                raise ValueError(f"{meta.engine}: {size} rows or columns do not divide into {blocks} rollout shards")
            length = size // blocks
            views.append(View(meta, meta.cut, block * length, length))
    return ReshardPlan(tuple(views), tuple(copies))


def _shared_kv(meta: ParameterMeta, qkv_rows: tuple[int, int, int], blocks: int, block: int) -> LocalCopy:
    """One KV head serves several rollout ranks: this rank's share of its queries, and the head's k and v."""
    q, k, v = (rows // meta.qkv_blocks for rows in qkv_rows)
    sharing = blocks // meta.qkv_blocks
    if blocks % meta.qkv_blocks or q % sharing:
        raise ValueError(f"{meta.engine}: {meta.qkv_blocks} KV blocks cannot be shared by {blocks} rollout shards")
    stored, place = divmod(block, sharing)
    start = stored * (q + k + v)
    return LocalCopy(meta, ((start + place * (q // sharing), q // sharing), (start + q, k), (start + q + k, v)))
