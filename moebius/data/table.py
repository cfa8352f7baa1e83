"""Prompts as flat arrays, in memory or mapped from a file: a prompt object is made when it is asked for."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np

# name -> kind of number. The ids and records of row i lie from offset i to offset i + 1.
ARRAYS = {"token_ids": "i4", "token_offsets": "i8", "records": "u1", "record_offsets": "i8"}


@dataclass(frozen=True)
class Prompt:
    """One row, ready to generate from.

    index: place among the prompts, from 0. token_ids: what engine and trainer both get. text: the text of these ids,
    templated where a template applies. metadata: the row's other columns. source: short name of where it came from.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    label: str
    metadata: dict[str, Any]
    source: str = ""


class PartCount(NamedTuple):
    """Of one file or table: its source, the rows read, those longer than the limit, and those that became prompts."""

    source: int
    read: int
    overlong: int
    kept: int


class TableBuilder:
    """Takes prompts one after the other."""

    def __init__(self) -> None:
        self._token_ids, self._token_offsets = array("i"), array("q", [0])
        self._records, self._record_offsets = bytearray(), array("q", [0])

    def __len__(self) -> int:
        return len(self._token_offsets) - 1

    def add(self, token_ids: Sequence[int], text: str, label: str, metadata: dict[str, Any]) -> None:
        """Appends one prompt."""
        self._token_ids.extend(token_ids)
        self._token_offsets.append(len(self._token_ids))
        self._records += json.dumps([text, label, metadata]).encode("ascii")
        self._record_offsets.append(len(self._records))

    def arrays(self) -> dict[str, np.ndarray]:
        """The prompts so far, in the order of ARRAYS; they share memory with the builder, which is done with."""
        held = (self._token_ids, self._token_offsets, self._records, self._record_offsets)
        return {name: np.frombuffer(values, kind) for (name, kind), values in zip(ARRAYS.items(), held, strict=True)}


class Prompts(Sequence[Prompt]):
    """Read-only prompts, those of one source after those of another; indexing makes a `Prompt`.

    Attributes:
        sources: short names. rows_of_sources: prompts of each. rows_read: rows before overlong ones were dropped.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], counts: Sequence[PartCount], sources: Sequence[str]) -> None:
        self._arrays = arrays
        self.sources = tuple(sources)
        self.rows_of_sources = tuple(sum(c.kept for c in counts if c.source == i) for i in range(len(sources)))
        self.rows_read = sum(count.read for count in counts)
        self._ends = np.cumsum(self.rows_of_sources)
        assert len(self) == sum(self.rows_of_sources)

    @classmethod
    def none(cls) -> Prompts:
        """Prompts of no source."""
        return cls(TableBuilder().arrays(), [], [])

    def __len__(self) -> int:
        return len(self._arrays["token_offsets"]) - 1

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        text, label, metadata = json.loads(self._cut("records", "record_offsets", place).tobytes())
        token_ids = tuple(self._cut("token_ids", "token_offsets", place).tolist())
        source = self.sources[int(np.searchsorted(self._ends, place, side="right"))]
        return Prompt(place, token_ids, text, label, metadata, source)

    def _cut(self, values: str, offsets: str, place: int) -> np.ndarray:
        first, end = self._arrays[offsets][place : place + 2]
        return self._arrays[values][first:end]
