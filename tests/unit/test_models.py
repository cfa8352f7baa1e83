"""Shapes, tables, block order, and the pure plan that binds the engine's parameters."""

import json
from pathlib import Path

import pytest
import torch

from moebius.models.blocks import fuse, unfuse
from moebius.models.families import read_shape, weights
from moebius.models.hf_io import plan_files
from moebius.models.hf_reader import HFReader, check_names
from moebius.models.shape import ModelShape, check_fits


def shape(**changes: object) -> ModelShape:
    sizes: dict[str, object] = {
        "family": "qwen3",
        "num_layers": 4,
        "hidden_size": 48,
        "ffn_hidden_size": 96,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "head_dim": 16,
        "vocab_size": 151,
        "tied": True,
        "qk_layernorm": True,
        "rope_theta": 1e6,
        "norm_epsilon": 1e-6,
        "max_position_embeddings": 512,
    }
    return ModelShape(**{**sizes, **changes})  # pyright: ignore[reportArgumentType]


def write_config(folder: Path, **changes: object) -> Path:
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 151,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_explicit_head_dim_is_taken(tmp_path: Path) -> None:
    """case 1.10: head_dim 16 where hidden / heads is 6."""
    read = read_shape(write_config(tmp_path))
    assert read == shape()
    by_name = {w.trainer: w for w in weights(read)}
    qkv = by_name["decoder.layers.3.self_attention.linear_qkv.weight"]
    assert qkv.rows == (128, 32, 32) and qkv.columns == 48
    assert by_name["decoder.layers.0.self_attention.linear_proj.weight"].columns == 128


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_arithmetic_that_is_not_done_is_refused_by_name(tmp_path: Path, changes: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word) as error:
        read_shape(write_config(tmp_path, **changes))
    assert "--hf-checkpoint" in str(error.value)


@pytest.mark.parametrize(("heads", "groups", "tp"), [(6, 2, 3), (8, 2, 3), (8, 8, 3), (12, 4, 6)])
def test_tp_that_does_not_fit_the_heads_is_refused(heads: int, groups: int, tp: int) -> None:
    """case 1.02: the message names heads, KV heads and TP, for training and for rollouts."""
    model = shape(num_attention_heads=heads, num_query_groups=groups, ffn_hidden_size=144, vocab_size=192)
    for sizes in ((tp, 1, None), (1, 1, tp)):
        with pytest.raises(ValueError) as error:
            check_fits(model, *sizes)
        for word in (f"{heads} query heads", f"{groups} KV heads", f"parallel-size {tp}"):
            assert word in str(error.value)


def test_kv_heads_fewer_than_rollout_ranks_are_allowed() -> None:
    check_fits(shape(), 1, 1, 4)
    check_fits(shape(), 2, 1, 8)


def test_other_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--pipeline-model-parallel-size 5.*4 layers"):
        check_fits(shape(), 1, 5, None)
    with pytest.raises(ValueError, match=r"--tensor-model-parallel-size 2.*feed-forward size 95"):
        check_fits(shape(ffn_hidden_size=95), 2, 1, None)
    with pytest.raises(ValueError, match=r"151.*192 rows.*nearest size that does is 4"):
        check_fits(shape(num_attention_heads=10, num_query_groups=5, ffn_hidden_size=100), 5, 1, None)


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_block_order_is_undone(blocks: int) -> None:
    parts = [torch.randn(rows, 5) for rows in (16, 8, 8)]
    fused = fuse(parts, blocks)
    for part, back in zip(parts, unfuse(fused, [16, 8, 8], blocks), strict=True):
        assert torch.equal(part, back)
    first = torch.cat([part[: len(part) // blocks] for part in parts])
    assert torch.equal(fused[: 32 // blocks], first), "the first block must be the first rollout rank's q, k, v"


def test_files_are_cut_by_size() -> None:
    assert plan_files({"a": 5, "b": 5, "c": 12, "d": 1}, 10) == [["a", "b"], ["c"], ["d"]]


def test_broken_model_folders_get_a_message(tmp_path: Path) -> None:
    """A config that is cut off or lacks a field, and weights that are missing or no safetensors file."""
    write_config(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config[:40])
    with pytest.raises(ValueError, match=r"--ref-load .*config.json cannot be read"):
        read_shape(tmp_path, "--ref-load")
    (tmp_path / "config.json").write_text(config.replace("num_hidden_layers", "n_layers"))
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*lacks 'num_hidden_layers'"):
        read_shape(tmp_path)
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*neither"):
        HFReader(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.example/spec/v1")
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*model.safetensors cannot be read"):
        HFReader(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "gone"}}))
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*gone cannot be read"):
        check_names(HFReader(tmp_path), shape())
