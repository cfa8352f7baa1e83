"""train_grpo.py as people start it: launchers, seeds, evaluation, and bad input."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness import ROOT, environment, torchrun
from tiny_models import make_hf_model

from examples.arithmetic.make_data import make_data
from examples.arithmetic.make_tokenizer import make_tokenizer

CLOCK = ("time/", "memory/", "tokens_per_second/", "switch/seconds")
FAILS = """
import os

calls = 0


def fails(prompt, response, label, **metadata):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls > 8:
        raise KeyError("on purpose")
    return len(response)
"""
KEYS = (
    *("step", "reward/mean", "policy/approx_kl", "policy/ratio_mean", "rollout/prompt_tokens_computed"),
    *("mismatch/logprob_abs_mean", "mismatch/logprob_abs_max"),
    *("switch/bytes_moved", "switch/bytes_aliased", "switch/seconds"),
    *("time/rollout", "time/update", "time/step", "memory/rollout/allocated", "memory/update/allocated"),
    *("tokens_per_second/rollout", "tokens_per_second/update"),
)
REWARD = """
def digits(prompt, response, label, **metadata):
    return sum(c in "13579" for c in response) / (1 + len(response))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a real tokenizer, prompts, ten evaluation rows and a reward file."""
    made = tmp_path_factory.mktemp("script")
    make_data(made / "data")
    make_tokenizer(made / "data" / "warmup.jsonl", made / "model")
    make_hf_model("qwen3", made / "model", tied=True, layers=2, vocab=52, heads=4, kv_heads=4)
    (made / "reward.py").write_text(REWARD)
    lines = (made / "data" / "eval.jsonl").read_text().splitlines(keepends=True)
    (made / "eval10.jsonl").write_text("".join(lines[:10]))
    return made


def flags(folder: Path, name: str, **changes: object) -> list[str]:
    """The script's command line; a change of None leaves a flag out, True makes it bare, a tuple gives many values."""
    chosen: dict[str, object] = {
        "hf_checkpoint": folder / "model",
        "prompt_data": folder / "data" / "rl.jsonl",
        "custom_rm_path": f"{folder / 'reward.py'}:digits",
        "rollout_tensor_model_parallel_size": 2,
        "num_rollout": 2,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "rollout_max_prompt_len": 16,
        "rollout_max_response_len": 8,
        "global_batch_size": 8,
        "max_tokens_per_gpu": 64,
        "lr": 1e-3,
        "seed": 0,
        "rollout_shuffle": True,
        "vllm_kv_cache_gb": 0.05,
        "vllm_max_num_seqs": 32,
        "eval_prompt_data": folder / "eval10.jsonl",
        "eval_interval": 2,
        "data_cache": folder / "cache",
        "save": folder / "runs" / name,
        **changes,
    }
    line: list[str] = []
    for key, value in chosen.items():
        if value is not None:
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            line += [f"--{key.replace('_', '-')}", *map(str, values)]
    return ["train_grpo.py", *line]


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(CLOCK)} for line in lines]


def run(folder: Path, name: str, nproc: int = 2, **changes: object) -> list[dict[str, Any]]:
    done = torchrun(nproc, flags(folder, name, **changes), timeout=240)
    assert done.returncode == 0, done.stdout[-6000:]
    return metrics(folder, name)


@pytest.fixture(scope="module")
def base(folder: Path) -> list[dict[str, Any]]:
    return run(folder, "base")


def test_run_folder_holds_what_others_rely_on(folder: Path, base: list[dict[str, Any]]) -> None:
    lines = [json.loads(line) for line in (folder / "runs" / "base" / "metrics.jsonl").read_text().splitlines()]
    for line in lines[:2]:
        assert [key for key in KEYS if key not in line] == []
        assert line["switch/bytes_moved"] == 0 and line["switch/bytes_aliased"] > 0
        assert line["mismatch/logprob_abs_max"] <= 1e-4
        assert abs(line["policy/ratio_before_update"] - 1) < 5e-5
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [0, 2]
    assert (folder / "runs" / "base" / "curves.png").stat().st_size > 10_000
    saved = json.loads((folder / "runs" / "base" / "arguments.json").read_text())
    assert saved["arguments"]["seed"] == 0 and saved["arguments"]["rollout_seed"] == 0
    assert len(list((folder / "runs" / "base" / "aliasing").glob("rank-*.json"))) == 2


def test_prompts_share_their_blocks_in_a_run(base: list[dict[str, Any]]) -> None:
    """4 prompts x 4 samples: the sum of prompt lengths (at most 16 each) and at most one block per further sample."""
    for line in base[:2]:
        assert line["rollout/prompt_tokens_computed"] <= 4 * 16 + 12 * 32


def test_two_agents_give_the_metrics_of_one(folder: Path, base: list[dict[str, Any]]) -> None:
    """`--nnodes 2 --nproc-per-node 1` twice on this host with one rendezvous, as on two nodes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = []
    for node in range(2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        launcher += ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        agents.append(
            subprocess.Popen(
                launcher + flags(folder, "agents"),
                env=environment(),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs[0][-3000:] + outputs[1][-3000:]
    assert metrics(folder, "agents") == base


def test_every_evaluation_row_is_scored_once(folder: Path, base: list[dict[str, Any]]) -> None:
    """case 5.03: 10 rows over one engine and over four; case 9.05: another seed gives other samples."""
    four = run(folder, "four", nproc=4, rollout_tensor_model_parallel_size=1, seed=1)
    assert base[0]["eval/n"] == four[0]["eval/n"] == 10
    assert abs(base[0]["eval/accuracy"] - four[0]["eval/accuracy"]) < 1e-6
    assert base[0]["reward/mean"] != four[0]["reward/mean"]
    assert all(line["policy/ratio_mean"] > 0 for line in four[:2])


def test_reference_and_padded_batches(folder: Path) -> None:
    """case 2.15: KL to a reference that equals the policy is 0 at step 0, at temperature 0.7, and grows after."""
    changes = {"use_kl_loss": True, "kl_loss_coef": 0.1, "rollout_temperature": 0.7, "global_batch_size": 16}
    padded = {"qkv_format": "bshd", "max_tokens_per_gpu": None, "micro_batch_size": 2, "save_hf": True}
    lines = run(folder, "reference", eval_prompt_data=None, eval_interval=None, **changes, **padded)
    assert lines[0]["policy/ref_kl"] < 1e-6 and lines[1]["policy/ref_kl"] > 1e-6
    assert abs(lines[0]["policy/ratio_mean"] - 1) < 1e-5 and lines[0]["policy/grad_norm"] > 0
    assert (folder / "runs" / "reference" / "hf" / "tokenizer.json").is_file()


def test_several_sources_and_a_template_file(folder: Path) -> None:
    """case 5.04: engine and trainer agree on ids that come out of a template file, which the export carries.

    Also a mixture by weight, dropped rows, accuracies of each source, and one preparation for both ranks.
    """
    template = folder / "own.jinja"
    template.write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [json.loads(line) for line in (folder / "eval10.jsonl").read_text().splitlines()]
    longer = {"prompt": "1+" * 20, "label": "0"}
    pq.write_table(pa.Table.from_pylist([*rows[:6], longer]), folder / "six.parquet")
    sources = {"prompt_data": (folder / "data" / "rl.jsonl", folder / "six.parquet"), "prompt_data_weights": (1, 3)}
    evaluation = {"eval_prompt_data": (folder / "eval10.jsonl", folder / "six.parquet"), "overlong_prompt": "drop"}
    templated = {"apply_chat_template": True, "chat_template": template, "save_hf": True}
    changes: dict[str, object] = {**sources, **evaluation, **templated, "data_cache": folder / "own_cache"}
    done = torchrun(2, flags(folder, "sources", **changes), timeout=240)
    assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.count(f"{folder}/six.parquet: 1 of 7 prompts are longer than --rollout-max-prompt-len 16") == 2
    lines = metrics(folder, "sources")
    assert len(lines) == 3
    for line in (lines[0], lines[2]):
        assert (line["eval/eval10/n"], line["eval/six/n"], line["eval/n"]) == (10, 6, 16)
        total = 10 * line["eval/eval10/accuracy"] + 6 * line["eval/six/accuracy"]
        assert line["eval/accuracy"] == pytest.approx(total / 16)
    for line in lines[:2]:
        assert line["mismatch/logprob_abs_max"] <= 1e-4 and abs(line["policy/ratio_before_update"] - 1) < 5e-5
    assert (folder / "runs" / "sources" / "hf" / "chat_template.jinja").read_text() == template.read_text()
    kept = [path for path in (folder / "own_cache").iterdir() if path.is_dir()]
    assert len(kept) == 2


BAD = {
    "typo": ({"rolout_batch_size": 4}, ("--rolout-batch-size", "did you mean --rollout-batch-size")),
    "rollout TP": ({"rollout_tensor_model_parallel_size": 3}, ("--rollout-tensor-model-parallel-size 3", "2")),
    "training TP": (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "rollout_tensor_model_parallel_size": 2},
        ("--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "world size 2"),
    ),
    "batch": ({"global_batch_size": 7}, ("--global-batch-size 7", "16")),
    "length": (
        {"rollout_max_response_len": 1000, "max_tokens_per_gpu": 2000},
        ("--rollout-max-prompt-len 16", "512 positions"),
    ),
    "column": ({"label_key": "answer"}, ("--label-key", "answer", "found columns")),
    "temperature": ({"rollout_temperature": 0.005}, ("--rollout-temperature 0.005", "at least 0.01")),
    "reference": ({"use_kl_loss": True, "ref_load": "nowhere"}, ("--ref-load nowhere",)),
    "few rows": ({"rollout_batch_size": 5000, "global_batch_size": None}, ("--rollout-batch-size 5000", "rows")),
}


@pytest.mark.parametrize("fault", list(BAD))
def test_bad_input_is_refused_on_every_rank(folder: Path, fault: str) -> None:
    """Flag, value and rule on rank 0, non-zero exit everywhere within 60 s, no metrics and no half-written file.

    Cases 1.02 (TP), 5.02 (fewer rows than a batch), 5.05 (columns), 8.08 (sizes). A rank that fails alone speaks too.
    """
    changes, words = BAD[fault]
    started = time.monotonic()
    done = torchrun(2, flags(folder, "bad", **changes), timeout=60)
    assert done.returncode != 0 and time.monotonic() - started < 60
    for word in words:
        assert word in done.stdout, done.stdout[-3000:]
    assert 'Traceback (most recent call last):\n  File "' + str(ROOT) not in done.stdout
    assert not (folder / "runs" / "bad").exists()


def test_tp_that_does_not_fit_the_heads(folder: Path) -> None:
    """case 1.02 on three ranks: 4 query heads and rollout TP 3, refused before weights are read."""
    done = torchrun(
        3,
        flags(folder, "heads", rollout_tensor_model_parallel_size=3, global_batch_size=None, rollout_batch_size=3),
        timeout=60,
    )
    assert done.returncode != 0
    for word in ("4 query heads", "4 KV heads", "--rollout-tensor-model-parallel-size 3"):
        assert word in done.stdout, done.stdout[-3000:]


def test_a_failing_rank_ends_the_job(folder: Path) -> None:
    """A reward that raises on rank 1 alone, at the second step: the whole job ends, and says where it came from."""
    (folder / "fails.py").write_text(FAILS)
    changes = {"custom_rm_path": f"{folder / 'fails.py'}:fails", "eval_prompt_data": None, "eval_interval": None}
    changes["on_reward_error"] = "stop"
    done = torchrun(2, flags(folder, "fails", **changes), timeout=120)
    assert done.returncode != 0
    assert "on purpose" in done.stdout and "fails" in done.stdout
    assert [line["step"] for line in metrics(folder, "fails")] == [0]
