"""Which rank takes which place of the training grid, given that rollout groups are consecutive ranks. Pure.

The world is made of equal *blocks*: the smallest runs of ranks that hold whole model copies and whole rollout engines.
Inside a block a rank's number is read as digits in mixed radix, each digit a factor of one training axis. The search
runs over the orders of these digits and takes the order in which the fewest bytes have to move when the layout
changes.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import lcm
from typing import NamedTuple


class Digit(NamedTuple):
    """A factor of an axis: `coordinates[axis] += value * weight`, with value in [0, size)."""

    axis: str
    size: int
    weight: int


Placement = tuple[Digit, ...]  # slowest first


def block_size(tp: int, pp: int, rollout_tp: int) -> int:
    """Ranks of one block."""
    return lcm(tp * pp, rollout_tp)


def place(placement: Placement, rank: int) -> dict[str, int]:
    """Coordinates of a rank inside its block."""
    found = {"tp": 0, "pp": 0, "dp": 0}
    for axis, size, weight in reversed(placement):
        rank, value = divmod(rank, size)
        found[axis] += value * weight
    return found


def rank_at(placement: Placement, at: dict[str, int]) -> int:
    """Inverse of `place`."""
    rank = 0
    for axis, size, weight in placement:
        rank = rank * size + at[axis] // weight % size
    return rank


@lru_cache(maxsize=256)
def choose_placement(tp: int, pp: int, rollout_tp: int, node_size: int) -> Placement:
    """The order of axes with the lowest cost: (training TP groups that leave a node, share of a model copy that moves
    between nodes, share that moves at all, number of digits). Of equals the first: TP slowest, stages fastest.

    Process groups keep their ranks in ascending order, so an axis' digits come in falling weight.

    Args:
        node_size: consecutive ranks that share fast links.
    """
    size = block_size(tp, pp, rollout_tp)
    best: tuple[tuple[float, ...], Placement] | None = None
    for placement in _orders(tp, size // (tp * pp), pp):
        cost = _cost(placement, tp, pp, rollout_tp, size, node_size)
        if best is None or cost < best[0]:
            best = (cost, placement)
    assert best is not None
    return best[1]


def _orders(tp: int, dp: int, pp: int) -> Iterator[Placement]:
    """Every merge of the axes' digits, each axis whole or in two factors."""
    seen = set()
    for axes in ((t, d, p) for t in _factors("tp", tp) for d in _factors("dp", dp) for p in _factors("pp", pp)):
        for merged in _merges(axes):
            if merged not in seen:
                seen.add(merged)
                yield merged


def _factors(axis: str, size: int) -> list[Placement]:
    whole = [(Digit(axis, size, 1),) if size > 1 else ()]
    splits = [(Digit(axis, size // n, n), Digit(axis, n, 1)) for n in range(2, size) if size % n == 0]
    return [*whole, *splits]


def _merges(axes: tuple[Placement, ...]) -> Iterator[Placement]:
    """Orders of all digits that keep each axis' own order; an axis that comes earlier goes first."""
    axes = tuple(axis for axis in axes if axis)
    if not axes:
        yield ()
        return
    for index, axis in enumerate(axes):
        for rest in _merges((*axes[:index], axis[1:], *axes[index + 1 :])):
            yield (axis[0], *rest)


def _cost(placement: Placement, tp: int, pp: int, rollout_tp: int, size: int, node_size: int) -> tuple[float, ...]:
    """See `choose_placement`; every stage counts as an equal part of a tensor cut evenly over TP."""
    at = [place(placement, rank) for rank in range(size)]
    nodes_of_tp: dict[tuple[int, int], set[int]] = {}
    holders: dict[tuple[int, int], set[int]] = {}
    for rank, c in enumerate(at):
        nodes_of_tp.setdefault((c["dp"], c["pp"]), set()).add(rank // node_size)
        holders.setdefault((c["tp"], c["pp"]), set()).add(rank // node_size)
    leaving = sum(len(nodes) - 1 for nodes in nodes_of_tp.values()) if tp <= node_size else 0
    moved = far = 0
    for rank, c in enumerate(at):
        index = (
            rank % rollout_tp
        )  # shard [index / rollout_tp, (index + 1) / rollout_tp), in units of 1 / (tp rollout_tp)
        for shard in range(index * tp // rollout_tp, -(-(index + 1) * tp // rollout_tp)):
            overlap = min((index + 1) * tp, (shard + 1) * rollout_tp) - max(index * tp, shard * rollout_tp)
            for stage in range(pp):
                if (shard, stage) == (c["tp"], c["pp"]):
                    continue
                moved += overlap
                if rank // node_size not in holders[shard, stage]:
                    far += overlap
    return leaving, far, moved, len(placement)
