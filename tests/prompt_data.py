"""Prompt files and a tokenizer of one token a character, for the tests of moebius.data."""

import json
import string
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from moebius.data import PromptOptions, Prompts, load_prompts

CHARACTERS = string.printable
BODY = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def character_tokenizer(
    template: str | None = None, bos: bool = True, auto_bos: bool = False, pad: str | None = None
) -> PreTrainedTokenizerFast:
    """One token a character; <unk> 0, <s> 1, </s> 2 (both of them absent without `bos`, but for the end)."""
    pieces = ["<unk>", "<s>", "</s>", *CHARACTERS] if bos else ["<unk>", "</s>", *CHARACTERS]
    tokenizer = Tokenizer(models.Unigram([(piece, 0.0) for piece in pieces], unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    if auto_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", **({"bos_token": "<s>"} if bos else {})
    )
    fast.chat_template = template
    if pad:
        fast.pad_token = pad
    return fast


def write_rows(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(
    paths: str | list[str], tokenizer: PreTrainedTokenizerBase, template: bool = False, limit: int = 100, **more: Any
) -> Prompts:
    """The prompts of columns `prompt` and `answer`; `more` are fields of PromptOptions."""
    options = PromptOptions("prompt", "answer", limit, template, **more)
    return load_prompts([paths] if isinstance(paths, str) else paths, tokenizer, options)
