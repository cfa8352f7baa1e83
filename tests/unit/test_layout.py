"""ParallelLayout: both grids as pure arithmetic."""

import itertools
from typing import Any

import pytest

from parallel_state import ParallelLayout
from parallel_state.placement import block_size


def test_meshes_print_both_grids() -> None:
    assert ParallelLayout(6, rollout_tensor_model_parallel_size=2).meshes() == (
        "rollout mesh (dp=3, infer_tp=2): [[0, 1], [2, 3], [4, 5]]\n"
        "train mesh (dp=6, tp=1): [[0], [1], [2], [3], [4], [5]]"
    )
    assert ParallelLayout(4, 2, rollout_tensor_model_parallel_size=4).meshes() == (
        "rollout mesh (dp=1, infer_tp=4): [[0, 1, 2, 3]]\ntrain mesh (dp=2, tp=2): [[0, 2], [1, 3]]"
    )
    assert "pp=2" in ParallelLayout(4, 1, 2).meshes()


GRIDS = list(itertools.product((1, 2, 3, 4), (1, 2, 3), (None, 1, 2, 4, 6), (1, 2), (4, 8)))


@pytest.mark.parametrize(("t", "p", "g", "copies", "node"), GRIDS)
def test_grids_partition_the_world(t: int, p: int, g: int | None, copies: int, node: int) -> None:
    """Training TP 1 to 4, 1 to 3 stages, rollout TP narrower, equal, wider and across stages."""
    world = copies * block_size(t, p, g or t * p)
    layout = ParallelLayout(world, t, p, g, local_world_size=node)
    for groups in (
        layout.tensor_parallel_ranks(),
        layout.data_parallel_ranks(),
        layout.pipeline_parallel_ranks(),
        layout.model_parallel_ranks(),
        layout.rollout_tensor_parallel_ranks(),
        layout.rollout_data_parallel_ranks(),
    ):
        assert sorted(r for group in groups for r in group) == list(range(world))
        assert all(group == sorted(group) for group in groups), "new_group sorts ranks: other orders would be lost"
    for rank in range(world):
        at = layout.coordinates(rank)
        assert layout.rank(at.tp, at.pp, at.dp) == rank
    for group in layout.rollout_tensor_parallel_ranks():
        assert group == list(range(group[0], group[0] + layout.rollout_tp))


@pytest.mark.parametrize(("t", "k", "blocks"), list(itertools.product((1, 2, 4), (1, 2, 3), (1, 2))))
def test_every_rollout_shard_lies_in_the_training_shard_of_its_rank(t: int, k: int, blocks: int) -> None:
    rows = 48
    world = t * k * blocks
    layout = ParallelLayout(world, t, rollout_tensor_model_parallel_size=t * k, local_world_size=world)
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        training = set(range(at.tp * rows // t, (at.tp + 1) * rows // t))
        n = rows // layout.rollout_tp
        assert set(range(at.rollout_tp * n, (at.rollout_tp + 1) * n)) <= training
        assert at.rollout_tp == at.tp * k + at.dp % k
        assert at.rollout_dp == at.dp // k


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((6, 4), ("--tensor-model-parallel-size 4", "world size 6")),
        ((4, 1, 3), ("--pipeline-model-parallel-size 3", "world size 4")),
        ((4, 0), ("--tensor-model-parallel-size is 0", "at least 1")),
        ((4, 1, 1, None, True), ("--sequence-parallel", "--tensor-model-parallel-size")),
        ((6, 1, 1, 4), ("--rollout-tensor-model-parallel-size 4", "world size 6")),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[Any, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        ParallelLayout(*sizes)
    for word in words:
        assert word in str(error.value)
