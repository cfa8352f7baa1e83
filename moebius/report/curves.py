"""metrics.jsonl -> one PNG: did it learn, did it stay stable, where did seconds and memory go.

`python -m moebius.report.curves runs/NAME` draws runs/NAME/curves.png.
"""

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, MaxNLocator

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A5CA8", "#8C6D46")
REST = "#C8CCD2"
LEGEND_COLUMNS = 4
GIB, MIB = 2**30, 2**20


def plot_curves(metrics_jsonl: Path, out_png: Path) -> None:
    """Draws six panels over steps; a panel without its metrics says so. One step is enough.

    Args:
        metrics_jsonl: one JSON object with `step` a line; null counts as missing.
        out_png: written whole or not at all.

    Raises:
        ValueError: when the file is missing, has no complete line, or a line before the last is not JSON.
    """
    records = _read(metrics_jsonl)
    steps = np.array([record["step"] for record in records], dtype=float)
    figure = Figure(figsize=(15, 7.6), layout="constrained")
    figure.suptitle(
        f"{metrics_jsonl.resolve().parent.name}, up to step {steps.max():.0f}", fontsize=14, fontweight="bold"
    )
    axes = figure.subplots(2, 3)
    _reward(axes[0, 0], steps, records)
    _policy(axes[0, 1], steps, records)
    _length(axes[0, 2], steps, records)
    _mismatch(axes[1, 0], steps, records)
    _seconds(axes[1, 1], steps, records)
    _memory(axes[1, 2], steps, records)
    for panel in axes.flat:
        panel.set_xlim(steps.min() - 0.5, steps.max() + 0.5)
    partial = out_png.with_name(out_png.name + ".partial")
    figure.savefig(partial, format="png", dpi=110)
    os.replace(partial, out_png)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; it must be the metrics.jsonl of a run")
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            # A killed run may leave half of its last line.
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: it must be a JSON object") from None
    if not records:
        raise ValueError(f"{path}: it holds no step yet")
    return records


def _series(records: list[dict[str, Any]], key: str) -> np.ndarray:
    """One number a step; NaN where the step lacks it."""
    return np.array([np.nan if record.get(key) is None else record[key] for record in records], dtype=float)


def _names(records: list[dict[str, Any]], prefix: str, suffix: str = "") -> list[str]:
    """Keys `prefix...suffix` in the order in which they first appear."""
    keys = dict.fromkeys(key for record in records for key in record)
    return [key for key in keys if key.startswith(prefix) and key.endswith(suffix)]


def _line(
    axes: Axes, steps: np.ndarray, values: np.ndarray, label: str, color: str, width: float = 1.6, marker: str = ""
) -> None:
    """Joins the steps that have a value; few points are marked, since a line alone hides a single one."""
    present = np.isfinite(values)
    if present.any():
        marker = "o" if present.sum() <= 30 else marker
        axes.plot(
            steps[present], values[present], label=label, color=color, linewidth=width, marker=marker, markersize=3.5
        )


def _finish(axes: Axes, title: str, artists: Iterable[Any] | None = None) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    handles = list(artists) if artists is not None else axes.get_legend_handles_labels()[0]
    rows = -(-len(handles) // LEGEND_COLUMNS)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=8 + 16 * rows)
    if handles:
        place = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "borderaxespad": 0.0}
        axes.legend(handles=handles, ncols=LEGEND_COLUMNS, frameon=False, fontsize=9, columnspacing=1.2, **place)
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not in this run", transform=axes.transAxes, ha="center", va="center", color="grey")


def _reward(axes: Axes, steps: np.ndarray, records: list[dict[str, Any]]) -> None:
    _line(axes, steps, _series(records, "reward/mean"), "reward, mean of the batch", COLORS[0])
    _line(axes, steps, _series(records, "eval/accuracy"), "accuracy of evaluation", COLORS[1], width=2.2, marker="o")
    _finish(axes, "Reward and accuracy")


def _policy(axes: Axes, steps: np.ndarray, records: list[dict[str, Any]]) -> None:
    ratio_axes = axes.twinx()
    _line(axes, steps, _series(records, "policy/approx_kl"), "KL to the old policy (left, nats)", COLORS[0])
    _line(ratio_axes, steps, _series(records, "policy/ratio_mean"), "importance ratio (right)", COLORS[1])
    ratio_axes.spines[["top"]].set_visible(False)
    ratio_axes.yaxis.set_visible(bool(ratio_axes.lines))
    ratio_axes.ticklabel_format(useOffset=False)
    axes.yaxis.set_major_formatter(FormatStrFormatter("%.3g"))
    handles = axes.get_legend_handles_labels()[0] + ratio_axes.get_legend_handles_labels()[0]
    _finish(axes, "Policy change: KL and mean ratio", handles)


def _length(axes: Axes, steps: np.ndarray, records: list[dict[str, Any]]) -> None:
    _line(axes, steps, _series(records, "rollout/response_length_mean"), "mean response", COLORS[0])
    _finish(axes, "Response length (tokens)")


def _mismatch(axes: Axes, steps: np.ndarray, records: list[dict[str, Any]]) -> None:
    largest, mean = (_series(records, f"mismatch/logprob_abs_{name}") for name in ("max", "mean"))
    _line(axes, steps, largest, "largest of the batch", COLORS[5])
    _line(axes, steps, mean, "mean of the batch", COLORS[0])
    values = np.concatenate([largest, mean])
    if (values > 0).any():
        decades = np.log10(values[values > 0])
        axes.set_yscale("log")
        axes.set_ylim(10 ** np.floor(decades.min()), 10 ** (np.floor(decades.max()) + 1))
    _finish(axes, "|trainer - engine| log-prob (nats)")


def _seconds(axes: Axes, steps: np.ndarray, records: list[dict[str, Any]]) -> None:
    """Phases are stacked up to the step's own time. The switch lies inside a phase, so it is a line, not a layer."""
    series = {name: _series(records, name) for name in _names(records, "time/") if name != "time/step"}
    # Phases of every step at the bottom, so that an evaluation now and then does not lift them.
    phases = sorted(series, key=lambda name: -np.isfinite(series[name]).sum())
    layers = {name.removeprefix("time/"): np.nan_to_num(series[name]) for name in phases}
    whole = np.nan_to_num(_series(records, "time/step"))
    if whole.any():
        layers["rest"] = np.clip(whole - sum(layers.values(), np.zeros_like(whole)), 0.0, None)
    # Each step is a block one step wide: a single step shows, and a line of zero width does not.
    edges = np.repeat(steps, 2) + np.tile([-0.5, 0.5], len(steps))
    bottom = np.zeros_like(edges)
    for index, (name, values) in enumerate(layers.items()):
        top = bottom + np.repeat(values, 2)
        color = REST if name == "rest" else COLORS[index % len(COLORS)]
        axes.fill_between(edges, bottom, top, label=name, color=color, linewidth=0, alpha=0.85)
        bottom = top
    _line(axes, steps, _series(records, "switch/seconds"), "switch", "black", width=1.2)
    _finish(axes, "Time of a step (seconds)")


def _memory(axes: Axes, steps: np.ndarray, records: list[dict[str, Any]]) -> None:
    series = {name: _series(records, name) for name in _names(records, "memory/", "/allocated")}
    largest = max((np.nanmax(values, initial=0.0) for values in series.values()), default=0.0)
    unit, size = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
    for index, (name, values) in enumerate(series.items()):
        phase = name.removeprefix("memory/").removesuffix("/allocated")
        _line(axes, steps, values / size, phase, COLORS[index % len(COLORS)])
    if series:
        axes.set_ylim(bottom=0)
    _finish(axes, f"Memory in use at each phase ({unit})")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw RUN/curves.png from RUN/metrics.jsonl.")
    parser.add_argument("run", type=Path, help="run folder")
    folder = parser.parse_args().run
    try:
        plot_curves(folder / "metrics.jsonl", folder / "curves.png")
    except ValueError as error:
        parser.error(str(error))
    print(folder / "curves.png")


if __name__ == "__main__":
    main()
