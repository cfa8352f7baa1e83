"""The shape of the repository: one direction of imports, small files and functions, no machine named in the text."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("parallel_state", "hybrid_engine", "moebius")
# Each imports nothing of ours but itself.
LEAVES = (
    "parallel_state",
    "moebius.arguments",
    "moebius.advantages",
    "moebius.data",
    "moebius.losses",
    "moebius.rewards",
)
NEVER_IMPORTED = ("examples", "tests", "launch", "bench", "tools")


def held_files() -> list[Path]:
    """Files that git holds or would take in: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    names = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


PYTHON_FILES = [path for path in held_files() if path.suffix == ".py"]
SCRIPTS = {path.stem for path in PYTHON_FILES if path.parent == ROOT}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, root: Path) -> Iterator[str]:
    """Absolute names of all modules that a file imports, at the top or inside functions, relative ones resolved.

    `from a import b` counts as `a.b` where that is a module under `root`, else as `a`.
    """
    package = list(path.relative_to(root).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                target = root / Path(*base.split(".")) / alias.name
                is_module = target.with_suffix(".py").exists() or target.is_dir()
                yield f"{base}.{alias.name}" if is_module else base


def broken_rules(path: Path, root: Path) -> list[str]:
    """Imports of one file that go against the one direction, each as a sentence."""
    own = module_name(path, root)
    found = []
    for name in sorted(set(imported_modules(path, root))):
        ours = any(within(name, package) for package in PACKAGES)
        # The bare package only holds `__version__`.
        leaf = next((leaf for leaf in LEAVES if within(own, leaf)), None)
        if leaf and ours and not within(name, leaf) and name != "moebius":
            found.append(f"{own} imports {name}: {leaf} must import none of ours")
        if within(own, "hybrid_engine") and within(name, "moebius"):
            found.append(f"{own} imports {name}: hybrid_engine knows parallel_state only")
        if name.split(".")[0] in {*SCRIPTS, *NEVER_IMPORTED}:
            found.append(f"{own} imports {name}: packages import no script")
    return found


def test_imports_go_one_way() -> None:
    modules = [path for path in PYTHON_FILES if path.relative_to(ROOT).parts[0] in PACKAGES]
    assert {path.relative_to(ROOT).parts[0] for path in modules} == set(PACKAGES)
    assert [broken for path in modules for broken in broken_rules(path, ROOT)] == []


@pytest.mark.parametrize(
    ("place", "source", "broken"),
    [
        ("moebius/losses.py", "def f():\n    from . import data", True),
        ("moebius/losses.py", "from .data import rows", True),
        ("moebius/losses.py", "from moebius import __version__\nimport torch", False),
        ("moebius/rewards/math.py", "from ..rewards import workers\nfrom . import workers", False),
        ("moebius/rewards/math.py", "from .. import losses", True),
        ("moebius/train_step.py", "import hybrid_engine, parallel_state.layout, moebius.losses", False),
        ("moebius/train_step.py", "from tests.unit import test_imports", True),
        ("hybrid_engine/engine.py", "from parallel_state.layout import ParallelLayout", False),
        ("hybrid_engine/engine.py", "import moebius.log_probs as lp", True),
        ("parallel_state/groups.py", "from .layout import ParallelLayout", False),
        ("parallel_state/groups.py", "import hybrid_engine.engine", True),
        ("parallel_state/groups.py", "import setup", True),
    ],
)
def test_checker_sees_every_form_of_import(place: str, source: str, broken: bool, tmp_path: Path) -> None:
    for name in ("moebius/data.py", "moebius/losses.py", "moebius/rewards/workers.py", place):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / place).write_text(source)
    assert bool(broken_rules(tmp_path / place, tmp_path)) is broken


def test_functions_and_files_are_short() -> None:
    long = []
    for path in PYTHON_FILES:
        source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        limit = 250 if name == "train_grpo.py" else 400
        if source.count("\n") > limit:
            long.append(f"{name}: {source.count(chr(10))} lines, at most {limit}")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > 100:
                    long.append(f"{name}:{node.lineno} {node.name}: {lines} lines, at most 100")
    assert long == []


def forbidden_text() -> re.Pattern[str]:
    """Package registries (not PyTorch's own index) and paths of one machine; in pieces, as this file is read too."""
    hosts = ("pypi" + r"\.org", "python" + "hosted", "registry" + r"\.npmjs", "debian" + r"\.org")
    paths = (r"(?<![\w.$}])/(?:work|farm|root|opt)/", "/tmp" + "/venv")
    return re.compile("|".join((*hosts, *paths)))


def test_text_names_no_registry_and_no_machine() -> None:
    pattern, found, read = forbidden_text(), [], 0
    for path in held_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        read += 1
        lines = text.splitlines()
        found += [f"{path.relative_to(ROOT)}:{i}: {line}" for i, line in enumerate(lines, 1) if pattern.search(line)]
    assert read > 10
    assert found == []


def test_forbidden_text_is_recognised() -> None:
    pattern = forbidden_text()
    forbidden = ("https://" + "pypi" + ".org/simple", "cd /" + "work/main", "(/" + "root/.cache)", "/tmp" + "/venv/bin")
    for text in forbidden:
        assert pattern.search(text), text
    for text in ("https://download.pytorch.org/whl/cpu", "$HOME/work/runs", "./opt/x", "the network/root/leaf"):
        assert not pattern.search(text), text
