"""The tokenizer of a Hugging Face folder: loading it, its end tokens, and copying its files unchanged."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def load_tokenizer(hf_checkpoint: str) -> PreTrainedTokenizerBase:
    """Load the folder's tokenizer, without network and without running code of the folder.

    Raises ValueError, naming --hf-checkpoint, when there is no such folder, no tokenizer in it that this
    version of transformers can load, or only a slow (pure Python) one.
    """
    if not Path(hf_checkpoint).is_dir():
        raise ValueError(f"--hf-checkpoint {hf_checkpoint}: no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(hf_checkpoint, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"--hf-checkpoint {hf_checkpoint}: cannot load a tokenizer: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"--hf-checkpoint {hf_checkpoint}: {type(tokenizer).__name__} is a slow tokenizer; "
            "a folder with a tokenizer.json (or files that convert to one) is needed"
        )
    return tokenizer


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, hf_checkpoint: str) -> list[int]:
    """All ids that end a response, ascending: the tokenizer's end token and those of the folder's config files.

    config.json and generation_config.json may lack `eos_token_id`, or hold an id, a list of ids, or null.

    Raises ValueError when a config file holds something else, or when no source names any end token.
    """
    found: set[int] = set()
    if isinstance(tokenizer.eos_token_id, int):
        found.add(tokenizer.eos_token_id)
    for name in ("config.json", "generation_config.json"):
        path = Path(hf_checkpoint) / name
        if not path.is_file():
            continue
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and i >= 0 for i in ids):
            raise ValueError(
                f"--hf-checkpoint: {path}: eos_token_id {value!r} is neither a token id nor a list of them"
            )
        found.update(ids)
    if not found:
        raise ValueError(
            f"--hf-checkpoint {hf_checkpoint}: neither the tokenizer nor config.json nor generation_config.json "
            "names an end token, so no response would end"
        )
    return sorted(found)


def tokenizer_files(hf_checkpoint: str | Path) -> list[Path]:
    """The folder's tokenizer, chat template and generation_config files.

    An export copies them byte for byte, because saving a loaded tokenizer may rewrite its settings.
    """
    return [path for name in TOKENIZER_FILES if (path := Path(hf_checkpoint) / name).is_file()]
