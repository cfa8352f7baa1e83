"""Several rewards as one: the total of a sample is the weighted sum of its rewards."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from moebius.rewards.pool import RewardPool, RewardResult
from moebius.rewards.specs import RewardItem, RewardSpec


@dataclass(frozen=True)
class Scores:
    """Totals in the order of the items, and each reward's own result by its name."""

    totals: list[float]
    parts: dict[str, RewardResult]


class Rewards:
    """One pool of workers for each reward, scored one after another: all samples by the first, then by the next.

    All workers start at once and load while the caller goes on.
    """

    def __init__(self, specs: Sequence[RewardSpec], num_workers: int, timeout_seconds: float) -> None:
        self.specs = tuple(specs)
        self.grouped = any(spec.grouped for spec in specs)
        self._pools = {spec.name: RewardPool(spec, num_workers, timeout_seconds) for spec in specs}

    def wait_until_ready(self) -> None:
        """Returns when every worker has loaded its reward. Rank 0 prints what a reward has to say of this system.

        Raises:
            RuntimeError: as `RewardPool.wait_until_ready`.
        """
        for pool in self._pools.values():
            for notice in pool.wait_until_ready():
                if os.environ.get("RANK", "0") == "0":
                    print(notice, flush=True)

    def score(self, items: Sequence[RewardItem], group_size: int = 1) -> Scores:
        """Scores the items; with grouped rewards, `group_size` items in a row are the samples of one prompt.

        What failed counts 0. The first traceback of each reward is printed, once a call.

        Raises:
            RuntimeError: as `RewardPool.score`.
        """
        parts = {name: pool.score(items, group_size) for name, pool in self._pools.items()}
        for name, part in parts.items():
            if part.first_error is not None:
                print(
                    f"reward {name}: {part.errors} of {len(items)} samples failed and count 0. The first:\n"
                    f"{part.first_error.rstrip()}",
                    file=sys.stderr,
                    flush=True,
                )
        return Scores(weighted_sum(self.specs, {name: part.rewards for name, part in parts.items()}), parts)

    def close(self) -> None:
        """Ends all workers."""
        for pool in self._pools.values():
            pool.close()


def weighted_sum(specs: Sequence[RewardSpec], rewards: dict[str, list[float]]) -> list[float]:
    """The sum over the rewards of weight times reward, for each sample."""
    columns = [[spec.weight * reward for reward in rewards[spec.name]] for spec in specs]
    return [sum(sample) for sample in zip(*columns, strict=True)]
