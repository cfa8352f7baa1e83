"""The plan of the exchange and the form in which samples travel (the exchange itself: test_arithmetic.py)."""

import math
import random
import struct

import pytest

from moebius.batches import Sample
from moebius.exchange import _decode, _encode, plan_exchange

RANDOM = random.Random(9)


def lengths(count: int, longest: int) -> list[int]:
    return [RANDOM.randint(2, longest) for _ in range(count)]


@pytest.mark.parametrize(
    ("sizes", "per_update", "dp"),
    [
        (lengths(16, 9), 16, 1),
        (lengths(16, 9), 8, 2),
        (lengths(24, 300), 8, 4),
        (lengths(60, 40), 12, 3),
        ([2] * 7 + [100], 8, 4),
        (lengths(8, 9), 8, 8),
    ],
)
def test_plan_gives_every_update_its_range_and_balances_tokens(sizes: list[int], per_update: int, dp: int) -> None:
    plan = plan_exchange(sizes, per_update, dp)
    assert plan == plan_exchange(tuple(sizes), per_update, dp), "every rank makes the same plan"
    assert list(plan.update) == [i // per_update for i in range(len(sizes))]
    assert len(plan.dp) == len(sizes) and set(plan.dp) == set(range(dp))
    for update in range(len(sizes) // per_update):
        members = [i for i in range(len(sizes)) if plan.update[i] == update]
        loads = [sum(sizes[i] for i in members if plan.dp[i] == rank) for rank in range(dp)]
        assert min(loads) > 0, "no rank is left without a sample"
        assert max(loads) - min(loads) <= max(sizes[i] for i in members)


def test_plan_of_one_update_does_not_depend_on_the_others() -> None:
    first, second = lengths(8, 50), lengths(8, 50)
    both = plan_exchange([*first, *second], 8, 2)
    assert both.dp == plan_exchange(first, 8, 2).dp + plan_exchange(second, 8, 2).dp


def bits(values: list[float]) -> list[bytes]:
    return [struct.pack("<f", value) for value in values]


def test_samples_travel_bit_for_bit() -> None:
    """fp32 values, the strange ones too: -0.0, the smallest and the largest number, infinities, NaN."""
    strange = [-0.0, 2.0**-149, -(2.0**-126), 3.4028234663852886e38, math.inf, -math.inf, math.nan, -1.25]
    sample = Sample([0, 2**31 - 1, 5], list(range(100, 108)), strange, advantage=-0.0, reward=1.0 / 1024)
    words = _encode(sample)
    assert words.dtype.name == "int32" and len(words) == 3 + 2 * 8 + 2
    back = _decode(words, 3, 8)
    assert back.prompt_ids == sample.prompt_ids and back.response_ids == sample.response_ids
    assert bits(list(back.rollout_log_probs)) == bits(strange)
    assert bits([back.advantage, back.reward]) == bits([sample.advantage, sample.reward])
    assert back.loss_mask is back.old_log_probs is back.ref_log_probs is None


def test_what_would_be_lost_on_the_way_is_refused() -> None:
    """Only some samples travel, so a field that is not carried would differ between ranks without a word."""
    with pytest.raises(AssertionError, match="loss masks"):
        _encode(Sample([1], [2, 3], [-1.0, -1.0], loss_mask=[1, 0]))
    with pytest.raises(AssertionError, match="one log-prob a response token"):
        _encode(Sample([1], [2, 3]))
