"""Rotary frequencies, plain and stretched."""

import math

import torch
from torch import Tensor

from moebius.models.shape import ModelShape


def inverse_frequencies(shape: ModelShape) -> Tensor:
    """[head_dim / 2] radians per position of each rotated pair, fp32 on the host: theta^(-2i / head_dim).

    With `rope_scaling` as in Llama 3.1 (Dubey et al. 2024; the "llama3" rope_type of config.json): a pair that turns
    more than `high_freq_factor` times within the original context keeps its frequency, one that turns less than
    `low_freq_factor` times is slowed down by `factor`, and those between are interpolated by their number of turns.
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    plain = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return plain
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * plain + (1 - kept) * plain / scaling.factor
