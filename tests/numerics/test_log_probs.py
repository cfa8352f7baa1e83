"""Chunked log-probs and entropy against torch's log_softmax in float64, one process (TP 2: test_arithmetic.py)."""

import pytest
import torch
from torch import Tensor

from moebius.log_probs import vocab_parallel_log_probs
from moebius.losses import policy_loss

ROWS, HIDDEN, VOCAB, PADDED = 11, 16, 37, 40


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype)
    weight = (0.7 * torch.randn(PADDED, HIDDEN, generator=generator)).to(dtype)
    # the padded rows would win every row if they took part
    weight[VOCAB:] = 50 * hidden[0]
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    targets[0], targets[1] = 0, VOCAB - 1
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight[:VOCAB].t() / temperature
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def scalar(log_probs: Tensor, entropy: Tensor, used: str) -> Tensor:
    """One number that depends on the outputs in `used`, on every row with another weight."""
    weights = torch.arange(1, ROWS + 1, dtype=log_probs.dtype).sin()
    parts = {"log_probs": (log_probs * weights).sum(), "entropy": (entropy * weights.flip(0)).sum()}
    return sum((parts[name] for name in used.split("+")), torch.zeros((), dtype=log_probs.dtype))


@pytest.mark.parametrize("used", ["log_probs", "entropy", "log_probs+entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_values_and_gradients_equal_float64(chunk: int, temperature: float, used: str) -> None:
    """case 3.11: entropy and log-probs from one pass, backward through either of them or both."""
    hidden, weight, targets = inputs()
    kept = hidden.detach().clone(), weight.detach().clone()
    log_probs, entropy = vocab_parallel_log_probs(hidden, weight, targets, None, VOCAB, temperature, chunk)
    scalar(log_probs, entropy, used).backward()
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected, expected_entropy = reference(*exact, targets, temperature)
    scalar(expected, expected_entropy, used).backward()
    assert log_probs.dtype == entropy.dtype == torch.float32
    pairs = [(log_probs, expected), (entropy, expected_entropy), (hidden.grad, exact[0].grad)]
    for mine, theirs in [*pairs, (weight.grad, exact[1].grad)]:
        assert mine is not None and theirs is not None
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-6)
    assert weight.grad is not None and not weight.grad[VOCAB:].any(), "padded rows get no gradient"
    assert torch.equal(hidden, kept[0]) and torch.equal(weight, kept[1]), "inputs stay as they were"
    with torch.no_grad():
        again = vocab_parallel_log_probs(hidden, weight, targets, None, VOCAB, temperature, chunk)
    assert torch.equal(again[0], log_probs) and torch.equal(again[1], entropy)


@pytest.mark.parametrize("chunk", [3, 1000])
def test_bf16_inputs_stay_within_the_rounding_of_logits(chunk: int) -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    log_probs, entropy = vocab_parallel_log_probs(hidden, weight, targets, None, VOCAB, 1.0, chunk)
    scalar(log_probs, entropy, "log_probs+entropy").backward()
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected, expected_entropy = reference(*exact, targets, 1.0)
    scalar(expected, expected_entropy, "log_probs+entropy").backward()
    largest = (exact[0] @ exact[1][:VOCAB].t()).abs().max().item()
    # a bf16 logit has 8 significant bits
    assert (log_probs - expected).abs().max() <= largest * 2**-8
    assert (entropy - expected_entropy).abs().max() <= largest * 2**-7
    for mine, theirs in ((hidden.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        assert mine is not None and theirs is not None and mine.dtype == torch.bfloat16
        assert (mine.double() - theirs).abs().max() <= 0.03 * theirs.abs().max()


def of_logits(logits: list[float], target: int, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob and entropy of one row of logits, and the head's weights that the gradient goes to."""
    weight = torch.tensor(logits)[:, None].requires_grad_()
    return (
        *vocab_parallel_log_probs(
            torch.ones(1, 1), weight, torch.tensor([target]), None, len(logits), temperature=temperature
        ),
        weight,
    )


def test_temperature_divides_logits() -> None:
    """case 2.01: -0.01815, not -0.12693 (no temperature) or -0.25386 (log-prob divided); ratio 1 before an update."""
    log_probs, _, _ = of_logits([2.0, 0.0], 0, 0.5)
    assert log_probs.item() == pytest.approx(-0.01815, abs=5e-6)
    old = of_logits([2.0, 0.0], 0, 0.5)[0].detach()
    _, sums = policy_loss(log_probs, old, torch.ones(1), torch.ones(1), 0.2, 0.2)
    assert sums["ratio"].item() == 1.0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_entropy_and_log_prob_by_hand(order: tuple[int, int]) -> None:
    """case 3.11: backward through both in either order; p = (.8438, .1142, .0420)."""
    with torch.no_grad():
        outside = of_logits([2.0, 0.0, -1.0], 0)
    *both, weight = of_logits([2.0, 0.0, -1.0], 0)
    for log_probs, entropy in (outside[:2], both):
        assert log_probs.item() == pytest.approx(-0.1699, abs=1e-4)
        assert entropy.item() == pytest.approx(0.5243, abs=5e-5)
    for index in order:
        both[index].backward(retain_graph=True)
    p = torch.tensor([2.0, 0.0, -1.0]).softmax(-1)
    expected = torch.tensor([1.0, 0.0, 0.0]) - p - p * (p.log() + 0.5243)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[:, 0], expected, rtol=0, atol=5e-5)


def test_no_row_gives_empty_results_and_zero_gradients() -> None:
    """case 8.01: a micro-batch without samples."""
    hidden, weight, _ = inputs()
    log_probs, entropy = vocab_parallel_log_probs(hidden[:0], weight, torch.zeros(0, dtype=torch.long), None, VOCAB)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert weight.grad is not None and not weight.grad.any()


def test_logits_are_not_kept_for_the_backward_pass() -> None:
    """What waits for backward is the inputs and numbers for each row, nothing of rows x vocabulary."""
    hidden, weight = torch.randn(256, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        vocab_parallel_log_probs(hidden, weight, torch.arange(256), None, vocab_size=500, chunk=16)
    assert sum(kept) <= hidden.numel() + weight.numel() + 3 * 256
