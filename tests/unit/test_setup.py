"""What set-up refuses before a process group exists or a weight is read."""

import shutil
from pathlib import Path

import pytest
from tiny_models import make_hf_model

from moebius import setup
from moebius.arguments import parse_arguments


def test_a_reference_without_weights_is_refused_at_the_start(tmp_path: Path) -> None:
    """--random-init makes the policy's weights, but not those of the reference."""
    make_hf_model("qwen3", tmp_path / "whole", layers=2, kv_heads=4)
    (tmp_path / "config_only").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "config_only")
    (tmp_path / "rows.jsonl").write_text("{}")
    flags = ["--prompt-data", str(tmp_path / "rows.jsonl"), "--rm-type", "math", "--random-init", "--use-kl-loss"]
    flags += ["--rollout-max-prompt-len", "16", "--rollout-max-response-len", "16", "--save", str(tmp_path / "run")]
    refused = parse_arguments([*flags, "--hf-checkpoint", str(tmp_path / "config_only")])
    with pytest.raises(ValueError, match=r"--ref-load .*config_only: neither model.safetensors.index.json nor"):
        setup.check(refused, 1)
    setup.check(parse_arguments([*flags, "--hf-checkpoint", str(tmp_path / "whole")]), 1)
