"""Several sources in one order: by weight, resumable, each in epochs of its own."""

import json
from collections import Counter
from pathlib import Path

import pytest
from prompt_data import character_tokenizer, load, write_rows

from moebius import setup
from moebius.arguments import parse_arguments
from moebius.data import PromptSampler

ROWS = [5, 20, 1000]
WEIGHTS = [1.0, 2.0, 1.0]


def sampler(batch_size: int = 8, seed: int = 3, shuffle: bool = True, weights: list[float] = WEIGHTS) -> PromptSampler:
    return PromptSampler(sum(ROWS), batch_size, seed, shuffle, rows_of_sources=ROWS, weights=weights)


def source_of(row: int) -> int:
    return 0 if row < 5 else 1 if row < 25 else 2


def test_weights_are_the_shares_of_the_sources() -> None:
    """10,000 rows: shares within 3 standard deviations, and each source's rows once before one comes again."""
    mixed = sampler(batch_size=1000)
    rows = [row for _ in range(10) for row in mixed.next_batch()]
    counts = Counter(map(source_of, rows))
    for source, share in enumerate((0.25, 0.5, 0.25)):
        assert abs(counts[source] - 10_000 * share) < 3 * (10_000 * share * (1 - share)) ** 0.5
    orders = []
    for source, size in enumerate(ROWS):
        mine = [row for row in rows if source_of(row) == source]
        epochs = [mine[i : i + size] for i in range(0, len(mine) - size + 1, size)]
        assert all(len(set(epoch)) == size for epoch in epochs) and len(epochs) > 1
        assert epochs[0] != epochs[1]
        orders.append([row - mine[0] for row in mine[:5]])
    assert len({tuple(order) for order in orders}) == 3
    in_order = sampler(shuffle=False, batch_size=100).next_batch()
    assert [row for row in in_order if source_of(row) == 1][:21] == [*range(5, 25), 5]


def test_sources_of_one_size_are_shuffled_apart() -> None:
    mixed = PromptSampler(200, 150, seed=0, rows_of_sources=[100, 100], weights=[1, 1])
    rows = mixed.next_batch()
    first, second = ([row % 100 for row in rows if row // 100 == source][:20] for source in (0, 1))
    assert len(first) == len(second) == 20 and first != second


def test_draws_do_not_come_again() -> None:
    """They are made in blocks of 4096, each with numbers of its own."""
    mixed = sampler(batch_size=1)
    drawn = [source_of(mixed.next_batch()[0]) for _ in range(2 * 4096)]
    same = sum(a == b for a, b in zip(drawn[:4096], drawn[4096:], strict=True))
    assert abs(same / 4096 - (0.25**2 + 0.5**2 + 0.25**2)) < 0.05


def test_a_mixture_resumes_exactly() -> None:
    """case 5.07: stopped at any batch, also past the block of draws, and with another batch size."""
    unbroken = sampler(batch_size=500)
    expected = [unbroken.next_batch() for _ in range(20)]
    for stops in ([1], [7, 9], [8, 16], [0]):
        mixed, joined = sampler(batch_size=500), []
        for batch in range(20):
            if batch in stops:
                state = json.loads(json.dumps(mixed.state_dict()))
                mixed = sampler(batch_size=500)
                mixed.load_state_dict(state)
            joined.append(mixed.next_batch())
        assert joined == expected, stops
    first = sampler(batch_size=500)
    first.next_batch()
    other = sampler(batch_size=250)
    other.load_state_dict(first.state_dict())
    assert other.next_batch() + other.next_batch() == expected[1]
    assert sampler(batch_size=500).next_batch() == expected[0] != sampler(batch_size=500, seed=4).next_batch()


@pytest.mark.parametrize(
    ("other", "option"),
    [
        (sampler(weights=[1.0, 2.0, 3.0]), "--prompt-data-weights"),
        (sampler(weights=[]), "--prompt-data-weights"),
        (
            PromptSampler(sum(ROWS), 8, 3, rows_of_sources=[6, 19, 1000], weights=WEIGHTS),
            "--prompt-data: .* rows_of_sources",
        ),
    ],
)
def test_resume_with_another_mixture_is_refused(other: PromptSampler, option: str) -> None:
    with pytest.raises(ValueError, match=option):
        other.load_state_dict(sampler().state_dict())


def test_without_weights_all_rows_come_once_an_epoch() -> None:
    whole = sampler(batch_size=205, weights=[])
    assert sorted(row for _ in range(5) for row in whole.next_batch()) == list(range(1025))


def test_too_few_rows_say_how_many_there_were(tmp_path: Path) -> None:
    """case 5.02: rows before and after the drop, and the batch size."""
    rows = [{"prompt": "x" * n, "answer": "1"} for n in (1, 2, 3, 9, 9, 9, 9)]
    path = write_rows(tmp_path / "a.jsonl", *rows)
    prompts = load(path, character_tokenizer(), limit=3, overlong_prompt="drop")
    flags = ["--hf-checkpoint", "m", "--prompt-data", path, "--rollout-batch-size"]
    message = r"--rollout-batch-size 4: more than the 3 rows of --prompt-data \(7 before 4 overlong ones were dropped\)"
    with pytest.raises(ValueError, match=message):
        setup.make_sampler(parse_arguments([*flags, "4"]), prompts)
    assert sorted(setup.make_sampler(parse_arguments([*flags, "3"]), prompts).next_batch()) == [0, 1, 2]


def test_flags_reach_the_sampler(tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / f"{n}.jsonl", *[{"prompt": n, "answer": "1"}] * 4) for n in "ab"]
    prompts = load(paths, character_tokenizer())
    flags = [
        "--hf-checkpoint",
        "m",
        "--prompt-data",
        *paths,
        "--prompt-data-weights",
        "1",
        "1e-9",
        "--rollout-seed",
        "7",
    ]
    args = parse_arguments([*flags, "--rollout-batch-size", "8"])
    assert args.prompt_data == tuple(paths) and args.prompt_data_weights == (1.0, 1e-9)
    assert {prompts[row].source for row in setup.make_sampler(args, prompts).next_batch()} == {"a"}
