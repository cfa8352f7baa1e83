"""Rules between flags, checked before anything is loaded. ParallelLayout checks the grids, the data checks its rows."""

import json
import os
from pathlib import Path

from moebius.arguments.flags import Arguments, flag_name


def validate(args: Arguments, world_size: int) -> None:
    """Checks a resolved set for a world whose ParallelLayout has been accepted; reads the file system, writes nothing.

    Raises:
        ValueError: naming the flags, their values and the rule.
    """
    model_parallel_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    assert world_size % model_parallel_size == 0, f"ParallelLayout of {world_size} ranks has to be made first"
    _check_batches(args, world_size // model_parallel_size)
    _check_training(args)
    _check_sampling(args)
    _check_algorithm(args)
    _check_rewards(args)
    _check_evaluation(args)
    _check_data(args)
    _check_paths(args)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _named(args: Arguments, *names: str) -> str:
    """`--eps-clip 0.2, --seed 1`: flags with their values."""
    return ", ".join(f"{flag_name(name)} {_text(getattr(args, name))}" for name in names)


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_batches(args: Arguments, data_parallel_size: int) -> None:
    """Every update has the same number of samples, and every rank has the same share of it (Megatron's rule)."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    rollout = f"{_named(args, 'rollout_batch_size', 'n_samples_per_prompt')}: a rollout of {samples} samples"
    _require(
        samples % args.global_batch_size == 0,
        f"{rollout} must be a multiple of {_named(args, 'global_batch_size')}",
    )
    _require(
        args.micro_batch_size is None or args.max_tokens_per_gpu is None,
        f"{_named(args, 'micro_batch_size', 'max_tokens_per_gpu')}: only one of them can set the micro-batches",
    )
    micro = args.micro_batch_size or 1
    what = f"{_named(args, 'micro_batch_size')} x " if args.micro_batch_size else ""
    _require(
        args.global_batch_size % (micro * data_parallel_size) == 0,
        f"{_named(args, 'global_batch_size')} (default: the whole rollout) must be a multiple of "
        f"{what}{data_parallel_size} data-parallel ranks = {micro * data_parallel_size}",
    )
    longest = args.rollout_max_prompt_len + args.rollout_max_response_len
    _require(
        args.max_tokens_per_gpu is None or args.max_tokens_per_gpu >= longest,
        f"{_named(args, 'max_tokens_per_gpu')} must hold the longest sequence: "
        f"{_named(args, 'rollout_max_prompt_len', 'rollout_max_response_len')}, together {longest}",
    )


def _check_training(args: Arguments) -> None:
    _require(args.min_lr <= args.lr, f"{_named(args, 'min_lr', 'lr')}: the lowest rate must not be above the highest")
    _require(
        args.lr_warmup_iters < args.lr_decay_iters,
        f"{_named(args, 'lr_warmup_iters', 'lr_decay_iters')} (default: all updates of the run): "
        "the warm-up must end before the decay does",
    )
    untouched = args.recompute_method == "uniform" and args.recompute_num_layers == 1
    _require(
        args.recompute_granularity == "full" or untouched,
        f"{_named(args, 'recompute_method', 'recompute_num_layers')}: they need --recompute-granularity full, "
        f"which is {args.recompute_granularity or 'not set'}",
    )
    _require(
        args.overlap_grad_reduce or not args.overlap_param_gather, "--overlap-param-gather needs --overlap-grad-reduce"
    )


def _check_sampling(args: Arguments) -> None:
    _require(
        args.rollout_top_p == 1 and args.rollout_top_k == -1,
        f"{_named(args, 'rollout_top_p', 'rollout_top_k')}: training rollouts must sample from all tokens "
        "(--rollout-top-p 1, --rollout-top-k -1); log-probs are those of the whole distribution",
    )


def _check_algorithm(args: Arguments) -> None:
    _require(
        args.advantage_estimator != "grpo" or args.n_samples_per_prompt >= 2,
        f"{_named(args, 'n_samples_per_prompt', 'advantage_estimator')}: it must be at least 2, "
        "a group of one sample has no advantage",
    )
    _require(
        args.use_kl_loss or args.kl_loss_coef == 0,
        f"{_named(args, 'kl_loss_coef')} has no effect without --use-kl-loss",
    )
    _require(
        args.use_kl_loss or args.ref_load == args.hf_checkpoint,
        f"{_named(args, 'ref_load')} has no effect without --use-kl-loss",
    )


def _check_rewards(args: Arguments) -> None:
    """How rewards go together; `reward_specs` checks each of them."""
    built_in, custom = args.rm_type or (), args.custom_rm_path or ()
    _require(
        bool(built_in or custom),
        f"{_named(args, 'rm_type', 'custom_rm_path')}: at least one of them must give a reward",
    )
    _require(len(set(built_in)) == len(built_in), f"{_named(args, 'rm_type')}: each reward must be named once")
    weights, rewards = args.rm_weights, len(built_in) + len(custom)
    _require(
        weights is None or len(weights) == rewards,
        f"{_named(args, 'rm_weights')}: must be as many as the rewards of {_named(args, 'rm_type', 'custom_rm_path')}",
    )
    _require(
        ("remote_rm" in built_in) == (args.rm_url is not None),
        f"{_named(args, 'rm_type')}: remote_rm needs --rm-url, and nothing else does",
    )
    _require(
        not args.group_rm or bool(custom), "--group-rm needs --custom-rm-path: built-in rewards judge one response"
    )
    _require(
        not args.group_rm or "remote_rm" not in built_in,
        f"--group-rm, {_named(args, 'rm_type')}: remote_rm sends one response a request, it cannot be used with groups",
    )


def _check_evaluation(args: Arguments) -> None:
    if args.eval_prompt_data is not None:
        _require(args.eval_interval is not None, f"{_named(args, 'eval_prompt_data')} needs --eval-interval")
        return
    set_flags = {
        "eval_interval": args.eval_interval is not None,
        "eval_temperature": args.eval_temperature != 0,
        "eval_max_response_len": args.eval_max_response_len is not None,
    }
    for name, is_set in set_flags.items():
        _require(not is_set, f"{_named(args, name)} needs --eval-prompt-data")


def _check_data(args: Arguments) -> None:
    weights, sources = args.prompt_data_weights, len(args.prompt_data)
    _require(
        weights is None or len(weights) == sources,
        f"{_named(args, 'prompt_data_weights')}: must be as many as the sources of --prompt-data ({sources})",
    )
    for name in ("chat_template", "apply_chat_template_kwargs"):
        is_set = getattr(args, name) is not None
        _require(args.apply_chat_template or not is_set, f"{_named(args, name)} needs --apply-chat-template")
    try:
        variables = json.loads(args.apply_chat_template_kwargs or "{}")
    except json.JSONDecodeError:
        variables = None
    _require(isinstance(variables, dict), f"{_named(args, 'apply_chat_template_kwargs')}: it must be a JSON object")


def _check_paths(args: Arguments) -> None:
    for name in ("hf_checkpoint", "ref_load"):
        _require(
            (Path(getattr(args, name)) / "config.json").is_file(),
            f"{_named(args, name)}: it must be a Hugging Face model folder, but it has no config.json",
        )
    for name in ("prompt_data", "eval_prompt_data"):
        sources = getattr(args, name) or ()
        for source in sources:
            there = source.startswith("hf:") or Path(source).exists()
            _require(there, f"{flag_name(name)} {source}: no such file or folder")
            _require(sources.count(source) == 1, f"{flag_name(name)} {source}: a source must be named only once")
    template = args.chat_template
    _require(template is None or Path(template).is_file(), f"{_named(args, 'chat_template')}: no such file")
    existing = Path(args.save).absolute()
    while not existing.exists():
        existing = existing.parent
    _require(
        existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        f"{_named(args, 'save')} cannot be made: {existing} is not a folder to write in",
    )
