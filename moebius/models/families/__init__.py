"""Model families: one file for each kind, with what its config.json means and its table of weights.

A table is read in every direction: Hugging Face names, trainer names, engine names, and how each tensor is cut.
docs/adding_a_model.md shows the way to a new one.
"""

import json
from pathlib import Path
from typing import Any

from moebius.models.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from moebius.models.families.opt import OPT
from moebius.models.families.weight import Cut, Family, Weight
from moebius.models.shape import ModelShape

__all__ = ["FAMILIES", "Cut", "Weight", "num_parameters", "read_shape", "weights"]

FAMILIES = {"llama": LLAMA, "mistral": MISTRAL, "opt": OPT, "qwen2": QWEN2, "qwen3": QWEN3}
# Fields that do not change what a model computes when it is evaluated. Dropout is among them: a policy is trained
# without it, so that its log-probs are those of the model that generates.
_NEUTRAL = frozenset(
    [
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "activation_dropout",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dropout",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "init_std",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "layerdrop",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "prefix",
        "problem_type",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    ]
)
# Fields of any family that are known and not supported unless they say so; None: not set.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {"quantization_config": (None,), "compression_config": (None,)}


def weights(shape: ModelShape) -> list[Weight]:
    """Every weight of the model, in the order of the forward pass. A tied head is not listed: it is the embedding."""
    return FAMILIES[shape.family].weights(shape)


def num_parameters(shape: ModelShape) -> int:
    """Parameters of the Hugging Face model (vocabulary not padded)."""
    return sum(weight.num_elements for weight in weights(shape))


def read_shape(folder: str | Path, flag: str = "--hf-checkpoint") -> ModelShape:
    """Reads `folder/config.json`, with the defaults that transformers gives to fields that are left out.

    Args:
        flag: the option that named the folder, for messages.
    Raises:
        ValueError: naming the flag when the file is missing or broken, the family is unknown, or a field is not
            understood or asks for arithmetic that the trainer does not do (quantised weights, sliding windows, ...).
    """
    path, where = Path(folder) / "config.json", f"{flag} {folder}"
    if not path.is_file():
        raise ValueError(f"{where}: there is no config.json in it")
    try:
        written: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{where}: config.json cannot be read: {error}") from error
    family = FAMILIES.get(written.get("model_type", ""))
    if family is None:
        raise ValueError(f"{where}: model_type {written.get('model_type')!r} is not one of {', '.join(FAMILIES)}")
    if written.get("architectures") != [family.architecture]:
        raise ValueError(
            f"{where}: architectures is {written.get('architectures')!r}, wanted {[family.architecture]!r}"
        )
    _check_fields(written, family, where)
    config = _completed(path.parent, where)
    for field, supported in {**_UNSUPPORTED, **family.fixed}.items():
        if config.get(field) not in supported:
            raise ValueError(f"{where}: config.json says {field} is {config.get(field)!r}: not supported")
    try:
        return family.shape(config)
    except ValueError as error:
        raise ValueError(f"{where}: config.json: {error}") from error


def _check_fields(written: dict[str, Any], family: Family, where: str) -> None:
    lacking = sorted(family.sizes - written.keys())
    if lacking:
        raise ValueError(f"{where}: config.json lacks {', '.join(map(repr, lacking))}")
    known = family.sizes | family.fields | family.fixed.keys() | _UNSUPPORTED.keys() | _NEUTRAL
    unknown = sorted(field for field in written.keys() - known if written[field] is not None)
    if unknown:
        raise ValueError(
            f"{where}: config.json sets {', '.join(f'{name} to {written[name]!r:.80}' for name in unknown)}: not "
            "understood. Remove a field only if it does not change what the model computes"
        )


def _completed(folder: Path, where: str) -> dict[str, Any]:
    """config.json with the family's defaults, by transformers, which also knows the older spellings."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True).to_dict()
    except Exception as error:  # its validators raise exceptions of several libraries
        raise ValueError(f"{where}: config.json cannot be read: {error}") from error
