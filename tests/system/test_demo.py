"""The demo from the command line, whole: a run of a few minutes, with the numbers that it promises."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_demo

pytestmark = pytest.mark.system


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The run folder and the lines of a start that finds an older run in its place."""
    run = tmp_path_factory.mktemp("demo") / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("of an earlier start")
    return run, run_demo(run)


def test_it_learns_in_time_without_moving_weights(demo: tuple[Path, list[str]]) -> None:
    run, _ = demo
    rows = rows_of(run / "metrics.jsonl")
    accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    assert 0.15 <= accuracy[0] <= 0.6
    assert accuracy[-1] >= accuracy[0] + 0.3
    steps = [row for row in rows if "reward/mean" in row]
    assert [row["step"] for row in steps] == list(range(len(steps)))
    assert rows[0]["step"] == 0 and "eval/accuracy" in rows[0]
    assert all(row["switch/bytes_moved"] == 0 and row["switch/bytes_aliased"] > 0 for row in steps)
    assert max(row["mismatch/logprob_abs_max"] for row in steps) <= 1e-4
    assert sum(row["time/step"] for row in steps) <= 300


def test_it_is_evaluated_on_problems_of_its_own(demo: tuple[Path, list[str]]) -> None:
    data = demo[0] / "start" / "data"
    problems = {
        name: {frozenset(row["prompt"].removesuffix("=").split("+")) for row in rows_of(data / f"{name}.jsonl")}
        for name in ("warmup", "rl", "eval")
    }
    rows = rows_of(data / "eval.jsonl")
    assert len({row["prompt"] for row in rows}) == len(rows) >= 200
    assert not problems["eval"] & (problems["warmup"] | problems["rl"])
    last = rows_of(demo[0] / "metrics.jsonl")[-1]
    assert last["eval/n"] == len(rows)


def test_the_exported_model_adds(demo: tuple[Path, list[str]]) -> None:
    """What lies in hf/ is the trained model, for transformers alone."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(demo[0] / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo[0] / "hf")
    rows = rows_of(demo[0] / "start" / "data" / "eval.jsonl")
    prompts = torch.tensor([tokenizer(row["prompt"])["input_ids"] for row in rows])
    out = model.generate(prompts, max_new_tokens=8, do_sample=False)[:, prompts.shape[1] :]
    answers = tokenizer.batch_decode(out, skip_special_tokens=True)
    right = sum(answer == row["label"] for answer, row in zip(answers, rows, strict=True)) / len(rows)
    assert right >= rows_of(demo[0] / "metrics.jsonl")[-1]["eval/accuracy"] - 0.02


def test_what_it_leaves_and_says(demo: tuple[Path, list[str]]) -> None:
    run, lines = demo
    for name in ("metrics.jsonl", "curves.png", "hf/config.json", "arguments.json"):
        assert (run / name).stat().st_size > 0, name
    arguments = json.loads((run / "arguments.json").read_text())["arguments"]
    assert arguments["tensor_model_parallel_size"] == 1
    starts = ("What happened: accuracy ", f"Where it is: curves in {run}/curves.png", "What to try next: ")
    assert [line.startswith(start) for line, start in zip(lines[-3:], starts, strict=True)] == [True] * 3
    assert "; 0 bytes of weights moved" in lines[-3]
    older = run.with_name("run.previous-1")
    assert (older / "metrics.jsonl").read_text() == "of an earlier start"
    assert any(str(older) in line for line in lines)
