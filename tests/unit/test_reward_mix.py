"""Several rewards: weights, groups, errors that count as zero or stop, and what is written down of a URL."""

import json
import math
from pathlib import Path

import pytest
from reward_pools import children, custom_pool, item

from moebius.arguments import parse_arguments, public_values, save_arguments
from moebius.rewards import Rewards, RewardSpec, reward_specs
from moebius.rewards.weighted import weighted_sum
from moebius.rollout import Scored, reward_metrics

FUNCTIONS = """
def length(prompt, response, label, **metadata):
    if response == "bad":
        raise KeyError("no such column " + label)
    return len(response)

def rank(prompts, responses, labels, metadata):
    assert len({*prompts}) == 1, prompts
    if "bad" in responses:
        raise ValueError("a bad group")
    order = sorted(responses)
    return [order.index(response) + metadata[0]["offset"] for response in responses]
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    return str(tmp_path / "own.py")


def test_weighted_sum() -> None:
    specs = [RewardSpec("a", "math", 2.0), RewardSpec("b", "code", -0.5)]
    assert weighted_sum(specs, {"b": [2.0, 0.0, 4.0], "a": [1.0, 3.0, 0.0]}) == [1.0, 6.0, -2.0]
    assert weighted_sum(specs, {"a": [], "b": []}) == []


def test_math_with_a_group_function(functions: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Two prompts of three samples; the group with the bad one counts 0 as a whole, the other rewards go on."""
    specs = reward_specs(["math"], [f"{functions}:rank", f"{functions}:rank"], weights=[10.0, 1.0, 0.5], group_rm=True)
    assert [(spec.name, spec.grouped) for spec in specs] == [("math", False), ("rank", True), ("rank_2", True)]
    responses = [("b", "1"), ("#### 7", "1"), ("a", "1"), ("#### 7", "2"), ("bad", "2"), ("c", "2")]
    rewards = Rewards(specs, 2, 60.0)
    try:
        rewards.wait_until_ready()
        assert rewards.grouped
        scores = rewards.score([item(response, "7", prompt, offset=1) for response, prompt in responses], 3)
    finally:
        rewards.close()
    assert scores.parts["math"].rewards == [0, 1, 0, 1, 0, 0]
    assert scores.parts["rank"].rewards == [3, 1, 2, 0, 0, 0]
    assert scores.totals == [4.5, 11.5, 3.0, 10.0, 0.0, 0.0]
    assert [part.errors for part in scores.parts.values()] == [0, 3, 3]
    shown = capfd.readouterr().err
    assert shown.count("ValueError: a bad group") == 2  # once for each of the two rewards that failed
    assert "reward rank: 3 of 6 samples failed and count 0" in shown
    assert children() == []


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("1.0", "--group-rm: the function returned 1.0; it must be a list of numbers"),
        ("[1.0]", "--group-rm: the function returned 1 rewards for 2 responses"),
        ("[1.0, float('inf')]", "the reward is inf; it must be finite"),
        ("'ab'", "--group-rm: the function returned 'ab'; it must be a list"),
        ("[1.0, '2']", "the reward is '2' of type str; it must be a number"),
    ],
)
def test_results_of_group_functions(tmp_path: Path, result: str, message: str) -> None:
    source = f"def reward(prompts, responses, labels, metadata): return {result}"
    with custom_pool(tmp_path, source, group_rm=True) as pool:
        scored = pool.score([item("a"), item("b")], 2)
    assert (scored.rewards, scored.errors) == ([0.0, 0.0], 2)
    assert scored.first_error is not None and message in scored.first_error


def test_numbers_of_any_kind(tmp_path: Path) -> None:
    source = "import numpy as np\ndef reward(prompts, responses, labels, metadata): return np.arange(len(prompts)) / 2"
    with custom_pool(tmp_path, source, group_rm=True) as pool:
        assert pool.score([item("a")] * 6, 3).rewards == [0.0, 0.5, 1.0] * 2


def test_a_late_group_costs_its_limit_only(tmp_path: Path) -> None:
    source = """
        import time
        def reward(prompts, responses, labels, metadata):
            time.sleep(1000 if "hang" in responses else 0)
            return [1.0] * len(prompts)
    """
    with custom_pool(tmp_path, source, num_workers=2, timeout_seconds=1.0, group_rm=True) as pool:
        result = pool.score([item("a"), item("b"), item("a"), item("hang"), item("c"), item("d")], 2)
    assert (result.rewards, result.timeouts, result.errors) == ([1.0, 1.0, 0.0, 0.0, 1.0, 1.0], 2, 0)


@pytest.mark.parametrize(("on_error", "stops"), [("zero", False), ("stop", True)])
@pytest.mark.parametrize(
    ("body", "message"), [("raise KeyError('gone')", "KeyError: 'gone'"), ("time.sleep(1000)", "no answer after 0.5 s")]
)
def test_exceptions_and_time_outs(tmp_path: Path, on_error: str, stops: bool, body: str, message: str) -> None:
    """`--on-reward-error`: a counted zero, or the end with the reward's traceback."""
    source = (
        f"import time\ndef reward(prompt, response, label, **metadata):\n    if response == 'x': {body}\n    return 1\n"
    )
    with custom_pool(tmp_path, source, timeout_seconds=0.5, on_error=on_error) as pool:
        pool.wait_until_ready()
        if stops:
            with pytest.raises(
                RuntimeError, match=f"(?s)own_reward.py:reward failed for item 1 of the batch.*{message}"
            ):
                pool.score([item("a"), item("x"), item("b")])
        else:
            result = pool.score([item("a"), item("x"), item("b")])
            assert result.rewards == [1.0, 0.0, 1.0]
            assert result.timeouts + result.errors == 1 and result.errors == ("Error" in message)
        assert pool.score([item("a")]).rewards == [1.0]


def test_metrics_of_several_rewards() -> None:
    """Means and counts of each reward where there are several, and the sums over all."""
    sums = {"sum/math": 3.0, "timeouts/math": 1.0, "errors/math": 0.0}
    assert reward_metrics(sums, Scored(sums, {}), 4) == {"timeouts": 1.0, "errors": 0.0}
    sums |= {"sum/own": -1.0, "timeouts/own": 2.0, "errors/own": 3.0}
    made = reward_metrics({**sums, "other": 9.0}, Scored(sums, {"own": "shown"}), 4)
    assert made == {
        **{"timeouts": 3.0, "errors": 3.0},
        **{"math/mean": 0.75, "math/timeouts": 1.0, "math/errors": 0.0},
        **{"own/mean": -0.25, "own/timeouts": 2.0, "own/errors": 3.0},
    }


def test_a_reward_that_fails_for_every_sample_stops_the_run() -> None:
    """With --on-reward-error zero too; time-outs of all do not, as answers can cause them."""
    late = {"sum/own": 0.0, "timeouts/own": 4.0, "errors/own": 0.0}
    assert reward_metrics(late, Scored(late, {}), 4)["timeouts"] == 4.0
    failed = {"sum/own": 0.0, "timeouts/own": 0.0, "errors/own": 4.0}
    with pytest.raises(RuntimeError, match="(?s)reward own failed for every one of 4 samples.*the traceback"):
        reward_metrics(failed, Scored(failed, {"own": "the traceback"}), 4)
    with pytest.raises(RuntimeError, match="shown by another rank"):
        reward_metrics(failed, Scored(failed, {}), 4)


@pytest.mark.parametrize(
    "url",
    ["", "host", "ftp://host", "http://", "http:///path", "http://h:99999", "http://h:x", "http://ho st", "http://[1"],
)
def test_addresses_that_are_refused(url: str) -> None:
    """Without a word of the URL itself."""
    with pytest.raises(
        ValueError, match="^--rm-url: must be http://HOST or https://HOST, with a port or path where needed$"
    ):
        reward_specs(["remote_rm"], None, url=url)


def test_secrets_of_the_url_are_not_written_down(tmp_path: Path) -> None:
    """Neither in arguments.json, nor in what wandb is given, nor in a spec's text."""
    required = [
        "--hf-checkpoint",
        "m",
        "--prompt-data",
        "p",
        "--rm-type",
        "math",
        "remote_rm",
        "--rm-weights",
        "1",
        "-0.5",
    ]
    for url, shown in [
        ("https://user:hunter2@host:8000/rm?key=hunter2#hunter2", "https://***@host:8000/rm?***"),
        ("http://host/rm", "http://host/rm"),
    ]:
        args = parse_arguments([*required, "--rm-url", url])
        assert (args.rm_weights, args.rm_type, args.rm_url) == ((1.0, -0.5), ("math", "remote_rm"), url)
        assert public_values(args)["rm_url"] == shown
        text = save_arguments(args, tmp_path).read_text()
        assert json.loads(text)["arguments"]["rm_url"] == shown and "hunter2" not in text
        assert "hunter2" not in repr(reward_specs(["remote_rm"], None, url=url))
    assert math.isclose(sum(args.rm_weights or ()), 0.5)
