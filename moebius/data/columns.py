"""The columns of a row: what they must hold, labels as text, and values as plain Python."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Sequence
from datetime import date, time
from decimal import Decimal
from typing import Any, NamedTuple

REWARD_ARGUMENTS = ("prompt", "response", "label")  # a reward function gets these by name, other columns beside them


class Column(NamedTuple):
    """A wanted column: its name, the option that names it, and a check that says what is wrong ("" for nothing)."""

    name: str
    option: str
    fault: Callable[[object], str]


def plain(value: object) -> Any:
    """A value of a table as JSON would hold it.

    Bytes become base64, dates and times ISO text, decimals their digits, and what else JSON does not know `str` of it.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, date | time):
        return value.isoformat()
    return f"{value:f}" if isinstance(value, Decimal) else str(value)


def label_fault(value: object) -> str:
    """The check of a label column: a text, a finite number, a truth value, or lists and dicts of them."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}, wanted a finite number"
    if isinstance(value, list | dict):
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            return "holds a number that is not finite"
    elif not isinstance(value, str | int | float):
        return f"is {type(value).__name__}, wanted str, int, float, bool, list or dict"
    return ""


def normalize_label(value: str | int | float | list[Any] | dict[str, Any]) -> str:
    """A label as text: strings as they are (spaces too), numbers without exponent and whole ones without a fraction.

    Lists, dicts and truth values become JSON text, keys in the order given.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{Decimal(repr(float(value))):f}".removesuffix(".0")
    return json.dumps(value, ensure_ascii=False)


def input_fault(value: object, apply_chat_template: bool, has_template: bool) -> str:
    """The check of the prompt column: a text or, with a template, chat messages."""
    if isinstance(value, str):
        return ""
    if not isinstance(value, list):
        return f"is {type(value).__name__}, wanted str or a list of messages"
    if not apply_chat_template:
        template = "" if has_template else " and --chat-template, as the tokenizer of --hf-checkpoint has no template"
        return f"holds chat messages, which need --apply-chat-template{template}"
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return "holds a message that is not {'role': str, 'content': str}"
    return "" if value else "is an empty list of messages"


def row_faults(row: dict[str, Any], columns: Sequence[Column]) -> list[str]:
    """What is wrong with the wanted columns of a row."""
    missing = [column for column in columns if column.name not in row]
    found = ", ".join(map(repr, row)) or "none"
    faults = [f"column {c.name!r} ({c.option}) is missing; found columns: {found}" for c in missing]
    present = [(column, column.fault(row[column.name])) for column in columns if column.name in row]
    return faults + [f"column {column.name!r} ({column.option}) {fault}" for column, fault in present if fault]
