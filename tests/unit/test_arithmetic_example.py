"""The demo's problems, tokenizer, model sizes and closing lines, made small."""

import json
import random
import sys
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor
from transformers import Qwen3Config

from examples.arithmetic import make_data, make_tokenizer, summary, warm_up
from moebius.arguments import Arguments, resolve, save_arguments
from moebius.data import PromptOptions, load_prompts
from moebius.models.families import num_parameters, read_shape
from moebius.models.shape import check_fits
from moebius.tokenizer import load_tokenizer, stop_token_ids


def problem(row: dict[str, str]) -> frozenset[int]:
    a, b = row["prompt"].removesuffix("=").split("+")
    return frozenset((int(a), int(b)))


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_share_no_problem_and_labels_are_right(tmp_path: Path) -> None:
    make_data.make_data(tmp_path, range(30), warmup_rows=301, rl_rows=300, eval_rows=200)
    files = {name: rows_of(tmp_path / f"{name}.jsonl") for name in ("warmup", "rl", "eval")}
    assert {name: len(rows) for name, rows in files.items()} == {"warmup": 301, "rl": 300, "eval": 200}
    assert all(len({row["prompt"] for row in rows}) == len(rows) for rows in files.values())
    for row in files["rl"] + files["eval"]:
        assert sum(map(int, row["prompt"][:-1].split("+"))) == int(row["label"])
    problems = {name: {problem(row) for row in rows} for name, rows in files.items()}
    assert not problems["warmup"] & problems["rl"]
    assert not (problems["warmup"] | problems["rl"]) & problems["eval"]


def test_solved_additions_come_before_the_problem(tmp_path: Path) -> None:
    make_data.make_data(tmp_path, range(1, 31), warmup_rows=50, rl_rows=60, eval_rows=20, shots=3)
    solved: set[tuple[str, ...]] = set()
    seen: set[str] = set()
    for row in rows_of(tmp_path / "rl.jsonl") + rows_of(tmp_path / "eval.jsonl"):
        *shots, asked = row["prompt"].split("\n")
        assert sum(map(int, asked[:-1].split("+"))) == int(row["label"])
        for shot in shots:
            left, right = shot.split("=")
            assert sum(map(int, left.split("+"))) == int(right)
        solved.add(tuple(shots))
        seen.add(asked)
    assert len(solved) == 1
    (shots,) = solved
    assert len(shots) == 3 and not {f"{shot.split('=')[0]}=" for shot in shots} & seen


def test_default_sizes_fit_and_half_of_the_warm_up_is_right(tmp_path: Path) -> None:
    make_data.make_data(tmp_path)
    rows = rows_of(tmp_path / "warmup.jsonl")
    right = sum(sum(map(int, row["prompt"][:-1].split("+"))) == int(row["response"]) for row in rows)
    assert len(rows) == 4000
    assert 0.4 < right / len(rows) < 0.6
    assert len(rows_of(tmp_path / "eval.jsonl")) >= 200


@pytest.mark.parametrize(
    ("a", "b", "careless", "careful"),
    [(12, 29, 31, 41), (75, 48, 13, 123), (64, 72, 36, 136), (0, 0, 0, 0), (21, 34, 55, 55)],
)
def test_slips_are_forgotten_carries(a: int, b: int, careless: int, careful: int) -> None:
    generator = random.Random(0)
    assert make_data.careless_sum(a, b, 1.0, generator) == careless
    assert make_data.careless_sum(a, b, 0.0, generator) == careful


def test_the_seed_decides_the_files(tmp_path: Path) -> None:
    texts = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_data.make_data(tmp_path / name, range(10), warmup_rows=30, rl_rows=30, eval_rows=20, seed=seed)
        texts.append([(tmp_path / name / f"{kind}.jsonl").read_text() for kind in ("warmup", "rl", "eval")])
    assert texts[0] == texts[1]
    assert all(one != other for one, other in zip(texts[1], texts[2], strict=True))


@pytest.mark.parametrize("sizes", [(50, 40, 8), (3000, 4096, 256), (0, 1, 1)])
def test_too_few_problems_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="--min-number 0 --max-number 9 make 100 additions"):
        make_data.split_problems(range(10), sizes, seed=0)


def test_as_many_problems_as_are_promised() -> None:
    for seed in range(50):
        splits = make_data.split_problems(range(10), (49, 37, 11), seed)
        assert [len(split) for split in splits] == [49, 37, 11]


def test_command_lines_make_a_folder_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every problem survives encoding and decoding, digit by digit, beside a Qwen3 config as well."""
    sizes = ["--min-number", "0", "--max-number", "19", "--warmup-rows", "100", "--rl-rows", "100", "--eval-rows", "50"]
    monkeypatch.setattr(sys, "argv", ["make_data.py", str(tmp_path), *sizes])
    make_data.main()
    folder = tmp_path / "model"
    monkeypatch.setattr(sys, "argv", ["make_tokenizer.py", str(tmp_path / "warmup.jsonl"), str(folder)])
    make_tokenizer.main()
    Qwen3Config().save_pretrained(folder)

    tokenizer = load_tokenizer(str(folder))
    sentencepiece = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert 32 <= len(tokenizer) == sentencepiece.vocab_size() <= 64
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert special == [0, 1, 2, 3]
    assert tokenizer.chat_template is None
    texts = [row["prompt"] + row["response"] for row in rows_of(tmp_path / "warmup.jsonl")]
    for text in [*texts, "what is 1  plus 2?"]:
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert ids == sentencepiece.encode(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & set(special)
        assert tokenizer.decode([*ids, 2], skip_special_tokens=True) == text


def test_files_are_what_the_loaders_want(tmp_path: Path) -> None:
    make_data.make_data(tmp_path, range(10), warmup_rows=30, rl_rows=30, eval_rows=20)
    tokenizer = make_tokenizer.make_tokenizer(tmp_path / "warmup.jsonl", tmp_path)
    prompts = load_prompts([str(tmp_path / "eval.jsonl")], tokenizer, PromptOptions("prompt", "label", 4))
    assert [prompt.text for prompt in prompts] == [row["prompt"] for row in rows_of(tmp_path / "eval.jsonl")]
    worked = load_prompts([str(tmp_path / "warmup.jsonl")], tokenizer, PromptOptions("prompt", "response", 4))
    assert len(worked) == 30
    assert stop_token_ids(tokenizer, str(tmp_path)) == [2]


def test_the_model_fits_its_tokenizer_and_both_layouts(tmp_path: Path) -> None:
    make_data.make_data(tmp_path, range(10), warmup_rows=30, rl_rows=30, eval_rows=20)
    tokenizer = make_tokenizer.make_tokenizer(tmp_path / "warmup.jsonl", tmp_path / "tokenizer")
    warm_up.write_config(tmp_path, tokenizer)
    shape = read_shape(tmp_path)
    check_fits(shape, 1, 1, 2)
    assert (shape.family, shape.tied, shape.qk_layernorm, shape.vocab_size) == ("qwen3", True, True, len(tokenizer))
    assert 4e5 < num_parameters(shape) < 5e5
    warm_up.write_config(tmp_path, tokenizer, num_layers=2, hidden_size=256)
    larger = read_shape(tmp_path)
    assert (larger.num_layers, larger.hidden_size, larger.ffn_hidden_size) == (2, 256, 512)
    assert (larger.num_attention_heads, larger.num_query_groups, larger.head_dim) == (8, 2, 32)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 96}, "--hidden-size 96: it must be a multiple of 64"),
        ({"hidden_size": 0}, "--hidden-size 0: it must be a multiple of 64"),
        ({"num_layers": 0}, "--num-layers 0: it must be at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        warm_up.write_config(tmp_path / "model", [], **sizes)
    assert not (tmp_path / "model").exists()


def test_worked_problems_end_with_the_end_token(tmp_path: Path) -> None:
    make_data.make_data(tmp_path, range(10), warmup_rows=30, rl_rows=30, eval_rows=20)
    tokenizer = make_tokenizer.make_tokenizer(tmp_path / "warmup.jsonl", tmp_path)
    samples = warm_up.read_samples(tmp_path / "warmup.jsonl", tokenizer)
    assert len(samples) == 30
    for sample, row in zip(samples, rows_of(tmp_path / "warmup.jsonl"), strict=True):
        assert tokenizer.decode(list(sample.prompt_ids)) == row["prompt"]
        assert tokenizer.decode(list(sample.response_ids)) == row["response"] + "</s>"


def test_three_lines_say_what_the_run_did(tmp_path: Path) -> None:
    steps = [
        {"step": 0, "eval/accuracy": 0.4189, "eval/n": 1000.0, "switch/bytes_moved": 0},
        {"step": 1, "switch/bytes_moved": 7},
        {"step": 2, "eval/accuracy": 0.921, "eval/n": 1000.0},
    ]
    save_arguments(
        resolve(Arguments(hf_checkpoint="m", prompt_data=("p",), rm_type=("math",), eval_temperature=1.0)), tmp_path
    )
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join(map(json.dumps, steps)))
    happened, where, following = summary.summary(tmp_path, 118).splitlines()
    for part in ("0.42 -> 0.92", "temperature 1)", "1000 problems", "2 steps", "118 s", "7 bytes"):
        assert part in happened
    assert all(f"{tmp_path}/{name}" in where for name in ("curves.png", "metrics.jsonl", "hf"))
    assert "--debug-permute-rewards" in following

    metrics.write_text("\n".join(map(json.dumps, steps[:2])))
    with pytest.raises(ValueError, match="1 evaluations, at least 2"):
        summary.summary(tmp_path, 118)
