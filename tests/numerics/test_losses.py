"""Losses against token-by-token arithmetic in float64, and against numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from moebius.losses import kl_k3, policy_loss, sft_loss

LOW, HIGH = 0.2, 0.28


def by_hand(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[dict[str, float], list[float]]:
    """Sums over tokens (`loss` among them) and d loss / d new, from the definition of the clipped surrogate."""
    sums: dict[str, float] = {"loss": 0.0, "ratio": 0.0, "clipfrac": 0.0, "approx_kl": 0.0}
    gradient = []
    for n, o, a, m in zip(*(x.double().tolist() for x in (new, old, advantages, mask)), strict=True):
        if not m:
            gradient.append(0.0)
            continue
        ratio = math.exp(n - o)
        bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
        is_clipped = bounded * a < ratio * a
        sums["loss"] -= bounded * a if is_clipped else ratio * a
        sums["ratio"] += ratio
        sums["clipfrac"] += is_clipped
        sums["approx_kl"] += ratio - 1 - (n - o)
        gradient.append(0.0 if is_clipped else -ratio * a)
    return sums, gradient


def random_tokens(count: int = 400) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    new = -3 * torch.rand(count, generator=generator)
    old = new + 0.4 * torch.randn(count, generator=generator)
    advantages = torch.randn(count, generator=generator)
    mask = (torch.rand(count, generator=generator) < 0.8).float()
    return new.requires_grad_(), old, advantages, mask


def test_policy_loss_equals_float64_arithmetic() -> None:
    """Values, gradient and metrics, where both clip sides and both signs of the advantage take part."""
    new, old, advantages, mask = random_tokens()
    ratio, sign = (new - old).detach().exp()[mask > 0], advantages[mask > 0].sign()
    for side in (ratio < 1 - LOW, ratio > 1 + HIGH, (ratio > 1 - LOW) & (ratio < 1 + HIGH)):
        for direction in (-1, 1):
            assert (side & (sign == direction)).sum() > 10
    loss, sums = policy_loss(new, old, advantages, mask, LOW, HIGH)
    loss.backward()
    expected, gradient = by_hand(new.detach(), old, advantages, mask)
    assert new.grad is not None
    assert loss.item() == pytest.approx(expected.pop("loss"), rel=1e-5)
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(new.grad.double(), torch.tensor(gradient, dtype=torch.float64), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [(2, 1, -1.2, 0, 1), (0.5, 1, -0.5, -0.5, 0), (0.5, -1, 0.8, 0, 1), (5, -1, 5, 5, 0)],
)
def test_policy_loss_by_hand(ratio: float, advantage: float, loss: float, gradient: float, clipped: int) -> None:
    """case 3.14: which side is clipped follows from the sign of the advantage."""
    new = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    value, sums = policy_loss(new, torch.tensor([-1.0]), torch.tensor([float(advantage)]), torch.ones(1), 0.2, 0.2)
    value.backward()
    assert new.grad is not None
    assert value.item() == pytest.approx(loss, rel=1e-6)
    assert new.grad.item() == pytest.approx(gradient, rel=1e-6)
    assert sums["clipfrac"].item() == clipped


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize(("new", "old"), [(-1.0, -101.0), (-101.0, -1.0)])
def test_policy_loss_of_a_huge_ratio_is_finite(new: float, old: float, advantage: float) -> None:
    """case 3.14: e^100 does not fit into fp32."""
    log_probs = torch.tensor([new], requires_grad=True)
    loss, sums = policy_loss(log_probs, torch.tensor([old]), torch.tensor([advantage]), torch.ones(1), 0.2, 0.2)
    loss.backward()
    assert log_probs.grad is not None
    assert loss.isfinite() and log_probs.grad.isfinite().all() and all(x.isfinite() for x in sums.values())


def test_policy_loss_never_hides_nan() -> None:
    """case 3.14: NaN of a token that is trained on reaches the loss."""
    for new, old in ((math.nan, -1.0), (-1.0, math.nan)):
        ones = torch.ones(2)
        loss, sums = policy_loss(torch.tensor([new, -1.0]), torch.tensor([old, -1.0]), ones, ones, 0.2, 0.2)
        assert loss.isnan() and sums["ratio"].isnan() and sums["approx_kl"].isnan()


def spoil(values: Tensor, mask: Tensor) -> Tensor:
    """Puts NaN, inf and -inf at the masked positions in turn."""
    bad = torch.tensor([math.nan, math.inf, -math.inf]).repeat(len(mask))[: len(mask)]
    return torch.where(mask > 0, values.detach(), bad)


@pytest.mark.parametrize("spoiled", ["new", "old", "advantages", "all"])
def test_masked_tokens_do_not_leak(spoiled: str) -> None:
    """case 3.06: whatever stands at masked positions, loss, metrics and gradient are those of the other tokens."""
    new, old, advantages, mask = random_tokens(60)
    loss, sums = policy_loss(new, old, advantages, mask, LOW, HIGH)
    loss.backward()
    bad_new = new.detach().clone()
    if spoiled in ("new", "all"):
        bad_new = spoil(new, mask)
    if spoiled in ("old", "all"):
        old = spoil(old, mask)
    if spoiled in ("advantages", "all"):
        advantages = spoil(advantages, mask)
    bad_new.requires_grad_()
    bad_loss, bad_sums = policy_loss(bad_new, old, advantages, mask, LOW, HIGH)
    bad_loss.backward()
    assert new.grad is not None and bad_new.grad is not None
    assert torch.equal(bad_loss, loss) and bad_sums == sums
    assert torch.equal(bad_new.grad, new.grad)


def test_masked_tokens_do_not_leak_into_kl_and_supervised_loss() -> None:
    """case 3.06"""
    new, old, _, mask = random_tokens(60)
    bad_new, bad_old = spoil(new, mask).requires_grad_(), spoil(old, mask)
    for good, bad in (
        (kl_k3(new, old, mask), kl_k3(bad_new, bad_old, mask)),
        (sft_loss(new, mask), sft_loss(bad_new, mask)),
    ):
        new.grad = bad_new.grad = None
        good.backward()
        bad.backward()
        assert new.grad is not None and bad_new.grad is not None
        assert torch.equal(good, bad) and torch.equal(new.grad, bad_new.grad)
    assert sft_loss(new, mask).item() == pytest.approx(-new.detach()[mask > 0].sum().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("log_prob", "ref", "value", "gradient"), [(-1.0, -1.2, 0.018731, 0.18127), (-1.2, -1.0, 0.021403, -0.22140)]
)
def test_kl_k3_by_hand(log_prob: float, ref: float, value: float, gradient: float) -> None:
    """case 3.13: the sign of the gradient draws the policy back to the reference from both sides."""
    log_probs = torch.tensor([log_prob], requires_grad=True)
    kl = kl_k3(log_probs, torch.tensor([ref]), torch.ones(1))
    kl.backward()
    assert log_probs.grad is not None
    assert kl.item() == pytest.approx(value, abs=5e-7)
    assert log_probs.grad.item() == pytest.approx(gradient, abs=5e-6)


def test_kl_k3_is_never_negative() -> None:
    """case 3.13: token by token, and 0 where policy and reference agree."""
    new, old, _, _ = random_tokens()
    each = torch.stack([kl_k3(n[None], o[None], torch.ones(1)) for n, o in zip(new.detach(), old, strict=True)])
    assert (each >= 0).all() and each.max() > 0.1
    assert kl_k3(old, old, torch.ones_like(old)).item() == 0
