"""Prompt files, tokenizers, the order of prompts, and request seeds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from prompt_data import BODY, CHARACTERS, character_tokenizer, load, write_rows
from transformers import PreTrainedTokenizerFast

from moebius.data import (
    PromptOptions,
    PromptSampler,
    load_prompts,
    normalize_label,
    open_source,
    replica_rows,
    request_seed,
)
from moebius.tokenizer import load_tokenizer, stop_token_ids, tokenizer_files


def test_data_module_imports_no_large_package() -> None:
    code = (
        "import sys, moebius.data; print(sorted({'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_rows_of_all_kinds(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "b"}]
    path = write_rows(
        tmp_path / "a.jsonl", {"prompt": "a", "answer": 7, "level": 3}, {"prompt": messages, "answer": "x"}
    )
    first, second = load(path, character_tokenizer(BODY), template=True)
    assert first.text == "u:a;a:"
    assert [3 + CHARACTERS.index(c) for c in first.text] == list(first.token_ids)
    assert (first.index, first.label, first.metadata) == (0, "7", {"level": 3})
    assert (second.text, second.index, second.label, second.metadata) == ("s:S;u:b;a:", 1, "x", {})


def test_raw_prompts_are_what_the_tokenizer_makes_of_them(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "ab", "answer": "1"})
    (prompt,) = load(path, character_tokenizer(auto_bos=True))
    assert prompt.token_ids == (1, 3 + CHARACTERS.index("a"), 3 + CHARACTERS.index("b"))
    assert prompt.text == "ab"


@pytest.mark.parametrize(
    ("value", "label"),
    [
        *[(" 7 ", " 7 "), (72, "72"), (72.0, "72"), (-0.25, "-0.25"), (1e-7, "0.0000001"), (1e20, "1" + "0" * 20)],
        *[
            (0, "0"),
            (5.0, "5"),
            (True, "true"),
            (["é", 1, 2.0], '["é", 1, 2.0]'),
            ({"b": 1, "a": []}, '{"b": 1, "a": []}'),
        ],
    ],
)
def test_labels_become_text(value: str | int | float | list | dict, label: str) -> None:
    assert normalize_label(value) == label


@pytest.mark.parametrize(
    ("tokenizer", "begins"),
    [
        pytest.param(character_tokenizer("{{ bos_token }}" + BODY, auto_bos=True), 1, id="template and tokenizer"),
        pytest.param(character_tokenizer("{{ bos_token }}" + BODY), 1, id="template alone"),
        pytest.param(character_tokenizer(BODY, bos=False), 0, id="no begin token"),
    ],
)
def test_begin_token_is_never_doubled(tokenizer: PreTrainedTokenizerFast, begins: int, tmp_path: Path) -> None:
    """case 2.04: the ids are those of the library's own template-and-tokenize call, with one <s> at most."""
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "hi", "answer": "1"})
    (prompt,) = load(path, tokenizer, template=True)
    text = "u:hi;a:"
    first = tokenizer.get_vocab()[CHARACTERS[0]]
    body = [first + CHARACTERS.index(c) for c in text]
    assert list(prompt.token_ids) == [1] * begins + body
    library = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert list(prompt.token_ids) == library
    assert prompt.text == "<s>" * begins + text


@pytest.mark.parametrize(("pad", "pad_id"), [(None, None), ("</s>", 2)])
def test_tokenizer_without_pad_token_works_and_stays_unchanged(pad: str | None, pad_id: int, tmp_path: Path) -> None:
    """case 2.09: no pad token, or pad = eos; the exported files are the source's, byte for byte."""
    source = tmp_path / "model"
    character_tokenizer(BODY, pad=pad).save_pretrained(source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    tokenizer = load_tokenizer(str(source))
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "ab", "answer": "1"}, {"prompt": "longer", "answer": "1"})
    load(path, tokenizer, template=True)
    assert stop_token_ids(tokenizer, str(source)) == [2]
    assert tokenizer.pad_token_id == pad_id
    assert {path.name: path.read_bytes() for path in tokenizer_files(source)} == before
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(before)


def test_only_tokenizer_files_are_copied(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer.model", "generation_config.json", "config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    names = [path.name for path in tokenizer_files(tmp_path)]
    assert names == ["tokenizer.json", "tokenizer.model", "generation_config.json"]


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (None, None, [2]),
        ({"eos_token_id": 5}, {"eos_token_id": [9, 2]}, [2, 5, 9]),
        ({"eos_token_id": None}, {"top_k": 20}, [2]),
        ({"eos_token_id": 0}, None, [0, 2]),
    ],
)
def test_end_tokens_of_every_source(
    config: dict | None, generation: dict | None, ids: list[int], tmp_path: Path
) -> None:
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert stop_token_ids(character_tokenizer(), str(tmp_path)) == ids


def test_end_tokens_missing_or_malformed(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id \['</s>'\]"):
        stop_token_ids(tokenizer, str(tmp_path))
    (tmp_path / "generation_config.json").unlink()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="names an end token"):
        stop_token_ids(tokenizer, str(tmp_path))


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*nowhere: no such folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*cannot load a tokenizer"):
        load_tokenizer(str(tmp_path))


def test_overlong_prompts_are_refused_by_templated_length(tmp_path: Path) -> None:
    """case 5.01: 3, 8, 9 and 50 templated ids against 8; a template of 5 ids around a text of 6 counts 11."""
    tokenizer = character_tokenizer(BODY)
    rows = [{"prompt": "x" * n, "answer": "1"} for n in (3, 8, 9, 50)]
    with pytest.raises(ValueError) as caught:
        load(write_rows(tmp_path / "raw.jsonl", *rows), tokenizer, limit=8)
    assert "--rollout-max-prompt-len 8: 2 of 4 prompts" in str(caught.value)
    assert str(caught.value).splitlines()[1:] == ["  row 3: 9 tokens", "  row 4: 50 tokens"]
    path = write_rows(tmp_path / "chat.jsonl", {"prompt": "x" * 6, "answer": "1"})
    assert len(load(path, tokenizer, template=True, limit=11)[0].token_ids) == 11
    with pytest.raises(ValueError, match="row 1: 11 tokens"):
        load(path, tokenizer, template=True, limit=10)


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    """case 5.02: a batch larger than the data, no rows, and rows that are all too long."""
    with pytest.raises(ValueError, match="--rollout-batch-size 4: more than the 3 rows"):
        PromptSampler(3, 4, seed=1)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"--prompt-data .*empty.jsonl: 0 rows"):
        load(str(tmp_path / "empty.jsonl"), character_tokenizer())
    path = write_rows(tmp_path / "long.jsonl", *[{"prompt": "xxxx", "answer": "1"}] * 30)
    with pytest.raises(ValueError) as caught:
        load(path, character_tokenizer(), limit=3)
    assert "30 of 30 prompts" in str(caught.value) and "(0 fit)" in str(caught.value)
    assert str(caught.value).splitlines()[-1] == "  ... and 20 more"


@pytest.mark.parametrize("replicas", [1, 4, 12])
def test_evaluation_rows_are_dealt_exactly_once(replicas: int) -> None:
    """case 5.03: 10 rows over 1, 4 and 12 replicas."""
    shares = [replica_rows(10, replica, replicas) for replica in range(replicas)]
    assert sorted(row for share in shares for row in share) == list(range(10))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_tokenizer_without_template(tmp_path: Path) -> None:
    """case 5.04: chat rows and --apply-chat-template are refused, plain text works."""
    plain = write_rows(tmp_path / "plain.jsonl", {"prompt": "a", "answer": "1"})
    chat = write_rows(tmp_path / "chat.jsonl", {"prompt": [{"role": "user", "content": "a"}], "answer": "1"})
    assert len(load(plain, character_tokenizer())) == 1
    with pytest.raises(
        ValueError,
        match="--apply-chat-template: the tokenizer of --hf-checkpoint has no chat template; .*--chat-template",
    ):
        load(plain, character_tokenizer(), template=True)
    with pytest.raises(ValueError, match=r"row 1: column 'prompt' .*need --apply-chat-template and --chat-template"):
        load(chat, character_tokenizer())
    with pytest.raises(ValueError, match=r"chat messages, which need --apply-chat-template$"):
        load(chat, character_tokenizer(BODY))
    assert load(chat, character_tokenizer(BODY), template=True)[0].text == "u:a;a:"


def test_blank_lines_and_byte_order_marks_are_harmless(tmp_path: Path) -> None:
    """case 5.05: a byte-order mark, Windows line ends, a blank line, and a line separator inside a text."""
    row = '{"prompt": "a\u2028b", "answer": 1}'
    (tmp_path / "a.jsonl").write_bytes(f"\ufeff{row}\r\n\r\n  \n\ufeff{row}".encode())
    (part,) = open_source(str(tmp_path / "a.jsonl"), 0, "--prompt-data")
    rows = list(part.read())
    assert [line for line, _ in rows] == [1, 4]
    assert rows[0].values == {"prompt": "a\u2028b", "answer": 1}


def test_all_faulty_rows_are_reported_together(tmp_path: Path) -> None:
    """case 5.05: one message with file, row, wanted and found columns."""
    lines = [
        b'{"prompt": "a", "answer": "1"}',
        b'{"prompt": "a", "id": 3}',
        b'{"question": "a", "answer": null}',
        b"",
        b'{"prompt": "a", "answer": "1"',
        b'["a", "1"]',
        b'{"prompt": 5, "answer": [NaN]}',
        b'{"prompt": "a", "answer": NaN}',
        b'{"prompt": "\xff", "answer": "1"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError) as caught:
        load_prompts([str(path)], character_tokenizer(), PromptOptions("prompt", "answer", 9), "--eval-prompt-data")
    assert str(caught.value).splitlines() == [
        f"--eval-prompt-data {path}: 7 of 8 rows are faulty; wanted columns: 'prompt', 'answer'",
        "  row 2: column 'answer' (--label-key) is missing; found columns: 'prompt', 'id'",
        "  row 3: column 'prompt' (--input-key) is missing; found columns: 'question', 'answer'",
        "  row 3: column 'answer' (--label-key) is NoneType, wanted str, int, float, bool, list or dict",
        "  row 5: is not JSON: Expecting ',' delimiter at column 30",
        "  row 6: is list, wanted a JSON object",
        "  row 7: column 'prompt' (--input-key) is int, wanted str or a list of messages",
        "  row 7: column 'answer' (--label-key) holds a number that is not finite",
        "  row 8: column 'answer' (--label-key) is nan, wanted a finite number",
        "  row 9: is not UTF-8 text",
    ]


def test_a_file_of_faults_shows_the_first_ten(tmp_path: Path) -> None:
    """case 5.05: a file with other column names."""
    path = write_rows(tmp_path / "a.jsonl", *[{"question": "a", "answer": "1"}] * 1000)
    with pytest.raises(ValueError) as caught:
        load(path, character_tokenizer())
    assert len(str(caught.value).splitlines()) == 12
    assert "1000 of 1000 rows" in str(caught.value) and "... and 990 more" in str(caught.value)


def test_unreadable_file_names_the_option(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(ValueError, match=r"--prompt-data .*: cannot be read"):
            load(str(path), character_tokenizer())


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [
        ([], "empty list"),
        ([{"role": "user"}], "not {'role': str, 'content': str}"),
        ([{"role": "user", "content": ["a"]}], "not {'role': str, 'content': str}"),
        (["a"], "not {'role': str, 'content': str}"),
        ({"role": "user", "content": "a"}, "is dict, wanted str or a list of messages"),
        ([{"role": "tool", "content": "a"}], "row 2: TemplateError: no tools"),
        ("\ud800", "row 2: TypeError"),
    ],
)
def test_prompts_that_no_template_takes(prompt: object, fault: str, tmp_path: Path) -> None:
    template = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + BODY
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "a", "answer": "1"}, {"prompt": prompt, "answer": "1"})
    with pytest.raises(ValueError) as caught:
        load(path, character_tokenizer(template), template=True)
    assert fault in str(caught.value) and "1 of 2 rows" in str(caught.value)


def test_empty_prompts_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "", "answer": "1"})
    with pytest.raises(ValueError, match="row 1: the prompt has no token"):
        load(path, character_tokenizer())


def test_order_resumes_exactly() -> None:
    """case 5.07: 10 rows, batch 2, stopped after batches 7 and 9 and at an epoch's end (5 and 10)."""
    unbroken = PromptSampler(10, 2, seed=3)
    expected = [unbroken.next_batch() for _ in range(20)]
    for stops in ([7, 9], [5], [10], [5, 10], [0]):
        sampler, joined = PromptSampler(10, 2, seed=3), []
        for batch in range(20):
            if batch in stops:
                state = json.loads(json.dumps(sampler.state_dict()))
                sampler = PromptSampler(10, 2, seed=3)
                sampler.load_state_dict(state)
            joined.append(sampler.next_batch())
        assert joined == expected, stops
    epochs = [[row for batch in expected[i : i + 5] for row in batch] for i in range(0, 20, 5)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_batches_run_over_the_ends_of_epochs() -> None:
    """case 5.07: 10 rows in batches of 4 drop no row; a resume may use another batch size."""
    sampler = PromptSampler(10, 4, seed=3)
    rows = [row for _ in range(5) for row in sampler.next_batch()]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    resumed = PromptSampler(10, 10, seed=3)
    halfway = PromptSampler(10, 4, seed=3)
    halfway.next_batch()
    resumed.load_state_dict(halfway.state_dict())
    assert resumed.next_batch() == rows[4:14]
    assert [PromptSampler(3, 2, seed=0, shuffle=False).next_batch() for _ in range(2)] == [[0, 1], [0, 1]]
    in_order = PromptSampler(3, 2, seed=0, shuffle=False)
    assert [in_order.next_batch() for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]


@pytest.mark.parametrize(
    ("other", "option"),
    [
        (PromptSampler(11, 2, seed=3), "--prompt-data"),
        (PromptSampler(10, 2, seed=4), "--rollout-seed"),
        (PromptSampler(10, 2, seed=3, shuffle=False), "--rollout-shuffle"),
    ],
)
def test_resume_with_another_order_is_refused(other: PromptSampler, option: str) -> None:
    with pytest.raises(ValueError, match=option):
        other.load_state_dict(PromptSampler(10, 2, seed=3).state_dict())


def test_seed_0_is_a_seed() -> None:
    """case 9.05: seeds 0, 0, 1: the same order and requests twice, then others; a negative seed is refused."""
    first, again, other = (PromptSampler(100, 50, seed).next_batch() for seed in (0, 0, 1))
    assert first == again != other
    assert first != sorted(first)
    assert request_seed(0, 3, 5, 8) == request_seed(0, 3, 5, 8) != request_seed(1, 3, 5, 8)
    with pytest.raises(ValueError, match="--rollout-seed -1"):
        PromptSampler(10, 2, seed=-1)


def test_samples_of_a_step_never_share_a_seed() -> None:
    """case 9.03, case 9.01: n samples of a prompt, and one prompt taken twice, all draw with seeds of their own.

    Also in their low 32 bits, the only ones that torch's CPU generator looks at.
    """
    seeds = [request_seed(0, 7, position, 8) + sample for position in range(512) for sample in range(8)]
    assert len(set(seeds)) == len({seed % 2**32 for seed in seeds}) == 512 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_every_argument_enters_the_seed() -> None:
    """case 9.01: neither step, position, run seed nor purpose can be changed without other samples."""
    runs, steps, purposes = range(5), range(50), ("rollout", "eval")
    seeds = [request_seed(r, s, p, 8, purpose) for r in runs for s in steps for p in range(4) for purpose in purposes]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**62 for seed in seeds)
