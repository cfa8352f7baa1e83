"""Where numbers go on rank 0: metrics.jsonl, a line a step, curves.png, and wandb or TensorBoard on request."""

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from moebius.files import unused_name

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
    from wandb import Run

T = TypeVar("T")

# Part of the console line -> its keys and how to print them; parts stand in this order, apart by " | ".
CONSOLE: tuple[tuple[tuple[str, str], ...], ...] = (
    (("reward/mean", "reward {:.3f}"),),
    (("eval/accuracy", "accuracy {:.3f}"),),
    (("policy/approx_kl", "kl {:.1e}"),),
    (("policy/ratio_mean", "ratio {:.4f}"),),
    (("rollout/response_length_mean", "len {:.1f}"),),
    (("time/rollout", "rollout {:.2f}s"), ("time/update", "update {:.2f}s")),
    (("switch/seconds", "switch {:.2f}s"),),
)


class Timer:
    """Wall seconds of named phases, as metrics: `seconds["time/NAME"]`. Make a new one for each step.

    A phase entered twice adds up. Only host time is measured: a phase on a GPU has to end in a synchronisation.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the block's seconds to `time/NAME`, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            key = f"time/{name}"
            self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start


class MetricsLogger:
    """Writes the metrics of one run into `folder`. Rank 0 writes; with `enabled=False` every call does nothing.

    Args:
        config: what the run was started with, shown by wandb.
        total_steps: for `step 3/150` on the console.

    Raises:
        ValueError: --use-wandb or --use-tensorboard without its package, or wandb cannot start.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        use_wandb: bool,
        wandb_project: str,
        wandb_name: str | None,
        use_tensorboard: bool,
        tensorboard_dir: str | Path,
        config: dict[str, Any],
        total_steps: int,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        if not enabled:
            return
        self.folder = Path(folder)
        self.total_steps = total_steps
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tensorboard = _start_tensorboard(tensorboard_dir) if use_tensorboard else None
        self._wandb = _start_wandb(self.folder, wandb_project, wandb_name, config) if use_wandb else None
        _keep_previous(self.folder)
        self._file = (self.folder / "metrics.jsonl").open("w", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one JSON object with `step` and the metrics, and prints the step's line.

        Numbers that are not finite are null in the file and `nan` or `inf` on the console. Call it once a step, in
        rising order (wandb drops steps that go back).
        """
        if not self.enabled:
            return
        record = {"step": step} | {name: _json_number(value) for name, value in metrics.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        print(_console_line(step, self.total_steps, metrics), flush=True)
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()

    def close(self) -> None:
        """Ends the records and draws curves.png."""
        if not self.enabled:
            return
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._tensorboard is not None:
            self._tensorboard.close()
        # matplotlib is slow to import and only needed here.
        from moebius.report.curves import plot_curves

        plot_curves(self.folder / "metrics.jsonl", self.folder / "curves.png")


def progress(iterable: Iterable[T], total: int | None, description: str, alone: bool = False) -> Iterable[T]:
    """`iterable` with a progress bar on rank 0 (RANK of the launcher), once it has taken more than 2 seconds.

    The bar goes to stderr and leaves nothing behind; in a log file it is written twice a minute. With `alone` this rank
    works for all of its node, whichever it is, and the bar is that of the first node (GROUP_RANK).
    """
    if os.environ.get("GROUP_RANK" if alone else "RANK", "0") != "0":
        return iterable
    seconds = 0.1 if sys.stderr.isatty() else 30.0
    return tqdm(iterable, description, total, leave=False, delay=2, mininterval=seconds, maxinterval=max(seconds, 10.0))


def _json_number(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(value)


def _keep_previous(folder: Path) -> None:
    """An older run's metrics.jsonl makes room, under the first free number."""
    current = folder / "metrics.jsonl"
    if not current.exists():
        return
    kept = current.rename(unused_name(current))
    print(f"{current} is of an earlier run: kept as {kept.name}", flush=True)


def _start_wandb(folder: Path, project: str, name: str | None, config: dict[str, Any]) -> "Run":
    try:
        import wandb
    except ImportError:
        raise ValueError("--use-wandb: the package wandb must be installed") from None
    try:
        return wandb.init(project=project, name=name, dir=folder, config=config)
    except wandb.Error as error:
        raise ValueError(
            f"--use-wandb: wandb must be able to start; WANDB_MODE=offline needs no login: {error}"
        ) from error


def _start_tensorboard(folder: str | Path) -> "SummaryWriter":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--use-tensorboard: the package tensorboard must be installed") from None
    return SummaryWriter(str(folder))


def _console_line(step: int, total_steps: int, metrics: Mapping[str, float]) -> str:
    parts = [f"step {step}/{total_steps}"]
    for part in CONSOLE:
        parts.append(" ".join(text.format(metrics[key]) for key, text in part if key in metrics))
    lost = metrics.get("reward/timeouts", 0) + metrics.get("reward/errors", 0)
    if lost:
        parts.append(f"{lost:.0f} rewards timed out or failed")
    if "switch/bytes_moved" in metrics:
        parts.append(f"{_bytes(metrics['switch/bytes_moved'])} moved")
    memory = [value for key, value in metrics.items() if key.startswith("memory/") and key.endswith("/allocated")]
    parts.append(_bytes(max(memory)) if memory else "")
    return " | ".join(part for part in parts if part)


def _bytes(number: float) -> str:
    """0 -> `0 B`, 5.5e9 -> `5.1 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
