"""Group-relative advantages: numbers by hand, missing rewards, and groups without a signal."""

import math
import statistics

import pytest
import torch

from moebius.advantages import GROUP_EPSILON, grpo_advantages

NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "group_size", "expected"),
    [
        ([1.0], 1, [0.0]),
        ([1.0, 1.0, 1.0, 1.0], 4, [0.0, 0.0, 0.0, 0.0]),
        ([1.0, NAN, NAN, NAN], 4, [0.0, 0.0, 0.0, 0.0]),
        ([NAN, NAN, NAN, NAN], 4, [0.0, 0.0, 0.0, 0.0]),
        ([1.0, 0.0, 0.0, 0.0], 4, [1.5, -0.5, -0.5, -0.5]),
        ([1.0, NAN, 0.0, math.inf], 4, [0.70711, 0.0, -0.70711, 0.0]),
        ([1.0, 0.0, 1.0, 1.0], 2, [0.70711, -0.70711, 0.0, 0.0]),
    ],
)
def test_groups_by_hand(rewards: list[float], group_size: int, expected: list[float]) -> None:
    """case 3.04, case 3.15: n - 1 in the deviation; one finite reward has nothing to compare with and gets 0.

    Without division by the deviation the groups of size 1 and those with equal rewards give 0 too.
    """
    advantages = grpo_advantages(torch.tensor(rewards), group_size)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(expected, abs=1e-5)
    plain = grpo_advantages(torch.tensor(rewards), group_size, normalise_by_std=False)
    assert plain.isfinite().all()
    assert ((plain == 0) == (torch.tensor(expected) == 0)).all()


def test_groups_do_not_see_each_other() -> None:
    """case 3.04: the same rows whether they come in one call or in one call each, as over data parallelism."""
    rows = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, NAN, NAN, NAN], [1.0, 0.0, 0.0, 0.0], [0.1, 0.7, NAN, 0.2]])
    apart = [grpo_advantages(row, 4) for row in rows]
    assert torch.equal(grpo_advantages(rows.flatten(), 4), torch.cat(apart))
    assert torch.cat(apart).isfinite().all()


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1.0, 1 / 3, -0.2, 100.1, 1e-8])
def test_equal_rewards_give_exactly_zero(reward: float) -> None:
    """case 3.04: also where n equal fp32 numbers do not add up to n times the number in fp32."""
    for count in range(1, 65):
        assert not grpo_advantages(torch.full((count,), reward), count).any(), count


@pytest.mark.parametrize("normalise_by_std", [True, False])
def test_equals_the_definition_in_float64(normalise_by_std: bool) -> None:
    rewards = torch.rand(6, 8, generator=torch.Generator().manual_seed(2))
    expected = []
    for row in rewards.tolist():
        scale = statistics.stdev(row) + GROUP_EPSILON if normalise_by_std else 1.0
        expected += [(value - statistics.fmean(row)) / scale for value in row]
    assert grpo_advantages(rewards.flatten(), 8, normalise_by_std).tolist() == pytest.approx(expected, rel=1e-5)


def test_documented_epsilon_is_the_one_that_shows() -> None:
    """case 3.05: 1e-6 gives 0.62, where 1e-4 would give 0.047 and 1e-8 0.71."""
    assert GROUP_EPSILON == 1e-6 and "1e-6" in (grpo_advantages.__doc__ or "")
    assert grpo_advantages(torch.tensor([1.0, 1.00001]), 2).tolist() == pytest.approx([-0.62, 0.62], abs=0.005)


def test_rewards_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="5 rewards .* --n-samples-per-prompt 2"):
        grpo_advantages(torch.ones(5), 2)
