"""Names of files and folders that earlier runs left behind."""

from pathlib import Path


def unused_name(path: Path) -> Path:
    """Where something that stands in the way is kept: `hf.previous-1`, `metrics.previous-1.jsonl`, or the next number
    that is free. A file keeps its suffix."""
    suffix = path.suffix if path.is_file() else ""
    stem = path.name.removesuffix(suffix)
    number = 1
    while (kept := path.with_name(f"{stem}.previous-{number}{suffix}")).exists():
        number += 1
    return kept
