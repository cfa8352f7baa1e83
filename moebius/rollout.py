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
from moebius.rewards import RewardItem, Rewards, Scores
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
    """This engine's part of a step: samples by global index (position in the step's batch * n_samples + sample)."""

    samples: dict[int, Sample]
    prompts: dict[int, Prompt]
    generations: dict[int, Generation]
    n_samples: int


@dataclass(frozen=True)
class Scored:
    """What the rewards said of this engine's samples, to be added up over the engines.

    sums: for each reward NAME, `sum/NAME` of its rewards, `timeouts/NAME` and `errors/NAME` (counts). tracebacks: the
    first error of each reward on this rank.
    """

    sums: dict[str, float]
    tracebacks: dict[str, str]


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
    return Rollout(samples, prompts, generations, n)


def score(rollout: Rollout, rewards: Rewards, tokenizer: Any, state: ParallelState) -> Scored:
    """Fills in the total rewards; the ranks of an engine share the work. Collective over the rollout group."""
    indices = sorted(rollout.samples)
    # Functions for groups need all samples of a prompt, which lie side by side.
    size = rollout.n_samples if rewards.grouped else 1
    units = [indices[first : first + size] for first in range(0, len(indices), size)]
    mine = [index for unit in units[state.at.rollout_tp :: state.layout.rollout_tp] for index in unit]
    items = [
        RewardItem(
            prompt=rollout.prompts[index].text,
            response=tokenizer.decode(rollout.samples[index].response_ids, skip_special_tokens=True),
            label=rollout.prompts[index].label,
            metadata=rollout.prompts[index].metadata,
        )
        for index in mine
    ]
    scores = rewards.score(items, size)
    parts: list[Any] = [None] * state.layout.rollout_tp
    dist.all_gather_object(parts, (mine, scores.totals, _sums(scores)), group=state.rollout.tp)
    for scored, totals, _ in parts:
        for index, total in zip(scored, totals, strict=True):
            rollout.samples[index].reward = total
    sums = {name: float(sum(part[2][name] for part in parts)) for name in parts[0][2]}
    return Scored(sums, {name: part.first_error for name, part in scores.parts.items() if part.first_error})


def _sums(scores: Scores) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, part in scores.parts.items():
        sums |= {f"sum/{name}": sum(part.rewards), f"timeouts/{name}": part.timeouts, f"errors/{name}": part.errors}
    return sums


def reward_metrics(total: dict[str, float], scored: Scored, n: float) -> dict[str, float]:
    """`timeouts` and `errors` over all rewards, and for several rewards `NAME/mean`, `NAME/timeouts`, `NAME/errors`.

    Args:
        total: `scored.sums` over all engines. n: samples over all engines.

    Raises:
        RuntimeError: a reward failed for every sample, which is a bug in it and no answer of the model's.
    """
    names = [key.removeprefix("errors/") for key in scored.sums if key.startswith("errors/")]
    metrics = {kind: sum(total[f"{kind}/{name}"] for name in names) for kind in ("timeouts", "errors")}
    for name in names:
        if total[f"errors/{name}"] == n:
            seen = scored.tracebacks.get(name, "its traceback is shown by another rank")
            raise RuntimeError(f"reward {name} failed for every one of {n:.0f} samples:\n{seen}")
        if len(names) > 1:
            metrics[f"{name}/mean"] = total[f"sum/{name}"] / n
            metrics |= {f"{name}/{kind}": total[f"{kind}/{name}"] for kind in ("timeouts", "errors")}
    return metrics


def permute_rewards(rollout: Rollout, seed: int, step: int) -> None:
    """Control experiment: hands the rewards of this engine's samples to one another, so that nothing can be learned."""
    indices = sorted(rollout.samples)
    rewards = [rollout.samples[index].reward for index in indices]
    order = np.random.default_rng([seed, step, indices[0]]).permutation(len(indices))
    for index, source in zip(indices, order, strict=True):
        rollout.samples[index].reward = rewards[source]


def rollout_metrics(rollout: Rollout, scored: Scored, state: ParallelState, device: torch.device) -> dict[str, float]:
    """Means and counts over the whole step, on every rank. Collective over the world.

    Raises:
        RuntimeError: as `reward_metrics`.
    """
    n_samples = rollout.n_samples
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
        **scored.sums,
    }
    total = world_sums(sums, state, device)
    return {
        "reward/mean": total["reward"] / total["samples"],
        **{f"reward/{name}": value for name, value in reward_metrics(total, scored, total["samples"]).items()},
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
    rewards: Rewards,
    tokenizer: Any,
    step: int,
    device: torch.device,
) -> dict[str, float]:
    """Mean total reward over every row exactly once, and of each source where there are several.

    Collective over the world; the engine must be awake.

    Raises:
        RuntimeError: as `reward_metrics`.
    """
    rollout = generate(engine, state, prompts, sampling, step, "eval")
    scored = score(rollout, rewards, tokenizer, state)
    sums = {"n": len(rollout.samples), "reward": sum(s.reward for s in rollout.samples.values()), **scored.sums}
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
        **{f"eval/reward_{name}": value for name, value in reward_metrics(total, scored, total["n"]).items()},
    }
