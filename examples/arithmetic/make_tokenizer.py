"""Train the demo's tokenizer with sentencepiece and write it as a Hugging Face folder.

    python examples/arithmetic/make_tokenizer.py DATA_DIR/warmup.jsonl OUT_DIR

OUT_DIR gets tokenizer.model (sentencepiece's own file) and tokenizer.json with tokenizer_config.json, which
AutoTokenizer loads. Every character is a token, no text gets a begin token, and there is no chat template.
"""

import argparse
import io
import json
import string
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SPACE = "\u2581"  # how sentencepiece writes a space inside a piece
# Beyond what the additions hold, so that problems written in words need no new tokenizer.
CHARACTERS = string.digits + string.ascii_lowercase + "+-*/=().,:?" + SPACE


def train_sentencepiece(texts: list[str], model_path: Path) -> sentencepiece.SentencePieceProcessor:
    """Train a character model on `texts`; ids 0 to 3 are pad, bos, eos and unk. Writes `model_path`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="char",
        use_all_vocab=True,
        required_chars=CHARACTERS,
        split_digits=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    model_path.write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def to_fast_tokenizer(processor: sentencepiece.SentencePieceProcessor) -> PreTrainedTokenizerFast:
    """The same pieces and ids as a fast tokenizer, which adds no token of its own to a text."""
    # A text splits into characters in one way only, so scores do not matter; absent characters have -inf.
    pieces = [(processor.id_to_piece(i), 0.0) for i in range(processor.vocab_size())]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=processor.unk_id()))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **SPECIAL_TOKENS)


def make_tokenizer(warmup_path: Path, out_dir: Path) -> PreTrainedTokenizerFast:
    """Train on the prompts and responses of `warmup_path` and write the folder (made when missing)."""
    rows = [json.loads(line) for line in warmup_path.read_text(encoding="utf-8").splitlines()]
    out_dir.mkdir(parents=True, exist_ok=True)
    processor = train_sentencepiece([row["prompt"] + row["response"] for row in rows], out_dir / "tokenizer.model")
    tokenizer = to_fast_tokenizer(processor)
    tokenizer.save_pretrained(out_dir)
    return tokenizer


def main() -> None:
    """Read the command line and write the folder."""
    parser = argparse.ArgumentParser(description="Train the arithmetic tokenizer with sentencepiece.")
    parser.add_argument("warmup_path", type=Path, help="warmup.jsonl of make_data.py")
    parser.add_argument("out_dir", type=Path)
    options = parser.parse_args()
    make_tokenizer(options.warmup_path, options.out_dir)


if __name__ == "__main__":
    main()
