"""Arithmetic of a step with real models and processes: see workers/arithmetic.py for what is run.

Three launches (1, 2 and 4 ranks) serve all tests. Figures are lists with one entry for each rank.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import launch
from safetensors.torch import load_file
from toy_tokenizer import make_bpe
from workers.arithmetic import (
    EXCHANGES,
    SAMPLES_PER_UPDATE,
    TOKEN_MEANS,
    UNEVEN,
    contents,
    step_samples,
    vocabulary_inputs,
)

from moebius.exchange import plan_exchange


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arithmetic")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    """The single process's figures, without the list of ranks."""
    make_bpe(folder / "model", pad=False)
    return {name: values[0] for name, values in launch("arithmetic", 1, folder / "1.json", str(folder)).items()}


@pytest.fixture(scope="module")
def two(one: dict[str, Any], folder: Path) -> dict[str, Any]:
    return launch("arithmetic", 2, folder / "2.json", str(folder))


@pytest.fixture(scope="module")
def four(folder: Path) -> dict[str, Any]:
    return launch("arithmetic", 4, folder / "4.json", str(folder))


@pytest.mark.parametrize("beside", ["alone_padded_form", "padded_beside_9", "packed_before_9", "packed_after_9"])
def test_padding_and_neighbours_change_nothing(one: dict[str, Any], beside: str) -> None:
    """case 2.08: 5 tokens alone, padded on the right to 9, and packed with a sequence of 9.

    Left padding, the fourth form of the row, does not exist in this program: rows are packed or padded on the right.
    """
    assert one[beside][0] == pytest.approx(one["alone"][0], abs=1e-5)
    assert len(one[beside][0]) == 4


def test_packed_sequences_do_not_see_each_other(one: dict[str, Any]) -> None:
    """case 2.12: neither the ids of A nor, as a label rolled over the boundary, the first id of B."""
    (a, b), (other_a, same_b) = one["b_after_a"], one["b_after_other_a"]
    assert same_b == pytest.approx(b, abs=1e-6) and other_a != pytest.approx(a, abs=1e-2)
    assert one["b_first_changed_after_a"][0] == pytest.approx(a, abs=1e-6)
    assert one["b_first_changed_after_a"][1] != pytest.approx(b, abs=1e-2)
    assert (len(a), len(b)) == (4, 3)


def test_entry_i_is_the_log_prob_of_token_i(one: dict[str, Any]) -> None:
    """case 2.12: a changed token moves its own entry and later ones, not earlier ones; all equal Hugging Face's."""
    before, after = one["b_after_a"][1], one["b_changed_after_a"][1]
    assert after[0] == pytest.approx(before[0], abs=1e-6)
    assert abs(after[1] - before[1]) > 1e-2 and abs(after[2] - before[2]) > 1e-2
    for mine, reference in zip(one["b_after_a"], one["hf"], strict=True):
        assert mine == pytest.approx(reference, abs=1e-4)
        assert sum(mine) == pytest.approx(sum(reference), abs=1e-4)


def test_export_leaves_a_tokenizer_without_pad_token_unchanged(one: dict[str, Any], folder: Path) -> None:
    """case 2.09"""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / "export" / name).read_bytes() == (folder / "model" / name).read_bytes()
    assert "pad_token" not in (folder / "export" / "tokenizer_config.json").read_text()


def test_kl_to_a_copy_of_the_policy_is_zero(one: dict[str, Any]) -> None:
    """case 2.15 (k1, k2, k3 and the logged mean at temperature 0.7), case 2.01 (ratio 1 before an update)."""
    assert max(one["kl/estimates"]) < 1e-6
    assert abs(one["kl/step"]["ref_kl"]) < 1e-6
    assert one["kl/step"]["ratio"] == pytest.approx(1.0, abs=1e-6) and one["kl/step"]["clipfrac"] == 0
    assert min(one["kl_without_temperature/estimates"][1:]) > 1e-3
    assert one["kl_without_temperature/step"]["ref_kl"] > 1e-3


def test_a_masked_micro_batch_adds_nothing(one: dict[str, Any]) -> None:
    """case 3.06: although its log-probs of old policy and reference are NaN."""
    both, alone, _ = one["masked/steps"]
    assert both == pytest.approx(alone, rel=1e-6) and alone["tokens"] == 4 and alone["grad_norm"] > 0
    assert one["masked/gap"] <= 1e-6


def test_one_valid_token_is_finite(one: dict[str, Any]) -> None:
    """case 3.06"""
    step = one["masked/steps"][2]
    assert step["tokens"] == 1 and step["grad_norm"] > 0
    assert all(abs(value) < 1e6 for value in step.values())


def test_a_step_without_a_valid_token_is_skipped(one: dict[str, Any]) -> None:
    """case 3.06: weights, moments and schedule keep their bits; the next step changes them."""
    assert one["masked/skipped"] == {"skipped": 1.0, "tokens": 0.0}
    assert one["masked/unchanged"] is True and one["masked/changed_by_a_real_step"] is True


@pytest.mark.parametrize("mean", TOKEN_MEANS)
def test_loss_is_the_mean_over_all_tokens(one: dict[str, Any], two: dict[str, Any], mean: str) -> None:
    """case 3.01: 9.2, not 6.0, over two micro-batches and over two ranks; there is no sequence-mean to choose."""
    assert [one[f"token_mean/{mean}"], *two[f"token_mean/{mean}"]] == pytest.approx([float(mean)] * 3, rel=1e-6)


def merged(parts: list[dict[str, float]]) -> dict[int, float]:
    found = {int(index): value for part in parts for index, value in part.items()}
    assert len(found) == sum(map(len, parts)), "every sample on one rank only"
    return found


@pytest.mark.parametrize("engines", ["two_engines", "one_engine"])
def test_groups_survive_the_exchange(two: dict[str, Any], engines: str) -> None:
    """case 3.15: two prompts of two samples each. Both prompts are the same text and stay two groups."""
    parts = two[f"pairs/{engines}/advantages"]
    assert [merged(parts)[i] for i in range(4)] == pytest.approx([0.7071, -0.7071, 0, 0], abs=1e-4)
    assert [sorted(map(int, part)) for part in parts] == [[1, 3], [0, 2]]
    made = [[0, 1], [2, 3]] if engines == "two_engines" else [[0, 1, 2, 3]] * 2
    assert two[f"pairs/{engines}/made_here"] == made


@pytest.mark.parametrize("engines", ["two_engines", "one_engine"])
def test_groups_without_a_signal_are_the_same_over_data_parallelism(
    one: dict[str, Any], two: dict[str, Any], engines: str
) -> None:
    """case 3.04: [1,1,1,1], [1,NaN,NaN,NaN] and [1,0,0,0] on DP=1 and DP=2."""
    single = merged([one["groups/advantages"]])
    assert merged(two[f"groups/{engines}/advantages"]) == single
    assert [single[i] for i in range(12)] == pytest.approx([0.0] * 8 + [1.5, -0.5, -0.5, -0.5], abs=1e-4)


@pytest.mark.parametrize("size", [151, 70])
@pytest.mark.parametrize("chunk", [4, 1000])
def test_log_probs_over_two_shards_equal_float64(two: dict[str, Any], size: int, chunk: int) -> None:
    """case 3.11: TP=2 with padded columns; at 70 a whole shard is padding."""
    tag = f"vocab/{size}/{chunk}"
    hidden, weight, targets = vocabulary_inputs(size)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (hidden @ weight[:size].t() / 0.7).log_softmax(-1)
    log_probs, entropy = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (log_probs.cos().sum() + entropy.sin().sum()).backward()
    expected = torch.stack([log_probs, entropy])
    assert hidden.grad is not None and weight.grad is not None
    largest = weight.grad.abs().max().item()
    for rank in range(2):
        assert two[f"{tag}/values"][rank] == two[f"{tag}/outside"][rank] == two[f"{tag}/values"][0]
        torch.testing.assert_close(torch.tensor(two[f"{tag}/values"][rank]).double(), expected, rtol=1e-5, atol=2e-6)
        wanted = (hidden.grad, weight.grad.chunk(2)[rank])
        for grad, exact in zip(two[f"{tag}/grads"][rank], wanted, strict=True):
            torch.testing.assert_close(torch.tensor(grad).double(), exact, rtol=0, atol=1e-5 * largest)


def test_entropy_and_log_prob_by_hand_over_two_shards(two: dict[str, Any]) -> None:
    """case 3.11: logits 2, 0 on one rank, -1 and a padded 9 on the other; with and without gradient."""
    for values in two["by_hand/values"] + two["by_hand/outside"]:
        assert [x[0] for x in values] == pytest.approx([-0.1699, 0.5243], abs=1e-4)


@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_with_uneven_samples_agree(one: dict[str, Any], two: dict[str, Any], folder: Path, name: str) -> None:
    """case 8.01: at most 10 tokens in a micro-batch. The worker gives every collective a minute, so a hang would fail.

    Four sequences of 8 need four micro-batches, so the other rank runs four too, most of them without a sample.
    """
    full, rest = [5, 5, 5, 5], {"four": [1, 1, 1, 1], "one": [1, 0, 0, 0]}.get(name, [0, 0, 0, 0])
    assert two[f"{name}/calls"] == ([rest, full] if name == "none_on_rank_0" else [full, rest])
    assert len(one[f"{name}/calls"]) == 1
    for step in two[f"{name}/step"]:
        assert step == pytest.approx(one[f"{name}/step"], rel=1e-5)
        assert step["grad_norm"] > 0 and step["clipfrac"] > 0 and step["ref_kl"] > 0
    mine, single = (load_file(folder / f"{world}-{name}.safetensors") for world in ("two", "one"))
    assert mine.keys() == single.keys()
    for key, expected in single.items():
        assert expected.abs().max() > 0, key
        assert (mine[key] - expected).abs().max() <= 1e-5 * expected.abs().max(), key


@pytest.mark.parametrize("grid", EXCHANGES)
def test_exchange_hands_every_sample_to_one_replica(four: dict[str, Any], grid: str) -> None:
    """case 3.15: bit-equal contents, in global order, the update that the index says, as every rank's plan says."""
    samples = step_samples()
    ranks = four[grid]
    replicas = 4 // EXCHANGES[grid][0]
    plan = plan_exchange([s.num_tokens for s in samples.values()], SAMPLES_PER_UPDATE, replicas)
    assert {rank["dp"] for rank in ranks} == set(range(replicas))
    for rank in ranks:
        for update, held in enumerate(rank["held"]):
            wanted = [i for i in samples if plan.update[i] == update and plan.dp[i] == rank["dp"]]
            assert wanted and held == [contents(samples[i]) for i in wanted]
    made = {engine: made for rank in ranks for engine, made in [(rank["engine"], rank["made"])]}
    assert sorted(index for group in made.values() for index in group) == list(samples)
    moved = sum(
        contents(samples[i]) in held for r in ranks for held in r["held"] for i in samples if i not in r["made"]
    )
    assert (moved > 0) == (len(made) > 1), "samples that another engine made must take part"
