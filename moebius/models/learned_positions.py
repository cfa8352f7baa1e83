"""What a model with learned positions or a narrow embedding has in place of mcore's own modules (OPT)."""

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from moebius.models.families.opt import POSITION_OFFSET


def placed(config: Any) -> dict[str, Any]:
    """Type and device of a module that mcore does not make."""
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    return {"dtype": config.params_dtype, "device": device}


class LearnedPositionEmbedding(MegatronModule):
    """Words plus positions, [b, s] -> [s, b, h] (or this rank's part of s under sequence parallelism).

    mcore's own embedding makes its position table in fp32, with position 0 in row 0, and as wide as the layers.
    """

    def __init__(self, config: Any, vocab_size: int, positions: int, width: int, tp_group: Any) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.word_embeddings = VocabParallelEmbedding(
            num_embeddings=vocab_size,
            embedding_dim=width,
            init_method=config.embedding_init_method,
            config=config,
            tp_group=tp_group,
        )
        self.position_embeddings = torch.nn.Embedding(positions, config.hidden_size, **placed(config))
        config.embedding_init_method(self.position_embeddings.weight)
        self.project_in = None
        if width != config.hidden_size:
            # before the sequence is cut: every TP rank sees all of it, so gradients agree without a sum
            self.project_in = torch.nn.Linear(width, config.hidden_size, bias=False, **placed(config))
            config.init_method(self.project_in.weight)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        words = self.word_embeddings(input_ids)
        if self.project_in is not None:
            words = self.project_in(words)
        embeddings = (words + self.position_embeddings(position_ids + POSITION_OFFSET)).transpose(0, 1).contiguous()
        if self.config.sequence_parallel:
            embeddings = scatter_to_sequence_parallel_region(embeddings, group=self.tp_group).clone()
        return embeddings


def projection_out(config: Any, width: int) -> torch.nn.Linear:
    """From the layers' size to the head's, h -> width. Under sequence parallelism each TP rank projects its part."""
    linear = torch.nn.Linear(config.hidden_size, width, bias=False, **placed(config))
    config.init_method(linear.weight)
    # finalize_model_grads sums gradients of marked parameters over TP
    linear.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    return linear


def narrow_head(config: Any, width: int, vocab_size: int, no_weight: bool, tp_group: Any) -> ColumnParallelLinear:
    """A head over `width` features; without a weight of its own where it is the embedding's."""
    return ColumnParallelLinear(
        width,
        vocab_size,
        config=config,
        init_method=config.init_method,
        bias=False,
        gather_output=False,
        skip_weight_param_allocation=no_weight,
        tp_group=tp_group,
    )
