"""The trainer's parameters as the hybrid engine's plan sees them."""

from typing import Any

from torch import Tensor

from hybrid_engine.reshard_plan import ParameterMeta
from moebius.models.hf_io import local_weights
from moebius.models.metas import engine_metas
from moebius.models.shape import ModelShape
from parallel_state.groups import ParallelState


def engine_parameters(
    model: Any, shape: ModelShape, state: ParallelState
) -> tuple[list[ParameterMeta], dict[str, Tensor]]:
    """Metadata of every engine parameter, and this rank's tensors by trainer name."""
    tensors: dict[str, Tensor] = {weight.trainer: parameter for weight, parameter in local_weights(model, shape, state)}
    element_size = next(iter(tensors.values())).element_size()
    return engine_metas(shape, state.layout, element_size), tensors
