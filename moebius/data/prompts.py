"""From rows to prompts: templating and tokenizing in batches, and what happens to overlong ones."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from moebius.data.cache import Content, DataCache
from moebius.data.columns import REWARD_ARGUMENTS, Column, input_fault, label_fault, normalize_label, row_faults
from moebius.data.sources import ROWS_AT_A_TIME, Part, Row, open_source, source_names
from moebius.data.table import PartCount, Prompts, TableBuilder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAULTS_SHOWN = 10
TEMPLATE_CALL = ("conversation", "add_generation_prompt", "tokenize", "return_dict", "chat_template")

T = TypeVar("T")
Input = str | list[dict[str, Any]]


@dataclass(frozen=True)
class PromptOptions:
    """How rows become prompts; each field is the flag of its name.

    max_prompt_len: most ids of a prompt, templated (--rollout-max-prompt-len). overlong_prompt: `refuse` longer ones,
    `drop` their rows, or `left-cut` them to their last ids; their text is then what these ids decode to.
    template_kwargs: variables for the template (--apply-chat-template-kwargs). vocab_size: bound of the ids.
    """

    input_key: str
    label_key: str
    max_prompt_len: int
    apply_chat_template: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    overlong_prompt: str = "refuse"
    vocab_size: int | None = None


class Progress(Protocol):
    """Shows how far an iteration is. `alone`: this rank works for all ranks of its node."""

    def __call__(self, iterable: Iterable[T], total: int | None, description: str, alone: bool) -> Iterable[T]: ...


def no_progress(iterable: Iterable[T], total: int | None, description: str, alone: bool) -> Iterable[T]:
    """Shows nothing."""
    return iterable


@dataclass
class _Report:
    """What was found in one part: counts of rows, and the lines that say what is wrong with them."""

    name: str
    source: int
    read: int = 0
    faulty: int = 0
    overlong: int = 0
    kept: int = 0
    fault_lines: list[str] = field(default_factory=list)
    overlong_lines: list[str] = field(default_factory=list)

    def fault(self, row: Row, *found: str) -> None:
        self.faulty += 1
        self.fault_lines += [f"row {row.number}: {fault}" for fault in found]


def load_prompts(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    flag: str = "--prompt-data",
    cache: DataCache | None = None,
    progress: Progress = no_progress,
    batch_size: int | None = None,
) -> Prompts:
    """Read, check, template and tokenize every row of every source, or take the same from the cache.

    The input column holds a text or a list of {role, content} messages; with a template a text is one user message.
    `flag` is the option that named the sources. How many overlong rows were dropped or cut is printed on rank 0.
    `batch_size` (--rollout-batch-size) is what messages compare the rows with; a PromptSampler checks it.

    Raises ValueError for sources that cannot be read or have no row, for all faulty rows together (also those that
    the template refuses or that give no token), for rows longer than `max_prompt_len` if they are to be refused, for
    a source whose rows are all dropped, and for a template that the tokenizer does not have.
    """
    _check_template(tokenizer, options)
    names = source_names(sources)
    parts = [part for place, source in enumerate(sources) for part in open_source(source, place, flag)]

    def build(alone: bool) -> Content:
        return _build(parts, tokenizer, options, flag, progress, alone)

    if cache is None:
        arrays, counts = build(False)
    else:
        facts = [(part.source, part.digest) for part in parts]
        arrays, counts = cache.get(cache.key(facts, asdict(options), _tokenizer_facts(tokenizer)), build)
    _tell_overlong([part.name for part in parts], counts, options, flag)
    prompts = Prompts(arrays, counts, names)
    for place, rows in enumerate(prompts.rows_of_sources):
        if not rows:
            read = sum(count.read for count in counts if count.source == place)
            wanted = "" if batch_size is None else f" for --rollout-batch-size {batch_size}"
            raise ValueError(
                f"--overlong-prompt drop: all {read} prompts of {flag} {sources[place]} are longer than "
                f"--rollout-max-prompt-len {options.max_prompt_len}: 0 are left{wanted}"
            )
    return prompts


def _check_template(tokenizer: PreTrainedTokenizerBase, options: PromptOptions) -> None:
    if not options.apply_chat_template:
        return
    if not tokenizer.chat_template:
        raise ValueError(
            "--apply-chat-template: the tokenizer of --hf-checkpoint has no chat template; give one with "
            "--chat-template FILE.jinja, or leave the option out, with plain-text prompts"
        )
    for name in TEMPLATE_CALL:
        if name in options.template_kwargs:
            raise ValueError(f"--apply-chat-template-kwargs: {name} is not for the template: it is set already")


def _tokenizer_facts(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """What prompts depend on beside options and the tokenizer's files."""
    versions = [importlib.metadata.version(name) for name in ("transformers", "tokenizers", "sentencepiece")]
    template = tokenizer.chat_template
    today = date.today().isoformat() if "strftime_now" in str(template) else ""  # the template writes the date
    return [versions, type(tokenizer).__name__, template, today]


def encode_inputs(
    tokenizer: PreTrainedTokenizerBase, inputs: Sequence[Input], options: PromptOptions
) -> list[tuple[list[int], str]]:
    """Token ids and text of inputs, each a text or a list of chat messages.

    With a template both come from the tokenizer's own call: rendering first and encoding the text afterwards would
    add a second begin token. Without one the tokenizer adds its special tokens, but a begin token only where the text
    has none, and no end token: the response goes on from here. A fast tokenizer encodes in threads.
    """
    if not options.apply_chat_template:
        texts = cast(list[str], list(inputs))
        encoded = cast(list[list[int]], tokenizer(texts, return_attention_mask=False)["input_ids"])
        return [(_raw_ids(tokenizer, ids, text), text) for ids, text in zip(encoded, texts, strict=True)]
    chats = [_messages(value) for value in inputs]
    ids = tokenizer.apply_chat_template(
        chats, tokenize=True, add_generation_prompt=True, return_dict=False, **options.template_kwargs
    )
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True, **options.template_kwargs)
    return list(zip(cast(list[list[int]], ids), cast(list[str], texts), strict=True))


def _messages(value: Input) -> list[dict[str, Any]]:
    """A text as one user message. Tables fill what a message lacks with None, which templates would take for set."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [{key: held for key, held in message.items() if held is not None} for message in value]


def _raw_ids(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str) -> list[int]:
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    while begin is not None and ids[:2] == [begin, begin]:
        ids = ids[1:]
    appended = end is not None and ids[-1:] == [end] and not text.endswith(cast(str, tokenizer.eos_token))
    return ids[:-1] if appended and not (end == begin and len(ids) == 1) else ids


def _encode_rows(
    tokenizer: PreTrainedTokenizerBase, inputs: Sequence[Input], options: PromptOptions
) -> list[tuple[list[int], str] | str]:
    """Ids and text of each input, or what the tokenizer or the template said against it."""
    if not inputs:
        return []
    try:
        return list(encode_inputs(tokenizer, inputs, options))
    except Exception:  # a template is a program and can raise anything; which row it was is found next
        return [_encode_one(tokenizer, value, options) for value in inputs]


def _encode_one(
    tokenizer: PreTrainedTokenizerBase, value: Input, options: PromptOptions
) -> tuple[list[int], str] | str:
    try:
        return encode_inputs(tokenizer, [value], options)[0]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _build(
    parts: Sequence[Part],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    flag: str,
    progress: Progress,
    alone: bool,
) -> Content:
    has_template = bool(tokenizer.chat_template)
    columns = [
        Column(
            options.input_key,
            "--input-key",
            lambda value: input_fault(value, options.apply_chat_template, has_template),
        ),
        Column(options.label_key, "--label-key", label_fault),
    ]
    table, reports = TableBuilder(), []
    for part in parts:
        report = _Report(part.name, part.source)
        rows = iter(progress(part.read(), part.total, f"preparing {Path(part.name).name}", alone))
        while chunk := list(islice(rows, ROWS_AT_A_TIME)):
            _take(chunk, columns, tokenizer, options, table, report)
        reports.append(report)
    _refuse(reports, columns, options, flag)
    return table.arrays(), [PartCount(r.source, r.read, r.overlong, r.kept) for r in reports]


def _take(
    chunk: Sequence[Row],
    columns: Sequence[Column],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    table: TableBuilder,
    report: _Report,
) -> None:
    """Checks and encodes some rows; good ones go into the table, faults and counts into the report."""
    report.read += len(chunk)
    found = [[row.values] if isinstance(row.values, str) else row_faults(row.values, columns) for row in chunk]
    inputs = [
        row.values[options.input_key]
        for row, faults in zip(chunk, found, strict=True)
        if not faults and isinstance(row.values, dict)
    ]
    encoded = iter(_encode_rows(tokenizer, inputs, options))
    taken = {*REWARD_ARGUMENTS, options.input_key, options.label_key}
    for row, faults in zip(chunk, found, strict=True):
        if faults:
            report.fault(row, *faults)
            continue
        made = next(encoded)
        fault = made if isinstance(made, str) else _ids_fault(made[0], options)
        if fault or isinstance(made, str):
            report.fault(row, fault)
            continue
        ids, text = made
        if len(ids) > options.max_prompt_len:
            report.overlong += 1
            if options.overlong_prompt == "refuse":
                report.overlong_lines.append(f"row {row.number}: {len(ids)} tokens")
            if options.overlong_prompt != "left-cut":
                continue
            ids = ids[-options.max_prompt_len :]
            text = cast(str, tokenizer.decode(ids))
        assert isinstance(row.values, dict)
        metadata = {key: value for key, value in row.values.items() if key not in taken}
        table.add(ids, text, normalize_label(row.values[options.label_key]), metadata)
        report.kept += 1


def _ids_fault(ids: Sequence[int], options: PromptOptions) -> str:
    if not ids:
        return "the prompt has no token"
    if options.vocab_size is not None and max(ids) >= options.vocab_size:
        return f"token id {max(ids)} is outside the model's vocabulary of {options.vocab_size}"
    return ""


def _refuse(reports: Sequence[_Report], columns: Sequence[Column], options: PromptOptions, flag: str) -> None:
    """Raise one ValueError for everything that is wrong in any part, if anything is."""
    wanted = ", ".join(repr(column.name) for column in columns)
    blocks: list[str] = []
    for report in reports:
        if not report.read:
            blocks.append(f"{flag} {report.name}: 0 rows")
        if report.faulty:
            header = f"{flag} {report.name}: {report.faulty} of {report.read} rows are faulty; wanted columns: {wanted}"
            blocks.append(_block(header, report.fault_lines))
        if report.overlong and options.overlong_prompt == "refuse":
            header = (
                f"--rollout-max-prompt-len {options.max_prompt_len}: {report.overlong} of {report.read} prompts of "
                f"{flag} {report.name} are longer ({report.kept} fit); --overlong-prompt drop or left-cut takes them"
            )
            blocks.append(_block(header, report.overlong_lines))
    if blocks:
        raise ValueError("\n".join(blocks))


def _block(header: str, lines: Sequence[str]) -> str:
    more = len(lines) - FAULTS_SHOWN
    shown = [*lines[:FAULTS_SHOWN], *([f"... and {more} more"] if more > 0 else [])]
    return "\n  ".join([header, *shown])


def _tell_overlong(names: Sequence[str], counts: Sequence[PartCount], options: PromptOptions, flag: str) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    done = {"drop": "dropped", "left-cut": "cut from the left"}
    for name, count in zip(names, counts, strict=True):
        if count.overlong:
            print(
                f"{flag} {name}: {count.overlong} of {count.read} prompts are longer than --rollout-max-prompt-len "
                f"{options.max_prompt_len}: {done[options.overlong_prompt]}",
                flush=True,
            )
