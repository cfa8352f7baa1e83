"""Runs a model's Python program in a process that can neither stay, nor speak, nor see much.

Each program gets a fresh interpreter (`python -I -S`: the standard library only) with its own folder, which is also its
HOME and is deleted afterwards, an environment without anything of ours, limits on time, memory, files and their size,
and what `confine.py` adds where the system allows it. It is killed as a group when its time is over, and by the kernel
when this process ends. Its standard input and output are files in memory.

What a program can still do: read the files that this user can read; use the CPU time and memory of its limits; where
`namespaces` is refused, also write this user's files and see other processes; where both are refused, start processes
that outlive it. It is a guard against what models write, not against an attacker who is after this machine: for that,
start the whole run in a virtual machine.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebius.rewards.specs import OutOfTime

LAYERS = ("filter", "namespaces")
_RUNNER = Path(__file__).with_name("runner.py")
_PROBE_SECONDS = 30.0


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit code, what it printed, and what `runner.py` reported."""

    exit_code: int
    output: bytes
    report: bytes


class Sandbox:
    """Starts programs with every layer of confinement that this system allows, which is found out once."""

    def __init__(self, wanted: Sequence[str] = LAYERS) -> None:
        self.layers = [layer for layer in wanted if self._works(layer)]

    def notices(self) -> list[str]:
        """What this system does not allow, a sentence each."""
        refused = set(LAYERS) - set(self.layers)
        texts = []
        if "filter" in refused:
            texts.append("code reward: this system does not allow system-call filters; programs can start processes")
        if "namespaces" in refused:
            texts.append(
                "code reward: this system does not allow user namespaces; programs can write this user's files and see "
                "its processes"
            )
        if refused == set(LAYERS):
            texts.append("code reward: programs can reach the network, and start processes that outlive them")
        return texts

    def run(self, request: dict[str, Any], stdin: str, seconds: float) -> Ended:
        """Runs `runner.py` with the request, standard input and a limit of wall-clock time.

        Raises:
            OutOfTime: the program was still running then; it is gone now.
        """
        return self._run(request, stdin, seconds, self.layers)

    def _works(self, layer: str) -> bool:
        try:
            return self._run({"mode": "probe", "program": ""}, "", _PROBE_SECONDS, [layer]).exit_code == 0
        except OutOfTime:
            return False

    def _run(self, request: dict[str, Any], stdin: str, seconds: float, layers: list[str]) -> Ended:
        deadline = time.monotonic() + seconds
        with (
            tempfile.TemporaryDirectory(prefix="moebius-program-", ignore_cleanup_errors=True) as folder,
            _file_in_memory(stdin) as given,
            _file_in_memory("") as output,
            _file_in_memory("") as report,
        ):
            facts = {"layers": layers, "folder": folder, "parent": os.getpid(), "cpu_seconds": int(seconds) + 1}
            with _file_in_memory(json.dumps(request | facts)) as asked:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-X", "utf8", str(_RUNNER), str(asked.fileno()), str(report.fileno())],
                    stdin=given,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(asked.fileno(), report.fileno()),
                    cwd=folder,
                    env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder},
                    start_new_session=True,
                )
            try:
                if not _ends(process.pid, deadline):
                    raise OutOfTime(f"the program was still running after {seconds:.1f} s")
            finally:
                # Before it is reaped, while its number is still its own.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return Ended(process.returncode, _content(output), _content(report))


def _file_in_memory(text: str) -> Any:
    """An open file without a name. Writes count against the program's limit on file sizes, as on a disk."""
    file = os.fdopen(os.memfd_create("program"), "w+b", buffering=0)
    file.write(text.encode(errors="replace"))
    file.seek(0)
    return file


def _content(file: Any) -> bytes:
    file.seek(0)
    return file.read()


def _ends(pid: int, deadline: float) -> bool:
    """Whether a child ends before the deadline. It is left to be reaped."""
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(max(deadline - time.monotonic(), 0.0) * 1000))
    finally:
        os.close(descriptor)
