"""One launch serves many tests: a worker script under torchrun computes figures, the tests assert on them.

Worker side: `record(figures)` on every rank; rank 0 writes one JSON file. Test side: `launch(...)` returns its content.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ROOT / "tests" / "distributed" / "workers"


def environment() -> dict[str, str]:
    """What a child process needs: the repository on the path, gloo on the loopback interface, one thread."""
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "distributed"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


def torchrun(nproc: int, command: list[str], timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script under torchrun on this host; output comes back as text, also when it fails."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), *command]
    process = subprocess.Popen(
        line,
        env={**environment(), **env},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the workers too, not torchrun alone
        output, _ = process.communicate()
        raise RuntimeError(
            f"{command[0]} on {nproc} ranks was still running after {timeout} s:\n{output[-8000:]}"
        ) from None
    return subprocess.CompletedProcess(line, process.returncode, output)


def launch(worker: str, nproc: int, out: Path, *args: str, timeout: float = 300) -> dict[str, Any]:
    """Runs workers/`worker`.py on `nproc` ranks and returns the figures that it recorded."""
    done = torchrun(nproc, [str(WORKERS / f"{worker}.py"), str(out), *args], timeout)
    if done.returncode != 0:
        raise RuntimeError(f"{worker} on {nproc} ranks exited with {done.returncode}:\n{done.stdout[-8000:]}")
    return json.loads(out.read_text())


def run_demo(run: Path, *flags: str) -> list[str]:
    """The lines that launch/demo.sh prints, with `run` as its run folder; the packages are this interpreter's."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "launch/demo.sh", *flags],
        env={**os.environ, "PATH": path, "RUN": str(run)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout.splitlines()


def record(figures: dict[str, Any], out: str) -> None:
    """Gathers every rank's figures and writes {name: [value of rank 0, value of rank 1, ...]}. Collective."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, figures)
    if dist.get_rank() == 0:
        names = sorted({name for part in parts for name in part})
        merged = {name: [part[name] for part in parts if name in part] for name in names}
        Path(out).write_text(json.dumps(merged))
