"""A checkpoint of any size, made on the spot."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from moebius.models.families import read_shape, weights


def write_checkpoint(folder: Path, config: dict[str, object], file_bytes: int) -> int:
    """Writes config.json and bf16 safetensors files, tensor number i with the value (i mod 256) / 256 everywhere.

    Returns:
        the bytes of all tensors.
    """
    (folder / "config.json").write_text(json.dumps(config))
    held: dict[str, torch.Tensor] = {}
    file_of: dict[str, str] = {}
    total = held_bytes = number = 0

    def flush() -> None:
        file = f"model-{len(set(file_of.values())):05}.safetensors"
        save_file(held, folder / file)
        file_of.update(dict.fromkeys(held, file))
        held.clear()

    for weight in weights(read_shape(folder)):
        for name, rows in zip(weight.hf, weight.rows, strict=True):
            size = (rows,) if weight.columns is None else (rows, weight.columns)
            held[name] = torch.full(size, (number % 256) / 256, dtype=torch.bfloat16)
            number += 1
            total += held[name].nbytes
            held_bytes += held[name].nbytes
            if held_bytes > file_bytes:
                flush()
                held_bytes = 0
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return total
