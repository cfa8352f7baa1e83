"""Loss and gradient norm of three fixed Adam steps in fp32 against committed numbers, baselines/FAMILY.json.

A change that moves them says so by changing the files, in the same commit and with its reason. To write them anew:

    PYTHONPATH=tests:tests/distributed python tests/numerics/test_baselines.py
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness import launch

BASELINES = Path(__file__).parent / "baselines"
FAMILIES = ("qwen3", "llama")
TOLERANCE = 1e-4


def measure(folder: Path) -> dict[str, Any]:
    """{family: {"loss": [3 steps], "grad_norm": [3 steps]}} of one process."""
    return {family: values[0] for family, values in launch("baselines", 1, folder / "out.json", str(folder)).items()}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure(tmp_path_factory.mktemp("baselines"))


@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_equal_the_committed_numbers(measured: dict[str, Any], family: str) -> None:
    """Relative difference of at most 1e-4. New numbers: see the head of this file."""
    expected = json.loads((BASELINES / f"{family}.json").read_text())
    assert expected.keys() == measured[family].keys() == {"loss", "grad_norm"}
    for name, values in expected.items():
        assert len(set(values)) == 3, "every step must move"
        assert measured[family][name] == pytest.approx(values, rel=TOLERANCE), name


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for name, figures in measure(Path(place)).items():
            (BASELINES / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
