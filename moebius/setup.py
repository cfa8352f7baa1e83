"""Set-up of a run, one call for each noun of the script. What can be refused is refused before a weight is read."""

import json
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.engine import EngineOptions, HybridEngine
from moebius import runtime
from moebius.actor import Actor, build_actor, build_reference
from moebius.arguments import Arguments, public_values, save_arguments, validate
from moebius.data import DataCache, PromptOptions, Prompts, PromptSampler, load_prompts
from moebius.files import unused_name
from moebius.metrics import MetricsLogger, progress
from moebius.models.binding import engine_parameters
from moebius.models.families import read_shape
from moebius.models.hf_io import save_hf
from moebius.models.hf_reader import HFReader, check_names
from moebius.models.shape import ModelShape, check_fits
from moebius.rewards import Rewards, RewardSpec, reward_specs
from moebius.rollout import Sampling
from moebius.tokenizer import stop_token_ids, tokenizer_files
from moebius.train_step import Batching
from parallel_state.groups import ParallelState, make_parallel_state
from parallel_state.layout import ParallelLayout


def check(args: Arguments, world_size: int) -> tuple[ParallelLayout, ModelShape]:
    """Every check that needs no process group and reads no weight.

    Raises:
        ValueError: naming flag, values and rule.
    """
    layout = ParallelLayout(
        world_size,
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.rollout_tensor_model_parallel_size,
        args.sequence_parallel,
        int(os.environ.get("LOCAL_WORLD_SIZE", "8")),
    )
    validate(args, world_size)
    _specs(args)
    shape = read_shape(args.hf_checkpoint)
    check_fits(shape, layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size, layout.rollout_tp)
    longest = longest_sequence(args)
    if longest > shape.max_position_embeddings:
        raise ValueError(
            f"--rollout-max-prompt-len {args.rollout_max_prompt_len} and the longest response add up to {longest} "
            f"tokens, more than the {shape.max_position_embeddings} positions of --hf-checkpoint {args.hf_checkpoint}"
        )
    if layout.rollout_replicas > args.rollout_batch_size:
        raise ValueError(
            f"--rollout-batch-size {args.rollout_batch_size} leaves some of the {layout.rollout_replicas} engines "
            "without a prompt: it must be at least their number"
        )
    if not args.random_init:
        _check_weights(args.hf_checkpoint, shape, "--hf-checkpoint")
    if args.use_kl_loss and (args.random_init or args.ref_load != args.hf_checkpoint):
        if read_shape(args.ref_load, "--ref-load") != shape:
            raise ValueError(
                f"--ref-load {args.ref_load}: its config.json describes another model than --hf-checkpoint's"
            )
        _check_weights(args.ref_load, shape, "--ref-load")
    if any(token >= shape.vocab_size for token in args.rollout_stop_token_ids or ()):
        raise ValueError(
            f"--rollout-stop-token-ids {args.rollout_stop_token_ids}: ids must be below the model's vocabulary size "
            f"{shape.vocab_size}"
        )
    return layout, shape


def _check_weights(folder: str, shape: ModelShape, flag: str) -> None:
    reader = HFReader(folder, flag)
    check_names(reader, shape)
    reader.close()


def longest_sequence(args: Arguments) -> int:
    """Most tokens that prompt and response can have together."""
    return args.rollout_max_prompt_len + max(args.rollout_max_response_len, args.eval_max_response_len or 0)


def start_run(args: Arguments) -> tuple[ParallelState, ModelShape, torch.device]:
    """Checks the arguments, joins the other processes and makes both grids' groups."""
    layout, shape = check(args, int(os.environ.get("WORLD_SIZE", "1")))
    device = runtime.start(args.distributed_timeout_minutes)
    state = make_parallel_state(layout, timedelta(minutes=args.distributed_timeout_minutes))
    if state.rank == 0:
        print(layout.meshes(), flush=True)
    return state, shape, device


def open_run_folder(args: Arguments, state: ParallelState) -> None:
    """Makes the run folder with arguments.json and --chat-template, once all input has been checked.

    Refused runs write nothing.
    """
    if state.rank == 0:
        folder = Path(args.save)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "arguments.json").exists():
            (folder / "arguments.json").rename(unused_name(folder / "arguments.json"))
        save_arguments(args, folder)
        if args.chat_template is not None:
            shutil.copyfile(args.chat_template, folder / "chat_template.jinja")


def make_actor(args: Arguments, shape: ModelShape, state: ParallelState, device: torch.device) -> Actor:
    """The policy with its optimizer, in place for good: the engine binds to it next."""
    return build_actor(
        shape,
        state,
        None if args.random_init else args.hf_checkpoint,
        torch.bfloat16 if args.bf16 else torch.float32,
        device,
        lr=args.lr,
        seed=args.seed,
        min_lr=args.min_lr,
        lr_warmup_iters=args.lr_warmup_iters,
        lr_decay_style=args.lr_decay_style,
        lr_decay_iters=args.lr_decay_iters,
        optimizer=args.optimizer,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        ddp_bucket_size=args.ddp_bucket_size,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        init_method_std=args.init_method_std,
    )


def make_reference(args: Arguments, actor: Actor) -> Actor | None:
    """The frozen model of the KL term, None without --use-kl-loss."""
    if not args.use_kl_loss:
        return None
    return build_reference(actor.shape, actor.state, args.ref_load, actor.dtype, actor.device)


def make_engine(args: Arguments, actor: Actor) -> HybridEngine:
    """vLLM over the actor's weights, asleep. Writes the aliasing certificate."""
    metas, trainer = engine_parameters(actor.model, actor.shape, actor.state)
    options = EngineOptions(
        max_model_len=longest_sequence(args),
        max_num_seqs=args.vllm_max_num_seqs,
        kv_cache_bytes=None if args.vllm_kv_cache_gb is None else int(args.vllm_kv_cache_gb * 2**30),
        enforce_eager=args.vllm_enforce_eager,
        seed=args.seed % 2**31,
        reshard_bucket_bytes=args.reshard_bucket_mb << 20,
        verify_first_switch=not args.no_verify_first_switch,
    )
    engine = HybridEngine(args.hf_checkpoint, actor.state, metas, trainer, actor.sync_parameters, options, actor.device)
    engine.write_certificate(Path(args.save) / "aliasing")
    return engine


def load_data(args: Arguments, tokenizer: Any, shape: ModelShape) -> tuple[Prompts, Prompts]:
    """Training and evaluation prompts (none without --eval-prompt-data), checked and tokenized, or from the cache."""
    options = PromptOptions(
        input_key=args.input_key,
        label_key=args.label_key,
        max_prompt_len=args.rollout_max_prompt_len,
        apply_chat_template=args.apply_chat_template,
        template_kwargs=json.loads(args.apply_chat_template_kwargs or "{}"),
        overlong_prompt=args.overlong_prompt,
        vocab_size=shape.vocab_size,
    )
    folder = Path(args.hf_checkpoint)
    cache = DataCache(Path(args.data_cache).expanduser(), [folder / "config.json", *tokenizer_files(folder)])
    prompts = load_prompts(
        args.prompt_data, tokenizer, options, "--prompt-data", cache, progress, args.rollout_batch_size
    )
    if args.eval_prompt_data is None:
        return prompts, Prompts.none()
    return prompts, load_prompts(args.eval_prompt_data, tokenizer, options, "--eval-prompt-data", cache, progress)


def make_sampler(args: Arguments, prompts: Prompts) -> PromptSampler:
    """The order of the training prompts."""
    return PromptSampler(
        len(prompts),
        args.rollout_batch_size,
        args.rollout_seed,
        args.rollout_shuffle,
        rows_of_sources=prompts.rows_of_sources,
        weights=args.prompt_data_weights or (),
        rows_read=prompts.rows_read,
    )


def make_sampling(args: Arguments, tokenizer: Any) -> tuple[Sampling, Sampling]:
    """How training and evaluation responses are sampled."""
    stop = tuple(args.rollout_stop_token_ids or stop_token_ids(tokenizer, args.hf_checkpoint))
    train = Sampling(
        n_samples=args.n_samples_per_prompt,
        max_tokens=args.rollout_max_response_len,
        temperature=args.rollout_temperature,
        stop_token_ids=() if args.rollout_ignore_eos else stop,
        seed=args.rollout_seed,
    )
    evaluation = Sampling(
        n_samples=1,
        max_tokens=args.eval_max_response_len or args.rollout_max_response_len,
        temperature=args.eval_temperature,
        stop_token_ids=stop,
        seed=args.rollout_seed,
    )
    return train, evaluation


def make_rewards(args: Arguments) -> Rewards:
    """Starts the workers of every reward, which load while the run is set up."""
    return Rewards(_specs(args), args.rm_workers, args.rm_timeout)


def _specs(args: Arguments) -> tuple[RewardSpec, ...]:
    return reward_specs(
        args.rm_type,
        args.custom_rm_path,
        weights=args.rm_weights,
        group_rm=args.group_rm,
        url=args.rm_url,
        retries=args.rm_retries,
        on_error=args.on_reward_error,
    )


def make_logger(args: Arguments, state: ParallelState) -> MetricsLogger:
    """Writes on rank 0 only."""
    return MetricsLogger(
        Path(args.save),
        use_wandb=args.use_wandb,
        wandb_project=args.wandb_project,
        wandb_name=args.wandb_name,
        use_tensorboard=args.use_tensorboard,
        tensorboard_dir=args.tensorboard_dir,
        config=public_values(args),
        total_steps=args.num_rollout,
        enabled=state.rank == 0,
    )


def batching(args: Arguments) -> Batching:
    """How training batches are cut."""
    return Batching(
        micro_batch_size=args.micro_batch_size,
        max_tokens_per_gpu=args.max_tokens_per_gpu,
        packed=args.qkv_format == "thd",
        log_probs_chunk_size=args.log_probs_chunk_size,
        temperature=args.rollout_temperature,
    )


def export_hf(args: Arguments, actor: Actor) -> None:
    """Writes SAVE/hf: weights in canonical form, config, tokenizer. Collective over the world."""
    actor.sync_parameters()
    template = None if args.chat_template is None else Path(args.save) / "chat_template.jinja"
    files = tokenizer_files(args.hf_checkpoint, template)
    save_hf(actor.model, actor.shape, actor.state, args.hf_checkpoint, Path(args.save) / "hf", files)
