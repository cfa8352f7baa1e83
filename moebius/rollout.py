"""Generation of a step's samples, their rewards, and evaluation. Ids stay as sampled; text is made for rewards only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybrid_engine.engine import Generation, HybridEngine, Request
from moebius.batches import Sample
from moebius.data import Prompt, Prompts, replica_rows, request_seed
from moebius.rewards import RewardItem, RewardPool
from parallel_state.groups import ParallelState


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled. `stop_token_ids` empty generates to the full length."""

    n_samples: int
    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Rollout:
    """This engine's part of a step: samples by global index (position in the step's batch * n + sample)."""

    samples: dict[int, Sample]
    prompts: dict[int, Prompt]
    generations: dict[int, Generation]


def generate(
    engine: HybridEngine, state: ParallelState, batch: Sequence[Prompt], sampling: Sampling, step: int, purpose: str
) -> Rollout:
    """Samples n responses to each of this engine's share of the batch. Collective over the rollout group.

    Args:
        batch: the whole step's prompts, the same on every rank.
        step, purpose: enter the seeds, with the run's seed, the prompt's position and the sample's number.
    """
    n = sampling.n_samples
    requests, indices, prompts = [], [], {}
    for position in replica_rows(len(batch), state.at.rollout_dp, state.layout.rollout_replicas):
        seed, prompt = request_seed(sampling.seed, step, position, n, purpose), batch[position]
        for number in range(n):
            indices.append(position * n + number)
            prompts[indices[-1]] = prompt
            requests.append(
                Request(
                    prompt_ids=prompt.token_ids,
                    seed=seed + number,
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    stop_token_ids=sampling.stop_token_ids,
                )
            )
    generations = dict(zip(indices, engine.generate(requests), strict=True))
    samples = {
        index: Sample(prompts[index].token_ids, made.token_ids, made.log_probs) for index, made in generations.items()
    }
    return Rollout(samples, prompts, generations)


def score(rollout: Rollout, rewards: RewardPool, tokenizer: Any, state: ParallelState) -> dict[str, float]:
    """Fills in the rewards; the ranks of an engine share the work. Collective over the rollout group.

    Returns:
        counts over this engine's samples: `timeouts` and `errors` of the reward.
    """
    indices = sorted(rollout.samples)
    mine = indices[state.at.rollout_tp :: state.layout.rollout_tp]
    items = [
        RewardItem(
            prompt=rollout.prompts[index].text,
            response=tokenizer.decode(rollout.samples[index].response_ids, skip_special_tokens=True),
            label=rollout.prompts[index].label,
            metadata=rollout.prompts[index].metadata,
        )
        for index in mine
    ]
    result = rewards.score(items)
    parts: list[Any] = [None] * state.layout.rollout_tp
    dist.all_gather_object(parts, (mine, result.rewards, result.timeouts, result.errors), group=state.rollout.tp)
    for scored, values, _, _ in parts:
        for index, value in zip(scored, values, strict=True):
            rollout.samples[index].reward = value
    return {"timeouts": float(sum(p[2] for p in parts)), "errors": float(sum(p[3] for p in parts))}


def permute_rewards(rollout: Rollout, seed: int, step: int) -> None:
    """Control experiment: hands the rewards of this engine's samples to one another, so that nothing can be learned."""
    indices = sorted(rollout.samples)
    rewards = [rollout.samples[index].reward for index in indices]
    order = np.random.default_rng([seed, step, indices[0]]).permutation(len(indices))
    for index, source in zip(indices, order, strict=True):
        rollout.samples[index].reward = rewards[source]


def rollout_metrics(
    rollout: Rollout, counts: dict[str, float], n_samples: int, state: ParallelState, device: torch.device
) -> dict[str, float]:
    """Means and counts over the whole step, on every rank. Collective over the world."""
    indices = sorted(rollout.samples)
    samples = [rollout.samples[i] for i in indices]
    generations = [rollout.generations[i] for i in indices]
    groups = [samples[first : first + n_samples] for first in range(0, len(samples), n_samples)]
    identical = [n_samples > 1 and len({tuple(s.response_ids) for s in group}) == 1 for group in groups]
    sums = {
        "samples": len(samples),
        "reward": sum(s.reward for s in samples),
        "response_tokens": sum(len(s.response_ids) for s in samples),
        "truncated": sum(not g.finished for g in generations),
        "prompt_tokens_computed": sum(g.prompt_tokens_computed for g in generations),
        "groups": len(groups),
        "identical": sum(identical),
        "no_signal": sum(len({s.reward for s in group}) == 1 for group in groups),
        **counts,
    }
    total = world_sums(sums, state, device)
    return {
        "reward/mean": total["reward"] / total["samples"],
        "reward/timeouts": total["timeouts"],
        "reward/errors": total["errors"],
        "rollout/response_length_mean": total["response_tokens"] / total["samples"],
        "rollout/response_tokens": total["response_tokens"],
        "rollout/truncated_share": total["truncated"] / total["samples"],
        "rollout/prompt_tokens_computed": total["prompt_tokens_computed"],
        "rollout/identical_groups": total["identical"],
        "rollout/no_signal_groups": total["no_signal"],
    }


def world_sums(sums: dict[str, float], state: ParallelState, device: torch.device) -> dict[str, float]:
    """Adds up numbers that all ranks of an engine share, over the engines. Collective over the world."""
    values = torch.tensor([float(v) for v in sums.values()], dtype=torch.float64, device=device)
    if state.at.rollout_tp != 0:
        values.zero_()
    dist.all_reduce(values)
    return dict(zip(sums, values.tolist(), strict=True))


def evaluate(
    engine: HybridEngine,
    state: ParallelState,
    prompts: Prompts,
    sampling: Sampling,
    rewards: RewardPool,
    tokenizer: Any,
    step: int,
    device: torch.device,
) -> dict[str, float]:
    """Mean reward over every row exactly once, and of each source where there are several.

    Collective over the world; the engine must be awake.
    """
    rollout = generate(engine, state, prompts, sampling, step, "eval")
    counts = score(rollout, rewards, tokenizer, state)
    sums = {"n": len(rollout.samples), "reward": sum(s.reward for s in rollout.samples.values()), **counts}
    names = prompts.sources if len(prompts.sources) > 1 else ()
    for name in names:
        mine = [index for index, prompt in rollout.prompts.items() if prompt.source == name]
        sums[f"{name}/n"] = len(mine)
        sums[f"{name}/accuracy"] = sum(rollout.samples[index].reward for index in mine)
    total = world_sums(sums, state, device)
    of_sources = {f"eval/{name}/accuracy": total[f"{name}/accuracy"] / total[f"{name}/n"] for name in names}
    return {
        **of_sources,
        **{f"eval/{name}/n": total[f"{name}/n"] for name in names},
        "eval/accuracy": total["reward"] / total["n"],
        "eval/n": total["n"],
        "eval/reward_timeouts": total["timeouts"],
        "eval/reward_errors": total["errors"],
    }
