"""metrics.jsonl and its companions: console line, curves, wandb, TensorBoard, timers, progress."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moebius.metrics import MetricsLogger, Timer, progress
from moebius.report.curves import plot_curves

STEP: dict[str, float] = {
    "reward/mean": 0.53,
    "eval/accuracy": 0.44,
    "policy/approx_kl": 1.2e-3,
    "policy/ratio_mean": 1.0,
    "mismatch/logprob_abs_mean": 1e-6,
    "mismatch/logprob_abs_max": 4e-6,
    "rollout/response_length_mean": 3.14,
    "time/rollout": 0.41,
    "time/update": 0.62,
    "time/step": 1.2,
    "switch/seconds": 0.02,
    "switch/bytes_moved": 0,
    "memory/generation/allocated": int(5.1 * 2**30),
    "memory/training/allocated": 2**30,
}


def logger(folder: Path, **changes: Any) -> MetricsLogger:
    settings: dict[str, Any] = {
        "use_wandb": False,
        "wandb_project": "p",
        "wandb_name": None,
        "use_tensorboard": False,
        "tensorboard_dir": folder / "tensorboard",
        "config": {"seed": 0},
        "total_steps": 150,
    }
    return MetricsLogger(folder, **settings | changes)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_each_step_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    log = logger(tmp_path)
    log.log(0, {"eval/accuracy": 0.25})
    assert lines(tmp_path) == [{"step": 0, "eval/accuracy": 0.25}]
    log.log(1, STEP)
    assert lines(tmp_path)[1] == {"step": 1} | STEP
    assert '"switch/bytes_moved": 0,' in (tmp_path / "metrics.jsonl").read_text(), "bytes stay whole numbers"
    log.close()
    assert is_png(tmp_path / "curves.png")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_console_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = logger(tmp_path)
    log.log(12, STEP)
    log.log(13, {"reward/mean": math.nan, "switch/bytes_moved": 3 * 2**20})
    assert capsys.readouterr().out.splitlines() == [
        "step 12/150 | reward 0.530 | accuracy 0.440 | kl 1.2e-03 | ratio 1.0000 | len 3.1 | "
        "rollout 0.41s update 0.62s | switch 0.02s | 0 B moved | 5.1 GiB",
        "step 13/150 | reward nan | 3.0 MiB moved",
    ]


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    log = logger(tmp_path)
    log.log(1, {"reward/mean": math.nan, "policy/approx_kl": math.inf})
    log.close()
    assert lines(tmp_path) == [{"step": 1, "reward/mean": None, "policy/approx_kl": None}]
    assert is_png(tmp_path / "curves.png")


def test_an_earlier_run_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        logger(tmp_path).log(step, {})
    kept = [json.loads((tmp_path / f"metrics.previous-{n}.jsonl").read_text())["step"] for n in (1, 2)]
    assert (kept, lines(tmp_path)) == ([1, 2], [{"step": 3}])
    assert "kept as metrics.previous-2.jsonl" in capsys.readouterr().out


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = logger(tmp_path / "run", enabled=False, use_wandb=True, use_tensorboard=True)
    log.log(1, STEP)
    log.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_wandb_offline_writes_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}.items():
        monkeypatch.setenv(name, value)
    log = logger(tmp_path, use_wandb=True, wandb_name="name-of-the-run")
    log.log(1, {"reward/mean": 0.5})
    log.close()
    (records,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    content = records.read_bytes()
    assert b"reward/mean" in content
    assert b"name-of-the-run" in content


@pytest.mark.parametrize(("flag", "package"), [("use_wandb", "wandb"), ("use_tensorboard", "torch.utils.tensorboard")])
def test_an_absent_package_is_named_with_its_flag(
    flag: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')}: the package {package.split('.')[-1]} must be"):
        logger(tmp_path, **{flag: True})
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n", "a run that cannot start leaves the folder as it was"


def test_tensorboard_writes_every_metric(tmp_path: Path) -> None:
    log = logger(tmp_path, use_tensorboard=True)
    log.log(1, STEP)
    log.log(2, {"reward/mean": 0.75})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == set(STEP)
    assert [(event.step, round(event.value, 2)) for event in events.Scalars("reward/mean")] == [(1, 0.53), (2, 0.75)]


def test_timer_adds_up_and_survives_errors() -> None:
    timer = Timer()
    for _ in range(2):
        with timer.timed("rollout"):
            time.sleep(0.02)
    with pytest.raises(KeyError), timer.timed("update"):
        raise KeyError
    assert set(timer.seconds) == {"time/rollout", "time/update"}
    assert 0.04 <= timer.seconds["time/rollout"] < 5
    assert 0 <= timer.seconds["time/update"] < 0.04


def test_progress_is_silent_for_short_phases(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(iter(range(3)), 3, "evaluation")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_progress_of_a_long_phase_is_shown_by_rank_0_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    # The bar looks at the clock from time to time only, hence many short rounds.
    for _ in progress(range(50), 50, "evaluation"):
        time.sleep(0.045)
    assert "evaluation" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    items = range(50)
    assert progress(items, 50, "evaluation") is items
    # A rank that works for its whole node shows the bar, if it is the first node.
    for node, shown in (("0", True), ("1", False)):
        monkeypatch.setenv("GROUP_RANK", node)
        assert (progress(items, 50, "evaluation", alone=True) is not items) is shown


def test_curves_from_the_command_line(tmp_path: Path) -> None:
    """Steps differ in their keys, one is null, and a killed run left half a line."""
    records = [{"step": 0, "eval/accuracy": 0.1}, {"step": 1} | STEP, {"step": 2, "reward/mean": None}]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 3, "rew')
    command = [sys.executable, "-m", "moebius.report.curves", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "curves.png")), done.stderr
    assert is_png(tmp_path / "curves.png")


@pytest.mark.parametrize("record", [{"step": 1} | STEP, {"step": 1}], ids=["one step", "no metric"])
def test_curves_of_one_step(record: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    plot_curves(tmp_path / "metrics.jsonl", tmp_path / "out.png")
    assert is_png(tmp_path / "out.png")


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no such file"), ("", "holds no step"), ('{"step"\n{"step": 1}\n', "line 1: it must be a JSON object")],
)
def test_curves_refuse_what_is_not_a_run(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        plot_curves(tmp_path / "metrics.jsonl", tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()
