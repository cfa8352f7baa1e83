"""Prompts and their order: reading jsonl, templating, sampling batches that resume, and request seeds.

Everything here is checked before a model is loaded, and all faulty rows of a file are reported in one error.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from jinja2 import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAULTS_SHOWN = 10
REWARD_ARGUMENTS = ("prompt", "response", "label")  # a reward function gets these by name, other columns beside them


@dataclass(frozen=True)
class Prompt:
    """One row, ready to generate from.

    index: place in the file's rows, from 0, blank lines not counted. token_ids: what engine and trainer both
    get. text: the text of these ids, templated where a template applies. metadata: the row's other columns.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    label: str
    metadata: dict[str, Any]


class Row(NamedTuple):
    """One JSON object of a file and its line number, from 1."""

    line: int
    values: dict[str, Any]


class Column(NamedTuple):
    """A wanted column: its name, the option that names it, and a check that says what is wrong ("" for nothing)."""

    name: str
    option: str
    fault: Callable[[object], str]


def text_fault(value: object) -> str:
    """The check of a column that must hold a string."""
    return "" if isinstance(value, str) else f"is {type(value).__name__}, wanted str"


def label_fault(value: object) -> str:
    """The check of a label column: a string, an integer or a finite number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return f"is {type(value).__name__}, wanted str, int or float"
    return "" if isinstance(value, str | int) or math.isfinite(value) else f"is {value}, wanted a finite number"


def normalize_label(value: str | int | float) -> str:
    """A label as text: strings as they are, whole numbers without a fraction, never in exponent form."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{Decimal(repr(value)):f}".removesuffix(".0")
    return str(value)


def _messages_fault(messages: list[Any]) -> str:
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return "holds a message that is not {'role': str, 'content': str}"
    return "" if messages else "is an empty list of messages"


def _input_fault(value: object, apply_chat_template: bool, has_template: bool) -> str:
    if isinstance(value, str):
        return ""
    if not isinstance(value, list):
        return f"is {type(value).__name__}, wanted str or a list of messages"
    if not apply_chat_template:
        lacking = "" if has_template else " and a tokenizer with a chat template (that of --hf-checkpoint has none)"
        return f"holds chat messages, which need --apply-chat-template{lacking}"
    return _messages_fault(value)


def _refuse(header: str, faults: Sequence[str]) -> None:
    """Raise one ValueError for all `faults`, if any, of which the first few are shown."""
    if faults:
        more = len(faults) - FAULTS_SHOWN
        shown = [*faults[:FAULTS_SHOWN], *([f"... and {more} more"] if more > 0 else [])]
        raise ValueError("\n  ".join([header, *shown]))


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


def _row_faults(row: dict[str, Any], columns: Sequence[Column]) -> list[str]:
    missing = [column for column in columns if column.name not in row]
    found = ", ".join(map(repr, row)) or "none"
    faults = [f"column {c.name!r} ({c.option}) is missing; found columns: {found}" for c in missing]
    present = [(column, column.fault(row[column.name])) for column in columns if column.name in row]
    return faults + [f"column {column.name!r} ({column.option}) {fault}" for column, fault in present if fault]


def read_jsonl(path: str, columns: Sequence[Column], flag: str) -> list[Row]:
    """Read one JSON object a line; blank lines and byte-order marks are skipped.

    Raises ValueError, naming `flag` and the file, when it cannot be read or holds no row, or for all faulty
    rows together. Rows are numbered as an editor numbers lines.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be read: {error.strerror}") from error
    rows: list[Row] = []
    faults: list[str] = []
    faulty = total = 0
    for number, line in enumerate(lines, start=1):
        line = line.removeprefix(b"\xef\xbb\xbf").strip()
        if not line:
            continue
        total += 1
        row = _parse_line(line)
        found = [row] if isinstance(row, str) else _row_faults(row, columns)
        faults += [f"row {number}: {fault}" for fault in found]
        faulty += bool(found)
        if not isinstance(row, str):
            rows.append(Row(number, row))
    wanted = ", ".join(repr(column.name) for column in columns)
    _refuse(f"{flag} {path}: {faulty} of {total} rows are faulty; wanted columns: {wanted}", faults)
    if not rows:
        raise ValueError(f"{flag} {path}: 0 rows")
    return rows


def encode_input(
    tokenizer: PreTrainedTokenizerBase, value: str | list[dict[str, Any]], apply_chat_template: bool
) -> tuple[tuple[int, ...], str]:
    """Token ids and text of one input, which is a text or a list of chat messages.

    With a template both come from the tokenizer's own call: rendering first and encoding the text afterwards
    would add a second begin token.
    """
    if not apply_chat_template:
        assert isinstance(value, str)
        return tuple(tokenizer(value)["input_ids"]), value
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(cast(list[int], ids)), cast(str, text)


def load_prompts(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    input_key: str,
    label_key: str,
    apply_chat_template: bool,
    max_prompt_len: int,
    flag: str = "--prompt-data",
    vocab_size: int | None = None,
) -> list[Prompt]:
    """Read, check and tokenize every row of a jsonl file.

    The input column holds a text or a list of {role, content} messages; with `apply_chat_template` a text is
    one user message. `max_prompt_len` bounds the templated ids, `vocab_size` the ids themselves. `flag` is the
    option that named the file.

    Raises ValueError for an unreadable or empty file, for faulty rows, for rows that the template refuses or that
    give no token, for rows longer than `max_prompt_len`, and for a template that the tokenizer does not have.
    """
    has_template = bool(tokenizer.chat_template)
    if apply_chat_template and not has_template:
        raise ValueError(
            "--apply-chat-template: the tokenizer of --hf-checkpoint has no chat template; "
            "leave the option out, with plain-text prompts, or add a chat_template.jinja to the folder"
        )
    columns = [
        Column(input_key, "--input-key", lambda value: _input_fault(value, apply_chat_template, has_template)),
        Column(label_key, "--label-key", label_fault),
    ]
    rows = read_jsonl(path, columns, flag)
    prompts: list[Prompt] = []
    faults: list[str] = []
    overlong: list[str] = []
    for index, (line, row) in enumerate(rows):
        try:
            ids, text = encode_input(tokenizer, row[input_key], apply_chat_template)
        except (TemplateError, TypeError) as error:
            # The tokenizer raises TypeError for text with half of a surrogate pair.
            faults.append(f"row {line}: {type(error).__name__}: {error}")
            continue
        if not ids:
            faults.append(f"row {line}: the prompt has no token")
        elif vocab_size is not None and max(ids) >= vocab_size:
            faults.append(f"row {line}: token id {max(ids)} is outside the model's vocabulary of {vocab_size}")
        if len(ids) > max_prompt_len:
            overlong.append(f"row {line}: {len(ids)} tokens")
        metadata = {key: value for key, value in row.items() if key not in {input_key, label_key, *REWARD_ARGUMENTS}}
        prompts.append(Prompt(index, ids, text, normalize_label(row[label_key]), metadata))
    _refuse(f"{flag} {path}: {len(faults)} of {len(rows)} rows cannot be tokenized", faults)
    _refuse(
        f"--rollout-max-prompt-len {max_prompt_len}: {len(overlong)} of {len(rows)} prompts of {flag} {path} "
        f"are longer ({len(rows) - len(overlong)} fit)",
        overlong,
    )
    return prompts


class PromptSampler:
    """An endless order over rows, dealt in batches, that resumes exactly where it stopped.

    Every epoch holds each row once, shuffled by (seed, epoch); a batch may run over the end of an epoch.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        """Raises ValueError when there are fewer rows than a batch needs, or the seed is negative."""
        if batch_size > num_rows:
            raise ValueError(f"--rollout-batch-size {batch_size}: more than the {num_rows} rows of --prompt-data")
        if seed < 0:
            raise ValueError(f"--rollout-seed {seed}: must be 0 or more")
        assert batch_size > 0
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.consumed = 0
        self._order = self._epoch_order(0)

    def _epoch_order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_rows))
        bits = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))
        return np.random.Generator(bits).permutation(self.num_rows).tolist()

    def next_batch(self) -> list[int]:
        """The next `batch_size` row indices."""
        batch: list[int] = []
        for _ in range(self.batch_size):
            batch.append(self._order[self.consumed % self.num_rows])
            self.consumed += 1
            if self.consumed % self.num_rows == 0:
                self._order = self._epoch_order(self.consumed // self.num_rows)
        return batch

    def state_dict(self) -> dict[str, int]:
        """All that the order depends on, and how many rows were dealt."""
        return {
            "consumed": self.consumed,
            "num_rows": self.num_rows,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the row that `state` ends with; the batch size may differ from the saved run's.

        Raises ValueError when the rows, the seed or the shuffling differ from the saved run's.
        """
        mine = self.state_dict()
        for key, option in (
            ("num_rows", "--prompt-data"),
            ("seed", "--rollout-seed"),
            ("shuffle", "--rollout-shuffle"),
        ):
            if mine[key] != state[key]:
                raise ValueError(
                    f"{option}: the checkpoint was saved with {key} {state[key]} and this run has {mine[key]}, "
                    "so the order of the prompts cannot go on"
                )
        self.consumed = state["consumed"]
        self._order = self._epoch_order(self.consumed // self.num_rows)


def replica_rows(num_rows: int, replica: int, num_replicas: int) -> list[int]:
    """The rows that a replica evaluates: over all replicas every row exactly once, shares differing by one at most."""
    assert 0 <= replica < num_replicas
    return list(range(replica, num_rows, num_replicas))


def request_seed(run_seed: int, step: int, prompt_position: int, n_samples: int, purpose: str = "rollout") -> int:
    """The sampling seed of one request, whose sample i draws with seed + i (as vLLM does for n > 1).

    Within a step the requests take consecutive ranges of `n_samples` seeds from a 62-bit hash of purpose, run
    seed and step, so no two samples of a step share a seed, on whatever rank they are drawn. Ranges rather than a
    hash of each request, because torch's CPU generator looks at the low 32 bits only, where hashes would collide.

    prompt_position: place in the global batch of the step, so that one prompt taken twice gets different samples.
    purpose: keeps evaluation apart from training.
    """
    assert prompt_position >= 0 and n_samples > 0
    digest = hashlib.blake2b(f"{purpose}/{run_seed}/{step}".encode(), digest_size=8).digest()
    base = int.from_bytes(digest, "big") >> 2
    return (base + prompt_position * n_samples) % 2**62
