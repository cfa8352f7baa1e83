"""The code reward: where the program is, what labels mean, what cheats earn, and what a bad program costs."""

import json
import time

import pytest
from reward_pools import item, pool

from moebius.rewards.code_reward import extract_program, parse_tests, score_code
from moebius.rewards.sandbox import Sandbox
from moebius.rewards.specs import OutOfTime

ASSERTS = json.dumps(["assert double(2) == 4", "assert double(-1) == -2", "assert double(0) != 1"])
CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(5) in (10, 11)\n"
LINES = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})
CALLS = json.dumps({"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"]})
PAIRS = json.dumps({"fn_name": "pair", "inputs": [[1, 2.0]], "outputs": [[1, 2.0]]})
DOUBLE = "def double(x):\n    return 2 * x\n"
SUM = "print(sum(map(int, input().split())))"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox()


def reward(sandbox: Sandbox, program: str, label: str, seconds: float = 20.0, **metadata: object) -> float:
    return score_code(sandbox, f"```python\n{program}\n```", label, metadata, seconds)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("First\n```python\na = 1\n```\nno:\n```py\na = 2\n```\nRun it:\n```\n$ python a.py\n```", "a = 2\n"),
        ("```\na = 1\n```\nor\n```text\na = 2\n```", "a = 2\n"),
        ("```Python\na = 1\n```", "a = 1\n"),
        ("1. Do:\n   ```python title=x\n   a = 1\n   ```\n", "   a = 1\n   "),
        ("a = 1\nprint(a)", "a = 1\nprint(a)"),
        ("The answer is to add one.", None),
        ("```python\na = 1", None),
        ("", ""),
    ],
)
def test_where_the_program_is(response: str, program: str | None) -> None:
    assert (extract_program(response) or "").strip() == (program or "").strip()
    assert (extract_program(response) is None) == (program is None)


@pytest.mark.parametrize(
    ("program", "label", "expected"),
    [
        pytest.param(DOUBLE, ASSERTS, 1, id="asserts"),
        pytest.param("double = lambda x: x + x", ASSERTS, 1, id="lambda"),
        pytest.param("def double(x): return x * x", ASSERTS, 0, id="wrong for one"),
        pytest.param("def double(x) return 2 * x", ASSERTS, 0, id="no Python"),
        pytest.param("def twice(x): return 2 * x", ASSERTS, 0, id="another name"),
        pytest.param("import numpy_of_nobody\n" + DOUBLE, ASSERTS, 0, id="import"),
        pytest.param("print('x' * 100)\n" + DOUBLE + "if __name__ == '__main__': input()", ASSERTS, 1, id="main"),
        pytest.param("import json, math, re, collections, itertools, heapq\n" + DOUBLE, ASSERTS, 1, id="library"),
        pytest.param(DOUBLE, "from math import inf\nassert double(inf) == inf", 1, id="text"),
        pytest.param(DOUBLE, json.dumps("assert double(3) == 6"), 1, id="text as JSON"),
        pytest.param(SUM, LINES, 1, id="lines"),
        pytest.param(SUM + "\nprint()\n", LINES, 1, id="empty lines at the end"),
        pytest.param(SUM.replace("))", "), '  ')"), LINES, 0, id="syntax"),
        pytest.param("print(input().split()[0])", LINES, 0, id="other lines"),
        pytest.param("import sys\n" + SUM + "\nsys.exit(0)", LINES, 1, id="exit"),
        pytest.param(SUM + "\n1 / 0", LINES, 0, id="fails at its end"),
        pytest.param("import sys\nsys.stdout.write('3' if sys.stdin.read(1) == '1' else '7   ')", LINES, 1, id="read"),
        pytest.param("def add(a, b): return a + b", CALLS, 1, id="calls"),
        pytest.param("class Solution:\n    def add(self, a, b): return a + b", CALLS, 1, id="class"),
        pytest.param("def add(a, b): return 3", CALLS, 0, id="wrong call"),
        pytest.param("def add(a, b): return {a, b}", CALLS, 0, id="no JSON"),
        pytest.param("def pair(a, b): return (a, int(b))", PAIRS, 1, id="tuple"),
    ],
)
def test_rewards(sandbox: Sandbox, program: str, label: str, expected: float) -> None:
    assert reward(sandbox, program, label) == expected


def test_check_function(sandbox: Sandbox) -> None:
    """As in HumanEval: the column entry_point names the function."""
    assert reward(sandbox, DOUBLE, CHECK, entry_point="double") == 1.0
    assert reward(sandbox, DOUBLE.replace("2 *", "3 *"), CHECK, entry_point="double") == 0.0
    assert reward(sandbox, DOUBLE, CHECK + "check(double)") == 1.0
    assert reward(sandbox, DOUBLE + "def check(candidate): pass", CHECK, entry_point="triple") == 0.0


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("import sys\nsys.exit(0)", id="exit"),
        pytest.param("import os\nos._exit(0)", id="hard exit"),
        pytest.param("def double(x): raise SystemExit(0)", id="exit in the function"),
        pytest.param("import os\ndef double(x): os._exit(0)", id="hard exit in the function"),
        pytest.param("import atexit, os\natexit.register(os._exit, 0)\n", id="exit at exit"),
        pytest.param("print('passed'); print(1.0); print('{\"rewards\": [1.0]}')", id="prints"),
        pytest.param(
            "import os\nfor f in range(3, 64):\n try: os.write(f, b'passed')\n except OSError: pass", id="writes"
        ),
        pytest.param("import sys\nsys.excepthook = lambda *a: None\nsys.settrace(lambda *a: None)", id="hooks"),
        pytest.param(
            "class Same:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return True\n"
            "def double(x): return Same()",
            id="equal to all",
        ),
        pytest.param(
            "class Int(int):\n    def __eq__(self, other): return True\n    __ne__ = __eq__\n    __hash__ = None\n"
            "def double(x): return Int(7)",
            id="number equal to all",
        ),
        pytest.param(
            "import builtins\nbuiltins.AssertionError = ValueError\n"
            "builtins.compile = builtins.exec = lambda *a: None\nbuiltins.any = lambda *a: False\n"
            "__equal__ = __differ__ = lambda a, b: True\ndef double(x): return 7",
            id="built-in functions",
        ),
        pytest.param(
            "try:\n    assert double(2) == 4\nexcept BaseException: pass\ndef double(x): return 7", id="catches"
        ),
        pytest.param("def double(x):\n    try: return 1 / 0\n    finally: return 4", id="finally"),
        pytest.param("import sys, os\nprint(os.environ, sys.argv)\nopen('passed', 'w').write('1.0')", id="files"),
        pytest.param("import threading, os\nthreading.Thread(target=os._exit, args=(0,)).start()", id="thread"),
    ],
)
def test_cheats_earn_nothing(sandbox: Sandbox, program: str) -> None:
    assert reward(sandbox, program, ASSERTS) == 0.0


def test_equality_of_the_programs_own_classes(sandbox: Sandbox) -> None:
    """What is refused to cheats is granted where both sides are the program's, in containers too."""
    program = "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass P:\n    x: int\n"
    assert (
        reward(sandbox, program, "assert P(1) == P(1) and P(1) != P(2) and [P(1)] == [P(1)] and P(1) in {P(1)}") == 1.0
    )
    assert reward(sandbox, program, "assert P(1) == P(2)") == 0.0
    nested = "class S:\n    def __eq__(self, o): return True\ndef f(): return {'a': [(S(),)]}"
    assert reward(sandbox, nested, "assert f() == {'a': [(1,)]}") == 0.0


def test_outputs_never_enter_the_sandbox(sandbox: Sandbox) -> None:
    """A program that searches all objects of its interpreter finds inputs, but no output."""
    program = (
        "import gc\nfound = str([o for o in gc.get_objects() if isinstance(o, (dict, list))])\n"
        "def search(a, b): return [''.join((a, b)) in found, ''.join((a, b))]\n"
    )
    for hidden, expected in ((False, 1.0), (True, 0.0)):
        outputs = [[True, "search"], [hidden, "hidden"]]
        label = json.dumps({"fn_name": "search", "inputs": [["sea", "rch"], ["hid", "den"]], "outputs": outputs})
        assert reward(sandbox, program, label) == expected


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("", "assert nothing"),
        ("5", "must be a JSON list of asserts"),
        ("[]", "must be a JSON list of asserts"),
        ("[1, 2]", "must be a JSON list of asserts"),
        ("assert double(", "not Python"),
        ('["assert double("]', "not Python"),
        ("double(2)", "assert nothing"),
        (CHECK, "needs the column entry_point"),
        ('{"inputs": [], "outputs": []}', "same length, not empty"),
        ('{"inputs": ["1"], "outputs": ["1", "2"]}', "same length"),
        ('{"inputs": "1", "outputs": "1"}', "must be lists"),
        ('{"inputs": [[1]], "outputs": ["1"]}', "each input must be text"),
        ('{"inputs": ["1"], "outputs": [1]}', "each output must be text"),
        ('{"inputs": [1], "outputs": [1], "fn_name": "f"}', "each input must be a list of arguments"),
        ('{"inputs": [[1]], "outputs": [1], "fn_name": "f()"}', "the name of a function"),
    ],
)
def test_labels_that_hold_no_tests(label: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)the label .* is no test for the code reward: .*{message}"):
        parse_tests(label, {})


def test_time_is_shared_by_all_inputs(sandbox: Sandbox) -> None:
    """Each of six inputs alone would fit."""
    label = json.dumps({"inputs": [""] * 6, "outputs": [""] * 6})
    started = time.monotonic()
    with pytest.raises(OutOfTime):
        reward(sandbox, "import time\ntime.sleep(0.4)", label, seconds=1.0)
    assert time.monotonic() - started < 3.0


def test_a_batch_of_programs() -> None:
    """Bad programs cost their limit and no more, are counted, and leave the worker in place; labels are errors."""
    good = [
        item(DOUBLE, ASSERTS),
        item(f"```python\n{SUM}\n```", LINES),
        item("def add(a, b): return a + b", CALLS),
    ] * 8
    bad = [
        item("while True: pass", ASSERTS),
        item("import time\ntime.sleep(1000)", LINES),
        item("import os\nwhile True: os.fork()", ASSERTS),
        item("x = bytearray(8 << 30)", ASSERTS),
        item("No program.", ASSERTS),
        item(DOUBLE, "no tests"),
    ]
    with pool("code", num_workers=2, timeout_seconds=3.0) as rewards:
        rewards.wait_until_ready()
        result = rewards.score([*good[:12], *bad, *good[12:]])
        again = rewards.score(good)
    assert result.rewards == [1.0] * 12 + [0.0] * 6 + [1.0] * 12
    assert (result.timeouts, result.errors) == (2, 1)
    assert result.first_error is not None and "is no test for the code reward" in result.first_error
    assert result.seconds < 20
    assert (again.rewards, again.timeouts, again.errors) == ([1.0] * 24, 0, 0)
    print(f"{len(good) / again.seconds:.1f} programs/s by 2 workers")
