"""The trainer's parameters as the hybrid engine's plan sees them."""

from typing import Any

from torch import Tensor

from hybrid_engine.reshard_plan import ParameterMeta
from moebius.models.families import Cut
from moebius.models.hf_io import blocks_of, local_weights
from moebius.models.shape import ModelShape
from parallel_state.groups import ParallelState


def engine_parameters(
    model: Any, shape: ModelShape, state: ParallelState
) -> tuple[list[ParameterMeta], dict[str, Tensor]]:
    """Metadata of every engine parameter, and the trainer's tensors by trainer name."""
    metas, tensors = [], {}
    tp = state.layout.tensor_model_parallel_size
    dims = {Cut.WHOLE: None, Cut.ROWS: 0, Cut.COLUMNS: 1}
    for weight, parameter in local_weights(model, shape, state):
        q, k, v = (rows // tp for rows in weight.rows) if weight.heads else (0, 0, 0)
        tensors[weight.trainer] = parameter
        metas.append(
            ParameterMeta(
                engine=weight.engine,
                trainer=weight.trainer,
                shape=tuple(parameter.shape),
                element_size=parameter.element_size(),
                cut=dims[weight.cut],
                qkv_rows=(q, k, v) if weight.heads else None,
                qkv_blocks=blocks_of(weight, shape, state) if weight.heads else 1,
            )
        )
    return metas, tensors
