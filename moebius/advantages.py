"""Advantages as pure functions of rewards."""

import torch
from torch import Tensor

GROUP_EPSILON = 1e-6  # added to a group's standard deviation: rewards 1.0 and 1.00001 give about +-0.62


def grpo_advantages(rewards: Tensor, group_size: int, normalise_by_std: bool = True) -> Tensor:
    """Group-relative advantages: (r - mean) / (std + 1e-6), std with n - 1. Shao et al. 2024 (DeepSeekMath), sec. 4.1.

    A reward that is not finite counts as missing: it gets advantage 0 and does not enter the group's mean. A group with
    fewer than two finite rewards has nothing to compare with, so all of it gets 0.

    Args:
        rewards: [groups * group_size], the samples of one prompt side by side.
        normalise_by_std: False leaves the division out (Liu et al. 2025, Dr. GRPO).
    Returns:
        [groups * group_size] fp32.
    Raises:
        ValueError: when the rewards do not divide into groups.
    """
    if rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards do not divide into groups of --n-samples-per-prompt {group_size}")
    # in float64 the mean of equal fp32 rewards is exact; an error of one fp32 ulp would be a signal beside the epsilon
    grouped = rewards.double().view(-1, group_size)
    valid = grouped.isfinite()
    count = valid.sum(-1, keepdim=True)
    values = torch.where(valid, grouped, 0.0)
    mean = values.sum(-1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(valid, grouped - mean, 0.0)
    if normalise_by_std:
        variance = centred.square().sum(-1, keepdim=True) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + GROUP_EPSILON)
    return centred.flatten().float()
