"""Every model family: fp32 parity of Hugging Face, trainer and engine, and training that does not depend on the cut.

Biases and norms are random (tests/tiny_models.py), so that a wrong row or a missed bias moves the logits.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import launch
from safetensors.torch import load_file
from tiny_models import TRAINED_LAYERS, make_hf_model

MODELS = (
    "llama-tied",
    "llama-3.1-untied",
    "mistral-untied",
    "qwen2-tied",
    "qwen2-untied",
    "qwen3-untied",
    "opt-tied",
    "opt-350m-tied",
)
CUTS = {1: ("tp1",), 2: ("tp2", "pp2", "tp2_sp")}
PARITY = 1e-4
# families with modules or parameters that Llama and Qwen3 (test_training.py) lack
TRAINED = ("qwen2", "opt", "opt-350m")
TRAINING_CUTS = {1: ("one", "tokens", "recompute_full"), 2: ("dp2", "tp2", "pp2", "tp2_sp", "dp2_overlap")}
# more TP ranks than KV heads
SHARED_KV = ("qwen2-kv2", "qwen3-kv2")
SHARED_KV_CUTS = {1: ("one",), 4: ("tp4", "tp2_pp2")}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("families")
    found: dict[str, Any] = {}
    for world in CUTS:
        found |= launch("families", world, folder / f"{world}.json")
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("training")
    found: dict[str, Any] = {}
    for families, by_world in ((TRAINED, TRAINING_CUTS), (SHARED_KV, SHARED_KV_CUTS)):
        for world, cuts in by_world.items():
            arguments = (str(folder), ",".join(families), ",".join(cuts))
            found |= launch("training", world, folder / f"{world}.json", *arguments)
    return found, folder


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("world", "cut"), [(world, cut) for world, cuts in CUTS.items() for cut in cuts])
def test_trainer_equals_hugging_face(figures: dict[str, Any], world: int, cut: str, model: str) -> None:
    gaps = [gap for rank in figures[f"{world}/{model}/{cut}"] for gap in rank]
    assert len(gaps) >= 3 and max(gaps) <= PARITY


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("world", list(CUTS))
def test_engine_equals_trainer_and_hugging_face(figures: dict[str, Any], world: int, model: str) -> None:
    """Before any update and after each of two, every byte of the engine's weights being the trainer's."""
    assert max(figures[f"{world}/{model}/hf_gap"]) <= PARITY
    for gaps in figures[f"{world}/{model}/gaps"]:
        assert len(gaps) == 3 and max(gaps) <= PARITY
    assert min(figures[f"{world}/{model}/moved"]) > 0.1, "the updates must change the model"
    for moved, aliased, copied in figures[f"{world}/{model}/bytes"]:
        assert (moved, copied) == (0, 0) and aliased > 0


PAIRS = [(f, cut) for f in TRAINED for cuts in TRAINING_CUTS.values() for cut in cuts if cut != "one"]
PAIRS += [(f, cut) for f in SHARED_KV for cut in SHARED_KV_CUTS[4]]
SGD = [(f, cut) for f, cut in PAIRS if cut != "dp2_overlap"]


@pytest.mark.parametrize(("family", "cut"), PAIRS)
def test_training_does_not_depend_on_the_cut(runs: tuple[dict[str, Any], Path], family: str, cut: str) -> None:
    """Loss and gradient norm; every gradient, weight and moment relative to the tensor's largest value."""
    figures, folder = runs
    kinds = ("exp_avg", "exp_avg_sq") if (family, cut) not in SGD else ("grad", "weight", "exp_avg", "exp_avg_sq")
    for optimizer in ("sgd", "adam") if (family, cut) in SGD else ("adam",):
        for name in ("loss", "grad_norm"):
            base = figures[f"{family}/one/{optimizer}/{name}"][0]
            for value in figures[f"{family}/{cut}/{optimizer}/{name}"]:
                assert abs(value - base) <= TOLERANCE * abs(base), (optimizer, name, value, base)
    for kind in kinds:
        base = load_file(folder / f"{family}-one-{kind}.safetensors")
        other = load_file(folder / f"{family}-{cut}-{kind}.safetensors")
        assert base.keys() == other.keys()
        largest = max(tensor.abs().max() for tensor in base.values())
        for name, tensor in base.items():
            # a bias on k moves all scores of a query alike: its gradient is 0 but for rounding
            scale = tensor.abs().max() if not name.endswith("k_proj.bias") else largest
            assert scale > 0, name
            worst = ((tensor - other[name]).abs().max() / scale).item()
            assert worst <= TOLERANCE, (kind, name, worst)


EXPORTS = [(f, cut) for f in TRAINED for cut in ("tp2", "pp2")] + [(f, "tp4") for f in SHARED_KV]


@pytest.mark.parametrize(("family", "cut"), EXPORTS)
def test_export_reloads_bit_equal(runs: tuple[dict[str, Any], Path], family: str, cut: str) -> None:
    import transformers

    folder = runs[1] / "hf" / family / cut
    auto: Any = transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    original = make_hf_model(family, tied=True, kv_heads=4, layers=TRAINED_LAYERS.get(family, 4))
    pairs = zip(model.named_parameters(), original.named_parameters(), strict=True)
    for (name, mine), (_, theirs) in pairs:
        assert torch.equal(mine, theirs), name
