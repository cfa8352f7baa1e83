"""From the rollout grid to the training grid: which rank trains on which sample (pure), and the exchange that follows.

Every rank of a rollout engine holds all samples of that engine, so only samples that another engine made are sent: rank
j of engine a sends them to rank j of engine b, which stands for one data-parallel replica inside that engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moebius.batches import Sample, balanced_bins
from parallel_state.groups import ParallelState


@dataclass(frozen=True)
class ExchangePlan:
    """Where every sample of the step goes.

    Attributes:
        update: the optimizer step that uses each sample.
        dp: the data-parallel rank that trains on it.
    """

    update: tuple[int, ...]
    dp: tuple[int, ...]


def plan_exchange(lengths: Sequence[int], samples_per_update: int, data_parallel_size: int) -> ExchangePlan:
    """Consecutive samples form an update; inside an update token counts are balanced over data parallelism.

    Args:
        lengths: tokens of every sample of the step, in global order.
        samples_per_update: --global-batch-size; divides the number of samples.
    """
    assert len(lengths) % samples_per_update == 0, (len(lengths), samples_per_update)
    update = tuple(index // samples_per_update for index in range(len(lengths)))
    dp = [0] * len(lengths)
    for first in range(0, len(lengths), samples_per_update):
        for rank, group in enumerate(balanced_bins(lengths[first : first + samples_per_update], data_parallel_size)):
            for offset in group:
                dp[first + offset] = rank
    return ExchangePlan(update, tuple(dp))


def _encode(sample: Sample) -> np.ndarray:
    """A sample as int32 words; floats keep their bits."""
    assert sample.loss_mask is None, "the exchange does not carry loss masks"
    assert len(sample.rollout_log_probs) == len(sample.response_ids), "one log-prob a response token"
    floats = np.array([sample.advantage, sample.reward, *sample.rollout_log_probs], dtype=np.float32).view(np.int32)
    return np.concatenate([np.array([*sample.prompt_ids, *sample.response_ids], dtype=np.int32), floats])


def _decode(words: np.ndarray, prompt: int, response: int) -> Sample:
    ids = words[: prompt + response].tolist()
    floats = words[prompt + response :].view(np.float32).tolist()
    return Sample(ids[:prompt], ids[prompt:], rollout_log_probs=floats[2:], advantage=floats[0], reward=floats[1])


def exchange_samples(
    samples: dict[int, Sample], total: int, samples_per_update: int, state: ParallelState, device: torch.device
) -> list[list[Sample]]:
    """Hands every rank the samples that it trains on. Collective over the world.

    Args:
        samples: this engine's samples by global index, the same on all its ranks.
        total: samples of the step over all engines.
    Returns:
        for each optimizer step the samples of this rank's data-parallel replica, in global order.
    """
    sizes = torch.zeros(total, 3, dtype=torch.long, device=device)
    for index, sample in samples.items():
        row = [len(sample.prompt_ids), len(sample.response_ids), state.at.rollout_dp]
        sizes[index] = torch.tensor(row, device=device)
    dist.all_reduce(sizes, group=state.rollout.dp)
    table: list[list[int]] = sizes.tolist()
    plan = plan_exchange([p + r for p, r, _ in table], samples_per_update, state.layout.data_parallel_size)
    # all ranks of an engine have its samples, so this rank talks to those of its own index in the other engines only
    layout, engines = state.layout, state.layout.rollout_replicas
    engines_of: dict[int, list[int]] = {}
    for engine in range(engines):
        at = layout.coordinates(engine * layout.rollout_tp + state.at.rollout_tp)
        engines_of.setdefault(at.dp, []).append(engine)
    to_engine: list[list[int]] = [[] for _ in range(engines)]
    from_engine: list[list[int]] = [[] for _ in range(engines)]
    for index, (dp, (_, _, owner)) in enumerate(zip(plan.dp, table, strict=True)):
        if owner == state.at.rollout_dp:
            for engine in engines_of.get(dp, ()):
                to_engine[engine].append(index)
        if dp == state.at.dp:
            from_engine[owner].append(index)
    kept = {index: samples[index] for index in to_engine[state.at.rollout_dp]}
    to_engine[state.at.rollout_dp] = from_engine[state.at.rollout_dp] = []
    if engines > 1:
        kept.update(_all_to_all(samples, to_engine, from_engine, table, state, device))
    updates: list[list[Sample]] = [[] for _ in range(total // samples_per_update)]
    for index in sorted(kept):
        updates[plan.update[index]].append(kept[index])
    return updates


def _all_to_all(
    samples: dict[int, Sample],
    to_engine: list[list[int]],
    from_engine: list[list[int]],
    table: list[list[int]],
    state: ParallelState,
    device: torch.device,
) -> dict[int, Sample]:
    words = [[2 * r + p + 2 for p, r, _ in (table[i] for i in group)] for group in from_engine]
    empty = np.zeros(0, dtype=np.int32)
    outgoing = [np.concatenate([_encode(samples[i]) for i in group] or [empty]) for group in to_engine]
    send: Tensor = torch.from_numpy(np.concatenate(outgoing)).to(device)
    receive = torch.empty(sum(map(sum, words)), dtype=torch.int32, device=device)
    dist.all_to_all_single(
        receive,
        send,
        output_split_sizes=[sum(group) for group in words],
        input_split_sizes=[len(part) for part in outgoing],
        group=state.rollout.dp,
    )
    received, found, start = receive.cpu().numpy(), {}, 0
    for group, lengths in zip(from_engine, words, strict=True):
        for index, length in zip(group, lengths, strict=True):
            prompt, response, _ = table[index]
            found[index] = _decode(received[start : start + length], prompt, response)
            start += length
    return found
