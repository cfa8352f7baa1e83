"""The sizes and switches of a model, and the checks that need nothing else. `moebius.models.families` reads them."""

from dataclasses import dataclass

VOCAB_MULTIPLE = 64  # vLLM stores vocabularies padded to this, so the trainer does too: then rows are views


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of rotary positions (see `moebius.models.rope`), in the words of config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of a decoder-only model.

    Attributes:
        qkv_bias: biases on q, k and v.
        linear_bias: biases on all linear layers but the head (q, k and v too).
        layer_norm: LayerNorm with bias in place of RMSNorm.
        post_norm: norms follow the residual sums instead of preceding the blocks, and there is no final norm.
        gated_mlp: silu(gate) * up in place of relu.
        learned_positions: rows of a learned position table; 0 for rotary positions.
        word_embed_proj_dim: width of embedding and head where projections join them to hidden_size; else None.
    """

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
    qkv_bias: bool = False
    linear_bias: bool = False
    layer_norm: bool = False
    post_norm: bool = False
    gated_mlp: bool = True
    learned_positions: int = 0
    word_embed_proj_dim: int | None = None
    rope_scaling: RopeScaling | None = None

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the stored embedding and head."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def embedding_size(self) -> int:
        """Columns of embedding and head."""
        return self.word_embed_proj_dim or self.hidden_size


def check_fits(shape: ModelShape, tp: int, pp: int, rollout_tp: int | None) -> None:
    """Checks that a model can be cut into the layout, before any weight is read.

    Args:
        rollout_tp: None where nothing will be generated.
    Raises:
        ValueError: naming flag, values and rule.
    """
    if shape.num_layers < pp:
        raise ValueError(f"--pipeline-model-parallel-size {pp} is more than the {shape.num_layers} layers of the model")
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    numbers = f"{heads} query heads and {groups} KV heads"
    if heads % tp or (groups % tp and (tp % groups or shape.head_dim * groups % tp)):
        raise ValueError(
            f"--tensor-model-parallel-size {tp} does not fit {numbers}: it must divide the query heads, and be a "
            "divisor or a multiple of the KV heads"
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
