"""Runs a plan: makes the engine's tensors from the trainer's, refreshes the copies, and proves the aliasing."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybrid_engine.reshard_plan import LocalCopy, ReshardPlan


def engine_tensors(plan: ReshardPlan, trainer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The engine's parameters by name: views of the trainer's tensors, and the buffers of the plan's copies.

    Args:
        trainer: the trainer's parameters by their trainer names, after DDP and optimizer have placed them for good.
    """
    made = {}
    for view in plan.views:
        whole = trainer[view.meta.trainer].detach()
        made[view.meta.engine] = whole if view.dim is None else whole.narrow(view.dim, view.start, view.length)
    for copy in plan.copies:
        made[copy.meta.engine] = _collect(copy, trainer[copy.meta.trainer])
    return made


def _collect(copy: LocalCopy, whole: Tensor) -> Tensor:
    return torch.cat([whole.detach().narrow(0, start, length) for start, length in copy.rows])


def refresh_copies(plan: ReshardPlan, trainer: Mapping[str, Tensor], engine: Mapping[str, Tensor]) -> None:
    """Brings the copies up to date in place, so that captured graphs stay valid."""
    for copy in plan.copies:
        engine[copy.meta.engine].copy_(_collect(copy, trainer[copy.meta.trainer]))


def aliasing_certificate(
    plan: ReshardPlan, trainer: Mapping[str, Tensor], engine: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """For each engine parameter: where in the trainer's memory it lies, read off the live tensors.

    Returns:
        rows with `engine`, `trainer`, `kind` ("view" or "copy"), `offset` (bytes from the start of the trainer's
        tensor), `storage_offset` (elements from the start of the storage both share), `shape` and `stride`.
    Raises:
        RuntimeError: when a parameter that should be a view lies outside the trainer's tensor.
    """
    rows: list[dict[str, Any]] = []
    for view in plan.views:
        mine, theirs = engine[view.meta.engine], trainer[view.meta.trainer]
        last = (
            mine.data_ptr() + sum((n - 1) * s for n, s in zip(mine.shape, mine.stride(), strict=True)) * mine.itemsize
        )
        inside = theirs.data_ptr() <= mine.data_ptr() and last < theirs.data_ptr() + theirs.nbytes
        if mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr() or not inside:
            raise RuntimeError(f"{view.meta.engine} no longer lies in the memory of the trainer's {view.meta.trainer}")
        rows.append(_row(view.meta.engine, view.meta.trainer, "view", mine, mine.data_ptr() - theirs.data_ptr()))
    for copy in plan.copies:
        rows.append(_row(copy.meta.engine, copy.meta.trainer, "copy", engine[copy.meta.engine], None))
    return rows


def _row(engine: str, trainer: str, kind: str, tensor: Tensor, offset: int | None) -> dict[str, Any]:
    return {
        "engine": engine,
        "trainer": trainer,
        "kind": kind,
        "offset": offset,
        "storage_offset": tensor.storage_offset() if offset is not None else None,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }
