"""Hugging Face folders in and out, tensor by tensor: no rank ever holds the whole model.

Reading slices the safetensors files, so that a rank reads only its own rows and columns. Writing gathers one tensor at
a time to rank 0, in canonical form: no blocks, no padding.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moebius.files import unused_name
from moebius.models.blocks import fuse, unfuse
from moebius.models.build import unwrap
from moebius.models.families import Cut, Weight, weights
from moebius.models.hf_reader import INDEX, SINGLE, HFReader, check_names
from moebius.models.metas import blocks_of, stage_of, stage_starts
from moebius.models.shape import ModelShape
from parallel_state.groups import ParallelState


def local_weights(model: Any, shape: ModelShape, state: ParallelState) -> Iterator[tuple[Weight, torch.nn.Parameter]]:
    """This rank's parameters with their table rows; a tied head alone on the last stage goes with the embedding's."""
    named: dict[str, torch.nn.Parameter] = dict(unwrap(model).named_parameters())
    stages = state.layout.pipeline_model_parallel_size
    offset = stage_starts(shape.num_layers, stages)[state.at.pp]
    used = set()
    for weight in weights(shape):
        name = weight.trainer
        if weight.layer is not None:
            name = name.replace(f"layers.{weight.layer}.", f"layers.{weight.layer - offset}.")
        here = stage_of(weight, shape, stages) == state.at.pp
        if not here and shape.tied and weight.padded and state.is_last_stage:
            here, name = True, "output_layer.weight"
        if here:
            used.add(name)
            yield weight, named[name]
    assert used == set(named), f"the table of {shape.family} and the model disagree on {sorted(used ^ set(named))}"


def _read_part(reader: HFReader, weight: Weight, part: int, shape: ModelShape, tp: int, index: int) -> Tensor:
    """Shard `index` of `tp` of one Hugging Face part."""
    rows, name = weight.rows[part], weight.hf[part]
    columns = None if weight.columns is None else (0, weight.columns)
    if weight.cut is Cut.WHOLE:
        return reader.read(name, (0, rows), columns)
    if weight.cut is Cut.COLUMNS:
        assert weight.columns is not None
        width = weight.columns // tp
        return reader.read(name, (0, rows), (index * width, (index + 1) * width))
    height = (shape.padded_vocab_size if weight.padded else rows) // tp
    first, last = index * height, (index + 1) * height
    found = reader.read(name, (min(first, rows), min(last, rows)), columns)
    if len(found) == height:
        return found
    return torch.cat([found, found.new_zeros(height - len(found), *found.shape[1:])])


@torch.no_grad()
def load_hf(model: Any, shape: ModelShape, state: ParallelState, folder: str | Path) -> None:
    """Fills this rank's parameters in place from a Hugging Face folder, so that views of them stay valid.

    Raises:
        ValueError: when names or shapes differ from the family's table.
    """
    reader = HFReader(folder)
    check_names(reader, shape)
    tp = state.layout.tensor_model_parallel_size
    for weight, parameter in local_weights(model, shape, state):
        parts = [_read_part(reader, weight, part, shape, tp, state.at.tp) for part in range(len(weight.hf))]
        fused = fuse(parts, blocks_of(weight, shape, state.layout))
        assert fused.shape == parameter.shape, (weight.trainer, tuple(fused.shape), tuple(parameter.shape))
        parameter.data.copy_(fused.to(parameter.dtype))
    reader.close()


def _gathered(weight: Weight, shard: Tensor, shape: ModelShape, state: ParallelState) -> list[Tensor] | None:
    """The Hugging Face parts of a weight on TP rank 0, None on the others. Collective over TP."""
    tp = state.layout.tensor_model_parallel_size
    shard = shard.detach().contiguous()
    if weight.cut is Cut.WHOLE or tp == 1:
        shards = [shard]
    else:
        shards = [torch.empty_like(shard) for _ in range(tp)] if state.at.tp == 0 else None
        dist.gather(shard, shards, group=state.tp, group_dst=0)
    if state.at.tp != 0 or shards is None:
        return None
    if weight.cut is Cut.COLUMNS:
        return [torch.cat(shards, dim=1)]
    split = len(shards)
    blocks = blocks_of(weight, shape, state.layout)
    per_shard = [unfuse(s, [rows // split for rows in weight.rows], blocks) for s in shards]
    parts = [torch.cat(pieces) for pieces in zip(*per_shard, strict=True)]
    return [part[:rows] for part, rows in zip(parts, weight.rows, strict=True)]


def _itself(parameter: torch.nn.Parameter) -> Tensor:
    return parameter.detach()


def export_tensors(
    model: Any,
    shape: ModelShape,
    state: ParallelState,
    value_of: Callable[[torch.nn.Parameter], Tensor] = _itself,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, whole tensor on the host) on global rank 0, one at a time; nothing elsewhere.

    Collective over the model-parallel ranks of data-parallel replica 0; the other replicas return at once.

    Args:
        value_of: what to export for a parameter: itself, or a gradient or moment of its shape.
    """
    if state.at.dp != 0:
        return
    stages = state.layout.pipeline_model_parallel_size
    mine = {weight.trainer: value_of(parameter) for weight, parameter in local_weights(model, shape, state)}
    like = next(iter(mine.values()))
    for weight in weights(shape):
        owner = stage_of(weight, shape, stages)
        parts = _gathered(weight, mine[weight.trainer], shape, state) if owner == state.at.pp else None
        if owner != 0 and state.at.tp == 0:
            parts = _to_first_stage(weight, parts, owner, like, state)
        if state.rank == 0:
            assert parts is not None
            for name, part in zip(weight.hf, parts, strict=True):
                yield name, part.cpu().contiguous()


def _to_first_stage(
    weight: Weight, parts: list[Tensor] | None, owner: int, like: Tensor, state: ParallelState
) -> list[Tensor] | None:
    """Moves the parts of one weight from the stage that owns it to the first one (TP rank 0 of each)."""
    if state.at.pp == owner:
        assert parts is not None
        for part in parts:
            dist.send(part.contiguous(), group=state.pp, group_dst=0)
    if state.at.pp != 0:
        return None
    received = []
    for rows in weight.rows:
        buffer = like.new_empty((rows,) if weight.columns is None else (rows, weight.columns))
        dist.recv(buffer, group=state.pp, group_src=owner)
        received.append(buffer)
    return received


def plan_files(sizes: dict[str, int], max_bytes: int) -> list[list[str]]:
    """Divides tensors, in order, over files of at most `max_bytes` bytes (a larger tensor gets a file of its own)."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def save_hf(
    model: Any,
    shape: ModelShape,
    state: ParallelState,
    source: str | Path,
    folder: str | Path,
    other_files: Sequence[Path] = (),
    max_bytes: int = 4 << 30,
) -> None:
    """Writes `folder` as a Hugging Face model. Collective over the world; rank 0 writes, file by file, then renames.

    A folder that is there already is kept as `folder.previous-N`.

    Args:
        source: the folder whose config.json describes the model.
        other_files: files copied unchanged (tokenizer, chat template, generation settings).
        max_bytes: size of one safetensors file, and the most that rank 0 holds at a time.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    if state.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dtype = next(unwrap(model).parameters()).dtype
    sizes = {
        name: rows * (weight.columns or 1) * dtype.itemsize
        for weight in weights(shape)
        for name, rows in zip(weight.hf, weight.rows, strict=True)
    }
    files = plan_files(sizes, max_bytes)
    names = (
        [SINGLE] if len(files) == 1 else [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    )
    held: dict[str, Tensor] = {}
    written = 0
    for name, tensor in export_tensors(model, shape, state):
        held[name] = tensor
        if name == files[written][-1]:
            save_file(held, partial / names[written], metadata={"format": "pt"})
            (partial / names[written]).chmod(0o644)  # safetensors makes files that only their owner can read
            held, written = {}, written + 1
    if state.rank == 0:
        if len(files) > 1:
            weight_map = {name: file for file, group in zip(names, files, strict=True) for name in group}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            (partial / INDEX).write_text(json.dumps(index, indent=2))
        config = json.loads((Path(source) / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (partial / "config.json").write_text(json.dumps(config, indent=2))
        for file in other_files:
            shutil.copy(file, partial / file.name)
        if folder.exists():
            folder.rename(unused_name(folder))
        partial.rename(folder)
    dist.barrier()
