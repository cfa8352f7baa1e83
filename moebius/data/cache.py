"""Prepared prompts on disk, found again by the content of everything that they depend on.

One folder for each table: meta.json and one .npy file for each array, which is mapped, not read. The first rank of a
node that asks makes it under a lock, the others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from moebius.data.table import ARRAYS, PartCount

FORMAT = 1  # to be raised when the same rows would become other files

Content = tuple[Mapping[str, np.ndarray], list[PartCount]]


class Damaged(Exception):
    """A cached table that is not what was written."""


@dataclass(frozen=True)
class DataCache:
    """Where prepared prompts are kept (--data-cache), and the tokenizer's files, whose content enters the key."""

    folder: Path
    tokenizer_files: Sequence[Path]

    def key(self, *facts: object) -> str:
        """A name for what follows from `facts` (as JSON), from the tokenizer's files and from this format."""
        files = sorted((path.name, _digest(path)) for path in self.tokenizer_files)
        return hashlib.blake2b(json.dumps([FORMAT, files, facts]).encode(), digest_size=16).hexdigest()

    def get(self, key: str, build: Callable[[bool], Content]) -> Content:
        """The table of `key`, which `build` makes if nobody has yet.

        A damaged table is made again. When the folder cannot be used, that is said once and `build` works alone.

        Args:
            build: its argument says whether it works for all ranks of the node. Its ValueErrors are raised here, also
                in the ranks that have waited for it, and are not kept.
        """
        try:
            return _read(self.folder / key)
        except (OSError, Damaged):
            pass
        try:
            lock = _Lock(self.folder, key)
        except OSError as error:
            _warn(f"--data-cache {self.folder}: {error.strerror}: prompts are prepared by every rank")
            return build(False)
        with lock:
            return self._make(key, build, lock)

    def _make(self, key: str, build: Callable[[bool], Content], lock: _Lock) -> Content:
        path, partial = self.folder / key, self.folder / f"{key}.partial"
        try:
            return _read(path)
        except Damaged as error:
            print(f"--data-cache {self.folder}: {key} is damaged ({error}) and is made again", flush=True)
        except OSError:
            pass
        if lock.waited and (message := lock.message()):
            raise ValueError(message)
        lock.leave("")
        try:
            content = build(True)
        except ValueError as error:
            lock.leave(str(error))
            raise
        try:
            shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(partial, ignore_errors=True)
            _write(partial, content)
            os.rename(partial, path)
            return _read(path)
        except (OSError, Damaged) as error:
            shutil.rmtree(partial, ignore_errors=True)
            _warn(f"--data-cache {self.folder}: {error}: prompts are not kept")
            return content


class _Lock:
    """The lock of one table, held from the call on. A failed builder leaves its message to those who wait."""

    def __init__(self, folder: Path, key: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{key}.lock").open("a+", encoding="utf-8", errors="surrogatepass", newline="")
        self.waited = False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.waited = True
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def message(self) -> str:
        self._file.seek(0)
        return self._file.read()

    def leave(self, message: str) -> None:
        with contextlib.suppress(OSError):  # on a full disk those who wait find out by themselves
            self._file.seek(0)
            self._file.truncate()
            self._file.write(message)
            self._file.flush()


@functools.cache
def _warn(message: str) -> None:
    """Says it once, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {message}", file=sys.stderr, flush=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _write(folder: Path, content: Content) -> None:
    arrays, counts = content
    folder.mkdir()
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values, allow_pickle=False)
    meta = {"counts": counts, "digests": {name: _digest(folder / f"{name}.npy") for name in arrays}}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def _read(folder: Path) -> Content:
    """Raises FileNotFoundError when there is no such table, Damaged when it is not whole."""
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    try:
        meta: Any = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for name in ARRAYS:
            if _digest(folder / f"{name}.npy") != meta["digests"][name]:
                raise Damaged(f"{name}.npy has changed")
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS}
        return arrays, [PartCount(*count) for count in meta["counts"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error
