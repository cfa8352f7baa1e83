"""The actor: this process's shard of the model with mcore's DDP, distributed optimizer and learning-rate schedule."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moebius.models.build import build_model, transformer_config, unwrap
from moebius.models.hf_io import load_hf
from moebius.models.shape import ModelShape
from parallel_state.groups import ParallelState


@dataclass
class Actor:
    """What a training step needs. `ddp`, `optimizer`, `scheduler` and `config` are mcore's (untyped).

    `ddp` is a bare model where there is no optimizer (a reference model).
    """

    shape: ModelShape
    state: ParallelState
    config: Any
    ddp: Any
    dtype: torch.dtype
    device: torch.device
    optimizer: Any = None
    scheduler: Any = None

    @property
    def model(self) -> Any:
        """The PolicyModel itself."""
        return unwrap(self.ddp)

    def sync_parameters(self) -> None:
        """Waits until every parameter holds its newest value. Collective over DP.

        With --overlap-param-gather the optimizer's values arrive in the next forward pass, which would be too late for
        an engine that reads the same memory.
        """
        if self.optimizer is not None and self.optimizer.config.overlap_param_gather:
            self.ddp.start_param_sync(force_sync=True)


def _finalize(model: list[Any], _num_tokens: Any, **kwargs: Any) -> None:
    """mcore's gradient reduction, without its division by tokens: losses come normalised (see train_step)."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(model, None, **kwargs)


def build_reference(
    shape: ModelShape, state: ParallelState, folder: str | Path, dtype: torch.dtype, device: torch.device
) -> Actor:
    """A frozen model in the actor's layout, read from a Hugging Face folder.

    Raises:
        ValueError: when the folder does not match the shape.
    """
    config = transformer_config(shape, state, dtype, on_cpu=device.type == "cpu")
    model = build_model(shape, state, config, seed=0)
    load_hf(model, shape, state, folder)
    model.requires_grad_(False)
    return Actor(shape=shape, state=state, config=config, ddp=model, dtype=dtype, device=device)


def build_actor(
    shape: ModelShape,
    state: ParallelState,
    folder: str | Path | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    lr: float,
    lr_decay_iters: int,
    seed: int = 1234,
    min_lr: float = 0.0,
    lr_warmup_iters: int = 0,
    lr_decay_style: str = "constant",
    optimizer: str = "adam",
    weight_decay: float = 0.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.999,
    adam_eps: float = 1e-8,
    clip_grad: float = 1.0,
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
    ddp_bucket_size: int | None = None,
    recompute_granularity: str | None = None,
    recompute_method: str = "uniform",
    recompute_num_layers: int = 1,
    init_method_std: float = 0.02,
) -> Actor:
    """Builds model, DDP, optimizer and schedule; arguments are the flags of the same names. Collective over the world.

    Args:
        folder: Hugging Face folder with the weights; None makes them at random from `seed`.
        lr_decay_iters: optimizer steps until `min_lr`, warm-up included.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = transformer_config(
        shape,
        state,
        dtype,
        on_cpu=device.type == "cpu",
        recompute_granularity=recompute_granularity,
        recompute_method=recompute_method,
        recompute_num_layers=recompute_num_layers,
        init_method_std=init_method_std,
    )
    # mcore marks weights as tensor parallel while it initialises them; unmarked ones would miss from the gradient norm
    assert config.perform_initialization
    model = build_model(shape, state, config, seed)
    if folder is not None:
        load_hf(model, shape, state, folder)
    distributed = optimizer == "adam"  # mcore's distributed optimizer is for Adam only
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        grad_reduce_in_fp32=True,
        bucket_size=ddp_bucket_size,
    )
    ddp = DistributedDataParallel(config, ddp_config, model, pg_collection=state.train)
    ddp.broadcast_params()
    config.finalize_model_grads_func = _finalize
    if overlap_grad_reduce:
        config.no_sync_func = ddp.no_sync
    if overlap_param_gather:
        config.param_sync_func = ddp.start_param_sync
    optimizer_config = OptimizerConfig(
        optimizer=optimizer,
        lr=lr,
        min_lr=min_lr,
        weight_decay=weight_decay,
        adam_beta1=adam_beta1,
        adam_beta2=adam_beta2,
        adam_eps=adam_eps,
        sgd_momentum=0.0,
        bf16=config.bf16,
        params_dtype=dtype,
        clip_grad=clip_grad,
        use_distributed_optimizer=distributed,
        overlap_param_gather=overlap_param_gather,
    )
    built = get_megatron_optimizer(optimizer_config, [ddp], use_gloo_process_groups=False, pg_collection=state.train)
    if distributed:
        _make_adam_state(built)
    return Actor(
        shape=shape,
        state=state,
        config=config,
        ddp=ddp,
        dtype=dtype,
        device=device,
        optimizer=built,
        scheduler=_schedule(built, lr, min_lr, weight_decay, lr_warmup_iters, lr_decay_style, lr_decay_iters),
    )


def _make_adam_state(optimizer: Any) -> None:
    """Allocates Adam's moments now instead of in the first step: the engine sizes its KV cache by what is free."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                one.optimizer.state[parameter].update(
                    step=torch.tensor(0.0),
                    exp_avg=torch.zeros_like(parameter),
                    exp_avg_sq=torch.zeros_like(parameter),
                )


def _schedule(
    optimizer: Any, lr: float, min_lr: float, weight_decay: float, warmup: int, style: str, decay: int
) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=style,
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
    )
