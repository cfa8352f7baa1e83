"""The modules of a transformer layer that mcore lacks without Transformer Engine, or that must know about blocks."""

import copy
import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from moebius.models.learned_positions import LearnedPositionEmbedding, narrow_head, placed, projection_out


class RMSNorm:
    """torch's RMSNorm built from a mcore config; mcore's own wrapper refuses sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> torch.nn.RMSNorm:
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, **placed(config))
        # finalize_model_grads sums gradients of marked parameters over TP
        norm.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        return norm


class LayerNorm:
    """torch's LayerNorm built from a mcore config, as RMSNorm above."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.LayerNorm:
        norm = torch.nn.LayerNorm(hidden_size, eps=eps, **placed(config))
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        return norm


@cache
def _varlen_options() -> frozenset[str]:
    """varlen_attn's signature moves between torch versions."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options = _varlen_options()
    extra: dict[str, Any] = {"scale": scale}
    if "window_size" in options:
        extra["window_size"] = (-1, 0)
    else:
        extra["is_causal"] = True
    if "enable_gqa" in options:
        extra["enable_gqa"] = q.size(1) != k.size(1)
    elif q.size(1) != k.size(1):
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    attend: Any = varlen_attn
    return attend(q.contiguous(), k.contiguous(), v.contiguous(), bounds, bounds, longest, longest, **extra)


class CoreAttention(MegatronModule):
    """Causal self attention with grouped queries: SDPA for [s, b, n, d], varlen attention for packed [t, n, d]."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert attention_type == "self" and attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        self.tp_group = pg_collection.tp  # sharded_state_dict asks mcore's parallel_state where a module has none
        self.scale: float = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, packed: Any) -> Tensor:
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            out = _varlen(q, k, v, packed.cu_seqlens_q, packed.max_seqlen_q, self.scale)
            return out.reshape(out.size(0), -1)
        gqa = q.size(1) != k.size(1)
        lengths = packed.cu_seqlens_q.diff().tolist()
        outs = []
        for sequence in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
            heads_first = [x.transpose(0, 1)[None] for x in sequence]
            out = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=self.scale, enable_gqa=gqa)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs).reshape(q.size(0), -1)


class BlockedSelfAttention(SelfAttention):
    """mcore's SelfAttention whose qkv rows are stored as `blocks` x [q; k; v] (see blocks.py).

    Where TP ranks outnumber KV heads, a rank stores its part of the rows of one k and one v head, and gathers the rest
    of both from the ranks that share them.
    """

    def __init__(self, *args: Any, blocks: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        heads, kv_heads = self.config.num_attention_heads, self.config.num_query_groups
        assert kv_heads is not None
        self.tp_size: int = self.pg_collection.tp.size()
        self.sharing = max(1, self.tp_size // kv_heads)
        queries, groups = heads // self.tp_size, max(1, kv_heads // self.tp_size)
        assert queries % blocks == 0 and groups % blocks == 0, (queries, groups, blocks)
        self.blocks = blocks
        self.heads_per_block = [queries // blocks, groups // blocks, groups // blocks]

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Any = None, output_gate: bool = False, split_qkv: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert key_value_states is None and not output_gate and split_qkv
        linear: Any = self.linear_qkv
        mixed, _ = linear(hidden_states)
        s, b, d = mixed.size(0), mixed.size(1), self.hidden_size_per_attention_head
        if self.sharing > 1:
            mixed = self._with_whole_kv_head(mixed, self.heads_per_block[0] * d)
        parts = mixed.view(s, b, self.blocks, -1, d).split(self.heads_per_block, dim=3)
        query, key, value = (part.reshape(s, b, -1, d) for part in parts)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value

    def _with_whole_kv_head(self, mixed: Tensor, query_rows: int) -> Tensor:
        """[s, b, q + parts of k, v] -> [s, b, q + k + v]; backward sums over the ranks that share the head."""
        query, part = mixed.split([query_rows, mixed.size(-1) - query_rows], dim=-1)
        group = self.pg_collection.tp
        gathered = all_gather_last_dim_from_tensor_parallel_region(part.contiguous(), group=group)
        first = group.rank() // self.sharing * self.sharing
        parts = gathered.unflatten(-1, (self.tp_size, 2, -1))[:, :, first : first + self.sharing]
        return torch.cat([query, parts.transpose(2, 3).flatten(2)], dim=-1)


class BlockedMLP(MLP):
    """mcore's gated MLP whose first weight is stored as `blocks` x [gate; up] (see blocks.py)."""

    def __init__(self, *args: Any, blocks: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.config.gated_linear_unit and not self.config.add_bias_linear
        self.blocks = blocks

    def forward(self, hidden_states: Tensor, per_token_scale: Any = None, **_: Any) -> tuple[Tensor, Any]:
        assert per_token_scale is None
        mixed, _ = self.linear_fc1(hidden_states)
        gate, up = mixed.unflatten(-1, (self.blocks, -1)).chunk(2, dim=-1)
        return self.linear_fc2((F.silu(gate) * up).flatten(-2))


class PostNormLayer(TransformerLayer):
    """A layer whose norms follow the residual sums: LN(x + f(x)). mcore's own norms are identities here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        size, eps = self.config.hidden_size, self.config.layernorm_epsilon
        self.post_attention_layernorm = LayerNorm(self.config, size, eps)
        self.post_mlp_layernorm = LayerNorm(self.config, size, eps)

    def _forward_attention(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        hidden, context = super()._forward_attention(*args, **kwargs)
        return self.post_attention_layernorm(hidden), context

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Any = super()._forward_mlp(*args, **kwargs)
        return self.post_mlp_layernorm(hidden)


class Head(ColumnParallelLinear):
    """The output layer up to, but without, its product: hands back hidden states [s, b, h] whole on every TP rank.

    `moebius.log_probs` applies the weight in chunks. Calling this module still runs the hooks by which DDP waits for a
    lazily gathered weight. Its backward sums the shards' parts of the hidden states' gradient over TP.
    """

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=True, group=self.tp_group
            ), None
        return copy_to_tensor_model_parallel_region(input_, group=self.tp_group), None


class PolicyModel(GPTModel):
    """mcore's GPTModel that returns the last hidden states [s, b, h] instead of logits, so that [tokens, vocabulary]
    never exists as a whole. `head_weight` is what they are to be multiplied with."""

    def __init__(self, *args: Any, learned_positions: int, embedding_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: Any = self.config
        vocabulary, tp_group = self.vocab_size, self.pg_collection.tp
        narrow = embedding_size != config.hidden_size
        self.project_out = projection_out(config, embedding_size) if narrow and self.post_process else None
        if learned_positions and self.pre_process:
            self.embedding = LearnedPositionEmbedding(config, vocabulary, learned_positions, embedding_size, tp_group)
        if narrow and self.post_process:
            no_weight = self.pre_process and self.share_embeddings_and_output_weights
            self.output_layer = narrow_head(config, embedding_size, vocabulary, no_weight, tp_group)
        if learned_positions or narrow:
            self.setup_embeddings_and_output_layer()  # what GPTModel did to the modules replaced here
        if self.post_process:
            self.output_layer.__class__ = Head  # same state, another forward

    @property
    def head_weight(self) -> Tensor:
        """[padded vocabulary / TP, h]: the output layer's weight, the embedding's where they are tied."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert weight is not None, "the head is on the last pipeline stage only"
        return weight

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        if self.project_out is not None:
            hidden_states = self.project_out(hidden_states)
        return self.output_layer(hidden_states)[0]


def block_spec(
    config: Any, post_norm: bool, mlp_blocks: int, attention_blocks: int, tp_group: Any, pp_rank: int
) -> Any:
    """The layers of one pipeline stage as a mcore spec."""
    kind = config.normalization
    norm: Any = RMSNorm if kind == "RMSNorm" else LayerNorm
    spec: Any = copy.deepcopy(get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=kind))
    layer: Any = spec.submodules
    if post_norm:
        spec.module = PostNormLayer
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    else:
        layer.input_layernorm = layer.pre_mlp_layernorm = norm
    attention = layer.self_attention
    attention.module = BlockedSelfAttention
    attention.params = {**attention.params, "blocks": attention_blocks}
    attention.submodules.core_attention = CoreAttention
    if config.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = norm
    if config.gated_linear_unit:
        layer.mlp.module = BlockedMLP
        # mcore hands tp_group to a module that *is* MLP only; a subclass without it is silently built unsharded
        layer.mlp.params = {**(layer.mlp.params or {}), "blocks": mlp_blocks, "tp_group": tp_group}
    layers = get_num_layers_to_build(config, pp_rank=pp_rank)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=None if post_norm else norm)
