"""What tests of rewards share: pools, items, and a look at the processes that run."""

import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from moebius.rewards import RewardItem, RewardPool, reward_specs


def item(response: str, label: str = "0", prompt: str = "", **metadata: object) -> RewardItem:
    return RewardItem(prompt, response, label, metadata)


@contextmanager
def pool(
    rm_type: str | None = None,
    custom_rm_path: str | None = None,
    num_workers: int = 1,
    timeout_seconds: float = 60.0,
    **flags: object,
) -> Iterator[RewardPool]:
    """A pool of the one reward that is named; `flags` are those of `reward_specs`."""
    [spec] = reward_specs(rm_type and [rm_type], custom_rm_path and [custom_rm_path], **flags)  # type: ignore[arg-type]
    made = RewardPool(spec, num_workers, timeout_seconds)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def custom_pool(
    folder: Path,
    source: str,
    num_workers: int = 1,
    timeout_seconds: float = 60.0,
    on_error: str = "zero",
    group_rm: bool = False,
) -> Iterator[RewardPool]:
    """A pool for the function `reward` of a file with this source."""
    path = folder / "own_reward.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    with pool(None, f"{path}:reward", num_workers, timeout_seconds, on_error=on_error, group_rm=group_rm) as made:
        yield made


@contextmanager
def math_pool(num_workers: int = 1, timeout_seconds: float = 60.0) -> Iterator[RewardPool]:
    with pool("math", None, num_workers, timeout_seconds) as made:
        yield made


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not reaped by a foreign parent does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pids: list[int]) -> bool:
    """Whether all of them end within a generous time: signals are delivered when the kernel likes."""
    end = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


def children() -> list[psutil.Process]:
    """The reward workers that this process started, and whatever they started."""
    running = [child for child in psutil.Process().children(recursive=True) if alive(child.pid)]
    services = ("resource_tracker", "wandb")  # what other tests in this process leave running
    return [child for child in running if not any(name in part for part in child.cmdline() for name in services)]
