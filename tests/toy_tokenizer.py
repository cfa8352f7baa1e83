"""A byte-pair tokenizer of 15 tokens in which what was sampled and what its text encodes to differ."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

PIECES = ("<pad>", "<s>", "</s>", "h", "e", "l", "o", "he", "ll", "llo", "hello", "1", "2", "12", " ")
MERGES = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("1", "2")]


def make_bpe(folder: Path, pad: bool = True) -> PreTrainedTokenizerFast:
    """Saves the tokenizer to `folder`; without a pad token where `pad` is False."""
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, MERGES))
    tokenizer.decoder = decoders.Fuse()
    tokens = {"bos_token": "<s>", "eos_token": "</s>"} | ({"pad_token": "<pad>"} if pad else {})
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **tokens)
    fast.save_pretrained(folder)
    return fast
