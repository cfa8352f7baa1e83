"""How the engine's parameters come out of the trainer's, as pure data: no process group, no tensor, no torch.

Every parameter is cut along one dimension, by both sides. What a rank needs is therefore a list of intervals, and so is
what a rank holds. An interval that the rank holds itself is never moved: if the whole parameter is one such interval it
is a *view* of the trainer's tensor, which costs nothing and never goes stale; else the parameter gets a *buffer*, which
is filled from local copies and from transfers. With rollout TP = k x training TP and one pipeline stage everything is a
view, but for qkv with fewer KV heads than rollout ranks, where each KV head is needed more than once.

Weights never leave a block of ranks (see parallel_state.placement), and layers of a stage are alike: both keep planning
for one rank cheap on any number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from parallel_state.layout import ParallelLayout


class Kind(NamedTuple):
    """What two parameters must share to be planned alike. Sizes are those of the whole model.

    Attributes:
        cut: the dimension that tensor parallelism divides; None for replicated weights.
        parts: sizes along that dimension (0 where cut is None) of the tensors fused into this one: q, k, v; gate, up.
        other: size of the other dimension; None for vectors.
        head_dim: rows of one head where the parts are q, k, v; else 0.
        blocks: blocks of [part 0; part 1; ...] that a training shard is stored in.
        element_size: bytes of one element.
    """

    cut: Literal[0, 1] | None
    parts: tuple[int, ...]
    other: int | None
    head_dim: int
    blocks: int
    element_size: int

    @property
    def unit_bytes(self) -> int:
        """Bytes of one row or column along the cut dimension."""
        return self.element_size * (self.other or 1)


@dataclass(frozen=True)
class ParameterMeta:
    """One engine parameter and the trainer's tensor that holds it.

    Attributes:
        engine: name in vLLM's model.
        trainer: name in the trainer's model.
        stages: pipeline stages that hold it (two for a tied embedding).
    """

    engine: str
    trainer: str
    kind: Kind
    stages: tuple[int, ...] = (0,)


class Segment(NamedTuple):
    """Elements [start, start + length) of one part, at `local` in a shard; along the cut dimension."""

    part: int
    start: int
    local: int
    length: int


class Piece(NamedTuple):
    """Elements [source, source + length) of training shard `tp` are [dest, dest + length) of an engine shard."""

    tp: int
    source: int
    dest: int
    length: int


class Transfer(NamedTuple):
    """A piece that crosses ranks: `peer` sends or receives it."""

    meta: ParameterMeta
    peer: int
    source: int
    dest: int
    length: int

    @property
    def num_bytes(self) -> int:
        return self.length * self.meta.kind.unit_bytes


@dataclass(frozen=True)
class View:
    """The engine's parameter is `trainer.narrow(dim, start, length)`; the whole tensor where dim is None."""

    meta: ParameterMeta
    dim: int | None
    start: int
    length: int

    @property
    def num_bytes(self) -> int:
        return self.length * self.meta.kind.unit_bytes


@dataclass(frozen=True)
class Buffer:
    """The engine's parameter has memory of its own, of `length` along the cut dimension.

    `copies` come from this rank's own shard, `receives` from other ranks.
    """

    meta: ParameterMeta
    length: int
    copies: tuple[Piece, ...]
    receives: tuple[Transfer, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        kind = self.meta.kind
        if kind.other is None:
            return (self.length,)
        return (kind.other, self.length) if kind.cut == 1 else (self.length, kind.other)


@dataclass(frozen=True)
class ReshardPlan:
    """What one rank does so that its engine shard exists. Transfers follow the order of the parameters everywhere."""

    views: tuple[View, ...]
    buffers: tuple[Buffer, ...]
    sends: tuple[Transfer, ...]

    @property
    def bytes_aliased(self) -> int:
        return sum(view.num_bytes for view in self.views)

    @property
    def bytes_copied(self) -> int:
        return sum(piece.length * buffer.meta.kind.unit_bytes for buffer in self.buffers for piece in buffer.copies)

    @property
    def bytes_received(self) -> int:
        return sum(transfer.num_bytes for buffer in self.buffers for transfer in buffer.receives)

    @property
    def bytes_sent(self) -> int:
        return sum(transfer.num_bytes for transfer in self.sends)


def training_segments(kind: Kind, tp: int, index: int) -> list[Segment]:
    """What training shard `index` of `tp` holds, in the order in which it is stored."""
    if kind.cut is None:
        return [Segment(0, 0, 0, kind.parts[0])]
    found, local = [], 0
    for block in range(kind.blocks):
        for part, size in enumerate(kind.parts):
            length, rest = divmod(size, tp * kind.blocks)
            assert not rest, (kind, tp)
            found.append(Segment(part, (index * kind.blocks + block) * length, local, length))
            local += length
    return found


def engine_segments(kind: Kind, tp: int, index: int) -> list[Segment]:
    """What engine shard `index` of `tp` needs, in vLLM's order: its part of each fused tensor, one after another."""
    if kind.cut is None:
        return [Segment(0, 0, 0, kind.parts[0])]
    found, local = [], 0
    for part, size in enumerate(kind.parts):
        shards, mine = tp, index
        if kind.head_dim and part > 0 and size // kind.head_dim < tp:
            shards = size // kind.head_dim  # a KV head for each of several engine ranks
            mine = index * shards // tp
        length, rest = divmod(size, shards)
        assert not rest, (kind, tp)
        found.append(Segment(part, mine * length, local, length))
        local += length
    return found


@lru_cache(maxsize=4096)
def pieces(kind: Kind, training_tp: int, engine_tp: int, index: int) -> tuple[Piece, ...]:
    """Where each element of an engine shard comes from, in the shard's order; neighbours in both shards are joined."""
    if kind.cut is None:
        return (Piece(-1, 0, 0, kind.parts[0]),)
    found: list[Piece] = []
    for need in engine_segments(kind, engine_tp, index):
        size = kind.parts[need.part]
        first, last = need.start * training_tp // size, (need.start + need.length - 1) * training_tp // size
        for tp in range(first, last + 1):
            for held in training_segments(kind, training_tp, tp):
                if held.part != need.part:
                    continue
                start, end = max(need.start, held.start), min(need.start + need.length, held.start + held.length)
                if start < end:
                    piece = Piece(tp, held.local + start - held.start, need.local + start - need.start, end - start)
                    found.append(piece)
    found.sort(key=lambda piece: piece.dest)
    joined: list[Piece] = []
    for piece in found:
        last_one = joined[-1] if joined else None
        if last_one and last_one.tp == piece.tp and last_one.source + last_one.length == piece.source:
            joined[-1] = last_one._replace(length=last_one.length + piece.length)
        else:
            joined.append(piece)
    return tuple(joined)


class _Routes(NamedTuple):
    """Routes of one kind in one block: for each destination (source rank in the block, piece), and by source."""

    to: tuple[tuple[tuple[int, Piece], ...], ...]
    by_source: dict[int, list[tuple[int, Piece]]]


@lru_cache(maxsize=4096)
def _routes(kind: Kind, stages: tuple[int, ...], layout: ParallelLayout, offset: int) -> _Routes:
    """Which rank of a block takes which piece from which; the block starts `offset` ranks into a node.

    A rank that holds a piece takes it from itself. Otherwise the holders in its own node come first, and of equals the
    one that has been given the least so far.
    """
    size, training_tp = layout.block_size, layout.tensor_model_parallel_size
    at = [layout.coordinates(rank) for rank in range(size)]
    node = [(offset + rank) // layout.local_world_size for rank in range(size)]
    holders: dict[int, list[int]] = {-1: [rank for rank in range(size) if at[rank].pp in stages]}
    for rank in holders[-1]:
        holders.setdefault(at[rank].tp, []).append(rank)
    load = [0] * size
    to, by_source = [], {}
    for dest in range(size):
        mine = []
        for piece in pieces(kind, training_tp, layout.rollout_tp, at[dest].rollout_tp):
            if at[dest].pp in stages and piece.tp in (-1, at[dest].tp):
                mine.append((dest, piece))
                continue
            near = [rank for rank in holders[piece.tp] if node[rank] == node[dest]] or holders[piece.tp]
            source = min(near, key=lambda rank: (load[rank], (rank - dest) % size))
            load[source] += piece.length
            mine.append((source, piece))
            by_source.setdefault(source, []).append((dest, piece))
        to.append(tuple(mine))
    return _Routes(tuple(to), by_source)


def plan_reshard(parameters: Sequence[ParameterMeta], layout: ParallelLayout, rank: int) -> ReshardPlan:
    """Plans the engine shard of one rank; every rank of a block can plan any other's part alike."""
    views, buffers, sends = [], [], []
    block, inside = divmod(rank, layout.block_size)
    base = block * layout.block_size
    offset = base % layout.local_world_size
    for meta in parameters:
        routes = _routes(meta.kind, meta.stages, layout, offset)
        mine = routes.to[inside]
        length = sum(piece.length for _, piece in mine)
        local = tuple(piece for source, piece in mine if source == inside)
        if len(local) == len(mine) == 1:
            cut = meta.kind.cut
            views.append(View(meta, cut, local[0].source, length))
        else:
            receives = tuple(
                Transfer(meta, base + source, piece.source, piece.dest, piece.length)
                for source, piece in mine
                if source != inside
            )
            buffers.append(Buffer(meta, length, local, receives))
        sends += [
            Transfer(meta, base + dest, piece.source, piece.dest, piece.length)
            for dest, piece in routes.by_source.get(inside, ())
        ]
    return ReshardPlan(tuple(views), tuple(buffers), tuple(sends))


def lower_bound(parameters: Sequence[ParameterMeta], layout: ParallelLayout, rank: int) -> int:
    """Fewest bytes that one rank must receive: unique elements of its engine shard outside its training shard.

    Counted as sets of elements, apart from the plan's intervals.
    """
    at, total = layout.coordinates(rank), 0
    for meta in parameters:
        needed = _elements(engine_segments(meta.kind, layout.rollout_tp, at.rollout_tp))
        if at.pp in meta.stages:
            needed -= _elements(training_segments(meta.kind, layout.tensor_model_parallel_size, at.tp))
        total += len(needed) * meta.kind.unit_bytes
    return total


def _elements(segments: Sequence[Segment]) -> set[tuple[int, int]]:
    return {(part, start + i) for part, start, _, length in segments for i in range(length)}
