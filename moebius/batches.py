"""Micro-batches: which samples go together (pure), and the tensors that the model reads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor


@dataclass
class Sample:
    """One prompt with one response, as token ids that are never decoded and encoded again.

    Attributes:
        prompt_ids, response_ids: token ids as the engine read and sampled them.
        rollout_log_probs: [response] the engine's log-prob of each sampled token, at the sampling temperature.
        loss_mask: [response] 1 where a token is trained on; all ones where None.
        advantage, reward: of the whole response.
        old_log_probs, ref_log_probs: [response] on the host, once they are computed (last pipeline stage only).
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    rollout_log_probs: Sequence[float] = ()
    loss_mask: Sequence[int] | None = None
    advantage: float = 0.0
    reward: float = 0.0
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_loss_tokens(self) -> int:
        return len(self.response_ids) if self.loss_mask is None else sum(self.loss_mask)


@dataclass
class MicroBatch:
    """What one forward pass reads. `rows` and every tensor in `fields` run over the response tokens of all samples.

    Attributes:
        tokens, position_ids: [1, t] packed one after another, or [b, s] padded on the right.
        packed: mcore's PackedSeqParams for the packed form, None for the padded one.
        rows: [n] index into the flattened [s * b] hidden states of the position that predicts each response token.
        targets: [n] the response tokens.
        lengths: response length of each sample, to cut results back into samples.
        fields: `loss_mask`, `advantages`, `old_log_probs`, ... [n] fp32 each.
    """

    tokens: Tensor
    position_ids: Tensor
    packed: Any
    rows: Tensor
    targets: Tensor
    lengths: list[int]
    fields: dict[str, Tensor] = field(default_factory=dict)


def balanced_bins(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Divides items over bins of near-equal total length: longest first, each into the lightest bin. Deterministic.

    Returns:
        item indices of each bin, ascending; bins can be empty when there are fewer items than bins.
    """
    loads = [0] * bins
    members: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        lightest = min(range(bins), key=lambda b: (loads[b], len(members[b]), b))
        loads[lightest] += lengths[item]
        members[lightest].append(item)
    return [sorted(group) for group in members]


def bins_needed(lengths: Sequence[int], max_tokens: int) -> int:
    """Fewest micro-batches of at most `max_tokens` tokens that `balanced_bins` can make.

    Raises:
        ValueError: when one sample alone is longer than --max-tokens-per-gpu.
    """
    if lengths and max(lengths) > max_tokens:
        raise ValueError(
            f"--max-tokens-per-gpu {max_tokens}: a sample has {max(lengths)} tokens and cannot be divided; "
            "the limit must be at least prompt plus response"
        )
    bins = -(-sum(lengths) // max_tokens)
    while any(sum(lengths[i] for i in group) > max_tokens for group in balanced_bins(lengths, max(bins, 1))):
        bins += 1
    return max(bins, 1)


def plan_micro_batches(
    lengths: Sequence[int], micro_batch_size: int | None, max_tokens: int | None, count: int | None = None
) -> list[list[int]]:
    """Sample indices of each micro-batch.

    Args:
        lengths: tokens of each sample.
        micro_batch_size: samples in a micro-batch (exactly one of this and `max_tokens` is given).
        max_tokens: most tokens in a micro-batch.
        count: number of micro-batches agreed over data parallelism; micro-batches without samples fill it up.
    """
    if max_tokens is not None:
        return balanced_bins(lengths, count or bins_needed(lengths, max_tokens))
    assert micro_batch_size is not None
    groups = [
        list(range(first, min(first + micro_batch_size, len(lengths))))
        for first in range(0, len(lengths), micro_batch_size)
    ]
    return groups + [[] for _ in range((count or 1) - len(groups))]


def _packed_params(lengths: list[int], device: torch.device) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def make_micro_batch(
    samples: Sequence[Sample], device: torch.device, packed: bool = True, multiple: int = 1, pad_id: int = 0
) -> MicroBatch:
    """Builds the tensors of one micro-batch; also of an empty one, whose loss and gradients are 0.

    Args:
        packed: one row of sequences that do not see each other, else one padded row for each sequence.
        multiple: the sequence dimension is padded to a multiple of this (TP size under sequence parallelism).
        pad_id: any valid token id; padding is causal-after or a sequence of its own, so nothing reads it.
    """
    ids = [[*s.prompt_ids, *s.response_ids] for s in samples] or [[pad_id]]
    lengths = [len(x) for x in ids]
    longest = -(-max(lengths) // multiple) * multiple
    rows: list[int] = []
    start = 0
    for index, sample in enumerate(samples):
        first = len(sample.prompt_ids) - 1
        for position in range(first, first + len(sample.response_ids)):
            rows.append(start + position if packed else position * len(samples) + index)
        start += lengths[index]
    if packed:
        spare = -sum(lengths) % multiple
        if spare:
            ids.append([pad_id] * spare)
            lengths.append(spare)
        tokens = torch.tensor([list(chain.from_iterable(ids))])
        position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    else:
        tokens = torch.tensor([x + [pad_id] * (longest - len(x)) for x in ids])
        position_ids = torch.arange(longest).expand_as(tokens)
    return MicroBatch(
        tokens=tokens.to(device),
        position_ids=position_ids.to(device),
        packed=_packed_params(lengths, device) if packed else None,
        rows=torch.tensor(rows, dtype=torch.long).to(device),
        targets=torch.tensor([t for s in samples for t in s.response_ids], dtype=torch.long).to(device),
        lengths=[len(s.response_ids) for s in samples],
        fields=_fields(samples, device),
    )


def _fields(samples: Sequence[Sample], device: torch.device) -> dict[str, Tensor]:
    masks = [[1.0] * len(s.response_ids) if s.loss_mask is None else [float(m) for m in s.loss_mask] for s in samples]
    advantages = [[s.advantage] * len(s.response_ids) for s in samples]
    fields = {
        "loss_mask": torch.tensor(list(chain.from_iterable(masks)), dtype=torch.float32),
        "advantages": torch.tensor(list(chain.from_iterable(advantages)), dtype=torch.float32),
    }
    for name in ("old_log_probs", "ref_log_probs"):
        values = [value for s in samples if (value := getattr(s, name)) is not None]
        # without samples too: a loss function reads the same fields from every micro-batch
        if len(values) == len(samples):
            fields[name] = torch.cat([torch.empty(0), *values])
    if all(len(s.rollout_log_probs) == len(s.response_ids) for s in samples):
        rollout = [x for s in samples for x in s.rollout_log_probs]
        fields["rollout_log_probs"] = torch.tensor(rollout, dtype=torch.float32)
    return {name: value.to(device) for name, value in fields.items()}
