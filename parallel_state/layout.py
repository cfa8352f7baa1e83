"""Two grids over the same ranks, as pure arithmetic: training (TP x PP x DP) and rollout (DP x rollout TP).

Global rank order is the rollout order: a rollout group is `rollout TP` consecutive ranks, inside one node wherever
that is possible. The training grid is strided, so that a rank's rollout shard lies as far as possible inside the
training shard that it already holds (see placement.py). With t = training TP, one stage, and rollout TP = k t, ranks
are numbered

    rank = (block * t + tp) * k + replica

and the rank with training index `tp` and replica `replica` takes rollout index `tp * k + replica`, which lies wholly
inside.
"""

from dataclasses import dataclass

from parallel_state.placement import Placement, block_size, choose_placement, place, rank_at


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands in both grids."""

    tp: int
    pp: int
    dp: int
    rollout_tp: int
    rollout_dp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of both grids. Pure: needs no process group and no device.

    Attributes:
        rollout_tensor_model_parallel_size: ranks of one engine; None where nothing will be generated.
        local_world_size: ranks of one node, which share fast links.

    Raises:
        ValueError: naming the flags, their values and the rule, when the sizes do not fit each other.
    """

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    rollout_tensor_model_parallel_size: int | None = None
    sequence_parallel: bool = False
    local_world_size: int = 8

    def __post_init__(self) -> None:
        sizes = {
            "--tensor-model-parallel-size": self.tensor_model_parallel_size,
            "--pipeline-model-parallel-size": self.pipeline_model_parallel_size,
            "--rollout-tensor-model-parallel-size": self.rollout_tp,
            "the world size": self.world_size,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}: it must be at least 1")
        t, p, world = self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.world_size
        if world % (t * p):
            raise ValueError(
                f"--tensor-model-parallel-size {t} x --pipeline-model-parallel-size {p} = {t * p} "
                f"does not divide the world size {world}"
            )
        if self.sequence_parallel and t == 1:
            raise ValueError("--sequence-parallel needs --tensor-model-parallel-size of at least 2, but it is 1")
        if self.rollout_tensor_model_parallel_size is not None:
            self._check_rollout(self.rollout_tensor_model_parallel_size)

    def _check_rollout(self, rollout_tp: int) -> None:
        if self.world_size % rollout_tp:
            raise ValueError(
                f"--rollout-tensor-model-parallel-size {rollout_tp} does not divide the world size {self.world_size}"
            )

    @property
    def rollout_tp(self) -> int:
        """Ranks of one rollout engine; those of one model copy where no rollout is planned."""
        copy = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        return self.rollout_tensor_model_parallel_size or copy

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)

    @property
    def blocks(self) -> int:
        """k: rollout shards inside one training shard; 1 where rollout TP is not a multiple of training TP."""
        k, rest = divmod(self.rollout_tp, self.tensor_model_parallel_size)
        return k if not rest and self.rollout_tensor_model_parallel_size is not None else 1

    @property
    def block_size(self) -> int:
        """Ranks of the smallest run that holds whole model copies and whole engines: weights never leave it."""
        return block_size(self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.rollout_tp)

    @property
    def placement(self) -> Placement:
        """How a rank's number inside its block reads as training coordinates."""
        return choose_placement(
            self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.rollout_tp, self.local_world_size
        )

    @property
    def rollout_replicas(self) -> int:
        """Number of independent rollout engines."""
        return self.world_size // self.rollout_tp

    def coordinates(self, rank: int) -> Coordinates:
        """Both grids' indices of a global rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the world of {self.world_size}")
        block, inside = divmod(rank, self.block_size)
        at = place(self.placement, inside)
        copies = self.block_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)
        engine, index = divmod(rank, self.rollout_tp)
        return Coordinates(tp=at["tp"], pp=at["pp"], dp=block * copies + at["dp"], rollout_tp=index, rollout_dp=engine)

    def rank(self, tp: int, pp: int, dp: int) -> int:
        """Global rank of a place in the training grid; the inverse of `coordinates`."""
        copies = self.block_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)
        block, inside = divmod(dp, copies)
        return block * self.block_size + rank_at(self.placement, {"tp": tp, "pp": pp, "dp": inside})

    def tensor_parallel_ranks(self) -> list[list[int]]:
        """One list per (dp, pp): the ranks that hold one layer together, in the order of their shards."""
        return [
            [self.rank(tp, pp, dp) for tp in range(self.tensor_model_parallel_size)]
            for dp in range(self.data_parallel_size)
            for pp in range(self.pipeline_model_parallel_size)
        ]

    def data_parallel_ranks(self) -> list[list[int]]:
        """One list per (pp, tp): the ranks that hold the same shard."""
        return [
            [self.rank(tp, pp, dp) for dp in range(self.data_parallel_size)]
            for pp in range(self.pipeline_model_parallel_size)
            for tp in range(self.tensor_model_parallel_size)
        ]

    def pipeline_parallel_ranks(self) -> list[list[int]]:
        """One list per (dp, tp): the stages of one pipeline, first stage first."""
        return [
            [self.rank(tp, pp, dp) for pp in range(self.pipeline_model_parallel_size)]
            for dp in range(self.data_parallel_size)
            for tp in range(self.tensor_model_parallel_size)
        ]

    def model_parallel_ranks(self) -> list[list[int]]:
        """One list per dp: the ranks that hold one copy of the model, ascending."""
        places = [
            (tp, pp) for tp in range(self.tensor_model_parallel_size) for pp in range(self.pipeline_model_parallel_size)
        ]
        return [sorted(self.rank(tp, pp, dp) for tp, pp in places) for dp in range(self.data_parallel_size)]

    def rollout_tensor_parallel_ranks(self) -> list[list[int]]:
        """One list per engine: consecutive, ascending ranks (what vLLM makes of a world by itself)."""
        n = self.rollout_tp
        return [list(range(first, first + n)) for first in range(0, self.world_size, n)]

    def rollout_data_parallel_ranks(self) -> list[list[int]]:
        """One list per rollout TP index: the ranks with that index in every engine."""
        return [list(range(j, self.world_size, self.rollout_tp)) for j in range(self.rollout_tp)]

    def meshes(self) -> str:
        """Both grids as device meshes, two lines of text."""
        t, p = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        train = [
            [[self.rank(tp, pp, dp) for tp in range(t)] for pp in range(p)] for dp in range(self.data_parallel_size)
        ]
        rows = train if p > 1 else [stages[0] for stages in train]
        pipeline = f"pp={p}, " if p > 1 else ""
        return (
            f"rollout mesh (dp={self.rollout_replicas}, infer_tp={self.rollout_tp}): "
            f"{self.rollout_tensor_parallel_ranks()}\n"
            f"train mesh (dp={self.data_parallel_size}, {pipeline}tp={t}): {rows}"
        )
