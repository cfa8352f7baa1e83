"""Hugging Face folders read tensor by tensor, in slices: no rank ever holds more than it asked for."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moebius.models.families import weights
from moebius.models.shape import ModelShape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_TORCH_INDEX = "pytorch_model.bin.index.json"
_TORCH_SINGLE = "pytorch_model.bin"
_PREFIX = "model."
# A file is mapped into memory and its pages count as this process's: after so many bytes it is mapped anew.
_REMAP_BYTES = 64 << 20


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._file: Any = safe_open(str(path), framework="pt")
        self.names: list[str] = list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        return self._file.get_slice(name)[where]


class _TorchFile:
    """A `.bin` file, mapped; only tensors are unpickled (weights_only)."""

    def __init__(self, path: Path) -> None:
        self._tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not all(isinstance(value, Tensor) for value in self._tensors.values()):
            raise TypeError("it holds something else than tensors")
        self.names = list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        return self._tensors[name][where]


class HFReader:
    """The tensors of a Hugging Face folder, opened lazily and read in slices.

    safetensors files come first; where there are none, `pytorch_model.bin` files are read. A checkpoint saved without
    its head lacks the prefix `model.` in all names: they are known by their full names here.

    Raises:
        ValueError: naming `flag`, the folder and the file, when a file is missing or broken.
    """

    def __init__(self, folder: str | Path, flag: str = "--hf-checkpoint") -> None:
        self.folder = Path(folder)
        self.where = f"{flag} {folder}"
        self._open: dict[str, _SafetensorsFile | _TorchFile] = {}
        self._read_bytes = 0
        found = self._files()
        self._prefix = "" if any(name.startswith(_PREFIX) for name in found) else _PREFIX
        self.file_of = {self._prefix + name: file for name, file in found.items()}

    def _files(self) -> dict[str, str]:
        """The file of each tensor, by the tensors' names in the files."""
        for index, single in ((INDEX, SINGLE), (_TORCH_INDEX, _TORCH_SINGLE)):
            if (self.folder / index).is_file():
                return self._index(index)
            if (self.folder / single).is_file():
                return dict.fromkeys(self._handle(single).names, single)
        raise ValueError(f"{self.where}: neither {INDEX} nor {SINGLE} is in it, nor {_TORCH_SINGLE}")

    def _index(self, name: str) -> dict[str, str]:
        try:
            return dict(json.loads((self.folder / name).read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.where}: {name} cannot be read: {error!r}") from error

    def _handle(self, name: str) -> "_SafetensorsFile | _TorchFile":
        if name not in self._open:
            kind = _TorchFile if name.endswith(".bin") else _SafetensorsFile
            try:
                self._open[name] = kind(self.folder / name)
            except Exception as error:  # of several libraries
                raise ValueError(f"{self.where}: {name} cannot be read: {error}") from error
        return self._open[name]

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None) -> Tensor:
        """Elements [rows[0]:rows[1], columns[0]:columns[1]] of a tensor; a view of the file that the caller lets go."""
        where = (slice(*rows),) if columns is None else (slice(*rows), slice(*columns))
        if self._read_bytes > _REMAP_BYTES:
            self.close()
        found = self._handle(self.file_of[name]).read(name.removeprefix(self._prefix), where)
        # columns of a row-major tensor lie on all of its pages
        self._read_bytes += found.nbytes if columns is None else self._page_bytes(name, rows, found)
        return found

    def _page_bytes(self, name: str, rows: tuple[int, int], found: Tensor) -> int:
        return (rows[1] - rows[0]) * self.shape(name)[1] * found.element_size()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._handle(self.file_of[name]).shape(name.removeprefix(self._prefix))

    def close(self) -> None:
        self._open.clear()
        self._read_bytes = 0


def check_names(reader: HFReader, shape: ModelShape) -> None:
    """Compares names and shapes of a folder's tensors with the family's table.

    Raises:
        ValueError: naming the tensors that are missing, unknown, or of another shape.
    """
    wanted: dict[str, tuple[int, ...]] = {}
    for weight in weights(shape):
        for name, rows in zip(weight.hf, weight.rows, strict=True):
            wanted[name] = (rows,) if weight.columns is None else (rows, weight.columns)
    # a tied head may be written out again, and old exports carry rotary tables that are computed, not learned
    extra = {n for n in reader.file_of if n not in wanted and not n.endswith("rotary_emb.inv_freq")}
    if shape.tied:
        extra.discard("lm_head.weight")
    problems = [f"missing {n}" for n in wanted if n not in reader.file_of] + [f"unknown {n}" for n in sorted(extra)]
    problems += [
        f"{n} has shape {reader.shape(n)}, config.json says {size}"
        for n, size in wanted.items()
        if n in reader.file_of and reader.shape(n) != size
    ]
    if problems:
        raise ValueError(f"{reader.where}: does not match the {shape.family} table: {_shown(problems)}")


def _shown(problems: Sequence[str], limit: int = 8) -> str:
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return "; ".join(problems[:limit]) + more
