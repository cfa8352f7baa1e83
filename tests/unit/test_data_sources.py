"""Rows out of every kind of source, several at a time, and what happens to overlong ones."""

import datetime
import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prompt_data import BODY, CHARACTERS, character_tokenizer, load, write_rows

from moebius.data import DataCache, PromptOptions, Prompts, load_prompts, open_source, source_names

MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": "b", "name": "n"}]


def facts(prompts: Prompts) -> list[tuple]:
    return [(p.token_ids, p.text, p.label, p.metadata) for p in prompts]


def test_every_kind_of_source_gives_the_same_prompts(tmp_path: Path) -> None:
    """jsonl, parquet, a folder of files, and a saved dataset; chat messages keep their own keys only."""
    rows = [{"prompt": MESSAGES, "answer": i, "level": {"a": [i, None]}} for i in range(3)]
    write_rows(tmp_path / "rows.jsonl", *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    datasets.Dataset.from_list([*rows[1:], rows[0]]).select([2, 0, 1]).save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    write_rows(tmp_path / "folder" / "a.jsonl", *rows[:2])
    pq.write_table(pa.Table.from_pylist(rows[2:]), tmp_path / "folder" / "b.parquet")
    (tmp_path / "folder" / "README.md").touch()
    # a template that looks at a key which tables fill with None in the first message
    tokenizer = character_tokenizer("{% for m in messages %}{{ m.content }}{{ 'N' if 'name' in m }};{% endfor %}")
    expected = [(p.text, p.label, p.metadata) for p in load(str(tmp_path / "rows.jsonl"), tokenizer, template=True)]
    assert expected == [("S;bN;", str(i), {"level": {"a": [i, None]}}) for i in range(3)]
    for name in ("rows.parquet", "saved", "folder"):
        prompts = load(str(tmp_path / name), tokenizer, template=True)
        assert [(p.text, p.label, p.metadata) for p in prompts] == expected, name
        assert [(p.index, p.source) for p in prompts] == [(i, name.removesuffix(".parquet")) for i in range(3)]


def test_values_of_tables_become_plain(tmp_path: Path) -> None:
    """Short floats keep their digits; bytes, dates and decimals become text; a whole number needs no fraction."""
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "answer": pa.array([0.1, 5.0], pa.float32()),
            "half": pa.array([0.1, None], pa.float16()),
            "day": pa.array([datetime.date(2024, 2, 29)] * 2),
            "price": pa.array([Decimal("1.50")] * 2),
            "raw": pa.array([b"\xff\x00"] * 2),
            "choice": pa.array(["x", "y"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    first, second = load(str(tmp_path / "a.parquet"), character_tokenizer())
    assert (first.label, second.label) == ("0.1", "5")
    others = {"day": "2024-02-29", "price": "1.50", "raw": "/wA="}
    assert first.metadata == {"half": 0.1, "choice": "x"} | others
    assert second.metadata == {"half": None, "choice": "y"} | others


def test_labels_of_mixed_types_in_one_file(tmp_path: Path) -> None:
    answers = [7, "7", 7.0, True, [1, "a"], {"x": 1}]
    path = write_rows(tmp_path / "a.jsonl", *[{"prompt": "a", "answer": answer} for answer in answers])
    assert [p.label for p in load(path, character_tokenizer())] == ["7", "7", "7", "true", '[1, "a"]', '{"x": 1}']


def test_faults_of_all_files_are_reported_together(tmp_path: Path) -> None:
    """case 5.05: with file and row, be it a column, the template, or the length."""
    template = "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad') }}{% endif %}" + BODY
    good = [{"prompt": "a", "answer": "1"}] * 1500
    first = write_rows(tmp_path / "a.jsonl", *good, {"prompt": "bad", "answer": "1"}, {"prompt": "a"})
    pq.write_table(pa.table({"prompt": ["a", "b" * 50], "answer": [None, "2"]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError) as caught:
        load([first, str(tmp_path / "b.parquet")], character_tokenizer(template), template=True, limit=20)
    assert str(caught.value).splitlines() == [
        f"--prompt-data {first}: 2 of 1502 rows are faulty; wanted columns: 'prompt', 'answer'",
        "  row 1501: TemplateError: no bad",
        "  row 1502: column 'answer' (--label-key) is missing; found columns: 'prompt'",
        f"--prompt-data {tmp_path}/b.parquet: 1 of 2 rows are faulty; wanted columns: 'prompt', 'answer'",
        "  row 1: column 'answer' (--label-key) is NoneType, wanted str, int, float, bool, list or dict",
        f"--rollout-max-prompt-len 20: 1 of 2 prompts of --prompt-data {tmp_path}/b.parquet are longer (0 fit); "
        "--overlong-prompt drop or left-cut takes them",
        "  row 2: 55 tokens",
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "the folder is no saved dataset and holds no .jsonl or .parquet file"),
        ({"dataset_dict.json": '{"splits": ["train"]}', "train/state.json": "{}"}, "one of them must be named: train"),
        ({"state.json": "{"}, "cannot be read"),
        ({"train-0.jsonl": "{}", "test-0.parquet": ""}, r"several splits \(test, train\): name the files"),
    ],
)
def test_folders_that_hold_no_rows(content: dict[str, str], reason: str, tmp_path: Path) -> None:
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"--eval-prompt-data {tmp_path}: .*{reason}"):
        open_source(str(tmp_path), 0, "--eval-prompt-data")


def test_a_parquet_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("{}")
    with pytest.raises(ValueError, match=r"--prompt-data .*a.parquet: cannot be read: .*[Pp]arquet"):
        load(str(tmp_path / "a.parquet"), character_tokenizer())


BY_NAME = """
import json, sys
from pathlib import Path
import datasets
from moebius.data import open_source

cache = Path(datasets.config.HF_DATASETS_CACHE)
for config, first in (("default", 1), ("other", 5)):
    made = datasets.Dataset.from_list([{"prompt": "a", "answer": first}, {"prompt": "b", "answer": first + 1}])
    folder = cache / "me___tiny" / config / "0.0.0" / "abc"
    builder = {"builder_name": "parquet", "dataset_name": "tiny", "config_name": config, "version": "0.0.0"}
    made.save_to_disk(str(cache / "made"))
    folder.mkdir(parents=True)
    (cache / "made" / "data-00000-of-00001.arrow").rename(folder / "tiny-test.arrow")
    splits = {"test": {"name": "test", "num_bytes": 9, "num_examples": 2, "dataset_name": "tiny"}}
    info = json.loads((cache / "made" / "dataset_info.json").read_text()) | builder | {"splits": splits}
    (folder / "dataset_info.json").write_text(json.dumps(info))
answers, digests = [], set()
for source in ("default:test", "other:test", "other:test[1:]", "other:test[:1]"):
    (part,) = open_source(f"hf:me/tiny:{source}", 0, "--prompt-data")
    answers.append([row.values["answer"] for row in part.read()])
    digests.add(part.digest)
errors = []
for source in ("hf:me/tiny:other", "hf:me/none", "hf::a:b"):
    try:
        open_source(source, 0, "--eval-prompt-data")
    except ValueError as error:
        errors.append(str(error))
print(json.dumps([answers, len(digests), errors]))
"""


def test_datasets_by_name_without_network(tmp_path: Path) -> None:
    """Out of the cache of `datasets`, with config and split; what is not there is refused with the flag."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path), "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", BY_NAME], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    answers, digests, errors = json.loads(done.stdout.splitlines()[-1])
    assert answers == [[1, 2], [5, 6], [6], [5]] and digests == 4
    assert [error.split(": ")[0] for error in errors] == [
        "--eval-prompt-data hf:me/tiny:other",
        "--eval-prompt-data hf:me/none",
        "--eval-prompt-data hf::a:b",
    ]
    assert '"train"' in errors[0] and "me/none" in errors[1] and "hf:owner/name[:config][:split]" in errors[2]


def test_short_names_of_sources(tmp_path: Path) -> None:
    (tmp_path / "v1.0").mkdir()
    folder = str(tmp_path / "v1.0")
    sources = [
        "a/train.jsonl",
        "b/train.parquet",
        "c/eval.jsonl",
        "hf:openai/gsm8k",
        "hf:openai/gsm8k:main:test",
        folder,
    ]
    names = ["a-train", "b-train", "eval", "gsm8k", "gsm8k-main-test", "v1.0"]
    assert source_names(sources) == names
    assert source_names(["x/a.jsonl", "x/a.parquet"]) != ["x-a", "x-a"]
    assert len(set(source_names(["x/a.jsonl", "x/a.parquet"]))) == 2


LENGTHS = (3, 8, 9, 50)


@pytest.mark.parametrize("policy", ["drop", "left-cut"])
def test_overlong_prompts_are_dropped_or_cut(policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """case 5.01: 3, 8, 9 and 50 templated ids against 8, counted on rank 0 for each file."""
    letters = CHARACTERS[:50]
    first = write_rows(tmp_path / "a.jsonl", *[{"prompt": letters[:n], "answer": str(n)} for n in LENGTHS])
    second = write_rows(tmp_path / "b.jsonl", {"prompt": "x", "answer": "1"})
    prompts = load([first, second], character_tokenizer(), limit=8, overlong_prompt=policy)
    done = {"drop": "dropped", "left-cut": "cut from the left"}[policy]
    message = f"--prompt-data {first}: 2 of 4 prompts are longer than --rollout-max-prompt-len 8: {done}\n"
    assert capsys.readouterr().out == message
    assert prompts.rows_read == 5
    if policy == "drop":
        assert [(p.label, p.source, p.index) for p in prompts] == [("3", "a", 0), ("8", "a", 1), ("1", "b", 2)]
        assert prompts.rows_of_sources == (2, 1)
    else:
        assert [p.text for p in prompts] == [letters[:3], letters[:8], letters[1:9], letters[42:50], "x"]
        assert [len(p.token_ids) for p in prompts] == [3, 8, 8, 8, 1]
        assert all([3 + CHARACTERS.index(c) for c in p.text] == list(p.token_ids) for p in prompts)


def test_a_template_counts(tmp_path: Path) -> None:
    """case 5.01: 5 ids of the template around a text of 6 count 11, under every policy."""
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "x" * 6, "answer": "1"}, {"prompt": "x", "answer": "1"})
    tokenizer = character_tokenizer(BODY)
    assert len(load(path, tokenizer, template=True, limit=11)) == 2
    assert len(load(path, tokenizer, template=True, limit=10, overlong_prompt="drop")) == 1
    cut = load(path, tokenizer, template=True, limit=10, overlong_prompt="left-cut")
    assert cut[0].text == ":xxxxxx;a:" and cut[1].text == "u:x;a:"
    with pytest.raises(ValueError, match="row 1: 11 tokens"):
        load(path, tokenizer, template=True, limit=10)


def test_a_source_without_a_prompt_left_is_refused(tmp_path: Path) -> None:
    """case 5.02"""
    good = write_rows(tmp_path / "good.jsonl", {"prompt": "x", "answer": "1"})
    path = write_rows(tmp_path / "long.jsonl", *[{"prompt": "xxxx", "answer": "1"}] * 30)
    options = PromptOptions("prompt", "answer", 3, overlong_prompt="drop")
    cache = DataCache(tmp_path / "cache", [])
    message = r"--overlong-prompt drop: all 30 prompts of --prompt-data .*long.jsonl .* 0 are left for .*-batch-size 4"
    for sources in ([good, path], [path], [path]):
        with pytest.raises(ValueError, match=message):
            load_prompts(sources, character_tokenizer(), options, cache=cache, batch_size=4)
