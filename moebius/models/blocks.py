"""Block order: how fused weights are stored so that every rollout shard is a slice of the training shard.

A training shard holds k blocks, one for each rollout rank inside it: `linear_qkv` is k x [q; k; v], `linear_fc1` is
k x [gate; up]. Checkpoints and exports never see blocks.
"""

from collections.abc import Sequence

import torch


def fuse(parts: Sequence[torch.Tensor], blocks: int) -> torch.Tensor:
    """Interleaves the parts of one training shard, [rows_i, ...] each, into blocks of [part_0; part_1; ...]."""
    if len(parts) == 1:
        return parts[0]
    chunks = [part.chunk(blocks) for part in parts]
    return torch.cat([chunk[block] for block in range(blocks) for chunk in chunks])


def unfuse(weight: torch.Tensor, rows: Sequence[int], blocks: int) -> list[torch.Tensor]:
    """Inverse of `fuse`: the parts of one training shard, part i of shape [rows[i], ...]."""
    if len(rows) == 1:
        return [weight]
    per_block = weight.view(blocks, -1, *weight.shape[1:])
    parts = per_block.split([r // blocks for r in rows], dim=1)
    return [part.reshape(-1, *weight.shape[1:]) for part in parts]
