"""Writes a model folder of a well-known shape without weights, and prompts for it: to measure and to try a cluster.

    python examples/random_model/make_model.py qwen3-8b OUT_DIR

OUT_DIR gets config.json, a tokenizer with one word for each id ("t17" is id 17), and prompts.jsonl. Train on it with
`--random-init` and the dense reward of reward.py.
"""

import argparse
import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# model_type, hidden, layers, query heads, KV heads, feed-forward, vocabulary, tied
SHAPES = {
    "qwen3-0.6b": ("qwen3", 1024, 28, 16, 8, 3072, 151936, True),
    "qwen3-1.7b": ("qwen3", 2048, 28, 16, 8, 6144, 151936, True),
    "qwen3-4b": ("qwen3", 2560, 36, 32, 8, 9728, 151936, True),
    "qwen3-8b": ("qwen3", 4096, 36, 32, 8, 12288, 151936, False),
    "qwen2.5-0.5b": ("qwen2", 896, 24, 14, 2, 4864, 151936, True),
    "qwen2.5-7b": ("qwen2", 3584, 28, 28, 4, 18944, 152064, False),
    "llama3-8b": ("llama", 4096, 32, 32, 8, 14336, 128256, False),
    "llama3.1-8b": ("llama", 4096, 32, 32, 8, 14336, 128256, False),
    "mistral-7b": ("mistral", 4096, 32, 32, 8, 14336, 32768, False),
    "opt-350m": ("opt", 1024, 24, 16, 16, 4096, 50272, True),
    "opt-1.3b": ("opt", 2048, 24, 32, 32, 8192, 50272, True),
}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "opt": "OPT", "qwen2": "Qwen2", "qwen3": "Qwen3"}
LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_config(name: str, folder: Path, num_layers: int | None) -> int:
    """Writes config.json, with `num_layers` layers where given; returns the vocabulary size."""
    family, hidden, layers, heads, groups, ffn, vocab, tied = SHAPES[name]
    config: dict[str, object] = {
        "architectures": [f"{CLASSES[family]}ForCausalLM"],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers or layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    if family == "opt":
        narrow = name == "opt-350m"
        config |= {"ffn_dim": ffn, "max_position_embeddings": 2048}
        config |= {"do_layer_norm_before": not narrow, "word_embed_proj_dim": 512 if narrow else hidden}
    else:
        config |= {
            "intermediate_size": ffn,
            "num_key_value_heads": groups,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "max_position_embeddings": 32768,
        }
    if family == "qwen3":
        config["head_dim"] = 128
    if family == "mistral":
        config["sliding_window"] = None
    if name == "llama3.1-8b":
        config["rope_parameters"] = LLAMA_31_ROPE
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return vocab


def write_tokenizer(vocab: int, folder: Path) -> None:
    """One word for each id, so that any id decodes to text."""
    words = {f"t{i}": i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Metaspace(replacement=" ")  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t2", unk_token="t3")
    fast.save_pretrained(folder)


def write_prompts(vocab: int, path: Path, rows: int, words: int, seed: int) -> None:
    """Prompts of random words."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for row in range(rows):
            prompt = " ".join(f"t{rng.randrange(4, vocab)}" for _ in range(words))
            file.write(json.dumps({"prompt": prompt, "label": str(row)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model folder of a known shape, without weights.")
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--num-layers", type=int, help="layers in place of the shape's own, for smaller machines")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--words", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    vocab = write_config(options.shape, options.out_dir, options.num_layers)
    write_tokenizer(vocab, options.out_dir)
    write_prompts(vocab, options.out_dir / "prompts.jsonl", options.rows, options.words, options.seed)


if __name__ == "__main__":
    main()
