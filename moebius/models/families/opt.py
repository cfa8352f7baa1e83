"""OPT (Zhang et al. 2022): learned positions, LayerNorm, relu, biases everywhere.

OPT-350m differs from its siblings: norms follow the residual sums, and the embedding is narrower than the layers, with
a projection on either side.
"""

from collections.abc import Iterator
from typing import Any

from moebius.models.families.weight import Cut, Family, Weight, in_layers
from moebius.models.shape import ModelShape

POSITION_OFFSET = 2  # row of the first position; the rows before it stood for padding once
LAYER_NORM_EPSILON = 1e-5  # torch's default: config.json has no field for it


def _shape(config: dict[str, Any]) -> ModelShape:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config["word_embed_proj_dim"]
    return ModelShape(
        family="opt",
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        ffn_hidden_size=config["ffn_dim"],
        num_attention_heads=heads,
        num_query_groups=heads,
        head_dim=hidden // heads,
        vocab_size=config["vocab_size"],
        tied=config["tie_word_embeddings"],
        qk_layernorm=False,
        rope_theta=0.0,
        norm_epsilon=LAYER_NORM_EPSILON,
        max_position_embeddings=config["max_position_embeddings"],
        linear_bias=True,
        layer_norm=True,
        post_norm=not config["do_layer_norm_before"],
        gated_mlp=False,
        learned_positions=config["max_position_embeddings"] + POSITION_OFFSET,
        word_embed_proj_dim=None if width == hidden else width,
    )


def _layer(shape: ModelShape) -> Iterator[Weight]:
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    parts = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
    qkv = "self_attn.qkv_proj.weight"
    out, fc1, fc2 = "self_attn.out_proj.weight", "fc1.weight", "fc2.weight"
    norms = ("post_attention_layernorm", "post_mlp_layernorm")
    if not shape.post_norm:
        norms = ("input_layernorm", "pre_mlp_layernorm")
    for weight in (
        Weight(f"{norms[0]}.weight", (name := "self_attn_layer_norm.weight",), name, Cut.WHOLE, (hidden,)),
        Weight("self_attention.linear_qkv.weight", parts, qkv, Cut.ROWS, (hidden,) * 3, hidden, heads=True),
        Weight("self_attention.linear_proj.weight", (out,), out, Cut.COLUMNS, (hidden,), hidden),
        Weight(f"{norms[1]}.weight", (name := "final_layer_norm.weight",), name, Cut.WHOLE, (hidden,)),
        Weight("mlp.linear_fc1.weight", (fc1,), fc1, Cut.ROWS, (ffn,), hidden),
        Weight("mlp.linear_fc2.weight", (fc2,), fc2, Cut.COLUMNS, (hidden,), ffn),
    ):
        yield weight
        yield weight.bias()


def _weights(shape: ModelShape) -> list[Weight]:
    hidden, width = shape.hidden_size, shape.embedding_size

    def outside(trainer: str, name: str, cut: Cut, rows: int, columns: int | None, padded: bool = False) -> Weight:
        name = f"model.decoder.{name}" if name != "lm_head.weight" else name
        return Weight(trainer, (name,), name, cut, (rows,), columns, padded)

    vocabulary = shape.vocab_size
    words = outside("embedding.word_embeddings.weight", "embed_tokens.weight", Cut.ROWS, vocabulary, width, padded=True)
    positions = outside(
        "embedding.position_embeddings.weight", "embed_positions.weight", Cut.WHOLE, shape.learned_positions, hidden
    )
    found = [words, positions]
    if width != hidden:
        found.append(outside("embedding.project_in.weight", "project_in.weight", Cut.WHOLE, hidden, width))
    found += in_layers(shape, _layer(shape), "decoder.layers.{}.", "model.decoder.layers.{}.")
    if not shape.post_norm:
        norm = outside("decoder.final_layernorm.weight", "final_layer_norm.weight", Cut.WHOLE, hidden, None)
        found += [norm, norm.bias()]
    if width != hidden:
        found.append(outside("project_out.weight", "project_out.weight", Cut.WHOLE, width, hidden))
    if not shape.tied:
        found.append(outside("output_layer.weight", "lm_head.weight", Cut.ROWS, vocabulary, width, padded=True))
    return found


OPT = Family(
    architecture="OPTForCausalLM",
    sizes=frozenset(
        ["num_hidden_layers", "hidden_size", "ffn_dim", "num_attention_heads", "vocab_size", "max_position_embeddings"]
    ),
    fields=frozenset(("word_embed_proj_dim", "do_layer_norm_before", "tie_word_embeddings")),
    fixed={
        "activation_function": ("relu",),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
        "_remove_final_layer_norm": (False,),
    },
    shape=_shape,
    weights=_weights,
)
