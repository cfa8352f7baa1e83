"""Losses as pure functions of tensors. They return sums over tokens: the caller divides by a global count."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # nats; e^20 is far outside of any clipping range, and its square still fits into fp32


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate, summed over tokens: -min(r A, clip(r, 1 - eps, 1 + eps_high) A) with r = exp(new - old).

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", eq. 7; the separate upper bound is from Yu et al.
    2025 (DAPO).

    Args:
        log_probs, old_log_probs, advantages, loss_mask: [tokens] each; the mask is 0 or 1. Log-ratios count up to
            +-20 nats, beyond which a token has no gradient.
    Returns:
        the loss (a sum, in nats) and sums over tokens for metrics: `clipfrac`, `ratio`, `approx_kl`
        (k3 of old against new: r - 1 - log r, Schulman 2020).
    """
    # tokens outside the mask may hold anything, infinities too: replace, do not multiply
    log_ratio = torch.where(loss_mask > 0, log_probs - old_log_probs, 0.0)
    # an infinite ratio would turn the zero gradient of a clipped token into NaN
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    loss = -torch.where(loss_mask > 0, torch.minimum(unclipped, clipped), 0.0).sum()
    with torch.no_grad():
        sums = {
            "clipfrac": ((clipped < unclipped) * loss_mask).sum(),
            "ratio": (ratio * loss_mask).sum(),
            "approx_kl": ((ratio - 1 - log_ratio) * loss_mask).sum(),
        }
    return loss, sums


def kl_k3(log_probs: Tensor, ref_log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """Sum over tokens of the k3 estimator of KL(policy || reference): exp(d) - 1 - d, d = ref - new. Never negative.

    Schulman 2020, "Approximating KL divergence". Shapes: [tokens] each.
    """
    difference = torch.where(loss_mask > 0, ref_log_probs - log_probs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return ((difference.exp() - 1 - difference) * loss_mask).sum()


def sft_loss(log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """Negative log-likelihood of the masked tokens, a sum in nats. Shapes: [tokens] each."""
    return -torch.where(loss_mask > 0, log_probs, 0.0).sum()
