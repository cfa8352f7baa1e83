"""GRPO (Shao et al. 2024) with Megatron-core training and vLLM generation over one set of weights.

    torchrun --nproc-per-node 2 train_grpo.py --hf-checkpoint MODEL --prompt-data DATA.jsonl --rm-type math ...

Each step: prompts -> rollout -> rewards -> advantages -> log-probs (old, reference) -> clipped update -> metrics.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybrid_engine.engine import HybridEngine, memory_in_use
from moebius import runtime, setup
from moebius.actor import Actor
from moebius.advantages import grpo_advantages
from moebius.arguments import Arguments, parse_arguments
from moebius.batches import Sample
from moebius.exchange import exchange_samples
from moebius.losses import kl_k3, policy_loss
from moebius.metrics import Timer
from moebius.rollout import Rollout, evaluate, generate, permute_rewards, rollout_metrics, score
from moebius.tokenizer import load_tokenizer
from moebius.train_step import LossFunction, check_mismatch, compute_log_probs, mismatch_metrics, train_step


def assign_advantages(rollout: Rollout, group_size: int, normalise_by_std: bool) -> None:
    """Group-relative advantages of this engine's samples; the samples of one prompt lie side by side."""
    indices = sorted(rollout.samples)
    rewards = torch.tensor([rollout.samples[i].reward for i in indices])
    for index, advantage in zip(indices, grpo_advantages(rewards, group_size, normalise_by_std).tolist(), strict=True):
        rollout.samples[index].advantage = advantage


def make_loss(args: Arguments) -> LossFunction:
    """The clipped surrogate, plus KL to the reference, minus an entropy bonus: each a sum over tokens."""
    eps_clip, eps_clip_high = args.eps_clip, args.eps_clip_high
    use_kl_loss, kl_coef, entropy_coef = args.use_kl_loss, args.kl_loss_coef, args.entropy_coef

    def loss_function(
        log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask = fields["loss_mask"]
        loss, sums = policy_loss(
            log_probs, fields["old_log_probs"], fields["advantages"], mask, eps_clip, eps_clip_high
        )
        total_entropy = (entropy * mask).sum()
        loss = loss - entropy_coef * total_entropy
        sums["entropy"] = total_entropy.detach()
        if use_kl_loss:
            kl = kl_k3(log_probs, fields["ref_log_probs"], mask)
            loss = loss + kl_coef * kl
            sums["ref_kl"] = kl.detach()
        return loss, sums

    return loss_function


def update_policy(
    args: Arguments,
    actor: Actor,
    reference: Actor | None,
    updates: Sequence[Sequence[Sample]],
    timer: Timer,
    first: bool,
) -> dict[str, float]:
    """Scores the step's samples under the old policy and the reference, then makes the optimizer steps."""
    batching, loss_function = setup.batching(args), make_loss(args)
    samples = [sample for update in updates for sample in update]
    with timer.timed("log_probs"):
        old = compute_log_probs(actor, samples, batching)
        ref = compute_log_probs(reference, samples, batching) if reference is not None else None
        for index, sample in enumerate(samples):
            sample.old_log_probs = old[index] if old is not None else None
            sample.ref_log_probs = ref[index] if ref is not None else None
        metrics = mismatch_metrics(samples, actor)
        if first and (warning := check_mismatch(metrics, args.max_logprob_gap)) and actor.state.rank == 0:
            print(f"warning: {warning}", flush=True)
        metrics["memory/log_probs/allocated"] = memory_in_use(actor.device)
    with timer.timed("update"):
        steps = [train_step(actor, update, loss_function, batching) for update in updates]
        metrics["memory/update/allocated"] = memory_in_use(actor.device)
    made = [step for step in steps if not step["skipped"]]
    names = {"ratio": "policy/ratio_mean"}
    for name in made[0] if made else ():
        metrics[names.get(name, f"policy/{name}")] = sum(step[name] for step in made) / len(made)
    if made:  # 1 unless trainer and loss disagree: the first update's old log-probs are its own
        metrics["policy/ratio_before_update"] = made[0]["ratio"]
    metrics["policy/skipped"] = float(len(steps) - len(made))
    return metrics


def engine_metrics(engine: HybridEngine) -> dict[str, float]:
    """What the last switch between layouts cost."""
    record = engine.records[-1]
    return {
        "switch/seconds": record.seconds,
        "switch/bytes_moved": record.bytes_moved,
        "switch/bytes_aliased": record.bytes_aliased,
        "switch/bytes_copied": record.bytes_copied,
        **{f"memory/{phase}/allocated": size for phase, size in record.memory.items()},
    }


def throughput(metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """Tokens a second over the whole world: sampled ones of the rollout, all of them (prompts too) of the update."""
    return {
        "tokens_per_second/rollout": metrics["rollout/response_tokens"] / seconds["time/rollout"],
        "tokens_per_second/update": metrics["policy/batch_tokens"] / seconds["time/update"],
    }


def main() -> None:
    args = parse_arguments()
    state, shape, device = setup.start_run(args)
    tokenizer = load_tokenizer(args.hf_checkpoint, args.chat_template)
    prompts, eval_prompts = setup.load_data(args, tokenizer, shape)
    sampler = setup.make_sampler(args, prompts)
    rewards = setup.make_rewards(args)
    sampling, eval_sampling = setup.make_sampling(args, tokenizer)
    rewards.wait_until_ready()
    setup.open_run_folder(args, state)
    logger = setup.make_logger(args, state)
    actor = setup.make_actor(args, shape, state, device)
    reference = setup.make_reference(args, actor)
    engine = setup.make_engine(args, actor)

    for step in range(args.num_rollout):
        timer, metrics = Timer(), {}
        with timer.timed("step"):
            batch = [prompts[row] for row in sampler.next_batch()]
            with engine.rollout():
                if args.eval_interval is not None and step % args.eval_interval == 0:
                    with timer.timed("eval"):
                        metrics |= evaluate(
                            engine, state, eval_prompts, eval_sampling, rewards, tokenizer, step, device
                        )
                with timer.timed("rollout"):
                    rollout = generate(engine, state, batch, sampling, step, "train")
            with timer.timed("reward"):
                scored = score(rollout, rewards, tokenizer, state)
            if args.debug_permute_rewards:
                permute_rewards(rollout, args.seed, step)
            assign_advantages(rollout, args.n_samples_per_prompt, not args.disable_grpo_std_normalization)
            updates = exchange_samples(
                rollout.samples, len(batch) * args.n_samples_per_prompt, args.global_batch_size, state, device
            )
            metrics |= update_policy(args, actor, reference, updates, timer, first=step == 0)
        metrics |= rollout_metrics(rollout, scored, state, device)
        metrics |= engine_metrics(engine) | timer.seconds | throughput(metrics, timer.seconds)
        logger.log(step, metrics)

    if eval_prompts:
        with engine.rollout():
            last = evaluate(engine, state, eval_prompts, eval_sampling, rewards, tokenizer, args.num_rollout, device)
        logger.log(args.num_rollout, last)
    engine.write_certificate(Path(args.save) / "aliasing")
    if args.save_hf:
        setup.export_hf(args, actor)
    engine.close()
    rewards.close()
    logger.close()
    runtime.stop()


if __name__ == "__main__":
    runtime.run(main)
