"""Layers on pipeline stages."""

import itertools

import pytest

from moebius.models.metas import stage_starts


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (8, 1, [8]),
        (8, 4, [2, 2, 2, 2]),
        (5, 2, [3, 2]),
        (7, 4, [2, 2, 2, 1]),
        (30, 4, [7, 8, 8, 7]),
        (126, 16, [7, *[8] * 14, 7]),
        (9, 8, [2, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_every_layer_is_placed_once(layers: int, stages: int, sizes: list[int]) -> None:
    """case 1.09: 30 layers on 4 stages stay 30."""
    starts = stage_starts(layers, stages)
    assert [end - start for start, end in itertools.pairwise(starts)] == sizes
    assert starts[0] == 0 and starts[-1] == layers


def test_no_stage_is_empty() -> None:
    for stages in range(1, 17):
        for layers in range(stages, 130):
            starts = stage_starts(layers, stages)
            assert starts[-1] == layers and all(a < b for a, b in itertools.pairwise(starts)), (layers, stages)
