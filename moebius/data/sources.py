"""Where rows come from: jsonl and parquet files, folders of them, saved Hugging Face datasets, and datasets by name."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moebius.data.columns import plain

if TYPE_CHECKING:
    from datasets import Dataset
    from pyarrow import RecordBatch, Table

HUB = "hf:"
ROWS_AT_A_TIME = 1000
SPLITS = {"train", "test", "validation", "valid", "val", "dev"}  # first word of a file name


class Row(NamedTuple):
    """One row and its number from 1 (of a jsonl file: the line), or a text that says why it cannot be read."""

    number: int
    values: dict[str, Any] | str


@dataclass(frozen=True)
class Part:
    """One file or table of a source.

    name: what messages call it. source: place of its source on the command line. total: rows, or lines of a file.
    digest: hash of the content. read: goes through the rows from the start.
    """

    name: str
    source: int
    total: int
    digest: str
    read: Callable[[], Iterator[Row]]


def source_names(sources: Sequence[str]) -> list[str]:
    """A short name for each source, unique among them: `train` for `data/train.jsonl`, `gsm8k` for `hf:openai/gsm8k`.

    Sources of the same name take folders in: `a-train` and `b-train`.
    """
    paths = [_name_parts(source) for source in sources]
    names = [path[-1] for path in paths]
    for depth in range(2, max(map(len, paths), default=0) + 1):
        if len(set(names)) == len(names):
            break
        names = [
            "-".join(path[-depth:]) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)
        ]
    return [f"{name}-{i}" if names.count(name) > 1 else name for i, name in enumerate(names, start=1)]


def _name_parts(source: str) -> list[str]:
    if source.startswith(HUB):
        repository, *rest = source.removeprefix(HUB).split(":")
        *owner, name = repository.split("/")
        return [*owner, "-".join([name, *filter(None, rest)])]
    path = Path(os.path.abspath(source))
    return [*path.parent.parts[1:], path.name if path.is_dir() else path.stem]


def open_source(source: str, place: int, flag: str) -> list[Part]:
    """The parts of one source, hashed; their rows are read later.

    Args:
        source: a jsonl or .parquet file; a folder of `Dataset.save_to_disk`, or of .jsonl and .parquet files; or
            `hf:owner/name[:config][:split]`, a dataset by name out of the cache of `datasets` or its hub.
        place: its place on the command line. flag: the option that named it.

    Raises:
        ValueError: naming `flag` and the source, when it cannot be opened.
    """
    try:
        if source.startswith(HUB):
            return [_hub_part(source, place)]
        path = Path(source)
        return _folder_parts(path, place) if path.is_dir() else [_file_part(path, place)]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"{flag} {source}: cannot be read: {reason}") from error


def _scan(*paths: Path) -> tuple[str, int]:
    """Hash of the files' bytes, and how many lines they have."""
    digest, lines = hashlib.blake2b(digest_size=16), 0
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                lines += block.count(b"\n")
    return digest.hexdigest(), lines


def _file_part(path: Path, place: int) -> Part:
    digest, lines = _scan(path)
    if path.suffix != ".parquet":
        return Part(str(path), place, lines, digest, lambda: _jsonl_rows(path))
    import pyarrow.parquet

    rows = pyarrow.parquet.read_metadata(path).num_rows
    return Part(str(path), place, rows, digest, lambda: _parquet_rows(path))


def _folder_parts(path: Path, place: int) -> list[Part]:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        raise ValueError(f"the folder holds splits, and one of them must be named: {', '.join(splits)}")
    if (path / "state.json").is_file():
        from datasets import load_from_disk

        return [_dataset_part(str(path), place, _one_dataset(load_from_disk(str(path))))]
    files = sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".parquet") and file.is_file())
    if not files:
        raise ValueError("the folder is no saved dataset and holds no .jsonl or .parquet file")
    splits = sorted(SPLITS & {re.split(r"[-_.]", file.name)[0] for file in files})
    if len(splits) > 1:
        raise ValueError(f"the folder holds files of several splits ({', '.join(splits)}): name the files")
    return [_file_part(file, place) for file in files]


def _hub_part(source: str, place: int) -> Part:
    """Reads `hf:owner/name[:config][:split]`; the config may be left empty."""
    # a split such as train[:100] has a colon of its own
    name, config, split, *_ = [*source.removeprefix(HUB).split(":", 2), "", ""]
    if not name:
        raise ValueError("a dataset by name is written hf:owner/name[:config][:split]")
    import datasets

    if os.environ.get("RANK", "0") != "0":
        datasets.disable_progress_bars()
    try:
        dataset = datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # of hub, network, file formats: whatever it is, the dataset is not there
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return _dataset_part(source, place, _one_dataset(dataset))


def _one_dataset(dataset: object) -> Dataset:
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        raise ValueError(f"is a {type(dataset).__name__}, wanted a Dataset of one split")
    return dataset


def _dataset_part(name: str, place: int, dataset: Dataset) -> Part:
    files, _ = _scan(*(Path(file["filename"]) for file in dataset.cache_files))
    # A split such as train[:100] lies in the same files as the whole one, and a selection beside them.
    facts = [files, name if name.startswith(HUB) else "", len(dataset), str(dataset.features)]
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
    return Part(name, place, len(dataset), digest, lambda: _dataset_rows(dataset))


def _jsonl_rows(path: Path) -> Iterator[Row]:
    """One JSON object a line; blank lines and byte-order marks are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            if line:
                yield Row(number, _parse_line(line))


def _parse_line(line: bytes) -> dict[str, Any] | str:
    """The row's object, or what is wrong with the line."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "is not UTF-8 text"
    except json.JSONDecodeError as error:
        return f"is not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return f"cannot be parsed: {error}"
    return row if isinstance(row, dict) else f"is {type(row).__name__}, wanted a JSON object"


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        yield from _numbered(file.iter_batches(batch_size=ROWS_AT_A_TIME))


def _dataset_rows(dataset: Dataset) -> Iterator[Row]:
    yield from _numbered(dataset.with_format("arrow").iter(batch_size=ROWS_AT_A_TIME))


def _numbered(batches: Iterator[Any]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for values in _plain_rows(batch):
            number += 1
            yield Row(number, values)


def _plain_rows(batch: RecordBatch | Table) -> Iterator[dict[str, Any]]:
    columns = {name: batch.column(place).to_pylist() for place, name in enumerate(batch.schema.names)}
    for field in batch.schema:
        if str(field.type) in ("float", "halffloat"):  # 0.1 in 32 bits is 0.1, not 0.10000000149011612
            short = "e" if str(field.type) == "halffloat" else "f"
            columns[field.name] = [value and _shortest(value, short) for value in columns[field.name]]
    for values in zip(*columns.values(), strict=True):
        yield {name: plain(value) for name, value in zip(columns, values, strict=True)}


def _shortest(value: float, kind: str) -> float:
    """The decimal number with the fewest digits that the short float stands for."""
    import numpy as np

    return float(str(np.dtype(kind).type(value)))
