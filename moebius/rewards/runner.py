"""Runs one program of a model's: `python -I -S runner.py REQUEST REPORT`, a process that `sandbox.py` starts.

Both are numbers of files in memory. REQUEST holds a JSON object and is closed before the program starts; what is to be
reported goes into REPORT. Nothing of the project is imported but `confine.py`, which lies beside this file. `mode`:

- `probe`: confines itself, no more.
- `stdin`: the program runs as `__main__` and reports nothing; its output is what it prints.
- `call`: `fn_name` (of the module, or of its class Solution) is called with each argument list of `inputs`; the JSON
  list of results is reported.
- `tests`: the program runs as a module, then `tests`, Python text, in the module's namespace; `token` is reported when
  they pass.
"""

import builtins
import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAMES = ("__equal__", "__differ__", "__within__")  # what comparisons in tests were changed into, see `code_reward`


def main() -> None:
    """Confines this process and does what the request says."""
    request_file, report_file = int(sys.argv[1]), int(sys.argv[2])
    with open(request_file, "rb") as file:
        request = json.load(file)
    confine(request)
    sys.argv[:] = ["program.py"]
    mode, program = request["mode"], request["program"]
    if mode == "stdin":
        run(program, "__main__")
    elif mode == "call":
        results = call_function(run(program, "program"), request["fn_name"], request["inputs"])
        report(report_file, json.dumps(results))
    elif mode == "tests":
        run_tests(program, request["tests"])
        report(report_file, request["token"])


def confine(request: dict[str, Any]) -> None:
    """Limits this process as far as the probe at start-up found possible; anything less is an error."""
    # With -I the folder of this file is on no path, and programs must not find it there.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import confine as layers

    del sys.path[0], sys.modules["confine"]
    layers.die_with(request["parent"])
    if "namespaces" in request["layers"]:
        layers.enter_namespaces(request["folder"])
    os.chdir(request["folder"])
    layers.limit_resources(request["cpu_seconds"])
    layers.drop_privileges()
    if "filter" in request["layers"]:
        layers.install_filter()


def run(program: str, name: str) -> dict[str, Any]:
    """The namespace of the program after it ran as the module `name`."""
    module = ModuleType(name)
    sys.modules["__main__"] = sys.modules[name] = module
    exec(compile(program, "program.py", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def call_function(namespace: dict[str, Any], name: str, inputs: list[list[Any]]) -> list[Any]:
    """The results of the function for each argument list."""
    solution = namespace.get("Solution")
    function = namespace[name] if solution is None else getattr(solution(), name)
    return [function(*arguments) for arguments in inputs]


def run_tests(program: str, tests: str) -> None:
    """Runs the program, then the tests on it; returns when all pass.

    The program's changes to built-in functions, its trace functions and its names for our comparisons are undone first.
    """
    known = dict(builtins.__dict__)
    code = compile(tests, "tests.py", "exec", dont_inherit=True)
    namespace = run(program, "program")
    builtins.__dict__.update(known)
    sys.settrace(None)
    sys.setprofile(None)
    namespace["__builtins__"] = builtins
    namespace.update(comparisons(namespace))
    exec(code, namespace)


def comparisons(namespace: dict[str, Any]) -> dict[str, Callable[[Any, Any], Any]]:
    """`==`, `!=` and `in` for tests, which do not hold where only one side has an `__eq__` of the program's."""

    def own(value: Any) -> bool:
        kind = type(value)
        if getattr(kind.__eq__, "__globals__", None) is namespace:
            return True
        if kind is dict:
            return any(own(part) for pair in value.items() for part in pair)
        return kind in (list, tuple, set, frozenset) and any(own(part) for part in value)

    def equal(left: Any, right: Any) -> Any:
        return own(left) == own(right) and left == right

    def differ(left: Any, right: Any) -> Any:
        return own(left) == own(right) and left != right

    def within(left: Any, right: Any) -> Any:
        return own(left) == own(right) and left in right

    return dict(zip(NAMES, (equal, differ, within), strict=True))


def report(file: int, text: str) -> None:
    """Writes the whole report."""
    sys.stdout.flush()
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)


if __name__ == "__main__":
    main()
