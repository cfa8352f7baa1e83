"""Tokenizers that people bring: sentencepiece files alone, byte-level ones, pure bytes; and template files."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from prompt_data import BODY, character_tokenizer, load, write_rows
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import ByteLevelBPETokenizer
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from moebius.data import DataCache, PromptOptions, load_prompts
from moebius.tokenizer import load_tokenizer, stop_token_ids, tokenizer_files

TEXTS = ["hello world", "what is 1  + 2?\n\tanswer: é 例", " leading"]
TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
CORPUS = ["hello world, what is the answer?", "1 + 2 = 3 and 4 + 5 = 9", "the quick brown fox jumps over"] * 20


def sentencepiece_folder(folder: Path, **changes: Any) -> Path:
    """A folder with config.json and tokenizer.model only; trained as Llama's unless `changes` say otherwise."""
    folder.mkdir()
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 330,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    }
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=str(folder / "tokenizer"), minloglevel=2, **settings | changes
    )
    (folder / "tokenizer.vocab").unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def byte_level_folder(folder: Path, **special: str) -> Path:
    """GPT-2's kind: every text is made of known bytes; begin and pad tokens only if given."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(CORPUS, vocab_size=300, special_tokens=["<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|end|>", **special)
    fast.save_pretrained(folder)
    return folder


def prompts_of(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, template: bool = False) -> list[tuple[int, ...]]:
    rows = [{"prompt": text, "answer": "1"} for text in TEXTS]
    return [p.token_ids for p in load(write_rows(tmp_path / "rows.jsonl", *rows), tokenizer, template)]


def test_a_sentencepiece_file_alone(tmp_path: Path) -> None:
    """One begin token, then the ids of the sentencepiece library; decoding gives the text back."""
    folder = sentencepiece_folder(tmp_path / "model")
    reference = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = load_tokenizer(str(folder))
    ids = prompts_of(tokenizer, tmp_path)
    assert [list(row) for row in ids] == [[1, *reference.encode(text)] for text in TEXTS]
    assert [tokenizer.decode(list(row), skip_special_tokens=True) for row in ids] == TEXTS
    assert stop_token_ids(tokenizer, str(folder)) == [2]
    assert tokenizer.pad_token_id is None
    assert [path.name for path in tokenizer_files(folder)] == ["tokenizer.model"]
    tokenizer.chat_template = TEMPLATE
    assert all(row[0] == 1 and row.count(1) == 1 for row in prompts_of(tokenizer, tmp_path, template=True))
    # the settings that Llama's folders have beside it change nothing (but for a space at the start)
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": "<unk>"}))
    assert prompts_of(load_tokenizer(str(folder)), tmp_path)[:2] == ids[:2]


@pytest.mark.parametrize(
    "changes", [{"model_type": "unigram", "vocab_size": 298}, {"add_dummy_prefix": False}], ids=["unigram", "prefix"]
)
def test_a_sentencepiece_file_of_another_kind_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    """Rather than ids that its model never saw."""
    folder = sentencepiece_folder(tmp_path / "model", **changes)
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*not of Llama's kind; add the tokenizer_config.json"):
        load_tokenizer(str(folder))
    (folder / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*cannot load a tokenizer"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("special", [{}, {"bos_token": "<|end|>"}, {"pad_token": "<|pad|>"}], ids=["no", "bos", "pad"])
def test_byte_level_tokenizers(special: dict[str, str], tmp_path: Path) -> None:
    """Without begin token, with begin = end, with a pad token of its own: prompts hold the text's tokens alone."""
    folder = byte_level_folder(tmp_path / "model", **special)
    tokenizer = load_tokenizer(str(folder))
    ids = prompts_of(tokenizer, tmp_path)
    assert [tokenizer.decode(list(row)) for row in ids] == TEXTS
    assert stop_token_ids(tokenizer, str(folder)) == [0]
    assert tokenizer.decode([*ids[0], 0], skip_special_tokens=True) == TEXTS[0]
    tokenizer.chat_template = "{{ bos_token or '' }}" + BODY
    templated = prompts_of(tokenizer, tmp_path, template=True)
    assert [row.count(0) for row in templated] == [1 if "bos_token" in special else 0] * 3


def test_bytes_as_tokens(tmp_path: Path) -> None:
    """A slow tokenizer in pure Python, which ends every text with its end token: a prompt must not end."""
    ByT5Tokenizer().save_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert not tokenizer.is_fast and tokenizer("a")["input_ids"] == [100, 1]
    ids = prompts_of(tokenizer, tmp_path)
    assert [list(row) for row in ids] == [[byte + 3 for byte in text.encode()] for text in TEXTS]
    assert [tokenizer.decode(list(row), skip_special_tokens=True) for row in ids] == TEXTS
    assert stop_token_ids(tokenizer, str(tmp_path / "model")) == [1]
    tokenizer.chat_template = BODY
    (first, *_) = prompts_of(tokenizer, tmp_path, template=True)
    assert [i - 3 for i in first] == list(b"u:hello world;a:")
    ended = write_rows(tmp_path / "ended.jsonl", {"prompt": "a</s>", "answer": "1"})
    assert load(ended, tokenizer)[0].token_ids == (100, 1)
    faulty = write_rows(tmp_path / "faulty.jsonl", {"prompt": "a", "answer": 1}, {"prompt": "\ud800", "answer": 1})
    with pytest.raises(ValueError, match="row 2: UnicodeEncodeError"):
        load(faulty, tokenizer)


@pytest.mark.parametrize(("text", "begins"), [("hi", 0), ("<s>hi", 1), ("<s><s>hi", 1), ("h<s>i", 1)])
def test_a_raw_prompt_that_brings_its_begin_token(text: str, begins: int, tmp_path: Path) -> None:
    """case 2.04: one at the beginning, whether text, tokenizer or both bring it; one further on stays."""
    path = write_rows(tmp_path / "a.jsonl", {"prompt": text, "answer": "1"})
    (prompt,) = load(path, character_tokenizer(auto_bos=True))
    assert prompt.token_ids[0] == 1 and prompt.token_ids[1] != 1
    assert prompt.token_ids.count(1) == (2 if text == "h<s>i" else 1)
    (prompt,) = load(path, character_tokenizer())
    assert prompt.token_ids.count(1) == begins and prompt.text == text


def model_folder(folder: Path, template: str | None) -> Path:
    character_tokenizer(template, auto_bos=True).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("own", ["nowhere", "chat_template.jinja", "tokenizer_config.json"])
def test_a_template_file_for_trainer_and_engine(own: str, tmp_path: Path) -> None:
    """case 5.04: the ids of the prompts are those that a loader of the exported folder makes, and begin once."""
    source = model_folder(tmp_path / "model", "{{ 'another' }}" if own == "chat_template.jinja" else None)
    if own == "tokenizer_config.json":
        settings = json.loads((source / own).read_text())
        (source / own).write_text(json.dumps(settings | {"chat_template": "{{ 'another' }}"}))
    assert bool(load_tokenizer(str(source)).chat_template) is (own != "nowhere")
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "chat_template.jinja"
    file.write_text("{{ bos_token }}" + BODY)
    tokenizer = load_tokenizer(str(source), str(file))
    messages = [{"role": "user", "content": "hi"}]
    path = write_rows(tmp_path / "a.jsonl", {"prompt": messages, "answer": "1"}, {"prompt": "hi", "answer": "1"})
    chat, text = load(path, tokenizer, template=True)
    assert chat.token_ids == text.token_ids and chat.text == "<s>u:hi;a:" and chat.token_ids.count(1) == 1
    (tmp_path / "export").mkdir()
    for part in tokenizer_files(source, file):
        shutil.copy(part, tmp_path / "export")
    assert (tmp_path / "export" / "chat_template.jinja").read_text() == file.read_text()
    exported = load_tokenizer(str(tmp_path / "export"))
    ids = exported.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert tuple(ids) == chat.token_ids


def test_a_template_file_that_cannot_be_used(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "model", None)
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"--chat-template .*binary.jinja: cannot be read"):
        load_tokenizer(str(source), str(tmp_path / "binary.jinja"))
    (tmp_path / "faulty.jinja").write_text("{% if %}")
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "hi", "answer": "1"})
    with pytest.raises(ValueError, match="row 1: TemplateSyntaxError"):
        load(path, load_tokenizer(str(source), str(tmp_path / "faulty.jinja")), template=True)


def test_variables_for_the_template(tmp_path: Path) -> None:
    template = "{{ 'T' if enable_thinking else 'F' }}{{ effort }}" + BODY
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "x", "answer": "1"})
    variables = {"enable_thinking": False, "effort": "low"}
    (prompt,) = load(path, character_tokenizer(template), template=True, template_kwargs=variables)
    assert prompt.text == "Flowu:x;a:" and len(prompt.token_ids) == len(prompt.text)
    with pytest.raises(ValueError, match="--apply-chat-template-kwargs: tokenize is not for the template"):
        load(path, character_tokenizer(template), template=True, template_kwargs={"tokenize": False})


def test_a_template_that_writes_the_date_is_not_kept_over_night(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two time zones that never have the same day: only such a template is prepared again."""
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "x", "answer": "1"})
    options = PromptOptions("prompt", "answer", 100, apply_chat_template=True)
    cache = DataCache(tmp_path / "cache", [])
    tables, texts = [], []
    for template in (BODY, "{{ strftime_now('%Y-%m-%d') }}" + BODY):
        for zone in ("Etc/GMT+12", "Etc/GMT-14", "Etc/GMT+12"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            texts.append(load_prompts([path], character_tokenizer(template), options, cache=cache)[0].text)
        tables.append(len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]))
    monkeypatch.undo()
    time.tzset()
    assert tables == [1, 3]
    assert texts[0] == texts[1] == texts[2] == "u:x;a:" and texts[3] == texts[5] != texts[4]
