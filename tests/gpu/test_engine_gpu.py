"""The engine on two GPUs: bf16, torch.compile, CUDA graphs, sleep mode. Run with `pytest -m gpu` on such a machine."""

from typing import Any

import pytest
import torch
from harness import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
NAMES = ("2/llama-kv4", "2/qwen3-kv1-overlap")


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gpu")
    found: dict[str, Any] = {}
    for number, name in enumerate(NAMES):
        found |= launch("engine", 2, folder / f"{number}.json", name)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_captured_graphs_read_the_trainers_memory(figures: dict[str, Any], name: str) -> None:
    """Cases 6.02, 6.06: after each of three updates, and a load, captured graphs generate with the new weights."""
    assert figures[f"{name}/outside"] == [[], []] and all(figures[f"{name}/same_pointers"])
    worst = max(map(max, figures[f"{name}/gaps"]))
    assert worst < 0.25 and max(figures[f"{name}/gap_after_load"]) < 0.5
    assert min(figures[f"{name}/gap_to_first_weights"]) > 2 * worst
    assert all(moved == 0 for moved, _, _ in figures[f"{name}/bytes"])


@pytest.mark.parametrize("name", NAMES)
def test_host_keeps_its_random_state_and_trains_on(figures: dict[str, Any], name: str) -> None:
    assert all(figures[f"{name}/rng_kept"])
    assert all(norm > 0 for norm in figures[f"{name}/trains_after_close"])
    assert figures[f"{name}/tokens"][0] == figures[f"{name}/tokens"][1]
