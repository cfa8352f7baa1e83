"""Which rows come when: batches that resume exactly, mixtures of sources, shares of replicas, and request seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

DRAWS_AT_A_TIME = 4096


def _generator(seed: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


class _Order:
    """An endless order over `num_rows` rows from `first` on, each once an epoch; `key` keeps sources apart."""

    def __init__(self, first: int, num_rows: int, seed: int, shuffle: bool, key: tuple[int, ...] = ()) -> None:
        self.first, self.num_rows, self.seed, self.shuffle, self.key = first, num_rows, seed, shuffle, key
        self._epoch = -1
        self._rows: list[int] = []

    def row(self, dealt: int) -> int:
        """The row that follows after `dealt` rows."""
        epoch, place = divmod(dealt, self.num_rows)
        if epoch != self._epoch:
            self._epoch = epoch
            rows = np.arange(self.num_rows)
            if self.shuffle:
                rows = _generator(self.seed, epoch, *self.key).permutation(self.num_rows)
            self._rows = (rows + self.first).tolist()
        return self._rows[place]


class PromptSampler:
    """An endless order over rows, dealt in batches, that resumes exactly where it stopped. The same on every rank.

    Without weights an epoch holds each row once, shuffled by (seed, epoch). With weights every position of a batch
    draws a source with its weight's share, and each source runs through epochs of its own. A batch may run over the
    end of an epoch.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        *,
        rows_of_sources: Sequence[int] = (),
        weights: Sequence[float] = (),
        rows_read: int | None = None,
    ) -> None:
        """
        Args:
            rows_of_sources: rows of each source; the sources follow one another.
            weights: one for each source, or none.
            rows_read: how many rows there were before overlong ones were dropped, for the message.

        Raises:
            ValueError: fewer rows than a batch needs, or a negative seed.
        """
        if batch_size > num_rows:
            dropped = (rows_read or num_rows) - num_rows
            before = f" ({rows_read} before {dropped} overlong ones were dropped)" if dropped else ""
            raise ValueError(
                f"--rollout-batch-size {batch_size}: more than the {num_rows} rows of --prompt-data{before}"
            )
        if seed < 0:
            raise ValueError(f"--rollout-seed {seed}: must be 0 or more")
        assert batch_size > 0 and len(weights) in (0, len(rows_of_sources))
        assert not rows_of_sources or sum(rows_of_sources) == num_rows
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.rows_of_sources = list(rows_of_sources)
        self.weights = [float(weight) for weight in weights]
        self.consumed = 0
        if self.weights:
            ends = np.cumsum(self.rows_of_sources).tolist()
            self._orders = [
                _Order(end - rows, rows, seed, shuffle, (place,))
                for place, (end, rows) in enumerate(zip(ends, self.rows_of_sources, strict=True))
            ]
            self._bounds = np.cumsum(self.weights) / np.sum(self.weights)
        else:
            self._orders = [_Order(0, num_rows, seed, shuffle)]
            self._bounds = np.ones(1)
        self._dealt = [0] * len(self._orders)
        self._draws: tuple[int, list[int]] = (-1, [])

    def _source(self, position: int) -> int:
        """The source that the run's batch position `position` takes its row from."""
        if not self.weights:
            return 0
        block, place = divmod(position, DRAWS_AT_A_TIME)
        if block != self._draws[0]:
            draws = _generator(self.seed, block, 0, 0).random(DRAWS_AT_A_TIME)
            self._draws = (block, np.searchsorted(self._bounds, draws, side="right").tolist())
        return self._draws[1][place]

    def next_batch(self) -> list[int]:
        """The next `batch_size` row indices."""
        batch: list[int] = []
        for _ in range(self.batch_size):
            source = self._source(self.consumed)
            batch.append(self._orders[source].row(self._dealt[source]))
            self._dealt[source] += 1
            self.consumed += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """All that the order depends on, and how many rows were dealt; JSON holds it."""
        return {
            "consumed": self.consumed,
            "dealt": list(self._dealt),
            "num_rows": self.num_rows,
            "rows_of_sources": list(self.rows_of_sources),
            "weights": list(self.weights),
            "seed": self.seed,
            "shuffle": int(self.shuffle),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the row that `state` ends with; the batch size may differ from the saved run's.

        Raises ValueError when the rows, the weights, the seed or the shuffling differ from the saved run's.
        """
        mine = self.state_dict()
        for key, option in (
            ("num_rows", "--prompt-data"),
            ("rows_of_sources", "--prompt-data"),
            ("weights", "--prompt-data-weights"),
            ("seed", "--rollout-seed"),
            ("shuffle", "--rollout-shuffle"),
        ):
            if mine[key] != state[key]:
                raise ValueError(
                    f"{option}: the checkpoint was saved with {key} {state[key]} and this run has {mine[key]}, "
                    "so the order of the prompts cannot go on"
                )
        self.consumed = state["consumed"]
        self._dealt = list(state["dealt"])


def replica_rows(num_rows: int, replica: int, num_replicas: int) -> list[int]:
    """The rows that a replica evaluates: over all replicas every row exactly once, shares differing by one at most."""
    assert 0 <= replica < num_replicas
    return list(range(replica, num_rows, num_replicas))


def request_seed(run_seed: int, step: int, prompt_position: int, n_samples: int, purpose: str = "rollout") -> int:
    """The sampling seed of one request, whose sample i draws with seed + i (as vLLM does for n > 1).

    Within a step the requests take consecutive ranges of `n_samples` seeds from a 62-bit hash of purpose, run
    seed and step, so no two samples of a step share a seed, on whatever rank they are drawn. Ranges rather than a
    hash of each request, because torch's CPU generator looks at the low 32 bits only, where hashes would collide.

    prompt_position: place in the global batch of the step, so that one prompt taken twice gets different samples.
    purpose: keeps evaluation apart from training.
    """
    assert prompt_position >= 0 and n_samples > 0
    digest = hashlib.blake2b(f"{purpose}/{run_seed}/{step}".encode(), digest_size=8).digest()
    base = int.from_bytes(digest, "big") >> 2
    return (base + prompt_position * n_samples) % 2**62
