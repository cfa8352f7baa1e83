"""Every flag, with its default, its help and the rule that its own value must keep. Rules between flags: validation."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

GROUPS = ("parallel", "model", "training", "rollout", "algorithm", "reward", "data", "logging")


class Rule(NamedTuple):
    """What one value must satisfy; `text` ends the sentence "it must ..."."""

    text: str
    holds: Callable[[Any], bool]


POSITIVE = Rule("be at least 1", lambda v: v >= 1)
NOT_NEGATIVE = Rule("be at least 0", lambda v: v >= 0)
ABOVE_ZERO = Rule("be above 0", lambda v: v > 0)
SAMPLING = Rule("be at least 0.01, the lowest that vLLM samples at", lambda v: v >= 0.01)
GREEDY_OR_SAMPLING = Rule(
    "be 0 (greedy) or at least 0.01, the lowest that vLLM samples at", lambda v: v == 0 or v >= 0.01
)
DECAY = Rule("lie in [0, 1)", lambda v: 0 <= v < 1)
CLIP = Rule("lie in (0, 1)", lambda v: 0 < v < 1)
SHARE = Rule("lie in (0, 1]", lambda v: 0 < v <= 1)
TOP_K = Rule("be at least 1, or -1 for all tokens", lambda v: v == -1 or v >= 1)
SEED = Rule("lie in [0, 2^32)", lambda v: 0 <= v < 2**32)
NOT_EMPTY = Rule("not be empty", bool)


def flag_name(field_name: str) -> str:
    """`eps_clip` -> `--eps-clip`."""
    return "--" + field_name.replace("_", "-")


def flag(
    default: object,
    help: str,
    group: str,
    *,
    rule: Rule | None = None,
    choices: tuple[str, ...] = (),
    required: bool = False,
) -> Any:
    """A dataclass field that carries what the parser needs. A required one has no meaningful default: pass None."""
    assert group in GROUPS, group
    if choices:
        rule = Rule("be one of " + ", ".join(choices), choices.__contains__)
    metadata = {"help": help, "group": group, "rule": rule, "choices": choices, "required": required}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """The run's flags. Types are those of the resolved set: before `resolve`, defaults that depend on others are None.

    Raises:
        ValueError: naming flag, value and rule, when one value alone is out of range.
    """

    tensor_model_parallel_size: int = flag(1, "ranks that share one layer in training", "parallel", rule=POSITIVE)
    pipeline_model_parallel_size: int = flag(1, "pipeline stages in training", "parallel", rule=POSITIVE)
    sequence_parallel: bool = flag(False, "split activations between tensor-parallel regions too", "parallel")
    rollout_tensor_model_parallel_size: int = flag(
        None, "ranks of one generation engine (default: --tensor-model-parallel-size)", "parallel", rule=POSITIVE
    )
    distributed_timeout_minutes: int = flag(10, "after this, a collective that waits fails", "parallel", rule=POSITIVE)

    hf_checkpoint: str = flag(
        None, "Hugging Face model folder: config, tokenizer, weights", "model", rule=NOT_EMPTY, required=True
    )
    ref_load: str = flag(
        None, "Hugging Face folder of the KL reference (default: --hf-checkpoint)", "model", rule=NOT_EMPTY
    )
    bf16: bool = flag(False, "bf16 weights with fp32 master weights, instead of fp32", "model")
    random_init: bool = flag(False, "weights at random from --hf-checkpoint/config.json", "model")
    init_method_std: float = flag(0.02, "spread of random weights", "model", rule=ABOVE_ZERO)
    qkv_format: str = flag("thd", "packed (thd) or padded (bshd) micro-batches", "model", choices=("thd", "bshd"))

    optimizer: str = flag("adam", "update rule", "training", choices=("adam", "sgd"))
    lr: float = flag(1e-6, "highest learning rate", "training", rule=NOT_NEGATIVE)
    min_lr: float = flag(0.0, "learning rate at the end of the decay", "training", rule=NOT_NEGATIVE)
    lr_warmup_iters: int = flag(0, "updates of linear warm-up from 0", "training", rule=NOT_NEGATIVE)
    lr_decay_style: str = flag(
        "constant", "learning rate after the warm-up", "training", choices=("constant", "linear", "cosine")
    )
    lr_decay_iters: int = flag(
        None, "updates until --min-lr, warm-up included (default: all updates of the run)", "training", rule=POSITIVE
    )
    weight_decay: float = flag(0.0, "decoupled weight decay", "training", rule=NOT_NEGATIVE)
    adam_beta1: float = flag(0.9, "decay of Adam's first moment", "training", rule=DECAY)
    adam_beta2: float = flag(0.999, "decay of Adam's second moment", "training", rule=DECAY)
    adam_eps: float = flag(1e-8, "added to Adam's denominator", "training", rule=ABOVE_ZERO)
    clip_grad: float = flag(1.0, "largest global gradient norm; 0 turns clipping off", "training", rule=NOT_NEGATIVE)
    seed: int = flag(1234, "seed of the run; 0 is a seed like any other", "training", rule=SEED)
    micro_batch_size: int | None = flag(
        None, "sequences of one micro-batch (default: 1 without --max-tokens-per-gpu)", "training", rule=POSITIVE
    )
    max_tokens_per_gpu: int | None = flag(
        None, "tokens of one micro-batch on one rank; excludes --micro-batch-size", "training", rule=POSITIVE
    )
    global_batch_size: int = flag(
        None, "samples of one update over all ranks (default: the whole rollout)", "training", rule=POSITIVE
    )
    recompute_granularity: str | None = flag(
        None, "activations to recompute in backward (default: none)", "training", choices=("full", "selective")
    )
    recompute_method: str = flag(
        "uniform", "how --recompute-granularity full picks layers", "training", choices=("uniform", "block")
    )
    recompute_num_layers: int = flag(1, "layers of one recomputed unit or block", "training", rule=POSITIVE)
    overlap_grad_reduce: bool = flag(False, "reduce gradients during backward", "training")
    overlap_param_gather: bool = flag(False, "gather parameters during forward", "training")
    ddp_bucket_size: int | None = flag(
        None, "parameters of one reduction bucket (default: Megatron's)", "training", rule=POSITIVE
    )
    log_probs_chunk_size: int = flag(
        1024, "tokens whose logits are held in fp32 at one time", "training", rule=POSITIVE
    )

    num_rollout: int = flag(100, "steps of the run; each generates once", "rollout", rule=POSITIVE)
    rollout_batch_size: int = flag(32, "prompts of one step over all ranks", "rollout", rule=POSITIVE)
    n_samples_per_prompt: int = flag(8, "responses to each prompt: the group", "rollout", rule=POSITIVE)
    rollout_temperature: float = flag(1.0, "sampling temperature, in log-probs as well", "rollout", rule=SAMPLING)
    rollout_top_p: float = flag(1.0, "only 1 (all tokens) can be trained on yet", "rollout", rule=SHARE)
    rollout_top_k: int = flag(-1, "only -1 (all tokens) can be trained on yet", "rollout", rule=TOP_K)
    rollout_max_prompt_len: int = flag(512, "longest prompt in tokens", "rollout", rule=POSITIVE)
    rollout_max_response_len: int = flag(512, "longest response in tokens", "rollout", rule=POSITIVE)
    rollout_stop_token_ids: tuple[int, ...] | None = flag(
        None, "ids that end a response (default: the model's own end ids)", "rollout", rule=NOT_NEGATIVE
    )
    rollout_ignore_eos: bool = flag(False, "generate to the full length past end ids", "rollout")
    rollout_seed: int = flag(None, "seed of the rollouts (default: --seed)", "rollout", rule=SEED)
    vllm_kv_cache_gb: float | None = flag(
        None, "GiB of KV cache on each rank (default: chosen by the device)", "rollout", rule=ABOVE_ZERO
    )
    vllm_max_num_seqs: int = flag(256, "sequences that one engine runs at a time", "rollout", rule=POSITIVE)
    vllm_enforce_eager: bool = flag(False, "no compile and no CUDA graphs in the engine", "rollout")

    reshard_bucket_mb: int = flag(
        512, "MiB of weights whose transfers are in flight together", "rollout", rule=POSITIVE
    )
    no_verify_first_switch: bool = flag(
        False, "do not compare the engine's weights with the trainer's at the first rollout", "rollout"
    )
    max_logprob_gap: float | None = flag(
        None,
        "stop if trainer and engine differ by more than this in the first step, in nats a token on average "
        "(default: only warn, from 0.1)",
        "rollout",
        rule=ABOVE_ZERO,
    )

    advantage_estimator: str = flag("grpo", "how rewards become advantages", "algorithm", choices=("grpo",))
    disable_grpo_std_normalization: bool = flag(
        False, "do not divide advantages by the group's standard deviation", "algorithm"
    )
    eps_clip: float = flag(0.2, "the ratio is clipped from below at 1 - this", "algorithm", rule=CLIP)
    eps_clip_high: float = flag(
        None, "the ratio is clipped from above at 1 + this (default: --eps-clip)", "algorithm", rule=ABOVE_ZERO
    )
    use_kl_loss: bool = flag(False, "measure the KL to the reference and add it to the loss", "algorithm")
    kl_loss_coef: float = flag(
        0.0, "weight of the KL; 0 with --use-kl-loss only logs it", "algorithm", rule=NOT_NEGATIVE
    )
    kl_loss_type: str = flag("k3", "estimator of the KL", "algorithm", choices=("k3",))
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", "algorithm", rule=NOT_NEGATIVE)
    debug_permute_rewards: bool = flag(
        False, "control experiment: rewards are permuted across the batch, so nothing can be learned", "algorithm"
    )

    rm_type: tuple[str, ...] | None = flag(
        None, "built-in rewards, one or more", "reward", choices=("math", "code", "remote_rm")
    )
    custom_rm_path: tuple[str, ...] | None = flag(
        None, "own rewards as FILE.py:FUNCTION, one or more", "reward", rule=NOT_EMPTY
    )
    rm_weights: tuple[float, ...] | None = flag(
        None, "weight of each reward in the total, --rm-type first, then --custom-rm-path (default: 1 each)", "reward"
    )
    group_rm: bool = flag(False, "--custom-rm-path functions get all responses to a prompt at once", "reward")
    rm_url: str | None = flag(None, "http or https address that remote_rm sends samples to", "reward")
    rm_retries: int = flag(3, "further attempts of remote_rm, within --rm-timeout", "reward", rule=NOT_NEGATIVE)
    rm_timeout: float = flag(10.0, "seconds for one reward, with --group-rm for one group", "reward", rule=ABOVE_ZERO)
    rm_workers: int = flag(1, "workers of each reward on each rank", "reward", rule=POSITIVE)
    on_reward_error: str = flag(
        "zero",
        "a reward's exception or time-out is a counted zero, or stops the run",
        "reward",
        choices=("zero", "stop"),
    )

    prompt_data: tuple[str, ...] = flag(
        None,
        "training prompts, one or more sources: a jsonl or .parquet file, a folder of such files or of a saved "
        "dataset, or hf:owner/name[:config][:split]",
        "data",
        rule=NOT_EMPTY,
        required=True,
    )
    prompt_data_weights: tuple[float, ...] | None = flag(
        None,
        "share of each source of --prompt-data in the batches (default: every row of all sources once an epoch)",
        "data",
        rule=ABOVE_ZERO,
    )
    input_key: str = flag("prompt", "column of the prompt", "data", rule=NOT_EMPTY)
    label_key: str = flag("label", "column of the right answer", "data", rule=NOT_EMPTY)
    apply_chat_template: bool = flag(False, "prompts go through the tokenizer's chat template", "data")
    chat_template: str | None = flag(
        None, "Jinja file in the place of the tokenizer's chat template, also in the export", "data", rule=NOT_EMPTY
    )
    apply_chat_template_kwargs: str | None = flag(
        None, "variables for the chat template, a JSON object such as '{\"enable_thinking\": false}'", "data"
    )
    overlong_prompt: str = flag(
        "refuse",
        "prompts longer than --rollout-max-prompt-len, templated: refuse them all, drop them, or left-cut them to "
        "their last tokens",
        "data",
        choices=("refuse", "drop", "left-cut"),
    )
    data_cache: str = flag(
        None,
        "folder of prepared prompts, found again by content (default: moebius/data in XDG_CACHE_HOME or ~/.cache)",
        "data",
        rule=NOT_EMPTY,
    )
    rollout_shuffle: bool = flag(False, "new order of the prompts in each epoch", "data")
    eval_prompt_data: tuple[str, ...] | None = flag(
        None, "prompts to evaluate on: sources like those of --prompt-data", "data", rule=NOT_EMPTY
    )
    eval_interval: int | None = flag(None, "steps between evaluations", "data", rule=POSITIVE)
    eval_temperature: float = flag(
        0.0, "sampling temperature of evaluations; 0 is greedy", "data", rule=GREEDY_OR_SAMPLING
    )
    eval_max_response_len: int | None = flag(
        None, "longest response in evaluations (default: --rollout-max-response-len)", "data", rule=POSITIVE
    )

    save: str = flag("runs/grpo", "run folder: metrics, curves, arguments, export", "logging", rule=NOT_EMPTY)
    save_hf: bool = flag(False, "write the trained model to SAVE/hf in Hugging Face form", "logging")
    use_wandb: bool = flag(False, "log to Weights & Biases (WANDB_MODE=offline works)", "logging")
    wandb_project: str = flag("moebius", "project of --use-wandb", "logging", rule=NOT_EMPTY)
    wandb_name: str | None = flag(None, "run name of --use-wandb (default: chosen by wandb)", "logging", rule=NOT_EMPTY)
    use_tensorboard: bool = flag(False, "log to TensorBoard", "logging")
    tensorboard_dir: str = flag(
        None, "folder of --use-tensorboard (default: SAVE/tensorboard)", "logging", rule=NOT_EMPTY
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                _check(flag_name(field.name), value, field.metadata["rule"])
            elif field.metadata["required"]:
                raise ValueError(f"{flag_name(field.name)} is required: {field.metadata['help']}")


def _check(name: str, value: object, rule: Rule | None) -> None:
    for one in value if isinstance(value, tuple) else (value,):
        if isinstance(one, float) and not math.isfinite(one):
            raise ValueError(f"{name} {one}: it must be finite")
        if rule is not None and not rule.holds(one):
            raise ValueError(f"{name} {one!r}: it must {rule.text}")
