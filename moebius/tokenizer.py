"""The tokenizer of a Hugging Face folder: loading it, its end tokens, and copying its files unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import normalizers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
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
PROBES = ("Hello, world", " 2  + 2 = 4\n\tnot 5", "é 例")


def load_tokenizer(hf_checkpoint: str, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load the folder's tokenizer, without network and without running code of the folder.

    `chat_template` is a file that replaces the tokenizer's template (--chat-template).

    Raises ValueError, naming --hf-checkpoint, when there is no such folder, no tokenizer in it that this
    version of transformers can load, or a lone tokenizer.model that is not of Llama's kind; or naming
    --chat-template, when its file is not text.
    """
    if not Path(hf_checkpoint).is_dir():
        raise ValueError(f"--hf-checkpoint {hf_checkpoint}: no such folder")
    try:
        if _is_lone_sentencepiece(Path(hf_checkpoint)):
            tokenizer = _lone_sentencepiece(hf_checkpoint)
        else:
            tokenizer = AutoTokenizer.from_pretrained(hf_checkpoint, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ValueError(f"--hf-checkpoint {hf_checkpoint}: cannot load a tokenizer: {error}") from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--chat-template {chat_template}: cannot be read: {error}") from error
    return tokenizer


def _is_lone_sentencepiece(folder: Path) -> bool:
    others = ("tokenizer.json", "tokenizer_config.json")
    return (folder / "tokenizer.model").is_file() and not any((folder / name).is_file() for name in others)


def _lone_sentencepiece(hf_checkpoint: str) -> PreTrainedTokenizerBase:
    """A tokenizer.model alone, as Llama's: a begin token, then the ids of the sentencepiece library itself.

    AutoTokenizer would read it too, but leave out the begin token and, before some texts, the mark of a first word.
    """
    tokenizer = LlamaTokenizer.from_pretrained(hf_checkpoint, local_files_only=True, add_bos_token=True)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    reference = SentencePieceProcessor(model_file=str(Path(hf_checkpoint) / "tokenizer.model"))
    protocol: Any = sentencepiece_model_pb2
    kind = protocol.ModelProto.FromString(reference.serialized_model_proto()).trainer_spec.model_type
    begin = [tokenizer.bos_token_id]
    same = all(tokenizer(text)["input_ids"] == begin + reference.encode(text) for text in PROBES)
    if not same or kind != protocol.TrainerSpec.BPE:
        raise ValueError(
            "tokenizer.model alone does not say how it is used, and it is not of Llama's kind; "
            "add the tokenizer_config.json or tokenizer.json that belongs to it"
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


def tokenizer_files(hf_checkpoint: str | Path, chat_template: Path | None = None) -> list[Path]:
    """The folder's tokenizer, chat template and generation_config files.

    An export copies them byte for byte, because saving a loaded tokenizer may rewrite its settings. `chat_template`, a
    file of the name chat_template.jinja, takes the place of the folder's; loaders prefer it to one in the settings.
    """
    found = [path for name in TOKENIZER_FILES if (path := Path(hf_checkpoint) / name).is_file()]
    if chat_template is None:
        return found
    assert chat_template.name == "chat_template.jinja"
    return [path for path in found if path.stem != "chat_template"] + [chat_template]
