"""Llama, Mistral, Qwen2 and Qwen3: RMSNorm, rotary positions, grouped queries, silu-gated MLP.

They differ in biases on q, k and v (Qwen2), norms on each head's q and k (Qwen3), and Llama 3.1's rotary scaling.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from moebius.models.families.weight import Cut, Family, Weight, in_layers
from moebius.models.shape import ModelShape, RopeScaling

_SIZES = [
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
]
_FIELDS = [
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
]
_FIXED: dict[str, tuple[object, ...]] = {"hidden_act": ("silu",)}
_NO_WINDOW: dict[str, tuple[object, ...]] = {"use_sliding_window": (None, False)}
# what a window would be, where use_sliding_window says that there is none
_IDLE_WINDOW = ("sliding_window", "max_window_layers")


def _rope_scaling(config: dict[str, Any]) -> RopeScaling | None:
    rope = config["rope_parameters"]
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] != "llama3":
        raise ValueError(f"rope_type {rope['rope_type']!r} is not supported, only 'default' and 'llama3'")
    if config["model_type"] != "llama":
        raise ValueError(f"rope_type 'llama3' is not supported for model_type {config['model_type']!r}")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=rope["original_max_position_embeddings"],
    )


def _shape(config: dict[str, Any]) -> ModelShape:
    family, heads = config["model_type"], config["num_attention_heads"]
    if config["rope_parameters"].get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise ValueError("layer_types must all be 'full_attention': other kinds are not supported")
    return ModelShape(
        family=family,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        tied=config["tie_word_embeddings"],
        qk_layernorm=family == "qwen3",
        rope_theta=float(config["rope_parameters"]["rope_theta"]),
        norm_epsilon=config["rms_norm_eps"],
        max_position_embeddings=config["max_position_embeddings"],
        qkv_bias=family == "qwen2",
        rope_scaling=_rope_scaling(config),
    )


def _layer(shape: ModelShape) -> Iterator[Weight]:
    hidden, ffn, d = shape.hidden_size, shape.ffn_hidden_size, shape.head_dim
    q, kv = shape.num_attention_heads * d, shape.num_query_groups * d
    norm = "input_layernorm.weight"
    yield Weight(norm, (norm,), norm, Cut.WHOLE, (hidden,))
    qkv = Weight(
        "self_attention.linear_qkv.weight",
        tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
        "self_attn.qkv_proj.weight",
        Cut.ROWS,
        (q, kv, kv),
        hidden,
        heads=True,
    )
    yield qkv
    if shape.qkv_bias:
        yield qkv.bias()
    if shape.qk_layernorm:
        for part in "qk":
            norm = f"self_attn.{part}_norm.weight"
            yield Weight(f"self_attention.{part}_layernorm.weight", (norm,), norm, Cut.WHOLE, (d,))
    o_proj = "self_attn.o_proj.weight"
    yield Weight("self_attention.linear_proj.weight", (o_proj,), o_proj, Cut.COLUMNS, (hidden,), q)
    norm = "post_attention_layernorm.weight"
    yield Weight("pre_mlp_layernorm.weight", (norm,), norm, Cut.WHOLE, (hidden,))
    gate_up = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    yield Weight("mlp.linear_fc1.weight", gate_up, "mlp.gate_up_proj.weight", Cut.ROWS, (ffn, ffn), hidden)
    down = "mlp.down_proj.weight"
    yield Weight("mlp.linear_fc2.weight", (down,), down, Cut.COLUMNS, (hidden,), ffn)


def _weights(shape: ModelShape) -> list[Weight]:
    tokens, norm = "model.embed_tokens.weight", "model.norm.weight"
    rows, hidden = (shape.vocab_size,), shape.hidden_size
    embedding = Weight("embedding.word_embeddings.weight", (tokens,), tokens, Cut.ROWS, rows, hidden, padded=True)
    found = [embedding]
    found += in_layers(shape, _layer(shape), "decoder.layers.{}.", "model.layers.{}.")
    found.append(Weight("decoder.final_layernorm.weight", (norm,), norm, Cut.WHOLE, (hidden,)))
    if not shape.tied:
        head = replace(embedding, trainer="output_layer.weight", hf=("lm_head.weight",), engine="lm_head.weight")
        found.append(head)
    return found


def _family(architecture: str, fixed: dict[str, tuple[object, ...]], fields: tuple[str, ...] = ()) -> Family:
    return Family(
        architecture, frozenset(_SIZES), frozenset((*_FIELDS, *fields)), {**_FIXED, **fixed}, _shape, _weights
    )


_BIASES: dict[str, tuple[object, ...]] = {"attention_bias": (None, False)}
LLAMA = _family("LlamaForCausalLM", {**_BIASES, "mlp_bias": (None, False), "pretraining_tp": (None, 1)})
# a config.json of Mistral without the field means a window of 4096
MISTRAL = _family("MistralForCausalLM", {"sliding_window": (None,)})
QWEN2 = _family("Qwen2ForCausalLM", _NO_WINDOW, (*_IDLE_WINDOW, "layer_types"))
QWEN3 = _family("Qwen3ForCausalLM", {**_BIASES, **_NO_WINDOW}, (*_IDLE_WINDOW, "layer_types"))
