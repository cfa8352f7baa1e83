"""Runs a plan: makes the engine's tensors from the trainer's, fills the buffers, and proves the aliasing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_engine.reshard_plan import ParameterMeta, ReshardPlan, Transfer


def engine_tensors(plan: ReshardPlan, trainer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The engine's parameters by name: views of the trainer's tensors, and empty buffers for the rest.

    Args:
        trainer: this rank's parameters by their trainer names, after DDP and optimizer have placed them for good.
    """
    made = {}
    for view in plan.views:
        whole = trainer[view.meta.trainer].detach()
        made[view.meta.engine] = whole if view.dim is None else whole.narrow(view.dim, view.start, view.length)
    like = next(iter(trainer.values()))
    for buffer in plan.buffers:
        made[buffer.meta.engine] = torch.empty(buffer.shape, dtype=like.dtype, device=like.device)
    return made


def buckets(parameters: Sequence[ParameterMeta], bucket_bytes: int) -> list[set[str]]:
    """Names of consecutive engine parameters, at most `bucket_bytes` of the model together; alike on all ranks."""
    found: list[set[str]] = [set()]
    filled = 0
    for meta in parameters:
        size = sum(meta.kind.parts) * meta.kind.unit_bytes
        if found[-1] and filled + size > bucket_bytes:
            found.append(set())
            filled = 0
        found[-1].add(meta.engine)
        filled += size
    return found


@dataclass
class _Bucket:
    """Transfers under way. `operations` keep what is being sent alive; `unpack` holds (place, what arrives for it)."""

    names: list[str]
    operations: list[Any]
    works: list[Any]
    unpack: list[tuple[Tensor, Tensor]]


class Resharder:
    """Brings the buffers up to date in place, so that captured graphs stay valid.

    Transfers go point to point, a bucket at a time; the next bucket is on its way while one is unpacked.

    Args:
        bucket_bytes: bytes of the whole model whose transfers are in flight together.
    """

    def __init__(self, plan: ReshardPlan, parameters: Sequence[ParameterMeta], bucket_bytes: int) -> None:
        self.plan = plan
        self._buffers = {buffer.meta.engine: buffer for buffer in plan.buffers}
        self._sends: dict[str, list[Transfer]] = {}
        for transfer in plan.sends:
            self._sends.setdefault(transfer.meta.engine, []).append(transfer)
        order = {meta.engine: index for index, meta in enumerate(parameters)}
        moving = self._sends.keys() | {name for name, buffer in self._buffers.items() if buffer.receives}
        self._buckets = [sorted(bucket & moving, key=order.__getitem__) for bucket in buckets(parameters, bucket_bytes)]

    def run(self, trainer: Mapping[str, Tensor], engine: Mapping[str, Tensor]) -> None:
        """Fills every buffer. Collective over the ranks that exchange anything.

        Raises:
            RuntimeError: naming tensors, ranks and bytes of the bucket in which a transfer failed.
        """
        for buffer in self.plan.buffers:
            for piece in buffer.copies:
                source = _part(trainer[buffer.meta.trainer], buffer.meta, piece.source, piece.length)
                _part(engine[buffer.meta.engine], buffer.meta, piece.dest, piece.length).copy_(source)
        under_way: list[_Bucket] = []
        for names in filter(None, self._buckets):
            under_way.append(self._start(names, trainer, engine))
            if len(under_way) == 2:
                self._finish(under_way.pop(0))
        for bucket in under_way:
            self._finish(bucket)

    def _start(self, names: list[str], trainer: Mapping[str, Tensor], engine: Mapping[str, Tensor]) -> _Bucket:
        operations: list[Any] = []
        unpack: list[tuple[Tensor, Tensor]] = []
        for transfer in self._outgoing(names):
            source = _part(trainer[transfer.meta.trainer], transfer.meta, transfer.source, transfer.length)
            operations.append(dist.P2POp(dist.isend, source.contiguous(), transfer.peer))
        for transfer in self._incoming(names):
            place = _part(engine[transfer.meta.engine], transfer.meta, transfer.dest, transfer.length)
            arriving = place
            if not place.is_contiguous():
                arriving = torch.empty(place.shape, dtype=place.dtype, device=place.device)
                unpack.append((place, arriving))
            operations.append(dist.P2POp(dist.irecv, arriving, transfer.peer))
        try:
            return _Bucket(names, operations, dist.batch_isend_irecv(operations), unpack)
        except RuntimeError as error:
            raise RuntimeError(self._failure(names)) from error

    def _finish(self, bucket: _Bucket) -> None:
        try:
            for work in bucket.works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(self._failure(bucket.names)) from error
        for place, arriving in bucket.unpack:
            place.copy_(arriving)

    def _outgoing(self, names: list[str]) -> Iterator[Transfer]:
        for name in names:
            yield from self._sends.get(name, ())

    def _incoming(self, names: list[str]) -> Iterator[Transfer]:
        for name in names:
            if name in self._buffers:
                yield from self._buffers[name].receives

    def _failure(self, names: list[str]) -> str:
        receives, sends = list(self._incoming(names)), list(self._outgoing(names))
        sources, targets = sorted({t.peer for t in receives}), sorted({t.peer for t in sends})
        return (
            f"a transfer of {names[0]} to {names[-1]} failed on rank {dist.get_rank()}: "
            f"{sum(t.num_bytes for t in receives)} bytes from ranks {sources}, "
            f"{sum(t.num_bytes for t in sends)} bytes to ranks {targets}"
        )


def _part(tensor: Tensor, meta: ParameterMeta, start: int, length: int) -> Tensor:
    return tensor.detach().narrow(meta.kind.cut or 0, start, length)


def aliasing_certificate(
    plan: ReshardPlan, trainer: Mapping[str, Tensor], engine: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """For each engine parameter: where in the trainer's memory it lies, read off the live tensors.

    Returns:
        rows with `engine`, `trainer`, `kind` ("view" or "buffer"), `offset` (bytes from the start of the trainer's
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
        rows.append(_row(view.meta, "view", mine, mine.data_ptr() - theirs.data_ptr()))
    rows += [_row(buffer.meta, "buffer", engine[buffer.meta.engine], None) for buffer in plan.buffers]
    return rows


def _row(meta: ParameterMeta, kind: str, tensor: Tensor, offset: int | None) -> dict[str, Any]:
    return {
        "engine": meta.engine,
        "trainer": meta.trainer,
        "kind": kind,
        "offset": offset,
        "storage_offset": tensor.storage_offset() if offset is not None else None,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }
