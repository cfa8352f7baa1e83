"""What is to be scored and by which rewards: the flags as `RewardSpec`s, checked without running the user's code."""

import symtable
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

BUILT_IN = ("math", "code", "remote_rm")


class OutOfTime(Exception):
    """Raised by built-in rewards that end in time by themselves: a time-out that does not cost the worker."""


@dataclass(frozen=True)
class RewardItem:
    """One sample to score. `metadata` holds the row's other columns, as JSON has them."""

    prompt: str
    response: str
    label: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardSpec:
    """One reward of a run.

    name: in metrics and messages. target: one of `BUILT_IN`, or `/path/file.py:function`. weight: its factor in the
    total. grouped: the function gets all samples of a prompt at once. stop_on_error: exceptions and time-outs end the
    run; otherwise they count 0. url, retries: of `remote_rm`; the URL may hold a password, so it is never shown.
    """

    name: str
    target: str
    weight: float = 1.0
    grouped: bool = False
    stop_on_error: bool = False
    url: str | None = field(default=None, repr=False)
    retries: int = 0


def reward_specs(
    rm_type: Sequence[str] | None,
    custom_rm_path: Sequence[str] | None,
    *,
    weights: Sequence[float] | None = None,
    group_rm: bool = False,
    url: str | None = None,
    retries: int = 3,
    on_error: str = "zero",
) -> tuple[RewardSpec, ...]:
    """The rewards that the flags name, built-in ones first. The user's files are read but not run.

    Args:
        weights: one for each reward, in their order; None for 1 each.
        group_rm: the user's functions get groups.
        on_error: `zero` or `stop`, for exceptions and time-outs of every reward.

    Raises:
        ValueError: a path or the URL means nothing.
    """
    built_in, custom = tuple(rm_type or ()), tuple(custom_rm_path or ())
    assert set(built_in) <= set(BUILT_IN), built_in
    if url is not None:
        check_url(url)
    targets = [*built_in, *map(_checked_target, custom)]
    names = _unique([target.rpartition(":")[2] for target in targets])
    return tuple(
        RewardSpec(
            name=name,
            target=target,
            weight=weight,
            grouped=group_rm and target not in BUILT_IN,
            stop_on_error=on_error == "stop",
            url=url if target == "remote_rm" else None,
            retries=retries,
        )
        for name, target, weight in zip(names, targets, weights or [1.0] * len(targets), strict=True)
    )


def check_url(url: str) -> None:
    """Raises ValueError, which does not repeat the URL, unless it is http or https with a host and a sound port."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or any(character.isspace() for character in url):
        raise ValueError("--rm-url: must be http://HOST or https://HOST, with a port or path where needed")


def _unique(names: Sequence[str]) -> list[str]:
    """Names with a number behind those that stand before: f, g, f -> f, g, f_2."""
    made: list[str] = []
    for name in names:
        candidates = (name, *(f"{name}_{number}" for number in range(2, len(names) + 2)))
        made.append(next(candidate for candidate in candidates if candidate not in made))
    return made


def _checked_target(custom_rm_path: str) -> str:
    """`/absolute/file.py:function`, when the file gives that name a value."""
    flag = f"--custom-rm-path {custom_rm_path}"
    name, _, function = custom_rm_path.rpartition(":")
    if not name.endswith(".py") or not function.isidentifier():
        raise ValueError(f"{flag}: must be FILE.py:FUNCTION")
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"{flag}: there is no file {path}")
    try:
        table = symtable.symtable(path.read_text(encoding="utf-8"), str(path), "exec")
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag}: {path} is not Python: {error}") from error
    if function not in table.get_identifiers() or not _is_bound(table.lookup(function)):
        raise ValueError(f"{flag}: {path} defines no {function}")
    return f"{path}:{function}"


def _is_bound(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported()
