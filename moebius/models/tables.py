"""One table per family, read in every direction: Hugging Face names, trainer names, engine names, and how each is cut.

A `Weight` stands for one tensor of the trainer. Fused tensors list their Hugging Face parts in fusing order. Every part
is cut alike over tensor parallelism: by rows (column-parallel layers, embedding, head), by columns (row-parallel
layers), or not at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from moebius.models.shape import ModelShape


class Cut(Enum):
    """How tensor parallelism divides a weight."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True)
class Weight:
    """One trainer tensor and its names elsewhere.

    Attributes:
        trainer: name in the mcore GPTModel, with the layer's global number.
        hf: names of the parts in the Hugging Face checkpoint, in fusing order.
        engine: name in vLLM's model.
        cut: how tensor parallelism divides it.
        rows: rows of each Hugging Face part (unpadded, uncut).
        columns: columns of each part; None for vectors.
        padded: rows are padded to a multiple of 64 at the end (embedding and head).
        heads: parts are q, k, v heads.
        layer: global layer number, None outside the layers.
    """

    trainer: str
    hf: tuple[str, ...]
    engine: str
    cut: Cut
    rows: tuple[int, ...]
    columns: int | None = None
    padded: bool = False
    heads: bool = False
    layer: int | None = None


def _layer(shape: ModelShape) -> Iterator[Weight]:
    hidden, ffn, d = shape.hidden_size, shape.ffn_hidden_size, shape.head_dim
    q, kv = shape.num_attention_heads * d, shape.num_query_groups * d
    attention = "self_attn."
    yield Weight("input_layernorm", ("input_layernorm",), "input_layernorm", Cut.WHOLE, (hidden,))
    yield Weight(
        "self_attention.linear_qkv",
        tuple(f"{attention}{part}_proj" for part in "qkv"),
        f"{attention}qkv_proj",
        Cut.ROWS,
        (q, kv, kv),
        hidden,
        heads=True,
    )
    if shape.qk_layernorm:
        for part in "qk":
            name = f"{attention}{part}_norm"
            yield Weight(f"self_attention.{part}_layernorm", (name,), name, Cut.WHOLE, (d,))
    o_proj = f"{attention}o_proj"
    yield Weight("self_attention.linear_proj", (o_proj,), o_proj, Cut.COLUMNS, (hidden,), q)
    norm = "post_attention_layernorm"
    yield Weight("pre_mlp_layernorm", (norm,), norm, Cut.WHOLE, (hidden,))
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    yield Weight("mlp.linear_fc1", gate_up, "mlp.gate_up_proj", Cut.ROWS, (ffn, ffn), hidden)
    yield Weight("mlp.linear_fc2", ("mlp.down_proj",), "mlp.down_proj", Cut.COLUMNS, (hidden,), ffn)


def weights(shape: ModelShape) -> list[Weight]:
    """Every weight of the model, in the order of the forward pass. A tied head is not listed: it is the embedding."""
    embedding = Weight(
        "embedding.word_embeddings.weight",
        ("model.embed_tokens.weight",),
        "model.embed_tokens.weight",
        Cut.ROWS,
        (shape.vocab_size,),
        shape.hidden_size,
        padded=True,
    )
    found = [embedding]
    for number in range(shape.num_layers):
        for weight in _layer(shape):
            prefix = f"model.layers.{number}."
            found.append(
                replace(
                    weight,
                    trainer=f"decoder.layers.{number}.{weight.trainer}.weight",
                    hf=tuple(f"{prefix}{part}.weight" for part in weight.hf),
                    engine=f"{prefix}{weight.engine}.weight",
                    layer=number,
                )
            )
    norm = "model.norm.weight"
    found.append(Weight("decoder.final_layernorm.weight", (norm,), norm, Cut.WHOLE, (shape.hidden_size,)))
    if not shape.tied:
        head = replace(embedding, trainer="output_layer.weight", hf=("lm_head.weight",), engine="lm_head.weight")
        found.append(head)
    return found
