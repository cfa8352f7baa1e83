"""A 7 GB checkpoint made on the spot: what a rank holds while it reads its part."""

from pathlib import Path

import pytest
from harness import launch
from made_checkpoint import write_checkpoint

pytestmark = pytest.mark.slow

CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3072,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "intermediate_size": 9216,
    "vocab_size": 64001,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def test_a_rank_holds_its_shard_and_one_tensor(tmp_path: Path) -> None:
    """Peak of resident memory, mapped pages of the files included, <= shard + largest tensor + 10 %."""
    total = write_checkpoint(tmp_path, CONFIG, 1 << 30)
    assert total > 7e9
    figures = launch("load_memory", 2, tmp_path / "figures.json", str(tmp_path), timeout=600)
    print(f"checkpoint {total / 1e9:.2f} GB, figures {figures}")
    for peak, shard, largest in zip(figures["peak"], figures["shard"], figures["largest"], strict=True):
        assert shard > 0.49 * total
        assert peak <= 1.1 * (shard + largest)
    assert figures["wrong"] == [[], []]
