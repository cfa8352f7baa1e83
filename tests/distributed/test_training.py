"""Numbers that must not depend on how a batch or a model is cut, against one process with one micro-batch.

Cases 3.02 (micro-batches), 3.01 (global token mean), 1.06 and 1.10 (export) of the list of known faults.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import launch
from safetensors.torch import load_file
from tiny_models import make_hf_model

FAMILIES = ("qwen3", "llama")
CUTS = {
    1: ("micro2", "micro4", "micro8", "tokens", "padded", "chunked", "recompute_full", "recompute_selective"),
    2: ("dp2", "dp2_tokens", "tp2", "pp2", "pp2_micro8", "pp2_padded", "tp2_sp", "tp2_sp_recompute", "dp2_overlap"),
    4: ("tp4", "tp2_pp2", "pp2_dp2", "tp2_sp_dp2"),
}
ALL = [(family, cut) for family in FAMILIES for cuts in CUTS.values() for cut in cuts]
ADAM_ONLY = ("dp2_overlap",)  # parameters are gathered lazily by the distributed optimizer, which is for Adam
KINDS = {"grad": False, "weight": False, "exp_avg": True, "exp_avg_sq": True}
TENSORS = [(kind, f, c) for kind, of_adam in KINDS.items() for f, c in ALL if of_adam or c not in ADAM_ONLY]
SGD = [(f, c) for f, c in ALL if c not in ADAM_ONLY]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("training")
    figures: dict[str, Any] = {}
    for nproc in CUTS:
        figures |= launch("training", nproc, folder / f"{nproc}.json", str(folder))
    return figures, folder


@pytest.mark.parametrize(("family", "cut"), ALL)
def test_loss_and_gradient_norm_do_not_depend_on_the_cut(
    runs: tuple[dict[str, Any], Path], family: str, cut: str
) -> None:
    """case 3.02"""
    figures, _ = runs
    for optimizer in ("adam",) if cut in ADAM_ONLY else ("sgd", "adam"):
        for name in ("loss", "grad_norm", "clipfrac"):
            base = figures[f"{family}/one/{optimizer}/{name}"][0]
            for value in figures[f"{family}/{cut}/{optimizer}/{name}"]:
                assert abs(value - base) <= TOLERANCE * abs(base), (optimizer, name, value, base)
    assert figures[f"{family}/one/sgd/grad_norm"][0] > 0.7, "clipping must take part"
    assert figures[f"{family}/one/sgd/clipfrac"][0] > 0, "the clipped branch must take part"


@pytest.mark.parametrize(("kind", "family", "cut"), TENSORS)
def test_every_tensor_does_not_depend_on_the_cut(
    runs: tuple[dict[str, Any], Path], kind: str, family: str, cut: str
) -> None:
    """Gradients, weights after one SGD step, and Adam's moments: difference relative to the tensor's largest value."""
    _, folder = runs
    base = load_file(folder / f"{family}-one-{kind}.safetensors")
    other = load_file(folder / f"{family}-{cut}-{kind}.safetensors")
    assert base.keys() == other.keys()
    for name, tensor in base.items():
        assert tensor.abs().max() > 0, name
        worst = ((tensor - other[name]).abs().max() / tensor.abs().max()).item()
        assert worst <= TOLERANCE, (name, worst)


@pytest.mark.parametrize(("family", "cut"), [(f, "one") for f in FAMILIES] + SGD)
def test_log_probs_equal_hugging_face(runs: tuple[dict[str, Any], Path], family: str, cut: str) -> None:
    """fp32 parity of the trainer, also where sequences are packed or padded beside others (cases 2.08, 2.12)."""
    gaps = runs[0][f"{family}/{cut}/hf_gap"]
    assert gaps and max(gaps) <= 1e-4


@pytest.mark.parametrize(
    ("family", "cut"),
    [("qwen3", "tp2_pp2"), ("llama", "tp2_pp2"), ("llama", "tp2_sp"), ("qwen3", "tp4"), ("qwen3", "one")],
)
def test_export_reloads_bit_equal(runs: tuple[dict[str, Any], Path], family: str, cut: str) -> None:
    """case 1.06, case 1.10: 151 rows in embedding, head and config although 192 are stored; head_dim kept."""
    import transformers

    folder = runs[1] / "hf" / family / cut
    auto: Any = transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.config.vocab_size == 151 and model.config.head_dim == 32
    assert len(list(folder.glob("*.safetensors"))) > 1, "several files must take part"
    original = make_hf_model(family, tied=family == "qwen3", kv_heads=4)
    for (name, mine), (_, theirs) in zip(model.named_parameters(), original.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert (model(ids).logits - original(ids).logits).abs().max() <= 1e-4


def test_learning_rate_schedules(runs: tuple[dict[str, Any], Path]) -> None:
    """Warm-up from 0 over two updates to 1e-3, then to 1e-4 at update 6; the first update has rate 0, as Megatron's."""
    figures, _ = runs
    half = 1e-4 + 9e-4 / 2
    assert figures["lr/constant"][0] == pytest.approx([0, 5e-4, 1e-3, 1e-3, 1e-3, 1e-3])
    assert figures["lr/linear"][0] == pytest.approx([0, 5e-4, 1e-3, 7.75e-4, half, 3.25e-4])
    assert figures["lr/cosine"][0][2:5:2] == pytest.approx([1e-3, half])
    assert figures["lr/cosine"][0][3] == pytest.approx(1e-4 + 9e-4 * (0.5 + 0.5**1.5))


def test_bf16_trains_with_fp32_master_weights(runs: tuple[dict[str, Any], Path]) -> None:
    figures, _ = runs
    base = figures["llama/one/adam/grad_norm"][0]
    first, second = figures["bf16/grad_norm"][0]
    assert abs(first - base) < 0.05 * base and second > 0
    assert figures["bf16/changed"][0] > 0.9
