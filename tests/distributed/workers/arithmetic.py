"""Log-probs, token-mean, masks, groups, exchange and uneven micro-batches with real models and real processes.

    arithmetic.py OUT.json FOLDER

FOLDER holds a tokenizer and takes model and gradients. Which figures are made follows from the number of ranks.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import record
from safetensors.torch import save_file
from tiny_models import hf_log_probs, make_hf_model
from torch import Tensor

from moebius import runtime
from moebius.actor import Actor, build_actor, build_reference
from moebius.arguments import Arguments
from moebius.batches import Sample
from moebius.data import replica_rows
from moebius.exchange import exchange_samples
from moebius.log_probs import vocab_parallel_log_probs
from moebius.losses import kl_k3
from moebius.models.families import read_shape
from moebius.models.hf_io import local_weights, save_hf
from moebius.rollout import Rollout
from moebius.tokenizer import tokenizer_files
from moebius.train_step import Batching, LossFunction, compute_log_probs, train_step
from parallel_state.groups import ParallelState, make_parallel_state
from parallel_state.layout import ParallelLayout
from train_grpo import assign_advantages, make_loss

CPU = torch.device("cpu")
A, B, LONG = [31, 32, 33, 34, 35], [41, 42, 43, 44], list(range(51, 60))
ONE_BY_ONE, TOGETHER, PADDED = Batching(1), Batching(8), Batching(8, packed=False)
ARGUMENTS = Arguments(
    hf_checkpoint="-",
    prompt_data=("-",),
    rm_type=("math",),
    eps_clip=0.02,
    eps_clip_high=0.03,
    use_kl_loss=True,
    kl_loss_coef=0.1,
    entropy_coef=0.01,
)
# rank 0's and rank 1's samples as (prompt, response) lengths
UNEVEN = {
    "four": ([(3, 5)] * 4, [(1, 1)] * 4),
    "one": ([(3, 5)] * 4, [(1, 1)]),
    "none": ([(3, 5)] * 4, []),
    "none_on_rank_0": ([], [(3, 5)] * 4),
}
# per sample (loss of each token, tokens); each row is one rank's or one micro-batch's
TOKEN_MEANS = {"9.2": ((2.0, 1), (10.0, 9)), "2.5": ((1.0, 2), (3.0, 6))}
GROUPS = [1.0] * 4 + [1.0] + [float("nan")] * 3 + [1.0, 0.0, 0.0, 0.0]
EXCHANGES = {"rollout_tp2": (1, 2), "rollout_tp1": (1, 1), "tp2_rollout_tp2": (2, 2), "tp2_rollout_tp4": (2, 4)}
SAMPLES_PER_UPDATE = 8


def actor_of(folder: Path, state: ParallelState, lr: float = 0.0, optimizer: str = "sgd") -> Actor:
    """Clipping is off, so that the gradient norm is the norm of what `gradients` returns."""
    return build_actor(
        read_shape(folder),
        state,
        folder,
        torch.float32,
        CPU,
        lr=lr,
        lr_decay_iters=4,
        optimizer=optimizer,
        clip_grad=1e9,
    )


def gradients(actor: Actor) -> dict[str, Tensor]:
    """Copies of this rank's summed gradients by the trainer's names."""
    weights: Any = local_weights(actor.model, actor.shape, actor.state)  # mcore adds main_grad to parameters
    return {weight.trainer: parameter.main_grad.clone() for weight, parameter in weights}


def scored(actor: Actor, samples: list[Sample]) -> list[Sample]:
    """Gives samples old and reference log-probs a little away from the actor's, as a step of the program does."""
    found = compute_log_probs(actor, samples, Batching(None, 10))
    assert found is not None
    for sample, log_probs in zip(samples, found, strict=True):
        wave = torch.arange(len(log_probs)).add(sample.response_ids[0]).sin()
        sample.old_log_probs, sample.ref_log_probs = log_probs + 0.05 * wave, log_probs - 0.1 * wave
    return samples


def sequences(lengths: list[tuple[int, int]], seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for number, (prompt, response) in enumerate(lengths):
        ids = rng.integers(3, 150, prompt + response).tolist()
        samples.append(Sample(ids[:prompt], ids[prompt:], advantage=(1.0, -0.5, 0.25, -2.0)[number % 4]))
    return samples


def counting(loss_function: LossFunction) -> tuple[LossFunction, list[int]]:
    """The loss function, and a list that takes the number of response tokens of every micro-batch it is called for."""
    calls: list[int] = []

    def counted(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        calls.append(len(log_probs))
        return loss_function(log_probs, entropy, fields)

    return counted, calls


def uneven(actor: Actor, out: Path) -> dict[str, Any]:
    """case 8.01: one step for each entry of UNEVEN; gradients go to `out`-NAME.safetensors."""
    figures: dict[str, Any] = {}
    world, dp = actor.state.layout.data_parallel_size, actor.state.at.dp
    for name, parts in UNEVEN.items():
        shares = [sequences(lengths, seed) for seed, lengths in enumerate(parts)]
        samples = scored(actor, shares[dp] if world == 2 else shares[0] + shares[1])
        loss_function, calls = counting(make_loss(ARGUMENTS))
        figures[f"{name}/step"] = train_step(actor, samples, loss_function, Batching(None, 10 if world == 2 else 1000))
        figures[f"{name}/calls"] = calls
        found = gradients(actor)
        if dist.get_rank() == 0:
            save_file(found, f"{out}-{name}.safetensors")
    return figures


def given_losses(log_probs: Tensor, _: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Every token's loss is its advantage; the zero keeps the graph."""
    return (fields["advantages"] * fields["loss_mask"]).sum() + 0 * log_probs.sum(), {}


def token_means(actor: Actor) -> dict[str, Any]:
    """case 3.01: the loss that a step reports for TOKEN_MEANS, one micro-batch for each entry."""
    figures: dict[str, Any] = {}
    world, dp = actor.state.layout.data_parallel_size, actor.state.at.dp
    for name, rows in TOKEN_MEANS.items():
        samples = [Sample(A, list(range(60, 60 + count)), advantage=loss) for loss, count in rows]
        mine = samples[dp : dp + 1] if world == 2 else samples
        figures[f"token_mean/{name}"] = train_step(actor, mine, given_losses, ONE_BY_ONE)["loss"]
    return figures


def group_advantages(state: ParallelState, rewards: list[float], n: int, tag: str) -> dict[str, Any]:
    """case 3.04, case 3.15: {global index: advantage} of the samples that this rank trains on, after the exchange.

    Every prompt is the same text. Response lengths are such that samples change places between two engines.
    """
    samples = {}
    for prompt in replica_rows(len(rewards) // n, state.at.rollout_dp, state.layout.rollout_replicas):
        for index in range(prompt * n, prompt * n + n):
            length = (2, 5, 4, 1)[index % 4]
            samples[index] = Sample([5, 6, 7], [100 + index] * length, [-1.0] * length, reward=rewards[index])
    rollout = Rollout(samples, {}, {}, n)
    assign_advantages(rollout, n, normalise_by_std=True)
    updates = exchange_samples(rollout.samples, len(rewards), len(rewards), state, CPU)
    return {
        f"{tag}/advantages": {s.response_ids[0] - 100: s.advantage for s in updates[0]},
        f"{tag}/made_here": sorted(samples),
    }


def one(folder: Path) -> dict[str, Any]:
    """Figures of a single process."""
    hf = make_hf_model("qwen3", folder / "model", layers=2)
    state = make_parallel_state(ParallelLayout(1))
    reference = build_reference(read_shape(folder / "model"), state, folder / "model", torch.float32, CPU)
    actor = actor_of(folder / "model", state)
    figures = neighbours(reference, hf) | masked(actor, folder / "model", state) | reference_kl(actor, reference)
    save_hf(actor.model, actor.shape, state, folder / "model", folder / "export", tokenizer_files(folder / "model"))
    groups = group_advantages(state, GROUPS, 4, "groups")
    return figures | token_means(actor) | uneven(actor, folder / "one") | groups


def neighbours(model: Actor, hf: Any) -> dict[str, Any]:
    """case 2.08, case 2.12: log-probs of a sequence alone and beside others."""

    def log_probs(batching: Batching, *ids: list[int]) -> list[list[float]]:
        found = compute_log_probs(model, [Sample(x[:1], x[1:]) for x in ids], batching)
        assert found is not None
        return [x.tolist() for x in found]

    changed = [*B[:2], 99, B[3]]
    return {
        "alone": log_probs(TOGETHER, A),
        "alone_padded_form": log_probs(PADDED, A),
        "padded_beside_9": log_probs(PADDED, A, LONG),
        "packed_before_9": log_probs(TOGETHER, A, LONG),
        "packed_after_9": log_probs(TOGETHER, LONG, A)[::-1],
        "b_after_a": log_probs(TOGETHER, A, B),
        "b_after_other_a": log_probs(TOGETHER, [77, 3, 99, 120, 8], B),
        "b_changed_after_a": log_probs(TOGETHER, A, changed),
        "b_first_changed_after_a": log_probs(TOGETHER, A, [99, *B[1:]]),
        "hf": [hf_log_probs(hf, x[:1], x[1:]).tolist() for x in (A, B)],
    }


def masked(actor: Actor, folder: Path, state: ParallelState) -> dict[str, Any]:
    """case 3.06: a masked micro-batch beside another, one valid token, and no valid token at all."""
    loss_function = make_loss(ARGUMENTS)
    hidden, plain = scored(actor, sequences([(3, 5), (2, 4)], 7))
    hidden.loss_mask = [0] * 5
    hidden.old_log_probs = hidden.ref_log_probs = torch.full((5,), torch.nan)
    both_step, both = train_step(actor, [hidden, plain], loss_function, ONE_BY_ONE), gradients(actor)
    alone_step, alone = train_step(actor, [plain], loss_function, ONE_BY_ONE), gradients(actor)
    (single,) = scored(actor, sequences([(3, 5)], 8))
    single.loss_mask = [0, 0, 0, 1, 0]
    gaps = {name: ((both[name] - alone[name]).abs().max() / alone[name].abs().max()).item() for name in alone}
    figures: dict[str, Any] = {
        "masked/steps": [both_step, alone_step, train_step(actor, [single], loss_function, ONE_BY_ONE)],
        "masked/gap": max(gaps.values()),
    }
    adam = actor_of(folder, state, lr=0.1, optimizer="adam")
    train_step(adam, [plain], loss_function, ONE_BY_ONE)
    before = everything(adam)
    figures["masked/skipped"] = train_step(adam, [hidden, hidden], loss_function, ONE_BY_ONE)
    figures["masked/unchanged"] = same_bits(before, everything(adam))
    train_step(adam, [hidden, plain], loss_function, ONE_BY_ONE)
    figures["masked/changed_by_a_real_step"] = not same_bits(before, everything(adam))
    return figures


def everything(actor: Actor) -> dict[str, Tensor]:
    """Copies of weights, moments and the place in the learning-rate schedule."""
    held = {name: parameter.detach().clone() for name, parameter in actor.model.named_parameters()}
    for number, (_, state) in enumerate(actor.optimizer.optimizer.state.items()):
        held |= {f"{number}/{name}": torch.as_tensor(value).clone() for name, value in state.items()}
    return {**held, "schedule": torch.tensor(actor.scheduler.num_steps)}


def same_bits(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def reference_kl(actor: Actor, reference: Actor) -> dict[str, Any]:
    """case 2.15, case 2.01: a copy of the policy as reference, at temperature 0.7 and with it forgotten on one side."""
    warm = dataclasses.replace(TOGETHER, temperature=0.7)
    figures: dict[str, Any] = {}
    for name, batching in (("kl", warm), ("kl_without_temperature", TOGETHER)):
        samples = sequences([(5, 6), (2, 9), (7, 3)], 4)
        new = compute_log_probs(actor, samples, warm)
        ref = compute_log_probs(reference, samples, batching)
        assert new is not None and ref is not None
        gap = torch.cat(new) - torch.cat(ref)
        k3 = kl_k3(torch.cat(new), torch.cat(ref), torch.ones_like(gap))
        for sample, old, other in zip(samples, new, ref, strict=True):
            sample.old_log_probs, sample.ref_log_probs = old, other
        step = train_step(actor, samples, make_loss(ARGUMENTS), warm)
        estimates = [gap.mean().abs().item(), gap.square().mean().item() / 2, k3.item() / len(gap)]
        figures |= {f"{name}/estimates": estimates, f"{name}/step": step}
    return figures


def two(folder: Path) -> dict[str, Any]:
    """Figures of two processes."""
    if dist.get_rank() == 0:
        make_hf_model("qwen3", folder / "model", layers=2)
    dist.barrier()
    engines = make_parallel_state(ParallelLayout(2, 1, 1, 1))
    one_engine = make_parallel_state(ParallelLayout(2, 1, 1, 2))
    actor = actor_of(folder / "model", engines)
    figures = token_means(actor) | uneven(actor, folder / "two") | cut_vocabulary(engines.rollout.dp)
    for tag, state in (("two_engines", engines), ("one_engine", one_engine)):
        figures |= group_advantages(state, [1.0, 0.0, 1.0, 1.0], 2, f"pairs/{tag}")
        figures |= group_advantages(state, GROUPS, 4, f"groups/{tag}")
    return figures


def vocabulary_inputs(vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [9, 16], a head of 160 rows whose padded ones would win every row, and targets."""
    generator = torch.Generator().manual_seed(21)
    hidden = torch.randn(9, 16, generator=generator)
    weight = 0.7 * torch.randn(160, 16, generator=generator)
    weight[vocab_size:] = 50 * hidden[0]
    targets = torch.randint(0, vocab_size, (9,), generator=generator)
    targets[:2] = torch.tensor([0, vocab_size - 1])
    return hidden, weight, targets


def cut_vocabulary(group: Any) -> dict[str, Any]:
    """case 3.11: values and gradients over two shards; with vocabulary 70 all of rank 1's 80 rows are padding."""
    rank = dist.get_rank()
    figures: dict[str, Any] = {}

    def run(tag: str, hidden: Tensor, weight: Tensor, targets: Tensor, size: int, **options: Any) -> None:
        shard = weight.chunk(2)[rank].clone().requires_grad_()
        with torch.no_grad():
            outside = vocab_parallel_log_probs(hidden, shard, targets, group, size, **options)
        hidden = hidden.clone().requires_grad_()
        log_probs, entropy = vocab_parallel_log_probs(hidden, shard, targets, group, size, **options)
        (log_probs.cos().sum() + entropy.sin().sum()).backward()
        assert hidden.grad is not None and shard.grad is not None
        dist.all_reduce(hidden.grad, group=group)
        figures[f"{tag}/values"] = [log_probs.tolist(), entropy.tolist()]
        figures[f"{tag}/outside"] = [x.tolist() for x in outside]
        figures[f"{tag}/grads"] = [hidden.grad.tolist(), shard.grad.tolist()]

    for size in (151, 70):
        for chunk in (4, 1000):
            run(f"vocab/{size}/{chunk}", *vocabulary_inputs(size), size, temperature=0.7, chunk=chunk)
    run("by_hand", torch.ones(1, 1), torch.tensor([[2.0], [0.0], [-1.0], [9.0]]), torch.tensor([0]), 3)
    return figures


def step_samples() -> dict[int, Sample]:
    """24 samples of 12 prompts, with floats that fp32 holds exactly."""
    rng = np.random.default_rng(5)
    samples = {}
    for index in range(24):
        prompt, response = rng.integers(1, 12), rng.integers(1, 30)
        floats = (-5 * rng.random(response + 2)).astype(np.float32).tolist()
        ids = rng.integers(0, 2**31 - 1, prompt + response).tolist()
        samples[index] = Sample(ids[:prompt], ids[prompt:], floats[2:], advantage=floats[0], reward=floats[1])
    return samples


def contents(sample: Sample) -> list[Any]:
    floats = [sample.advantage, sample.reward, *sample.rollout_log_probs]
    return [list(sample.prompt_ids), list(sample.response_ids), [value.hex() for value in floats]]


def four(_: Path) -> dict[str, Any]:
    """Every engine makes the samples of its prompts; after the exchange each rank says what it holds."""
    figures: dict[str, Any] = {}
    for tag, (tp, rollout_tp) in EXCHANGES.items():
        state = make_parallel_state(ParallelLayout(4, tp, 1, rollout_tp))
        prompts = replica_rows(12, state.at.rollout_dp, state.layout.rollout_replicas)
        mine = {index: sample for index, sample in step_samples().items() if index // 2 in prompts}
        updates = exchange_samples(mine, 24, SAMPLES_PER_UPDATE, state, CPU)
        held = [[contents(sample) for sample in update] for update in updates]
        figures[tag] = {"dp": state.at.dp, "engine": state.at.rollout_dp, "made": sorted(mine), "held": held}
    return figures


def main() -> None:
    out, folder = sys.argv[1], Path(sys.argv[2])
    runtime.start(1)
    parts: dict[int, Callable[[Path], dict[str, Any]]] = {1: one, 2: two, 4: four}
    record(parts[dist.get_world_size()](folder), out)
    runtime.stop()


if __name__ == "__main__":
    main()
