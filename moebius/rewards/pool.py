"""Rewards computed in worker processes that can be killed.

The workers are plain subprocesses: `multiprocessing` would run the training script's imports again, and its start
method belongs to vLLM. One sample is in flight per worker, so that a worker that is killed takes nothing else with it.
"""

import atexit
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebius.rewards.specs import RewardItem, RewardSpec

START_SECONDS = 300.0  # imports on a busy file system; not part of a sample's limit
LONGEST_WAIT_SECONDS = 3600.0  # poll takes no infinity


@dataclass(frozen=True)
class RewardResult:
    """Rewards in the order of the items; how many of them are 0.0 for a time-out or an error; wall-clock seconds.

    first_error: the traceback of the first error that came in, None without errors.
    """

    rewards: list[float]
    timeouts: int
    errors: int
    seconds: float
    first_error: str | None


class RewardPool:
    """Worker processes that score samples, each within a time limit.

    The workers start at once and load the reward while the caller goes on; they live until `close`, or until the parent
    ends. A sample (for a grouped reward: a group) that takes longer than `timeout_seconds`, counted from when a worker
    was given it, scores 0.0 and costs the worker, which is killed with its children and replaced. All methods can be
    called from any thread.
    """

    def __init__(self, reward: RewardSpec, num_workers: int, timeout_seconds: float) -> None:
        assert num_workers > 0 and timeout_seconds > 0
        self._reward = reward
        self._timeout_seconds = timeout_seconds
        self._notices: set[str] = set()
        self._lock = threading.RLock()  # a signal handler may call `close` while this thread scores
        self._closed = False
        self._workers = [_Worker(reward, timeout_seconds) for _ in range(num_workers)]
        atexit.register(self.close)

    def wait_until_ready(self) -> list[str]:
        """Returns when every worker has loaded the reward.

        Returns:
            what the reward cannot do on this system, a sentence each.

        Raises:
            RuntimeError: the user's file raised an exception or took too long, or the pool is closed.
        """
        with self._lock:
            while not all(worker.ready for worker in self._workers):
                for worker in self._news():
                    self._take(worker)
        return sorted(self._notices)

    def score(self, items: Sequence[RewardItem], group_size: int = 1) -> RewardResult:
        """Scores the items, which go to the workers in any order; for a grouped reward, `group_size` in a row together.

        Raises:
            RuntimeError: the reward is to stop on errors and took too long, raised an exception, returned something
                that is not a finite number (or a list of them), or ended its process; or it cannot be loaded; or the
                pool is closed.
        """
        started = time.monotonic()
        size = group_size if self._reward.grouped else 1
        assert len(items) % size == 0, (len(items), size)
        starts = range(0, len(items), size)
        batch = _Batch(
            deque((start, _encode(items[start : start + size])) for start in starts), [0.0] * len(items), size
        )
        with self._lock:
            self._check_open()
            # One that was killed while idle, say for memory, must not be given a sample.
            for worker in tuple(self._workers):
                self._take(worker)
            try:
                while batch.waiting or any(worker.item is not None for worker in self._workers):
                    for worker in self._workers:
                        if worker.ready and worker.item is None and batch.waiting:
                            worker.hand(*batch.waiting.popleft(), self._timeout_seconds)
                    for worker in self._news():
                        self._settle(worker, batch)
            finally:
                # After an exception, samples still in flight would answer in the place of the next batch's.
                for worker in self._workers:
                    if worker.item is not None:
                        self._replace(worker)
        return RewardResult(batch.rewards, batch.timeouts, batch.errors, time.monotonic() - started, batch.first_error)

    def close(self) -> None:
        """Kills the workers and all that they started; a batch being scored in another thread raises."""
        self._closed = True
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.kill()
        with self._lock:
            for worker in self._workers:
                worker.discard()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the reward pool is closed")

    def _news(self) -> list["_Worker"]:
        """Waits for the workers; raises where the pool is closed, before or meanwhile."""
        self._check_open()
        workers = _with_news(self._workers)
        self._check_open()
        return workers

    def _settle(self, worker: "_Worker", batch: "_Batch") -> None:
        """Books what the worker says of its sample, where it says anything yet."""
        item = worker.item
        message = self._take(worker)
        if item is None or message is None:
            return
        if "rewards" in message:
            batch.rewards[item : item + batch.size] = message["rewards"]
            return
        if self._reward.stop_on_error:
            raise RuntimeError(f"reward {self._reward.target} failed for item {item} of the batch:\n{message['error']}")
        if message.get("timeout"):
            batch.timeouts += batch.size
        else:
            batch.errors += batch.size
            batch.first_error = batch.first_error or message["error"]

    def _take(self, worker: "_Worker") -> dict[str, Any] | None:
        """What the worker says of its sample, or None; one that ended or is late is replaced."""
        message = worker.receive()
        if message is None:
            return None
        if not worker.ready:
            if "ready" not in message:
                raise RuntimeError(f"reward {self._reward.target} cannot be loaded:\n{message['error']}")
            worker.ready = True
            self._notices.update(message["ready"])
            worker.deadline = math.inf
            return None
        worker.item = None
        worker.deadline = math.inf
        if "ended" in message:
            self._replace(worker)
        return message

    def _replace(self, worker: "_Worker") -> None:
        worker.discard()
        if not self._closed:
            self._workers[self._workers.index(worker)] = _Worker(self._reward, self._timeout_seconds)


@dataclass
class _Batch:
    """The samples of one call that no worker has yet, as (index, JSON line), and what is known of the others.

    A line holds `size` samples, of which the first has the index.
    """

    waiting: deque[tuple[int, bytes]]
    rewards: list[float]
    size: int
    timeouts: int = 0
    errors: int = 0
    first_error: str | None = None


class _Worker:
    """One worker process, seen from the parent. `item` is the index of the (first) sample in flight."""

    def __init__(self, reward: RewardSpec, timeout_seconds: float) -> None:
        self.ready = False
        self.item: int | None = None
        self.deadline = time.monotonic() + START_SECONDS
        self._limit = f"not ready after {START_SECONDS:.0f} s"
        self._incoming = bytearray()
        # Not on the command line, which everybody can read: the URL may hold a password.
        self._outgoing = memoryview(json.dumps(vars(reward) | {"timeout_seconds": timeout_seconds}).encode() + b"\n")
        lifeline, self._lifeline = os.pipe()
        root = str(Path(__file__).resolve().parents[2])
        search_path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            # -P: a module in the working directory must not take the place of a library's.
            [sys.executable, "-P", "-m", "moebius.rewards.worker", str(lifeline)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": search_path},
            pass_fds=(lifeline,),
            start_new_session=True,
        )
        os.close(lifeline)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._write()

    def hand(self, item: int, line: bytes, timeout_seconds: float) -> None:
        """Gives the idle worker a sample; its time runs from here."""
        self.item = item
        self.deadline = time.monotonic() + timeout_seconds
        self._limit = f"no answer after {timeout_seconds:g} s"
        self._outgoing = memoryview(line)
        self._write()

    def receive(self) -> dict[str, Any] | None:
        """The next message, or None; an `error` with `ended` when the process is gone, or overdue (`timeout`)."""
        self._write()
        with suppress(BlockingIOError):
            received = os.read(self._stdout.fileno(), 1 << 16)
            self._incoming += received
            if not received:
                self.kill()
                status = self._process.wait()
                return {"error": f"the worker process ended with exit code {status}", "ended": True}
        line, newline, rest = self._incoming.partition(b"\n")
        if newline:
            self._incoming = rest
            return json.loads(line)
        overdue = time.monotonic() >= self.deadline
        return {"error": self._limit, "timeout": True, "ended": True} if overdue else None

    def interests(self) -> Iterable[tuple[int, int]]:
        """Descriptors and events to wait for."""
        yield self._stdout.fileno(), select.POLLIN
        if self._outgoing:
            yield self._stdin.fileno(), select.POLLOUT

    def kill(self) -> None:
        """Kills the process and all that it started, as far as they stayed in its group."""
        # Once it is reaped, its number may belong to others.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def discard(self) -> None:
        """Kills the process, waits for its end and closes its pipes."""
        self.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _write(self) -> None:
        # A broken pipe also shows as the end of the worker's output.
        with suppress(BlockingIOError, BrokenPipeError):
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._stdin.fileno(), self._outgoing) :]


def _with_news(workers: Sequence[_Worker]) -> list[_Worker]:
    """Waits until a worker can be read or written, or is overdue; returns all such."""
    poll = select.poll()
    owners: dict[int, _Worker] = {}
    for worker in workers:
        for descriptor, events in worker.interests():
            poll.register(descriptor, events)
            owners[descriptor] = worker
    seconds = min(worker.deadline for worker in workers) - time.monotonic()
    events = poll.poll(min(max(seconds, 0.0), LONGEST_WAIT_SECONDS) * 1000)
    now = time.monotonic()
    spoken = {id(owners[descriptor]) for descriptor, _ in events}
    return [worker for worker in workers if id(worker) in spoken or worker.deadline <= now]


def _encode(items: Sequence[RewardItem]) -> bytes:
    return json.dumps([vars(item) for item in items]).encode() + b"\n"
