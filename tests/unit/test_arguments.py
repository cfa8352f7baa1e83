"""Flags: parsing, the resolved set, and every rule that `validate` keeps."""

import dataclasses
import json
from pathlib import Path

import pytest

from moebius.arguments import Arguments, parse_arguments, save_arguments, validate
from moebius.arguments.flags import GROUPS

REQUIRED = ["--hf-checkpoint", "model", "--prompt-data", "train.jsonl"]


def flags(text: str) -> list[str]:
    return text.split()


def run_folder(tmp_path: Path) -> list[str]:
    """Flags of a run that passes every rule, in a fresh folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text("{}\n")
    return [
        *("--hf-checkpoint", str(tmp_path / "model"), "--prompt-data", str(tmp_path / "train.jsonl")),
        *("--rm-type", "math", "--save", str(tmp_path / "runs" / "a")),
    ]


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a command line that ends with code 2."""
    with pytest.raises(SystemExit) as stop:
        parse_arguments(argv)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_resolved_defaults() -> None:
    args = parse_arguments(REQUIRED)
    assert (args.global_batch_size, args.micro_batch_size, args.max_tokens_per_gpu) == (256, 1, None)
    assert (args.ref_load, args.rollout_seed, args.lr_decay_iters) == ("model", 1234, 100)
    assert (args.eps_clip_high, args.rollout_tensor_model_parallel_size) == (0.2, 1)
    assert (args.eval_max_response_len, args.tensorboard_dir) == (None, "runs/grpo/tensorboard")
    assert (args.prompt_data, args.prompt_data_weights, args.overlong_prompt) == (("train.jsonl",), None, "refuse")


def test_the_data_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "x")
    assert parse_arguments(REQUIRED).data_cache == "x/moebius/data"
    assert parse_arguments([*REQUIRED, "--data-cache", "c"]).data_cache == "c"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert parse_arguments(REQUIRED).data_cache == "/h/.cache/moebius/data"


def test_resolve_follows_the_flags_it_depends_on() -> None:
    sizes = "--tensor-model-parallel-size 2 --rollout-max-response-len 7 --global-batch-size 64 --num-rollout 3"
    others = "--eps-clip 0.1 --eval-prompt-data e --max-tokens-per-gpu 2048 --save x"
    args = parse_arguments([*REQUIRED, *flags(sizes), *flags(others)])
    assert (args.rollout_tensor_model_parallel_size, args.eps_clip_high, args.eval_max_response_len) == (2, 0.1, 7)
    assert (args.micro_batch_size, args.lr_decay_iters, args.tensorboard_dir) == (None, 12, "x/tensorboard")


def test_resolve_keeps_what_is_set() -> None:
    values = {
        "ref_load": "r",
        "rollout_tensor_model_parallel_size": 4,
        "global_batch_size": 128,
        "micro_batch_size": 2,
        "lr_decay_iters": 5,
        "rollout_seed": 9,
        "eps_clip_high": 0.28,
        "eval_max_response_len": 3,
        "tensorboard_dir": "t",
    }
    argv = [part for name, value in values.items() for part in ("--" + name.replace("_", "-"), str(value))]
    args = parse_arguments(REQUIRED + argv)
    assert {name: getattr(args, name) for name in values} == values


def test_seed_zero_is_a_seed() -> None:
    """case 9.05: 0 is kept, for the run and for the rollout."""
    args = parse_arguments([*REQUIRED, "--seed", "0"])
    assert (args.seed, args.rollout_seed) == (0, 0)
    args = parse_arguments([*REQUIRED, "--seed", "5", "--rollout-seed", "0"])
    assert (args.seed, args.rollout_seed) == (5, 0)


def test_values_have_the_types_of_their_fields() -> None:
    argv = flags("--bf16 --lr 2e-5 --rollout-top-k -1 --rollout-stop-token-ids 2 151 --rm-timeout 3")
    args = parse_arguments(REQUIRED + argv)
    assert (args.bf16, args.lr, args.rollout_top_k, args.rollout_stop_token_ids) == (True, 2e-5, -1, (2, 151))
    assert isinstance(args.rm_timeout, float)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--rolout-batch-size 8", "unknown flag --rolout-batch-size; did you mean --rollout-batch-size?"),
        ("--hf-checkpont m", "unknown flag --hf-checkpont; did you mean --hf-checkpoint?"),
        ("--eps-clip-hi=0.3", "unknown flag --eps-clip-hi; did you mean --eps-clip-high?"),
        ("--zzz", "unknown flag --zzz "),
        ("8", "unexpected argument '8'"),
    ],
)
def test_unknown_flags_name_the_nearest(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(flags(argv), capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--lr abc", "--lr 'abc': it must be a number"),
        ("--num-rollout 1.5", "--num-rollout '1.5': it must be a whole number"),
        ("--rollout-stop-token-ids 1 x", "--rollout-stop-token-ids 'x': it must be a whole number"),
        ("--optimizer lion", "--optimizer 'lion': it must be one of adam, sgd"),
        ("--lr nan", "--lr nan: it must be finite"),
        ("--lr -1", "--lr -1.0: it must be at least 0"),
        ("--rollout-batch-size 0", "--rollout-batch-size 0: it must be at least 1"),
        ("--global-batch-size 0", "--global-batch-size 0: it must be at least 1"),
        ("--micro-batch-size -2", "--micro-batch-size -2: it must be at least 1"),
        ("--rollout-temperature 0", "--rollout-temperature 0.0: it must be at least 0.01"),
        ("--rollout-top-p 1.2", "--rollout-top-p 1.2: it must lie in (0, 1]"),
        ("--rollout-top-k 0", "--rollout-top-k 0: it must be at least 1, or -1"),
        ("--eps-clip 1", "--eps-clip 1.0: it must lie in (0, 1)"),
        ("--eps-clip-high 0", "--eps-clip-high 0.0: it must be above 0"),
        ("--adam-beta2 1", "--adam-beta2 1.0: it must lie in [0, 1)"),
        ("--kl-loss-coef -0.1", "--kl-loss-coef -0.1: it must be at least 0"),
        ("--recompute-num-layers 0", "--recompute-num-layers 0: it must be at least 1"),
        ("--rollout-stop-token-ids 3 -1", "--rollout-stop-token-ids -1: it must be at least 0"),
        ("--rm-type math maths", "--rm-type 'maths': it must be one of math, code, remote_rm"),
        ("--rm-weights 1 nan", "--rm-weights nan: it must be finite"),
        ("--rm-workers 0", "--rm-workers 0: it must be at least 1"),
        ("--rm-timeout nan", "--rm-timeout nan: it must be finite"),
        ("--on-reward-error skip", "--on-reward-error 'skip': it must be one of zero, stop"),
        ("--seed -1", "--seed -1: it must lie in [0, 2^32)"),
        ("--lr", "--lr expected one argument"),
    ],
)
def test_bad_values_name_flag_value_and_rule(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(REQUIRED + flags(argv), capsys)


def test_required_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--hf-checkpoint is required" in refused(REQUIRED[2:], capsys)
    assert "--prompt-data is required" in refused(REQUIRED[:2], capsys)


@pytest.mark.parametrize("argv", ["--rolout-batch-size 8", "--lr abc", "--rollout-batch-size 0", ""])
def test_other_ranks_exit_without_a_word(
    argv: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert refused(flags(argv), capsys) == ""
    with pytest.raises(SystemExit) as stop:
        parse_arguments(["--help"])
    assert (stop.value.code, capsys.readouterr().out) == (0, "")


def test_flags_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag --optim" in refused([*REQUIRED, "--optim", "sgd"], capsys)


def test_help_is_grouped_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_arguments(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    places = [text.index(f"\n{group}:\n") for group in GROUPS]
    assert places == sorted(places)
    for field in dataclasses.fields(Arguments):
        assert f"  --{field.name.replace('_', '-')}" in text
    assert places[2] < text.index("--max-tokens-per-gpu N") < places[3]
    assert "--lr-decay-style {constant,linear,cosine}" in text


def test_saved_arguments_are_the_resolved_set(tmp_path: Path) -> None:
    args = parse_arguments([*REQUIRED, "--rollout-stop-token-ids", "2"])
    path = save_arguments(args, tmp_path / "run")
    text = path.read_text()
    saved = json.loads(text)
    assert path == tmp_path / "run" / "arguments.json"
    assert saved["arguments"] == dataclasses.asdict(args) | {
        "rollout_stop_token_ids": [2],
        "prompt_data": ["train.jsonl"],
    }
    assert list(saved["arguments"]) == sorted(saved["arguments"])
    assert set(saved["versions"]) == {"python", "torch", "megatron-core", "vllm", "transformers"}
    assert all(saved["versions"].values())
    assert [entry.name for entry in path.parent.iterdir()] == ["arguments.json"]


def test_a_valid_run_passes(tmp_path: Path) -> None:
    """case 8.08: batch 8, update 4, micro-batch 2 on two data-parallel ranks runs."""
    base = run_folder(tmp_path)
    validate(parse_arguments(base), world_size=1)
    sizes = "--rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 4 --micro-batch-size 2"
    validate(parse_arguments(base + flags(sizes)), world_size=2)
    validate(
        parse_arguments([*base, "--eval-prompt-data", str(tmp_path / "eval.jsonl"), "--eval-interval", "5"]),
        world_size=2,
    )
    several = ["--prompt-data", "hf:a/b:c", str(tmp_path), "--prompt-data-weights", "1", "0.5"]
    template = ["--apply-chat-template", "--chat-template", str(tmp_path / "eval.jsonl")]
    variables = ["--apply-chat-template-kwargs", '{"enable_thinking": false}']
    validate(parse_arguments([*base, *several, *template, *variables]), world_size=1)
    packed = "--max-tokens-per-gpu 1024 --use-kl-loss --kl-loss-coef 0.1 --recompute-granularity full"
    validate(parse_arguments([*base, *flags(packed), "--recompute-num-layers", "2"]), world_size=2)


SMALL = "--rollout-batch-size 4 --n-samples-per-prompt 2 "


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        pytest.param(
            SMALL + "--global-batch-size 3",
            "--rollout-batch-size 4, --n-samples-per-prompt 2: a rollout of 8 samples must be a multiple of "
            "--global-batch-size 3",
            id="case 8.08 batch 8 update 3",
        ),
        pytest.param(
            SMALL + "--global-batch-size 1",
            "--global-batch-size 1 .* --micro-batch-size 1 x 2 data-parallel ranks = 2",
            id="case 8.08 update 1",
        ),
        pytest.param(
            SMALL + "--global-batch-size 4 --micro-batch-size 8",
            "--global-batch-size 4 .* --micro-batch-size 8 x 2 data-parallel ranks = 16",
            id="case 8.08 micro larger than update",
        ),
        pytest.param(
            "--rollout-batch-size 5 --n-samples-per-prompt 3",
            "--global-batch-size 15 .* 2 data-parallel ranks",
            id="case 8.08 batch 5 n 3",
        ),
        pytest.param(
            SMALL + "--global-batch-size 1 --max-tokens-per-gpu 1024",
            "--global-batch-size 1 .* multiple of 2 data-parallel ranks",
            id="case 8.08 update 1, packed",
        ),
        pytest.param(
            "--n-samples-per-prompt 1",
            "--n-samples-per-prompt 1, --advantage-estimator grpo: it must be at least 2",
            id="case 3.04 n 1",
        ),
        ("--micro-batch-size 1 --max-tokens-per-gpu 4096", "--micro-batch-size 1, --max-tokens-per-gpu 4096: only one"),
        ("--max-tokens-per-gpu 1023", "--max-tokens-per-gpu 1023 .* together 1024"),
        ("--lr 1e-6 --min-lr 1e-5", "--min-lr 1e-05, --lr 1e-06: "),
        ("--lr-warmup-iters 100", "--lr-warmup-iters 100, --lr-decay-iters 100 .* must end before"),
        ("--recompute-num-layers 2", "--recompute-num-layers 2: .* --recompute-granularity full, which is not set"),
        ("--recompute-granularity selective --recompute-method block", "--recompute-method block.* which is selective"),
        ("--overlap-param-gather", "--overlap-param-gather needs --overlap-grad-reduce"),
        ("--rollout-top-p 0.9", "--rollout-top-p 0.9, --rollout-top-k -1: .* all tokens"),
        ("--rollout-top-k 20", "--rollout-top-p 1.0, --rollout-top-k 20: .* all tokens"),
        ("--kl-loss-coef 0.1", "--kl-loss-coef 0.1 has no effect without --use-kl-loss"),
        ("--ref-load other", "--ref-load other has no effect without --use-kl-loss"),
        ("--use-kl-loss --ref-load other", "--ref-load other: .* no config.json"),
        ("--rm-type math math", "--rm-type math math: each reward must be named once"),
        (
            "--rm-weights 1 2",
            "--rm-weights 1.0 2.0: must be as many as the rewards of --rm-type math, --custom-rm-path",
        ),
        ("--rm-type code remote_rm", "--rm-type code remote_rm: remote_rm needs --rm-url"),
        ("--rm-url http://u:secret@h", "--rm-type math: remote_rm needs --rm-url, and nothing else does$"),
        ("--group-rm", "--group-rm needs --custom-rm-path"),
        (
            "--group-rm --custom-rm-path r.py:f --rm-type math remote_rm --rm-url http://h",
            "--group-rm, --rm-type math remote_rm: remote_rm sends one response a request",
        ),
        ("--eval-interval 5", "--eval-interval 5 needs --eval-prompt-data"),
        ("--eval-temperature 1", "--eval-temperature 1.0 needs --eval-prompt-data"),
        ("--eval-max-response-len 9", "--eval-max-response-len 9 needs --eval-prompt-data"),
        ("--eval-prompt-data e.jsonl", "--eval-prompt-data e.jsonl needs --eval-interval"),
        ("--eval-prompt-data hf:a/b e.jsonl --eval-interval 5", "--eval-prompt-data e.jsonl: no such file or folder"),
        ("--prompt-data none.jsonl", "--prompt-data none.jsonl: no such file or folder"),
        ("--prompt-data hf:a/b hf:a/c hf:a/b", "--prompt-data hf:a/b: a source must be named only once"),
        ("--prompt-data-weights 1 2", r"--prompt-data-weights 1.0 2.0: must be as many as the sources of .* \(1\)"),
        ("--chat-template c.jinja", "--chat-template c.jinja needs --apply-chat-template"),
        ("--apply-chat-template --chat-template c.jinja", "--chat-template c.jinja: no such file"),
        ("--apply-chat-template-kwargs {}", "--apply-chat-template-kwargs {} needs --apply-chat-template"),
        ("--apply-chat-template --apply-chat-template-kwargs [1]", r"kwargs \[1\]: it must be a JSON object"),
        ("--apply-chat-template --apply-chat-template-kwargs {", "kwargs {: it must be a JSON object"),
        ("--hf-checkpoint org/name", "--hf-checkpoint org/name: it must be a Hugging Face model folder"),
    ],
)
def test_rules_between_flags(argv: str, words: str, tmp_path: Path) -> None:
    args = parse_arguments(run_folder(tmp_path) + flags(argv))
    with pytest.raises(ValueError, match=words):
        validate(args, world_size=2)


def test_a_reward_is_needed(tmp_path: Path) -> None:
    base = run_folder(tmp_path)
    at = base.index("--rm-type")
    with pytest.raises(ValueError, match="--rm-type None, --custom-rm-path None: at least one"):
        validate(parse_arguments(base[:at] + base[at + 2 :]), world_size=1)


def test_data_parallel_size_leaves_out_model_parallel_ranks(tmp_path: Path) -> None:
    args = parse_arguments([*run_folder(tmp_path), *flags(SMALL), "--global-batch-size", "2"])
    validate(dataclasses.replace(args, tensor_model_parallel_size=2, pipeline_model_parallel_size=2), world_size=8)
    with pytest.raises(ValueError, match=r"--global-batch-size 2 .* 8 data-parallel ranks"):
        validate(args, world_size=8)


def test_save_folder_must_be_creatable(tmp_path: Path) -> None:
    base = run_folder(tmp_path)
    (tmp_path / "file").write_text("")
    for save in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=f"--save {save} cannot be made"):
            validate(parse_arguments([*base, "--save", str(save)]), world_size=1)
    assert not (tmp_path / "runs").exists()
