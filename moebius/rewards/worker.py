"""A reward worker: a process of its own that scores one sample (or one group) at a time for `RewardPool`.

`python -m moebius.rewards.worker LIFELINE`, the number of a pipe that only the parent holds open. The first JSON line
of standard input is the `RewardSpec` with `timeout_seconds`. The worker says `{"ready": [notices]}` when the reward is
loaded; from then on each JSON line, a list of samples (prompt, response, label, metadata), is answered on standard
output by `{"rewards": [1.0]}` or by `{"error": "traceback"}`, with `"timeout": true` where a built-in reward kept its
own limit, until standard input ends.
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

from moebius.rewards.specs import OutOfTime

MATH_MEMORY_BYTES = 4 << 30  # powers of powers fill a machine's memory within a generous time limit
TRACEBACK_CHARACTERS = 20_000

RewardFunction = Callable[..., Any]
Samples = list[dict[str, Any]]


def main() -> None:
    """Serves one parent until its pipe closes."""
    die_with_parent(int(sys.argv[1]))
    requests, answers = take_protocol()
    spec = json.loads(requests.readline())
    try:
        function, notices = load_reward(spec)
    except BaseException:
        send(answers, {"error": short_traceback()})
        return
    send(answers, {"ready": notices})
    for line in requests:
        send(answers, answer(function, json.loads(line), spec["grouped"]))


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


def load_reward(spec: dict[str, Any]) -> tuple[RewardFunction, list[str]]:
    """The function that the spec names, and what it cannot do on this system.

    Raises:
        Exception: whatever the user's file raises when it runs; AttributeError where it lacks the function.
    """
    # Below the pool's limit, so that what a reward started is cleared away by its own worker.
    own_limit = 0.9 * spec["timeout_seconds"]
    if spec["target"] == "math":
        return load_math_reward(), []
    if spec["target"] == "code":
        from moebius.rewards.code_reward import make_code_reward

        return make_code_reward(own_limit)
    if spec["target"] == "remote_rm":
        from moebius.rewards.remote import make_remote_reward

        return make_remote_reward(spec["url"], own_limit, spec["retries"]), []
    return load_custom_reward(spec["target"]), []


def load_custom_reward(target: str) -> RewardFunction:
    """The function of `/path/file.py:function`. The file's folder is put on the import path."""
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


def answer(function: RewardFunction, samples: Samples, grouped: bool) -> dict[str, Any]:
    """The samples' rewards, or the traceback of the exception that scoring them raised."""
    try:
        return {"rewards": call(function, samples, grouped)}
    except OutOfTime:
        return {"error": short_traceback(), "timeout": True}
    except BaseException:  # SystemExit too: the user's code must not end the worker without a word
        return {"error": short_traceback()}


def call(function: RewardFunction, samples: Samples, grouped: bool) -> list[float]:
    """Calls the function with one sample, or with lists of prompts, responses, labels and metadata of a group.

    Raises:
        Exception: what the function raises.
        TypeError, ValueError: the function's result is not a finite number, or not a list of one for each sample.
    """
    if not grouped:
        (sample,) = samples
        result = function(sample["prompt"], sample["response"], sample["label"], **sample["metadata"])
        return [checked_reward(result)]
    columns = ([sample[name] for sample in samples] for name in ("prompt", "response", "label", "metadata"))
    results = function(*columns)
    if isinstance(results, str | dict) or not hasattr(results, "__iter__"):
        raise TypeError(f"--group-rm: the function returned {results!r:.200}; it must be a list of numbers")
    rewards = [checked_reward(result) for result in results]
    if len(rewards) != len(samples):
        raise ValueError(f"--group-rm: the function returned {len(rewards)} rewards for {len(samples)} responses")
    return rewards


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
