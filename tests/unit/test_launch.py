"""Launch scripts and shapes: every flag that they pass is known and fits the model that they are for."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from examples.random_model import make_model
from moebius import setup
from moebius.arguments import parse_arguments
from moebius.models.families import num_parameters, read_shape

ROOT = Path(__file__).resolve().parents[2]
# the model of each script, as examples/random_model names its shape, and GPUs to start it on
SCRIPTS = {
    "qwen3_8b_gsm8k": ("qwen3-8b", 8),
    "qwen2.5_7b_gsm8k": ("qwen2.5-7b", 8),
    "llama3.1_8b_gsm8k": ("llama3.1-8b", 8),
    "mistral_7b_gsm8k": ("mistral-7b", 8),
    "opt_350m_gsm8k": ("opt-350m", 1),
    "smollm2_arithmetic": ("llama3-8b", 1),
}


def passed_to_torchrun(script: str, folder: Path, **env: str) -> list[str]:
    """What a script hands to torchrun, seen by a torchrun that only writes it down."""
    (folder / "bin").mkdir()
    writer = folder / "bin" / "torchrun"
    writer.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(folder / "flags"))}\n')
    writer.chmod(0o755)
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    script = str(ROOT / "launch" / f"{script}.sh")
    subprocess.run(["bash", script], env={**os.environ, **env, "PATH": path}, check=True, timeout=60)
    return (folder / "flags").read_text().splitlines()


@pytest.mark.parametrize("script", list(SCRIPTS))
def test_scripts_fit_their_model(tmp_path: Path, script: str) -> None:
    """Flags, batches and tensor parallel sizes pass every check that is made before weights are read."""
    shape, gpus = SCRIPTS[script]
    model = tmp_path / "model"
    make_model.write_config(shape, model, None)
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("{}")
    env = {"MODEL": str(model), "DATA": str(tmp_path), "GPUS": str(gpus), "RUN": str(tmp_path / "run")}
    flags = passed_to_torchrun(script, tmp_path, **env)
    assert flags[:4] == ["--standalone", "--nproc-per-node", str(gpus), "train_grpo.py"]
    layout, found = setup.check(parse_arguments([*flags[4:], "--random-init"]), gpus)
    assert found == read_shape(model) and layout.world_size == gpus


def test_every_script_is_tested_here_or_run_elsewhere() -> None:
    run_elsewhere = {"demo", "smollm2_gsm8k", "random_model"}
    assert {path.stem for path in (ROOT / "launch").glob("*.sh")} == {*SCRIPTS, *run_elsewhere}


@pytest.mark.parametrize("name", sorted(make_model.SHAPES))
def test_random_shapes_have_the_size_in_their_name(tmp_path: Path, name: str) -> None:
    make_model.write_config(name, tmp_path, None)
    found = re.search(r"-([\d.]+)([bm])$", name)
    assert found is not None
    promised = float(found[1]) * {"b": 1e9, "m": 1e6}[found[2]]
    assert abs(num_parameters(read_shape(tmp_path)) / promised - 1) < 0.2
    make_model.write_config(name, tmp_path, 2)
    assert read_shape(tmp_path).num_layers == 2
