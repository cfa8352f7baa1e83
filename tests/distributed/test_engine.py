"""vLLM on the trainer's own tensors: aliasing, parity after updates, seeds, what the host process keeps."""

from typing import Any

import pytest
from harness import launch

RUNS = {2: ("qwen3-kv2", "llama-kv4", "qwen3-kv1-overlap"), 4: ("qwen3-kv2", "llama-kv8-overlap")}
NAMES = [f"{world}/{name}" for world, names in RUNS.items() for name in names]
COPIES = {"2/qwen3-kv1-overlap", "4/qwen3-kv2"}  # more rollout ranks than KV heads
PARITY = 1e-4


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("engine")
    found: dict[str, Any] = {}
    for world in RUNS:
        run = launch("engine", world, folder / f"{world}.json")
        found |= {key.replace("seeds", f"{world}/seeds", 1): value for key, value in run.items()}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_engine_parameter_lies_in_the_trainers_storage(figures: dict[str, Any], name: str) -> None:
    """Data pointers, before and after a load and three optimizer steps; the qkv copy is the one exception."""
    assert figures[f"{name}/outside"] == [[]] * len(figures[f"{name}/outside"])
    assert all(figures[f"{name}/same_pointers"])
    assert all(n > 20 for n in figures[f"{name}/parameters"])
    assert all(n == 8 for n in figures[f"{name}/strided"]), "o_proj and down_proj of 4 layers are strided views"
    for moved, aliased, copied in figures[f"{name}/bytes"]:
        assert moved == 0 and aliased > 0
        assert copied == 0 or name in COPIES
    # of two ranks that share a KV head the second finds its queries right before it: a view
    copies = [4 * (name in COPIES and rank % 2 == 0) for rank in range(len(figures[f"{name}/certificate"]))]
    assert [row[1] for row in figures[f"{name}/certificate"]] == copies


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_of_engine_trainer_and_hugging_face_agree(figures: dict[str, Any], name: str) -> None:
    """fp32 at temperature 0.7 (case 2.01), before any update and after each one (case 6.02: prefix cache on)."""
    assert max(figures[f"{name}/hf_gap"]) <= PARITY
    for gaps in figures[f"{name}/gaps"]:
        assert len(gaps) == 3 and max(gaps) <= PARITY
    assert all(abs(ratio - 1) < 5e-5 for ratio in figures[f"{name}/ratio"])


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_step_changes_generation_without_a_copy(figures: dict[str, Any], name: str) -> None:
    assert min(figures[f"{name}/gap_to_first_weights"]) > 100 * max(map(max, figures[f"{name}/gaps"]))
    assert max(figures[f"{name}/gap_after_load"]) <= PARITY
    assert all(figures[f"{name}/greedy_repeats"])


@pytest.mark.parametrize("name", NAMES)
def test_ranks_of_an_engine_agree_and_the_host_keeps_its_random_state(figures: dict[str, Any], name: str) -> None:
    tokens = figures[f"{name}/tokens"]
    assert all(t == tokens[0] for t in tokens)
    assert all(figures[f"{name}/rng_kept"])
    assert all(norm > 0 for norm in figures[f"{name}/trains_after_close"])


@pytest.mark.parametrize("name", NAMES)
def test_further_samples_share_the_prompts_blocks(figures: dict[str, Any], name: str) -> None:
    """Prompt tokens computed = sum of prompt lengths + at most one block (32) for each further sample."""
    for computed in figures[f"{name}/prompt_tokens"]:
        first, further = computed[::2], computed[1::2]
        assert first == [70, 5, 12]
        assert all(n <= 32 for n in further)


def test_models_folder_settings_change_nothing(figures: dict[str, Any]) -> None:
    """case 2.03: a generation_config.json with top_k 2 and more end ids lies beside the model."""
    seen = {token for name in NAMES for sequence in figures[f"{name}/tokens"][0] for token in sequence}
    assert len(seen) > 40, "top_k 2 would leave few tokens"
    assert any(5 in s[:-1] or 6 in s[:-1] or 7 in s[:-1] for n in NAMES for s in figures[f"{n}/tokens"][0])


@pytest.mark.parametrize("world", list(RUNS))
def test_samples_of_one_prompt_differ_and_repeat(figures: dict[str, Any], world: int) -> None:
    """Cases 9.01 (two engines, the same prompt), 9.03 (n samples), 9.05 (seed 0 is a seed)."""
    key = f"{world}/seeds"
    by_sample: dict[str, list[int]] = {}
    for rank in figures[f"{key}/responses"]:
        for sample, response in rank.items():
            assert by_sample.setdefault(sample, response) == response, "ranks of one engine differ"
    assert len(by_sample) == 16, "4 prompts x 4 samples over two engines"
    assert len({tuple(response) for response in by_sample.values()}) == 16
    assert all(figures[f"{key}/repeats"])
    for changed in ("other", "later"):
        merged = {k: v for rank in figures[f"{key}/{changed}"] for k, v in rank.items()}
        assert all(merged[k] != by_sample[k] for k in by_sample)
