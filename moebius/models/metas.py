"""Where each weight lies in the training grid, and what the engine needs of it. Pure: no torch."""

from hybrid_engine.reshard_plan import Kind, ParameterMeta
from moebius.models.families import Cut, Weight, weights
from moebius.models.shape import ModelShape
from parallel_state.layout import ParallelLayout


def stage_starts(num_layers: int, stages: int) -> list[int]:
    """First layer of each pipeline stage, and the number of layers at the end.

    Where layers do not divide evenly, the stages between first and last are alike (mcore knows no other form) and the
    two ends share the rest: 7 layers on 4 stages are 2, 2, 2, 1.
    """
    for middle in (-(-num_layers // stages), num_layers // stages):
        ends = num_layers - middle * (stages - 2)
        if stages == 1 or ends >= 2:
            break
    sizes = [num_layers] if stages == 1 else [-(-ends // 2), *[middle] * (stages - 2), ends // 2]
    return [sum(sizes[:stage]) for stage in range(stages + 1)]


def stage_of(weight: Weight, shape: ModelShape, stages: int) -> int:
    """Pipeline stage that owns a weight (the embedding's owner is the first stage, also when it is tied)."""
    if weight.layer is not None:
        starts = stage_starts(shape.num_layers, stages)
        return next(stage for stage in range(stages) if weight.layer < starts[stage + 1])
    return 0 if weight.trainer.startswith("embedding.") else stages - 1


def qkv_blocks(shape: ModelShape, layout: ParallelLayout) -> int:
    """Blocks of a qkv shard: one for each rollout rank, or one for each KV head where ranks outnumber KV heads."""
    return max(1, min(layout.blocks, shape.num_query_groups // layout.tensor_model_parallel_size))


def blocks_of(weight: Weight, shape: ModelShape, layout: ParallelLayout) -> int:
    """Blocks in this weight's training shard."""
    if weight.heads:
        return qkv_blocks(shape, layout)
    return layout.blocks if len(weight.hf) > 1 else 1


def engine_metas(shape: ModelShape, layout: ParallelLayout, element_size: int) -> list[ParameterMeta]:
    """Metadata of every engine parameter of the whole model."""
    last = layout.pipeline_model_parallel_size - 1
    metas = []
    for weight in weights(shape):
        stage = stage_of(weight, shape, last + 1)
        tied_twice = shape.tied and weight.padded and last > 0
        stages = (stage, last) if tied_twice else (stage,)
        metas.append(ParameterMeta(weight.engine, weight.trainer, _kind(weight, shape, layout, element_size), stages))
    return metas


def _kind(weight: Weight, shape: ModelShape, layout: ParallelLayout, element_size: int) -> Kind:
    rows = (shape.padded_vocab_size,) if weight.padded else weight.rows
    blocks = blocks_of(weight, shape, layout)
    if weight.cut is Cut.COLUMNS:
        assert weight.columns is not None
        return Kind(1, (weight.columns,), weight.rows[0], 0, blocks, element_size)
    head_dim = shape.head_dim if weight.heads else 0
    return Kind(0 if weight.cut is Cut.ROWS else None, rows, weight.columns, head_dim, blocks, element_size)
