"""Programs that flood, hang, stay, spy and talk, in every combination of the layers that this system allows."""

import shutil
import socket
import subprocess
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from reward_pools import item, pool

from moebius.rewards import sandbox as module
from moebius.rewards.confine import FILE_BYTES, FOLDER_BYTES
from moebius.rewards.sandbox import LAYERS, Ended, Sandbox
from moebius.rewards.specs import OutOfTime

RUNNER = str(Path(module.__file__).with_name("runner.py"))
DAEMON = """
    import os, time
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
    except PermissionError:
        print("refused")
    print("end")
"""


@pytest.fixture(scope="module", params=[LAYERS, ("filter",), ("namespaces",)], ids=" ".join)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    made = Sandbox(request.param)
    if tuple(made.layers) != request.param:
        pytest.skip(f"this system allows {made.layers} only")
    return made


def test_namespaces_are_used_where_the_system_allows_them() -> None:
    """So that the other tests do not pass over them by mistake."""
    tool = shutil.which("unshare")
    if tool is None or subprocess.run([tool, "-Urnpf", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this system allows no namespaces")
    assert Sandbox().layers == list(LAYERS) and Sandbox().notices() == []


def run(sandbox: Sandbox, program: str, stdin: str = "", seconds: float = 20.0) -> Ended:
    return sandbox.run({"mode": "stdin", "program": textwrap.dedent(program)}, stdin, seconds)


def programs_left() -> list[int]:
    """Processes of programs, wherever they went; given a moment to end, as the kernel kills in its own time."""
    left: list[int] = []
    for _ in range(100):
        left = [p.pid for p in psutil.process_iter(["cmdline", "status"]) if RUNNER in (p.info["cmdline"] or ())]
        if not left:
            break
        time.sleep(0.05)
    return left


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.3)
        yield server


def connects(sandbox: Sandbox, listener: socket.socket) -> bool:
    """Whether a program's connection arrives here."""
    address = listener.getsockname()
    ended = run(sandbox, f"import socket\nsocket.create_connection({address}, timeout=5)\nprint('connected')")
    try:
        listener.accept()[0].close()
    except TimeoutError:
        assert ended.exit_code == 1
        return False
    assert ended.output == b"connected\n"
    return True


def test_no_network(sandbox: Sandbox, listener: socket.socket) -> None:
    assert not connects(sandbox, listener)


def test_without_layers_there_is_a_network_and_start_up_says_so(listener: socket.socket) -> None:
    bare = Sandbox(())
    assert connects(bare, listener)
    assert any("this system does not allow" in text for text in bare.notices())
    assert any("programs can reach the network" in text for text in bare.notices())
    assert not any("network" in text for text in Sandbox(("namespaces",)).notices())


def test_nothing_survives(sandbox: Sandbox) -> None:
    """A daemon by the book: forked twice, in a session of its own."""
    ended = run(sandbox, DAEMON)
    assert ended.output == (b"refused\nend\n" if "filter" in sandbox.layers else b"end\n")
    assert programs_left() == []


def test_nothing_survives_the_time_limit(sandbox: Sandbox) -> None:
    started = time.monotonic()
    with pytest.raises(OutOfTime, match=r"still running after 0\.6 s"):
        run(sandbox, DAEMON + "\n    while True: pass", seconds=0.6)
    assert time.monotonic() - started < 5
    assert programs_left() == []


def test_fork_bomb() -> None:
    guarded = Sandbox(("filter",))
    source = "import os\nfor _ in range(30):\n    try: os.fork()\n    except PermissionError: print('refused')"
    assert run(guarded, source).output == b"refused\n" * 30


def test_threads_work_other_programs_do_not() -> None:
    ended = run(
        Sandbox(),
        """
        import os, subprocess, threading
        numbers = []
        threads = [threading.Thread(target=numbers.append, args=(number,)) for number in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(sorted(numbers))
        for start in (lambda: subprocess.run(["true"]), lambda: os.execv("/bin/true", ["true"]), os.setsid):
            try: start()
            except PermissionError: print("refused")
        """,
    )
    assert ended == Ended(0, b"[0, 1, 2, 3, 4, 5, 6, 7]\nrefused\nrefused\nrefused\n", b"")


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("bytearray(8 << 30)", id="at once"),
        pytest.param("parts = []\nwhile True: parts.append(bytearray(1 << 28))", id="in parts"),
        pytest.param("1" + " * (1 << 40000000000)", id="in a number"),
    ],
)
def test_memory(sandbox: Sandbox, program: str) -> None:
    assert run(sandbox, program).exit_code == 1


def test_output_for_ever(sandbox: Sandbox) -> None:
    """Costs its limit at most; what is kept stays small."""
    ended = run(sandbox, "while True: print('x' * 1000)")
    assert ended.exit_code != 0 and len(ended.output) <= FILE_BYTES
    stubborn = "import os\nwhile True:\n    try: os.write(1, b'x' * 1000)\n    except OSError: pass"
    with pytest.raises(OutOfTime):
        run(sandbox, stubborn, seconds=0.6)


def test_files(sandbox: Sandbox) -> None:
    """One file, and where there are namespaces all files together, have a limit; the folder goes."""
    ended = run(
        sandbox,
        f"""
        import os
        total = 0
        for number in range({2 * FOLDER_BYTES // FILE_BYTES}):
            with open(str(number), "wb", buffering=0) as file:
                try:
                    while True: total += file.write(bytes(1 << 16))
                except OSError: pass
        print(os.path.getsize("0"), total, os.getcwd() == os.environ["HOME"] == os.environ["TMPDIR"], os.getcwd())
        """,
    )
    largest, total, own, folder = ended.output.decode().split()
    assert (int(largest), own) == (FILE_BYTES, "True")
    if "namespaces" in sandbox.layers:
        assert int(total) <= FOLDER_BYTES
    assert not Path(folder).exists()


def test_other_folders_are_read_only(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    program = f"""
        import os, shutil
        shutil.rmtree({str(tmp_path)!r}, ignore_errors=True)
        try: open({str(tmp_path / "kept")!r}, "w")
        except OSError as error: print(error.strerror)
    """
    guarded = Sandbox(("namespaces",))
    if not guarded.layers:
        pytest.skip("this system allows no namespaces")
    assert run(guarded, program).output == b"Read-only file system\n"
    assert (tmp_path / "kept").read_text() == "kept"


def test_secrets(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "do-not-tell")
    ended = run(sandbox, "import os, sys\nprint(dict(os.environ), sys.argv, sys.path)")
    assert b"HOME" in ended.output and b"do-not-tell" not in ended.output and b"moebius/rewards" not in ended.output
    spy = """
        from pathlib import Path
        for path in Path("/proc").glob("[0-9]*/environ"):
            try: print(path.read_bytes())
            except OSError: pass
    """
    if "namespaces" in sandbox.layers:  # others may see the processes of their own user
        assert run(sandbox, spy).output == b""
        assert run(sandbox, "import os\nprint(os.listdir('/proc'))").output == b"[]\n"


def test_signals_and_privileges(sandbox: Sandbox) -> None:
    """Neither its parents nor anybody else can be killed, and root is nobody special."""
    program = f"""
        import ctypes, os, signal, socket
        for target in (os.getppid(), {psutil.Process().pid}):
            try: os.kill(target or 1 << 21, signal.SIGKILL)
            except OSError: print("refused")
        print(ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", b"/", b"tmpfs", 0, None))
        os.kill(os.getpid(), 0)
    """
    assert run(sandbox, program) == Ended(0, b"refused\nrefused\n-1\n", b"")


def test_programs_end_with_their_worker() -> None:
    """The hard kill of a worker, here by `close`, leaves none of what it started."""
    label = '{"inputs": [""], "outputs": [""]}'
    with pool("code", num_workers=1, timeout_seconds=1000.0) as rewards, ThreadPoolExecutor(1) as threads:
        rewards.wait_until_ready()
        scoring = threads.submit(rewards.score, [item("while 1: pass", label)])
        end = time.monotonic() + 20
        while not any(RUNNER in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])):
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(0.3)  # past its start
        rewards.close()
        with pytest.raises(RuntimeError, match="closed"):
            scoring.result(timeout=30)
    assert programs_left() == []
