"""The sizes of a model, read from a Hugging Face `config.json`, and the checks that need nothing else."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB_MULTIPLE = 64  # vLLM stores vocabularies padded to this, so the trainer does too: then rows are views
FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Fields that change the arithmetic, and the values that mean "not used".
_UNUSED: dict[str, tuple[object, ...]] = {
    "quantization_config": (None,),
    "rope_scaling": (None,),
    "use_sliding_window": (None, False),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "pretraining_tp": (None, 1),
    "attention_dropout": (None, 0.0),
    "hidden_act": (None, "silu"),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of a decoder-only model, in the words of its config.json."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    tied: bool
    qk_layernorm: bool
    rope_theta: float
    norm_epsilon: float
    max_position_embeddings: int

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the stored embedding and head."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def num_parameters(self) -> int:
        """Parameters of the Hugging Face model (vocabulary not padded)."""
        heads = (self.num_attention_heads + 2 * self.num_query_groups) * self.head_dim
        attention = (heads + self.num_attention_heads * self.head_dim) * self.hidden_size
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_layernorm else 0)
        layer = attention + 3 * self.hidden_size * self.ffn_hidden_size + norms
        return self.num_layers * layer + self.vocab_size * self.hidden_size * (2 - self.tied) + self.hidden_size


def read_shape(folder: str | Path, flag: str = "--hf-checkpoint") -> ModelShape:
    """Reads `folder/config.json`; `flag` is the option that named the folder.

    Raises:
        ValueError: naming the flag when the file is missing or broken, the family is unknown, or a field asks for
            arithmetic that the trainer does not do (quantised weights, RoPE scaling, sliding windows, ...).
    """
    path, where = Path(folder) / "config.json", f"{flag} {folder}"
    if not path.is_file():
        raise ValueError(f"{where}: there is no config.json in it")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{where}: config.json cannot be read: {error}") from error
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{where}: model_type {family!r} is not one of {', '.join(FAMILIES)}")
    if config.get("architectures") != [FAMILIES[family]]:
        raise ValueError(f"{where}: architectures is {config.get('architectures')!r}, wanted {[FAMILIES[family]]!r}")
    rope = config.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type != "default":
        raise ValueError(f"{where}: rope_type {rope_type!r} is not supported, only 'default'")
    for field, unused in _UNUSED.items():
        if config.get(field) not in unused:
            raise ValueError(f"{where}: config.json sets {field} to {config[field]!r}: not supported")
    try:
        return _shape(family, config, rope)
    except KeyError as error:
        raise ValueError(f"{where}: config.json lacks {error.args[0]!r}") from error


def _shape(family: str, config: dict[str, Any], rope: dict[str, Any]) -> ModelShape:
    heads = config["num_attention_heads"]
    return ModelShape(
        family=family,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        # transformers leaves the field out of config.json where it is the family's default
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_layernorm=family == "qwen3",
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=config["max_position_embeddings"],
    )


def check_fits(shape: ModelShape, tp: int, pp: int, rollout_tp: int | None) -> None:
    """Checks that a model can be cut into the layout, before any weight is read.

    Args:
        rollout_tp: None where nothing will be generated.
    Raises:
        ValueError: naming flag, values and rule.
    """
    if shape.num_layers % pp:
        raise ValueError(
            f"--pipeline-model-parallel-size {pp} does not divide the {shape.num_layers} layers of the model"
        )
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    numbers = f"{heads} query heads and {groups} KV heads"
    if heads % tp or groups % tp:
        raise ValueError(
            f"--tensor-model-parallel-size {tp} does not fit {numbers}: it must divide both "
            "(KV heads are not copied in training)"
        )
    if shape.ffn_hidden_size % tp:
        raise ValueError(
            f"--tensor-model-parallel-size {tp} does not divide the feed-forward size {shape.ffn_hidden_size}"
        )
    _check_vocabulary(shape, tp, "--tensor-model-parallel-size")
    if rollout_tp is None:
        return
    flag = "--rollout-tensor-model-parallel-size"
    if heads % rollout_tp or (groups % rollout_tp and rollout_tp % groups):
        raise ValueError(
            f"{flag} {rollout_tp} does not fit {numbers}: it must divide the query heads, and be a divisor or a "
            "multiple of the KV heads"
        )
    if shape.ffn_hidden_size % rollout_tp:
        raise ValueError(f"{flag} {rollout_tp} does not divide the feed-forward size {shape.ffn_hidden_size}")
    _check_vocabulary(shape, rollout_tp, flag)


def _check_vocabulary(shape: ModelShape, tp: int, flag: str) -> None:
    rows = shape.padded_vocab_size
    if rows % tp:
        nearest = min((n for n in range(1, rows + 1) if rows % n == 0), key=lambda n: (abs(n - tp), n))
        raise ValueError(
            f"{flag} {tp} does not divide the vocabulary of {shape.vocab_size}, stored as {rows} rows; "
            f"the nearest size that does is {nearest}"
        )
