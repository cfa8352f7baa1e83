"""Log-probabilities and entropy of chosen tokens from hidden states, over a vocabulary cut into TP shards.

The head is applied in chunks of rows, in the forward pass and again in the backward pass, so that neither logits nor
their gradient exist for more than one chunk at a time.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def _chunk_logits(hidden: Tensor, weight: Tensor, first: int, vocab_size: int, temperature: float) -> Tensor:
    """fp32 logits [rows, v] of one chunk over this shard's v columns; padded columns are -inf."""
    logits = (hidden @ weight.t()).float()
    if temperature != 1.0:
        logits /= temperature
    real = max(vocab_size - first, 0)
    if real < logits.size(-1):
        logits[:, real:] = -torch.inf
    return logits


class _VocabParallelLogProbs(torch.autograd.Function):
    """Forward keeps log Z and the entropy of each row; backward recomputes the logits and needs no communication."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        group: ProcessGroup | None,
        vocab_size: int,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        shard = dist.get_rank(group) if group is not None else 0
        first = shard * weight.size(0)
        rows = hidden.size(0)
        log_z, picked, entropy = (hidden.new_empty(rows, dtype=torch.float32) for _ in range(3))
        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            logits = _chunk_logits(hidden[part], weight, first, vocab_size, temperature)
            top = logits.amax(-1)
            if group is not None:
                dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            local = targets[part] - first
            here = (local >= 0) & (local < weight.size(0))
            chosen = logits.gather(-1, local.clamp(0, weight.size(0) - 1)[:, None])[:, 0] - top
            shifted = logits.sub_(top[:, None])
            exps = shifted.exp()
            # exp is exactly 0 in padded columns, where 0 * -inf would be NaN
            weighted = torch.where(exps > 0, exps * shifted, 0.0)
            sums = torch.stack([exps.sum(-1), torch.where(here, chosen, 0.0), weighted.sum(-1)])
            if group is not None:
                dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            log_z[part] = top + log_sum
            picked[part] = sums[1] - log_sum
            entropy[part] = log_sum - sums[2] / sums[0]
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.options = (first, vocab_size, temperature, chunk)
        return picked, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        first, vocab_size, temperature, chunk = ctx.options
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, hidden.size(0), chunk):
            part = slice(start, min(start + chunk, hidden.size(0)))
            log_p = _chunk_logits(hidden[part], weight, first, vocab_size, temperature).sub_(log_z[part, None])
            p = log_p.exp()
            # d log p(target) / d logit_j = [j = target] - p_j;  dH / d logit_j = -p_j (log p_j + H)
            grad = p * -grad_log_probs[part, None]
            surprise = torch.where(p > 0, log_p + entropy[part, None], 0.0)
            grad -= grad_entropy[part, None] * p * surprise
            local = targets[part] - first
            here = (local >= 0) & (local < weight.size(0))
            at = local.clamp(0, weight.size(0) - 1)[:, None]
            grad.scatter_add_(-1, at, (grad_log_probs[part] * here)[:, None])
            grad = grad.div_(temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += grad.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight^T / temperature)[target] and the entropy of that distribution, in nats.

    The gradient of `hidden` is this shard's part only: sum it over `group` (mcore's copy/gather regions do).

    Args:
        hidden: [rows, h] last hidden states, equal on all ranks of `group`.
        weight: [padded vocabulary / TP, h] this rank's rows of the head.
        targets: [rows] token ids, below `vocab_size`.
        group: the TP group, None without tensor parallelism.
        vocab_size: columns from here on are padding and get probability 0.
        temperature: divides the logits, as the engine does before it samples.
        chunk: rows of logits that exist at a time.
    Returns:
        log_probs [rows] and entropy [rows], both fp32 and equal on all ranks of `group`.
    """
    return _VocabParallelLogProbs.apply(  # pyright: ignore[reportReturnType]
        hidden, weight, targets, group, vocab_size, temperature, chunk
    )
