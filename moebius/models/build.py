"""From a model's shape and a place in the training grid to a mcore model."""

from typing import Any

import torch
import torch.nn.functional as F

from moebius.models.metas import qkv_blocks, stage_starts
from moebius.models.rope import inverse_frequencies
from moebius.models.shape import ModelShape
from parallel_state.groups import ParallelState


def transformer_config(
    shape: ModelShape,
    state: ParallelState,
    dtype: torch.dtype,
    on_cpu: bool,
    recompute_granularity: str | None = None,
    recompute_method: str = "uniform",
    recompute_num_layers: int = 1,
    init_method_std: float = 0.02,
) -> Any:
    """mcore's TransformerConfig. Losses are normalised by the caller, so mcore only sums (calculate_per_token_loss)."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    layout = state.layout
    recompute: dict[str, Any] = {}
    if recompute_granularity == "full":
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": recompute_method,
            "recompute_num_layers": recompute_num_layers,
        }
    elif recompute_granularity == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        qk_layernorm=shape.qk_layernorm,
        add_bias_linear=shape.linear_bias,
        add_qkv_bias=shape.qkv_bias,
        normalization="LayerNorm" if shape.layer_norm else "RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        gated_linear_unit=shape.gated_mlp,
        activation_func=F.silu if shape.gated_mlp else F.relu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=init_method_std,
        use_cpu_initialization=on_cpu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it even in dense models
        batch_p2p_comm=True,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        calculate_per_token_loss=True,
        **recompute,
        **_uneven_stages(shape.num_layers, layout.pipeline_model_parallel_size),
    )


def _uneven_stages(num_layers: int, stages: int) -> dict[str, Any]:
    """mcore's fields where layers do not divide evenly."""
    if num_layers % stages == 0:
        return {}
    starts = stage_starts(num_layers, stages)
    return {
        "num_layers_in_first_pipeline_stage": starts[1],
        "num_layers_in_last_pipeline_stage": num_layers - starts[-2],
    }


def build_model(shape: ModelShape, state: ParallelState, config: Any, seed: int) -> Any:
    """Builds this rank's stage and shard with random weights. Collective over the training grid.

    Args:
        seed: seeds mcore's parallel random streams; every pipeline stage gets its own.
    Returns:
        a PolicyModel on the current device.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from moebius.models.modules import PolicyModel, block_spec

    stage_seed = seed + 100 * state.at.pp
    torch.manual_seed(stage_seed)
    model_parallel_cuda_manual_seed(
        stage_seed, tp_rank=state.at.tp, ep_rank=0, etp_rank=state.at.tp, force_reset_rng=True
    )
    blocks = (state.layout.blocks, qkv_blocks(shape, state.layout))
    spec = block_spec(config, shape.post_norm, *blocks, state.train.tp, state.at.pp)
    model = PolicyModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        pre_process=state.is_first_stage,
        post_process=state.is_last_stage,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="none" if shape.learned_positions else "rope",
        learned_positions=shape.learned_positions,
        embedding_size=shape.embedding_size,
        pg_collection=state.train,
    )
    if not shape.learned_positions:
        model.rotary_pos_emb.inv_freq = inverse_frequencies(shape)
    return model.cuda()


def unwrap(model: Any) -> Any:
    """The PolicyModel inside DDP and precision wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model
