"""A reward worker: a process of its own that scores one sample at a time for `RewardPool`.

`python -m moebius.rewards.worker TARGET LIFELINE`. TARGET is `math` or `/path/file.py:function`, LIFELINE the number of
a pipe that only the parent holds open. The worker says `{"ready": true}` when the reward is loaded; from then on each
JSON line of standard input (prompt, response, label, metadata) is answered by one of `{"reward": 1.0}` or
`{"error": "traceback"}` on standard output, until standard input ends.
"""

import fcntl
import importlib.util
import json
import math
import os
import resource
import select
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

MATH_MEMORY_BYTES = 4 << 30  # powers of powers fill a machine's memory within a generous time limit
TRACEBACK_CHARACTERS = 20_000

RewardFunction = Callable[..., Any]


def main() -> None:
    """Serves one parent until its pipe closes."""
    target, lifeline = sys.argv[1], int(sys.argv[2])
    die_with_parent(lifeline)
    requests, answers = take_protocol()
    try:
        function = load_reward(target)
    except BaseException:
        send(answers, {"error": short_traceback()})
        return
    send(answers, {"ready": True})
    for line in requests:
        send(answers, answer(function, json.loads(line)))


def die_with_parent(lifeline: int) -> None:
    """Has the kernel end this process group when the parent is gone, however it went.

    A thread would not do: sympy can hold the interpreter's lock for hours. Nor would PR_SET_PDEATHSIG: it acts when the
    thread that started this process ends. Nothing is ever written into the pipe, so SIGIO means its other end closed.
    """
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit("the process that asked for rewards is gone")


def take_protocol() -> tuple[TextIO, TextIO]:
    """Moves standard input and output to new descriptors, where the user's code neither reads nor prints."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def load_reward(target: str) -> RewardFunction:
    """The function that TARGET names. The file's folder is put on the import path.

    Raises:
        Exception: whatever the user's file raises when it runs; AttributeError where it lacks the function.
    """
    if target == "math":
        return load_math_reward()
    path, _, name = target.rpartition(":")
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def load_math_reward() -> RewardFunction:
    """The math reward, with sympy imported before any sample's time is measured, and its memory limited."""
    from moebius.rewards.math_reward import score_math

    def reward(prompt: str, response: str, label: str, **metadata: object) -> float:
        return score_math(response, label)

    score_math(r"\boxed{\sqrt{4}}", "2")
    resource.setrlimit(resource.RLIMIT_AS, (MATH_MEMORY_BYTES, MATH_MEMORY_BYTES))
    return reward


def answer(function: RewardFunction, request: dict[str, Any]) -> dict[str, Any]:
    """One sample's reward, or the traceback of the exception that scoring it raised."""
    try:
        result = function(request["prompt"], request["response"], request["label"], **request["metadata"])
        return {"reward": checked_reward(result)}
    except BaseException:  # SystemExit too: the user's code must not end the worker without a word
        return {"error": short_traceback()}


def checked_reward(result: object) -> float:
    """The result of the user's function as a finite float.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not finite.
    """
    if isinstance(result, str) or not hasattr(result, "__float__"):
        raise TypeError(f"the reward is {result!r:.200} of type {type(result).__name__}; it must be a number")
    reward = float(result)  # type: ignore[arg-type]
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}; it must be finite")
    return reward


def short_traceback() -> str:
    """The end of the current exception's traceback."""
    return traceback.format_exc()[-TRACEBACK_CHARACTERS:]


def send(answers: TextIO, message: dict[str, Any]) -> None:
    """Writes one message to the parent."""
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
