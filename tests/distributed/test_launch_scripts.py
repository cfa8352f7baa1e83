"""The launch script of each family, run for a step on two CPU processes with a tiny model of its family."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, environment
from tiny_models import make_hf_model
from toy_tokenizer import make_bpe

pytestmark = pytest.mark.slow

SCRIPTS = {
    "qwen3_8b_gsm8k": "qwen3",
    "qwen2.5_7b_gsm8k": "qwen2",
    "llama3.1_8b_gsm8k": "llama-3.1",
    "mistral_7b_gsm8k": "mistral",
    "opt_350m_gsm8k": "opt-350m",
}
SMALLER = """
    --tensor-model-parallel-size 1 --rollout-tensor-model-parallel-size 2 --num-rollout 1 --rollout-batch-size 2
    --n-samples-per-prompt 2 --global-batch-size 4 --rollout-max-prompt-len 32 --rollout-max-response-len 16
    --max-tokens-per-gpu 64 --lr-warmup-iters 0 --vllm-kv-cache-gb 0.05 --vllm-max-num-seqs 8
"""


@pytest.mark.parametrize("script", list(SCRIPTS))
def test_it_runs(tmp_path: Path, script: str) -> None:
    family, model = SCRIPTS[script], tmp_path / "model"
    make_hf_model(family, model, tied=family.startswith("opt"), layers=2, vocab=64, kv_heads=4)
    make_bpe(model)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    for name in ("train", "test"):
        rows = [json.dumps({"question": f"{word} 12 hello", "answer": f"1 #### {word}"}) for word in ("1", "2", "12")]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"MODEL": str(model), "DATA": str(tmp_path), "GPUS": "2", "RUN": str(tmp_path / "run"), "PATH": path}
    command = ["bash", f"launch/{script}.sh", *shlex.split(SMALLER)]
    process = subprocess.Popen(
        command,
        env={**environment(), **env},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output[-6000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["switch/bytes_moved"] == 0 and lines[0]["switch/bytes_aliased"] > 0
    assert lines[0]["mismatch/logprob_abs_mean"] < 0.1, "bf16 on both sides"
    assert (tmp_path / "run" / "hf" / "config.json").is_file()
