"""The code reward: 1.0 when the program in a response passes every test of its label, otherwise 0.0.

**Where the program is.** The response's last fenced block that is marked `python` or `py`; else its last fenced block;
else all of it, where that is Python. Otherwise there is no program and the reward is 0. The prompt is never looked at:
a response that only continues a function's head from the prompt is no program.

**What a label holds.** JSON where it parses, else Python text:

- a JSON list of assert statements (as in MBPP), run in the program's namespace after it;
- Python text with asserts. Where it defines `check(candidate)` (as in HumanEval), the column `entry_point` must name
  the function of the program to check;
- `{"inputs": [...], "outputs": [...]}`: the program runs once for each input as standard input, must end with exit code
  0, and prints the output: lines are compared without spaces at their ends, and without empty lines at the end;
- the same with `"fn_name"`: each input is a list of arguments for this function (of the module, or of a class
  `Solution`), each output its result, compared as JSON values: a tuple is a list, and 1 equals 1.0.

Any other label is an error. All tests of one sample share its time limit; a program that needs more counts as a
time-out.

**What a program can fake.** Outputs are compared here and never enter the program's process. Asserts have to be where
the program is: they pass when a random token comes back after they ran without an exception. The token is in no file,
argument or variable of the environment. Leaving early, printing, catching exceptions, patching built-in functions and
an `__eq__` that always agrees do not help. A program that searches the frames or objects of its interpreter for token
and tests still finds them. Prefer inputs and outputs where the choice is yours.
"""

import ast
import json
import re
import secrets
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moebius.rewards.sandbox import Ended, Sandbox
from moebius.rewards.specs import OutOfTime

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_LONGEST_PROGRAM = 100_000
_COMPARISONS = {ast.Eq: "__equal__", ast.NotEq: "__differ__", ast.In: "__within__"}  # see `runner.py`


@dataclass(frozen=True)
class ProgramTests:
    """A label's tests: Python text, or pairs of inputs and outputs, for a function where `fn_name` is given."""

    code: str = ""
    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    fn_name: str | None = None


def make_code_reward(seconds: float) -> tuple[Callable[..., float], list[str]]:
    """The reward with its limit for each sample, and what this system does not allow, a sentence each."""
    sandbox = Sandbox()

    def reward(prompt: str, response: str, label: str, **metadata: Any) -> float:
        return score_code(sandbox, response, label, metadata, seconds)

    return reward, sandbox.notices()


def score_code(sandbox: Sandbox, response: str, label: str, metadata: dict[str, Any], seconds: float) -> float:
    """1.0 when the response's program passes the label's tests by the rules of this module, else 0.0.

    Raises:
        ValueError: the label holds no tests.
        OutOfTime: the program did not end in time.
    """
    tests = parse_tests(label, metadata)
    program = extract_program(response)
    if program is None:
        return 0.0
    deadline = time.monotonic() + seconds
    if tests.fn_name is not None:
        return float(_calls_pass(sandbox, program, tests, seconds))
    if tests.code:
        return float(_tests_pass(sandbox, program, tests.code, seconds))
    for given, wanted in zip(tests.inputs, tests.outputs, strict=True):
        left = deadline - time.monotonic()
        if left <= 0:
            raise OutOfTime(f"the tests of one program took more than {seconds:.1f} s")
        if not _prints(sandbox.run({"mode": "stdin", "program": program}, given, left), wanted):
            return 0.0
    return 1.0


def extract_program(response: str) -> str | None:
    """The program of a response by the rules of this module; None where it holds none."""
    blocks = [(found.group(1).lower(), found.group(2)) for found in _FENCE.finditer(response)]
    marked = [text for language, text in blocks if language in ("python", "py")]
    if blocks:
        return (marked or [text for _, text in blocks])[-1]
    return response if len(response) <= _LONGEST_PROGRAM and _parse(response) is not None else None


def parse_tests(label: str, metadata: dict[str, Any]) -> ProgramTests:
    """The tests of a label.

    Raises:
        ValueError: it holds none, by the rules of this module.
    """
    try:
        value = json.loads(label)
    except ValueError:
        value = label
    if isinstance(value, str):
        return ProgramTests(code=_checked_code(value, metadata.get("entry_point")))
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return ProgramTests(code=_checked_code("\n".join(value), None))
    if isinstance(value, dict):
        return _pairs(value)
    raise _faulty(label, "it must be a JSON list of asserts, an object with inputs and outputs, or Python text")


def _checked_code(code: str, entry_point: object) -> str:
    """Python text of tests, with its comparisons guarded and `check` called."""
    tree = _parse(code)
    if tree is None:
        raise _faulty(code, "its tests are not Python")
    if not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree)):
        raise _faulty(code, "its tests assert nothing")
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        if isinstance(entry_point, str) and entry_point.isidentifier():
            tree.body += ast.parse(f"check({entry_point})").body
        elif not any(isinstance(node, ast.Expr | ast.Assert) and _calls_check(node) for node in tree.body):
            raise _faulty(code, "its check() needs the column entry_point with the name of a function")
    return ast.unparse(ast.fix_missing_locations(_Guarded().visit(tree)))


def _calls_check(node: ast.AST) -> bool:
    calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return any(isinstance(function, ast.Name) and function.id == "check" for function in calls)


class _Guarded(ast.NodeTransformer):
    """Changes `a == b`, `a != b` and `a in b` into calls that see through an `__eq__` of the program's."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        name = _COMPARISONS.get(type(node.ops[0])) if len(node.ops) == 1 else None
        if name is None:
            return node
        return ast.Call(ast.Name(name, ast.Load()), [node.left, node.comparators[0]], [])


def _pairs(value: dict[str, Any]) -> ProgramTests:
    inputs, outputs, fn_name = value.get("inputs"), value.get("outputs"), value.get("fn_name")
    label = json.dumps(value)
    if not (isinstance(inputs, list) and isinstance(outputs, list) and inputs and len(inputs) == len(outputs)):
        raise _faulty(label, "inputs and outputs must be lists of the same length, not empty")
    if fn_name is not None and not (isinstance(fn_name, str) and fn_name.isidentifier()):
        raise _faulty(label, "fn_name must be the name of a function")
    kind, what = (str, "text") if fn_name is None else (list, "a list of arguments")
    if not all(isinstance(given, kind) for given in inputs):
        raise _faulty(label, f"each input must be {what}")
    if fn_name is None and not all(isinstance(wanted, str) for wanted in outputs):
        raise _faulty(label, "each output must be text")
    return ProgramTests(inputs=tuple(inputs), outputs=tuple(outputs), fn_name=fn_name)


def _tests_pass(sandbox: Sandbox, program: str, code: str, seconds: float) -> bool:
    token = secrets.token_hex(32)
    ended = sandbox.run({"mode": "tests", "program": program, "tests": code, "token": token}, "", seconds)
    return ended.report == token.encode()


def _calls_pass(sandbox: Sandbox, program: str, tests: ProgramTests, seconds: float) -> bool:
    request = {"mode": "call", "program": program, "fn_name": tests.fn_name, "inputs": tests.inputs}
    try:
        results = json.loads(sandbox.run(request, "", seconds).report)
    except (ValueError, RecursionError):
        return False
    return isinstance(results, list) and results == list(tests.outputs)


def _prints(ended: Ended, wanted: str) -> bool:
    return ended.exit_code == 0 and _lines(ended.output.decode(errors="replace")) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _parse(text: str) -> ast.Module | None:
    """The syntax tree of Python text; None for anything else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "\d" and the like
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _faulty(label: str, rule: str) -> ValueError:
    return ValueError(f"the label {label[:200]!r} is no test for the code reward: {rule}")
