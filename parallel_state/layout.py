"""Two grids over the same ranks, as pure arithmetic: training (TP x PP x DP) and rollout (DP x rollout TP).

Global rank order is the rollout order: a rollout group is `rollout TP` consecutive ranks, inside one node wherever
that is possible. The training grid is the strided one. With t = training TP, p = pipeline stages and
k = rollout TP / (t p), ranks are numbered

    rank = ((block * t + tp) * k + replica) * p + stage

so that the rank with training index `tp` and replica `replica` takes rollout index `tp * k + replica`: every rollout
shard then lies inside the training shard that the rank already holds.
"""

from dataclasses import dataclass


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

    Raises:
        ValueError: naming the flags, their values and the rule, when the sizes do not fit each other.
    """

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    rollout_tensor_model_parallel_size: int | None = None
    sequence_parallel: bool = False

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
        t, p, world = self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.world_size
        if rollout_tp % t:
            raise ValueError(
                f"--rollout-tensor-model-parallel-size {rollout_tp} is not a multiple of --tensor-model-parallel-size "
                f"{t}: the engine's weights are views of the trainer's, so rollout TP = k x training TP with k >= 1"
            )
        if p > 1:
            raise ValueError(
                f"--pipeline-model-parallel-size {p} cannot generate yet: views of the trainer's weights need every "
                "layer on every rank, so rollouts want --pipeline-model-parallel-size 1"
            )
        if world % rollout_tp:
            raise ValueError(
                f"--rollout-tensor-model-parallel-size {rollout_tp} does not divide the world size {world}"
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
        """k: rollout shards inside one training shard, equal to the replicas that one rollout engine spans."""
        return self.rollout_tp // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)

    @property
    def rollout_replicas(self) -> int:
        """Number of independent rollout engines."""
        return self.world_size // self.rollout_tp

    def coordinates(self, rank: int) -> Coordinates:
        """Both grids' indices of a global rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the world of {self.world_size}")
        t, p, k = self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.blocks
        rest, stage = divmod(rank, p)
        rest, replica = divmod(rest, k)
        block, tp = divmod(rest, t)
        return Coordinates(
            tp=tp, pp=stage, dp=block * k + replica, rollout_tp=(tp * k + replica) * p + stage, rollout_dp=block
        )

    def rank(self, tp: int, pp: int, dp: int) -> int:
        """Global rank of a place in the training grid; the inverse of `coordinates`."""
        block, replica = divmod(dp, self.blocks)
        return (
            (block * self.tensor_model_parallel_size + tp) * self.blocks + replica
        ) * self.pipeline_model_parallel_size + pp

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
        """One list per dp: the ranks that hold one copy of the model."""
        return [
            [
                self.rank(tp, pp, dp)
                for tp in range(self.tensor_model_parallel_size)
                for pp in range(self.pipeline_model_parallel_size)
            ]
            for dp in range(self.data_parallel_size)
        ]

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
