"""Which samples share a micro-batch, and what the tensors of a micro-batch hold."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toy_tokenizer import make_bpe

from moebius.batches import MicroBatch, Sample, balanced_bins, bins_needed, make_micro_batch, plan_micro_batches
from moebius.exchange import _decode, _encode
from moebius.tokenizer import load_tokenizer, stop_token_ids, tokenizer_files

CPU = torch.device("cpu")
RANDOM = random.Random(4)
LENGTHS = [
    [RANDOM.randint(1, longest) for _ in range(count)]
    for count, longest in ((1, 9), (2, 3), (7, 40), (16, 100), (33, 12), (64, 500), (100, 2))
]


@pytest.mark.parametrize("lengths", [[], [5], [8, 8, 8, 8], [9, 1, 1, 1], *LENGTHS])
@pytest.mark.parametrize("bins", [1, 2, 3, 8, 40])
def test_balanced_bins_hold_every_item_once(lengths: list[int], bins: int) -> None:
    """Deterministic, ascending in a bin, empty bins last; no bin is lighter than another by more than one item."""
    made = balanced_bins(lengths, bins)
    assert made == balanced_bins(list(lengths), bins)
    assert len(made) == bins
    assert sorted(i for group in made for i in group) == list(range(len(lengths)))
    assert all(group == sorted(group) for group in made)
    filled = [bool(group) for group in made]
    assert filled == sorted(filled, reverse=True) and sum(filled) == min(bins, len(lengths))
    loads = [sum(lengths[i] for i in group) for group in made]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_bins_needed_keeps_the_limit_with_any_agreed_count(lengths: list[int]) -> None:
    """case 8.01: the limit holds for this rank's own count and for the larger one that another rank needs."""
    for limit in (max(lengths), max(lengths) + 3, 2 * max(lengths), sum(lengths)):
        needed = bins_needed(lengths, limit)
        assert -(-sum(lengths) // limit) <= needed <= len(lengths)
        for count in range(needed, needed + 5):
            groups = plan_micro_batches(lengths, None, limit, count)
            assert len(groups) == count
            assert all(sum(lengths[i] for i in group) <= limit for group in groups)
        if needed > 1:
            fewer = balanced_bins(lengths, needed - 1)
            assert any(sum(lengths[i] for i in group) > limit for group in fewer), "fewest that balanced_bins can make"
        assert plan_micro_batches(lengths, None, limit) == balanced_bins(lengths, needed)


def test_a_sample_above_the_limit_is_refused() -> None:
    """case 8.01"""
    with pytest.raises(ValueError, match="--max-tokens-per-gpu 10: a sample has 11 tokens"):
        bins_needed([3, 11, 2], 10)
    with pytest.raises(ValueError, match="--max-tokens-per-gpu 10"):
        plan_micro_batches([3, 11, 2], None, 10)
    assert bins_needed([10], 10) == 1


def test_micro_batches_of_a_fixed_size_keep_the_order() -> None:
    """case 8.01: micro-batches without samples come last."""
    lengths = [4, 1, 7, 2, 3]
    assert plan_micro_batches(lengths, 2, None) == [[0, 1], [2, 3], [4]]
    assert plan_micro_batches(lengths, 2, None, 5) == [[0, 1], [2, 3], [4], [], []]
    assert plan_micro_batches(lengths, 9, None) == [[0, 1, 2, 3, 4]]
    assert plan_micro_batches([], 2, None) == [[]] and plan_micro_batches([], 2, None, 3) == [[], [], []]
    assert bins_needed([], 10) == 1
    assert plan_micro_batches([], None, 10) == [[]] and plan_micro_batches([], None, 10, 2) == [[], []]


def places(batch: MicroBatch) -> list[tuple[int, int]]:
    """(row, column) in `tokens` of the position that predicts each response token, from the [s, b] order of `rows`."""
    return [(row % len(batch.tokens), row // len(batch.tokens)) for row in batch.rows.tolist()]


def response_grid(batch: MicroBatch) -> Tensor:
    """The loss mask laid over `tokens`: 1 at every token that is trained on."""
    grid = torch.zeros(batch.tokens.shape)
    for (row, column), value in zip(places(batch), batch.fields["loss_mask"].tolist(), strict=True):
        grid[row, column + 1] += value
    return grid


@pytest.mark.parametrize(("pad_id", "packed"), [(2, False), (0, False), (0, True)])
def test_mask_follows_lengths_and_not_ids(pad_id: int, packed: bool) -> None:
    """case 2.09: pad = eos = 2 with and without an end token in the response; the ids decide nothing."""
    samples = [Sample([7, 8], [5, 6, 2]), Sample([7, 8], [5, 6]), Sample([9], [2, 2, 5, 0, 2, 2])]
    batch = make_micro_batch(samples, CPU, packed=packed, pad_id=pad_id)
    assert batch.targets.tolist() == [5, 6, 2, 5, 6, 2, 2, 5, 0, 2, 2] and batch.lengths == [3, 2, 6]
    assert batch.fields["loss_mask"].tolist() == [1.0] * 11
    grid = response_grid(batch)
    if packed:
        assert batch.tokens.tolist() == [[7, 8, 5, 6, 2, 7, 8, 5, 6, 9, 2, 2, 5, 0, 2, 2]]
        assert grid.tolist() == [[0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1]]
        assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]]
        assert batch.packed.cu_seqlens_q.tolist() == [0, 5, 9, 16] and batch.packed.max_seqlen_q == 7
    else:
        assert batch.tokens[0].tolist() == [7, 8, 5, 6, 2, pad_id, pad_id]
        assert batch.tokens[1].tolist() == [7, 8, 5, 6, pad_id, pad_id, pad_id]
        assert grid[:, 2:].tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
        assert grid[:, :2].tolist() == [[0, 0], [0, 0], [0, 1]]
        assert batch.position_ids.tolist() == [list(range(7))] * 3 and batch.packed is None
    for (row, column), target in zip(places(batch), batch.targets.tolist(), strict=True):
        assert batch.tokens[row, column + 1] == target


def test_a_masks_own_zeros_stay() -> None:
    """case 2.09: a mask that is given is taken as it is, and counts what is trained on."""
    sample = Sample([7], [5, 6, 2], loss_mask=[1, 0, 1])
    batch = make_micro_batch([sample, Sample([7], [4])], CPU)
    assert batch.fields["loss_mask"].tolist() == [1, 0, 1, 1]
    assert sample.num_loss_tokens == 2 and sample.num_tokens == 4


@pytest.mark.parametrize("packed", [True, False])
def test_padding_to_a_multiple_belongs_to_no_sample(packed: bool) -> None:
    """case 2.12: in a packed row it is a sequence of its own."""
    batch = make_micro_batch([Sample([5], [6, 7]), Sample([5, 6], [8])], CPU, packed=packed, multiple=4, pad_id=9)
    if packed:
        assert batch.tokens.tolist() == [[5, 6, 7, 5, 6, 8, 9, 9]]
        assert batch.packed.cu_seqlens_q.tolist() == [0, 3, 6, 8]
    else:
        assert batch.tokens.tolist() == [[5, 6, 7, 9], [5, 6, 8, 9]]
    assert batch.targets.tolist() == [6, 7, 8] and batch.lengths == [2, 1]
    assert [int(batch.tokens[row, column + 1]) for row, column in places(batch)] == [6, 7, 8]


def test_tokenizer_without_a_pad_token(tmp_path: Path) -> None:
    """case 2.09: nothing asks for a pad token, and the files that an export copies stay as they are."""
    make_bpe(tmp_path, pad=False)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.pad_token_id is None and stop_token_ids(tokenizer, str(tmp_path)) == [2]
    samples = [Sample(tokenizer("hello")["input_ids"], [5, 6, 2]), Sample(tokenizer("12")["input_ids"], [5])]
    batch = make_micro_batch(samples, CPU, packed=False)
    assert batch.tokens.tolist() == [[10, 5, 6, 2], [13, 5, 0, 0]]
    assert batch.fields["loss_mask"].tolist() == [1, 1, 1, 1]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in tokenizer_files(tmp_path)}


@pytest.mark.parametrize(("sampled", "encoded"), [([7, 9], [10]), ([11, 12], [13])])
@pytest.mark.parametrize("packed", [True, False])
def test_sampled_ids_are_never_encoded_again(
    sampled: list[int], encoded: list[int], packed: bool, tmp_path: Path
) -> None:
    """case 2.05: over the exchange and into the micro-batch go [7, 9] and two log-probs, not [10] for "hello"."""
    tokenizer = make_bpe(tmp_path)
    text = tokenizer.decode(sampled, skip_special_tokens=True)
    assert tokenizer(text)["input_ids"] == encoded, "encoding the text again must give other ids"
    sample = Sample([3, 14], sampled, [-0.5, -0.25])
    for held in (sample, _decode(_encode(sample), 2, 2)):
        batch = make_micro_batch([held], CPU, packed=packed)
        assert batch.tokens.tolist() == [[3, 14, *sampled]]
        assert batch.targets.tolist() == sampled and batch.lengths == [2] and batch.rows.tolist() == [1, 2]
        assert batch.fields["rollout_log_probs"].tolist() == [-0.5, -0.25]


def test_fields_run_over_the_response_tokens() -> None:
    first = Sample([3, 4], [5, 6], [-1.0, -2.0], advantage=0.5, old_log_probs=torch.tensor([-1.5, -2.5]))
    second = Sample([3], [7], [-3.0], advantage=-1.0, old_log_probs=torch.tensor([-3.5]))
    fields = make_micro_batch([first, second], CPU).fields
    assert {name: value.tolist() for name, value in fields.items()} == {
        "loss_mask": [1, 1, 1],
        "advantages": [0.5, 0.5, -1],
        "rollout_log_probs": [-1, -2, -3],
        "old_log_probs": [-1.5, -2.5, -3.5],
    }
    second.old_log_probs = None
    assert "old_log_probs" not in make_micro_batch([first, second], CPU).fields


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("multiple", [1, 4])
def test_an_empty_micro_batch_has_tokens_to_run_and_every_field(packed: bool, multiple: int) -> None:
    """case 8.01: a loss that reads old log-probs must find them in a micro-batch without samples."""
    batch = make_micro_batch([], CPU, packed=packed, multiple=multiple)
    assert batch.tokens.shape == (1, multiple) and batch.position_ids.shape == (1, multiple)
    assert batch.rows.numel() == batch.targets.numel() == 0 and batch.lengths == []
    names = {"loss_mask", "advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs"}
    assert batch.fields.keys() == names
    assert all(value.shape == (0,) and value.dtype == torch.float32 for value in batch.fields.values())
