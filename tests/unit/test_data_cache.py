"""The cache of prepared prompts: found again by content, shared by ranks, rebuilt when damaged."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prompt_data import BODY, character_tokenizer, write_rows

from moebius.data import DataCache, PromptOptions, Prompts, load_prompts

ROWS = [{"prompt": f"row {i} é", "answer": i, "level": [i, None, "\ud800"]} for i in range(1100)]


def load(tmp_path: Path, name: str = "a.jsonl", **changes: object) -> Prompts:
    options = PromptOptions(**{"input_key": "prompt", "label_key": "answer", "max_prompt_len": 100} | changes)  # type: ignore[arg-type]
    files = [tmp_path / "tokenizer.json"]
    return load_prompts([str(tmp_path / name)], character_tokenizer(BODY), options, cache=cache_of(tmp_path, files))


def cache_of(tmp_path: Path, files: list[Path]) -> DataCache:
    return DataCache(tmp_path / "cache", files)


def entries(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "cache").iterdir() if path.is_dir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "a.jsonl", *ROWS)
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_the_cache_gives_what_was_prepared(folder: Path) -> None:
    fresh = load_prompts([str(folder / "a.jsonl")], character_tokenizer(BODY), PromptOptions("prompt", "answer", 100))
    first, again = load(folder), load(folder)
    assert list(fresh) == list(first) == list(again) and len(fresh) == 1100
    assert again[7].metadata == {"level": [7, None, "\ud800"]} and again[7].text == "row 7 é"
    assert all(type(token) is int for token in again[-1].token_ids)
    assert again[-1] == again[1099] and again[1:3] == [again[1], again[2]]
    with pytest.raises(IndexError):
        again[1100]


def test_the_second_load_prepares_nothing(folder: Path) -> None:
    """Seen from the files: they stay as they are, and what they hold is what comes back."""
    load(folder)
    (entry,) = entries(folder)
    before = {path.name: path.stat().st_mtime_ns for path in entry.iterdir()}
    shown: list[str] = []

    def progress(iterable, total, description, alone):  # noqa: ANN001, ANN202
        shown.append(description)
        return iterable

    options = PromptOptions("prompt", "answer", 100)
    cache = cache_of(folder, [folder / "tokenizer.json"])
    tokenizer = character_tokenizer(BODY)
    load_prompts([str(folder / "a.jsonl")], tokenizer, options, cache=cache, progress=progress)
    assert shown == []
    assert {path.name: path.stat().st_mtime_ns for path in entry.iterdir()} == before
    write_rows(folder / "b.jsonl", ROWS[0])
    load_prompts([str(folder / "b.jsonl")], tokenizer, options, cache=cache, progress=progress)
    assert shown == ["preparing b.jsonl"]


def test_the_key_is_the_content_and_not_the_name(folder: Path) -> None:
    load(folder)
    (folder / "copy.jsonl").write_bytes((folder / "a.jsonl").read_bytes())
    copied = load(folder, "copy.jsonl")
    assert copied[0].source == "copy" and len(entries(folder)) == 1


@pytest.mark.parametrize(
    "change", ["rows", "tokenizer", "template", "length", "policy", "variables", "column", "vocabulary"]
)
def test_whatever_matters_changes_the_key(change: str, folder: Path) -> None:
    load(folder)
    changes: dict[str, object] = {
        "template": {"apply_chat_template": True},
        "length": {"max_prompt_len": 99},
        "policy": {"overlong_prompt": "drop"},
        "variables": {"template_kwargs": {"x": 1}},
        "column": {"input_key": "other"},
        "vocabulary": {"vocab_size": 1000},
    }
    if change == "rows":
        write_rows(folder / "a.jsonl", ROWS[1], *ROWS[1:])
    if change == "tokenizer":
        (folder / "tokenizer.json").write_text("{ }")
    if change == "column":
        write_rows(folder / "a.jsonl", *[row | {"other": "x"} for row in ROWS])
        load(folder)
        assert load(folder, input_key="other")[0].text == "x" and load(folder)[0].text == "row 0 é"
        return
    load(folder, **changes.get(change, {}))  # type: ignore[arg-type]
    assert len(entries(folder)) == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "meta", "lost"])
def test_a_damaged_table_is_made_again(damage: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = list(load(folder))
    (entry,) = entries(folder)
    ids = entry / "token_ids.npy"
    content = bytearray(ids.read_bytes())
    if damage == "cut":
        ids.write_bytes(content[:-10])
    elif damage == "flip":
        content[-7] ^= 1
        ids.write_bytes(content)
    elif damage == "meta":
        (entry / "meta.json").write_text('{"counts": [')
    else:
        ids.unlink()
    capsys.readouterr()
    assert list(load(folder)) == expected
    assert f"--data-cache {folder}/cache: {entry.name} is damaged" in capsys.readouterr().out
    assert list(load(folder)) == expected and capsys.readouterr().out == ""


def test_errors_are_not_kept(folder: Path) -> None:
    write_rows(folder / "a.jsonl", *ROWS, {"prompt": "a"})
    for _ in range(2):
        with pytest.raises(ValueError, match="row 1101: column 'answer'"):
            load(folder)
    assert entries(folder) == []
    write_rows(folder / "a.jsonl", *ROWS)
    assert len(load(folder)) == 1100


def test_a_folder_that_cannot_be_written(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Said once, and the run goes on. (A file is in the way: permissions do not stop a superuser.)"""
    (folder / "cache").write_text("")
    assert list(load(folder)) == list(load(folder)) and len(load(folder)) == 1100
    assert capfd.readouterr().err.count(f"warning: --data-cache {folder}/cache: ") == 1


def test_dropped_rows_are_told_out_of_the_cache_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        prompts = load(folder, max_prompt_len=8, overlong_prompt="drop")
        assert (len(prompts), prompts.rows_read) == (100, 1100)
        assert f"{folder}/a.jsonl: 1000 of 1100 prompts are longer" in capsys.readouterr().out


RANK = """
import sys, time
from pathlib import Path
from prompt_data import character_tokenizer
from moebius.data import DataCache, PromptOptions, load_prompts

folder, lines = Path(sys.argv[1]), []

def progress(iterable, total, description, alone):
    (folder / f"built-{sys.argv[2]}").touch()
    for row in iterable:
        yield row

(folder / f"ready-{sys.argv[2]}").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
try:
    options = PromptOptions("prompt", "answer", 100)
    made = load_prompts([str(folder / "a.jsonl")], character_tokenizer(), options, "--prompt-data",
                        DataCache(folder / "cache", []), progress)
    print(len(made), hash(tuple(p.token_ids for p in made)))
except ValueError as error:
    print(error)
"""


def run_ranks(folder: Path, number: int) -> list[str]:
    """What each of several processes prints that ask for the same table at the same time."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", RANK, str(folder)]
    ranks = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True, env=environment) for i in range(number)
    ]
    deadline = time.monotonic() + 60
    while len(list(folder.glob("ready-*"))) < number and time.monotonic() < deadline:
        time.sleep(0.01)
    (folder / "go").touch()
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * number
    return outputs


def test_the_ranks_of_a_node_build_once(folder: Path) -> None:
    write_rows(folder / "a.jsonl", *ROWS * 18)
    outputs = run_ranks(folder, 3)
    assert len(set(outputs)) == 1 and outputs[0].startswith("19800 ")
    assert len(list(folder.glob("built-*"))) == 1
    assert [path.suffix for path in (folder / "cache").iterdir() if path.is_file()] == [".lock"]


def test_every_rank_raises_the_same_error(folder: Path) -> None:
    """And those that wait for the builder need not find it themselves, one after the other."""
    write_rows(folder / "a.jsonl", *ROWS * 18, {"prompt": 5, "answer": 1})
    outputs = run_ranks(folder, 3)
    assert len(set(outputs)) == 1 and "row 19801: column 'prompt' (--input-key) is int" in outputs[0]
    assert len(list(folder.glob("built-*"))) < 3
    assert entries(folder) == []


def test_a_killed_builder_leaves_nothing_in_the_way(folder: Path) -> None:
    load(folder)
    (entry,) = entries(folder)
    entry.rename(entry.with_name(entry.name + ".partial"))
    (folder / "cache" / (entry.name + ".partial") / "meta.json").unlink()
    assert len(load(folder)) == 1100
    assert entries(folder) == [entry]
    assert json.loads((entry / "meta.json").read_text())["counts"] == [[0, 1100, 0, 1100]]
