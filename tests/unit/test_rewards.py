"""Rewards: the math reward on its cases, and worker processes that print, fail, hang and die."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from reward_pools import children, custom_pool, item, math_pool, wait_for_end

from moebius.rewards import reward_specs, score_math
from moebius.rewards.math_reward import extract_answer, extract_gold
from moebius.rewards.worker import MATH_MEMORY_BYTES

REPOSITORY = Path(__file__).parents[2]
GSM8K = REPOSITORY.parent / "shared" / "data" / "gsm8k"
STRANGE = r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}"
GSM8K_LABEL = "She sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips.\n#### 72"


@pytest.mark.parametrize(
    ("label", "response", "reward"),
    [
        pytest.param("840", r"so \boxed{840}., thus **Final Answer** \boxed{840}", 1, id="case 4.01 same box twice"),
        pytest.param("4", r"\boxed{004}", 1, id="case 4.01 leading zeros"),
        pytest.param("7", r"First \boxed{5}. Wrong; it is \boxed{7}.", 1, id="case 4.01 last of two"),
        pytest.param("5", r"First \boxed{5}. Wrong; it is \boxed{7}.", 0, id="case 4.01 not the first"),
        pytest.param("7", r"It is \boxed{7}. Or \boxed{}", 1, id="case 4.01 last that is filled"),
        pytest.param(r"28\%", r"\boxed{28\%}", 1, id="case 4.03 percent"),
        pytest.param(r"28\%", "28 percent", 1, id="case 4.03 percent as a word"),
        pytest.param(r"28\%", r"\boxed{28 \text{ percent}}", 1, id="case 4.03 percent as text"),
        pytest.param(r"28\%", "28", 1, id="case 4.03 its number"),
        pytest.param(r"28\%", "0.28", 1, id="case 4.03 its hundredth"),
        pytest.param(r"28\%", "0.28%", 0, id="case 4.03 two percentages"),
        pytest.param("28", "2800%", 1, id="case 4.03 percent in the answer"),
        pytest.param("18", r"\boxed{18\text{ dollars}}", 1, id="case 4.03 unit as text"),
        pytest.param("18", r"\boxed{18 dollars an hour.}", 1, id="case 4.03 unit as words"),
        pytest.param("5", r"\boxed{5 million}", 0, id="case 4.03 not a unit"),
        pytest.param("90", r"\boxed{90^\circ}", 1, id="case 4.03 degrees"),
        pytest.param("12", r"\boxed{12\text{ cm}^2}", 1, id="case 4.03 squared unit"),
        pytest.param(r"\frac{1}{3}", r"\boxed{\frac{1}{2}}", 0, id="case 4.04 nested braces"),
        pytest.param(r"\frac{1}{23}", r"\boxed{\frac{12}{3}}", 0, id="case 4.04 digits of a fraction"),
        pytest.param(r"\frac{2}{3}", "2/3", 1, id="case 4.04 slash"),
        pytest.param("0.5", r"\frac12", 1, id="case 4.04 short fraction"),
        pytest.param(r"\frac12", "0.5", 1, id="case 4.04 gold short fraction"),
        pytest.param("3", r"\boxed{3", 0, id="case 4.04 never closed"),
        pytest.param("3", r"\boxed{}", 0, id="case 4.04 empty"),
        pytest.param("3", r"\boxed 3", 1, id="case 4.04 no braces"),
        pytest.param(r"$\sqrt{17}$", r"\sqrt{17}", 1, id="case 4.04 bare root"),
        pytest.param("17", r"\sqrt{17}", 0, id="case 4.04 not the number in the root"),
        pytest.param(r"\{1,2\}", r"\boxed{\{2,1\}}", 1, id="case 4.04 escaped braces"),
        pytest.param("72", "The total is 72 clips, altogether.", 1, id="case 4.05 comma after it"),
        pytest.param("1234", "1,234", 1, id="case 4.05 thousands"),
        pytest.param("1234", "1{,}234", 1, id="case 4.05 LaTeX thousands"),
        pytest.param("1234", r"\$1,234.00", 1, id="case 4.05 currency"),
        pytest.param("1234", "Total: 1,234.", 1, id="case 4.05 full stop"),
        pytest.param("42", "#### 42" + " words" * 70, 1, id="case 4.08 text on the line"),
        pytest.param("42", "#### 42\n" + "words " * 70, 1, id="case 4.08 text below"),
        pytest.param("42", "42", 1, id="case 4.09 bare number"),
        pytest.param("42", r"Answer: \boxed{42}", 1, id="case 4.09 box"),
        pytest.param("42", r"42! Mark your solution with \boxed ", 0, id="case 4.09 box that is not filled"),
        pytest.param("1/3", r"\boxed{\frac13}", 1, id="third"),
        pytest.param("1/3", "0.333333", 1, id="six decimals"),
        pytest.param("1/3", "0.333", 0, id="three decimals"),
        pytest.param("5/2", r"\boxed{2\frac12}", 1, id="mixed number"),
        pytest.param("3/4", r"so it is $\frac{3}{4}$.", 1, id="formula"),
        pytest.param("4", r"so it is $\frac{3}{4}$.", 0, id="not the number in the formula"),
        pytest.param(r"2\sqrt{3}", r"It is \[x = 2\sqrt{3}\] then.", 1, id="display formula"),
        pytest.param("20", "It costs $18 - wait, $20", 1, id="dollars are no formula"),
        pytest.param("7", r"\boxed{x = 3 + 4 = 7}", 1, id="right-hand side"),
        pytest.param("7", r"\boxed{x = 1, y = 7}", 0, id="list of equations"),
        pytest.param("19", "12+7=19", 1, id="sum"),
        pytest.param("3", "13 = 10+3, 10-3", 1, id="difference"),
        pytest.param("-3", "It is -3", 1, id="negative"),
        pytest.param("12", "The area is 12 cm^2 of H2O.", 1, id="raised and glued numbers"),
        pytest.param("53", r"\boxed{5*3}", 0, id="product is not digits"),
        pytest.param("4", r"\boxed{\sqrt{16}}", 1, id="value of a root"),
        pytest.param("x^2+1", r"\boxed{1+x^2}", 1, id="expression"),
        pytest.param("east", r"\boxed{\text{east}}", 1, id="word"),
        pytest.param("east", "east", 1, id="bare word"),
        pytest.param("5", "#### Step 3: we add 2 and 3, which is 5", 1, id="heading"),
        pytest.param("5", "", 0, id="nothing"),
    ],
)
def test_math_reward(label: str, response: str, reward: float) -> None:
    """Cases 4.01, 4.03, 4.04, 4.05, 4.08 and 4.09, and the rules of the module's docstring."""
    assert score_math(response, label) == reward


def test_order_of_arguments_matters() -> None:
    """Case 4.11: gold goes first; the same pair the other way round is judged otherwise."""
    interval, relation = r"x \in [-2,7]", r"-2 \le x \le 7"
    assert score_math(rf"\boxed{{{relation}}}", interval) == 0.0
    assert score_math(rf"\boxed{{{interval}}}", relation) == 1.0


def test_gsm8k_labels() -> None:
    assert extract_gold(GSM8K_LABEL) == "72"
    assert score_math(GSM8K_LABEL, GSM8K_LABEL) == 1.0
    assert score_math("In all 72 clips.", GSM8K_LABEL) == 1.0
    assert score_math("In all 73 clips.", GSM8K_LABEL) == 0.0
    assert score_math("#### 1234", "It is <<1200+34=1234>>1,234.\n#### 1,234") == 1.0
    with pytest.raises(ValueError, match="holds no answer"):
        score_math("5", "a solution without an end\n#### ")


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not beside the repository")
def test_all_gsm8k_labels() -> None:
    """Every solution is right for itself and wrong for its neighbour, unless their answers are the same number."""
    labels = [json.loads(line)["answer"] for file in sorted(GSM8K.glob("*.jsonl")) for line in file.open()]
    assert len(labels) == 8792
    assert all(score_math(label, label) == 1.0 for label in labels)
    for label, other in pairwise(labels):
        same = float(extract_gold(label).replace(",", "")) == float(extract_gold(other).replace(",", ""))
        assert score_math(other, label) == float(same)


@pytest.mark.parametrize(
    "text", ["#### 42 ", "9", r"\boxed{", r"\boxed{}", "#### a\n", "$1 ", r"\(", "1,111", "-", "5 ", "word ", r"\text{"]
)
def test_long_responses_take_no_time(text: str) -> None:
    """Case 4.08: 100,000 characters of anything, in the middle of a response, cost less than a second."""
    started = time.process_time()
    assert score_math("so 42" + text * (100_000 // len(text)) + "\n#### 42", "43") == 0.0
    extract_answer(text * (100_000 // len(text)))
    assert time.process_time() - started < 1.0


def test_threads_and_processes() -> None:
    """Case 4.12: no timer of math-verify is in the way of threads."""
    labels = ["1/3", r"\frac{1}{3} + 0x"] * 8  # the second is no plain number
    responses = [r"\boxed{\frac13}"] * len(labels)
    assert list(map(score_math, responses, labels)) == [1.0] * len(labels)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(score_math, responses, labels)) == [1.0] * len(labels)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as processes:
        assert list(processes.map(score_math, responses, labels)) == [1.0] * len(labels)


def test_import_is_light() -> None:
    code = "import sys, moebius.rewards; print({'torch', 'sympy', 'math_verify'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_strange_answer_costs_its_own_limit_only() -> None:
    """Case 4.13: 63 plain answers and one that keeps sympy busy for ever."""
    items = [item(f"#### {number}", str(number)) for number in range(63)]
    items.insert(20, item(STRANGE, "3"))
    with math_pool(num_workers=2, timeout_seconds=2.0) as pool:
        result = pool.score(items)
        assert result.rewards == [1.0] * 20 + [0.0] + [1.0] * 43
        assert (result.timeouts, result.errors) == (1, 0)
        assert result.seconds < 30  # of which 2 are the limit, the others imports on a busy machine
        assert pool.score(items[:20]).rewards == [1.0] * 20
    assert children() == []


def test_math_workers_are_limited_in_memory() -> None:
    with math_pool() as pool:
        pool.wait_until_ready()
        limits = [worker.rlimit(psutil.RLIMIT_AS) for worker in children()]
    assert limits == [(MATH_MEMORY_BYTES, MATH_MEMORY_BYTES)]


def test_prompt_never_scores_and_failing_math_reward_counts_as_zero() -> None:
    """Case 4.09: what the prompt has in its box is nobody's answer."""
    with math_pool() as pool:
        assert pool.score([item("no idea", "42", r"Answer as in \boxed{42}")]).rewards == [0.0]
        result = pool.score([item("5", "5"), item("5", ""), item("6", "6")])
    assert (result.rewards, result.timeouts, result.errors) == ([1.0, 0.0, 1.0], 0, 1)


def test_user_function_that_sleeps_for_ever(tmp_path: Path) -> None:
    """Case 4.13: killed with what it started, whichever way it hangs; the pool goes on."""
    source = f"""
        import subprocess, time
        def reward(prompt, response, label, **metadata):
            if response == "hang":
                child = subprocess.Popen(["sleep", "1000"])
                with open({str(tmp_path / "pid")!r}, "w") as file:
                    file.write(str(child.pid))
                time.sleep(1000)
            return len(response)
    """
    with custom_pool(tmp_path, source, timeout_seconds=1.0) as pool:
        result = pool.score([item("a"), item("hang"), item("bcd")])
        assert (result.rewards, result.timeouts, result.errors) == ([1.0, 0.0, 3.0], 1, 0)
        assert wait_for_end([int((tmp_path / "pid").read_text())])
    assert children() == []


def test_arguments_order_and_printing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's code may print, read standard input and import its neighbour, in any working directory."""
    (tmp_path / "neighbour.py").write_text("BONUS = 0.5")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(elsewhere)
    source = """
        import os, subprocess, sys
        from neighbour import BONUS
        print('{"ready": true}')
        def reward(prompt, response, label, **metadata):
            print('{"reward": 99}', flush=True)
            sys.__stdout__.write("more")
            os.write(1, b'{"reward": 99}')
            subprocess.run(["echo", '{"reward": 99}'])
            assert sys.stdin.read() == ""
            return int(label) * metadata["weight"] + len(prompt) + BONUS + (response == "\\ud83d é\\n")
    """
    items = [item("\ud83d é\n", str(number), "ab", weight=10, level="x") for number in range(40)]
    with custom_pool(tmp_path, source, num_workers=2) as pool:
        assert pool.score(items).rewards == [10 * number + 3.5 for number in range(40)]
        assert pool.score([]).rewards == []


def test_large_samples(tmp_path: Path) -> None:
    """More than a pipe holds, in both workers at once."""
    source = "def reward(prompt, response, label, **metadata): return len(response)"
    with custom_pool(tmp_path, source, num_workers=2) as pool:
        assert pool.score([item("x" * (1 << 20))] * 4).rewards == [1 << 20] * 4


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('no such column')", r"KeyError: 'no such column'"),
        ("return float('nan')", "the reward is nan; it must be finite"),
        ("return None", "the reward is None of type NoneType; it must be a number"),
        ("return '1.0'", "it must be a number"),
        ("sys.exit(0)", "SystemExit: 0"),
        ("os._exit(3)", "the worker process ended with exit code 3"),
        ("os.closerange(3, 99)\n    time.sleep(1000)", "the worker process ended with exit code -9"),
    ],
)
def test_failing_user_function_stops_the_run(tmp_path: Path, body: str, message: str) -> None:
    """The error names function and item; samples in flight do not answer for those of the next batch."""
    source = "import os, sys, time\ndef reward(prompt, response, label, **metadata):\n"
    source += f"    if response != 'bad': time.sleep(0.01 * float(label)); return float(label)\n    {body}\n"
    good = [item("good", str(number)) for number in range(9)]
    with custom_pool(tmp_path, source, num_workers=2, on_error="stop") as pool:
        with pytest.raises(RuntimeError, match=rf"(?s)own_reward\.py:reward failed for item 4 of the batch.*{message}"):
            pool.score([*good[:4], item("bad"), *good[4:]])
        assert pool.score(good).rewards == list(range(9))
    assert children() == []


def test_user_file_that_cannot_be_imported(tmp_path: Path) -> None:
    source = "import no_such_module_anywhere\ndef reward(**kwargs): return 0.0"
    with (
        custom_pool(tmp_path, source) as pool,
        pytest.raises(RuntimeError, match=r"(?s)own_reward.py:reward cannot be loaded.*No module named"),
    ):
        pool.wait_until_ready()


def test_worker_that_died_between_batches_is_replaced(tmp_path: Path) -> None:
    with custom_pool(tmp_path, "def reward(prompt, response, label, **metadata): return len(response)") as pool:
        assert pool.score([item("ab")]).rewards == [2.0]
        [worker] = children()
        worker.kill()
        assert wait_for_end([worker.pid])
        result = pool.score([item("abc")] * 3)
        assert (result.rewards, result.errors) == ([3.0] * 3, 0)


def test_pool_is_used_by_several_threads(tmp_path: Path) -> None:
    source = "def reward(prompt, response, label, **metadata): return float(label)"
    batches = [[item("", str(100 * batch + number)) for number in range(20)] for batch in range(6)]
    with custom_pool(tmp_path, source, num_workers=2) as pool, ThreadPoolExecutor(6) as threads:
        for batch, result in enumerate(threads.map(pool.score, batches)):
            assert result.rewards == [100 * batch + number for number in range(20)]


def test_close_while_another_thread_waits(tmp_path: Path) -> None:
    source = "import time\ndef reward(prompt, response, label, **metadata): time.sleep(1000)"
    with custom_pool(tmp_path, source) as pool, ThreadPoolExecutor(1) as threads:
        pool.wait_until_ready()
        scoring = threads.submit(pool.score, [item("")])
        time.sleep(0.2)
        pool.close()
        with pytest.raises(RuntimeError, match="the reward pool is closed"):
            scoring.result(timeout=30)
        with pytest.raises(RuntimeError, match="the reward pool is closed"):
            pool.score([item("")])
    assert children() == []


@pytest.mark.parametrize("ending", ["killed", "exit"])
def test_workers_die_with_their_parent(tmp_path: Path, ending: str) -> None:
    """Even while the user's code holds the interpreter's lock, and with a process that it started."""
    (tmp_path / "own_reward.py").write_text(
        "import os, subprocess\n"
        "def reward(prompt, response, label, **metadata):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        f"    print(os.getpid(), child.pid, file=open({str(tmp_path / 'part')!r}, 'w', encoding='utf-8'), flush=True)\n"
        f"    os.rename({str(tmp_path / 'part')!r}, {str(tmp_path / 'pids')!r})\n"
        "    return 7 ** 10 ** 9\n"
    )
    script = (
        "import os, threading, time\nfrom moebius.rewards import RewardItem, RewardPool, reward_specs\n"
        f"[spec] = reward_specs(None, [{str(tmp_path / 'own_reward.py') + ':reward'!r}])\n"
        "pool = RewardPool(spec, 1, 1000.0)\n"
        "threading.Thread(target=pool.score, args=([RewardItem('', '', '')],), daemon=True).start()\n"
        f"while not os.path.exists({str(tmp_path / 'pids')!r}): time.sleep(0.02)\n"
        f"time.sleep({1000 if ending == 'killed' else 0})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY)
    while not (tmp_path / "pids").exists():
        assert parent.poll() in (None, 0)
        time.sleep(0.02)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    if ending == "killed":
        os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert wait_for_end(pids)


def test_flags_are_checked_without_running_the_file(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "raise SystemExit('must not run')\nif True:\n    def inner(): pass\nfrom os import getcwd as found\n"
    )
    (tmp_path / "broken.py").write_text("def reward(:\n")
    for custom, message in [
        (str(path), r"--custom-rm-path .*reward\.py: must be FILE\.py:FUNCTION"),
        (f"{tmp_path}/absent.py:inner", r"--custom-rm-path .*: there is no file"),
        (f"{path}:outer", r"--custom-rm-path .*: .*reward\.py defines no outer"),
        (f"{path}:SystemExit", r"--custom-rm-path .*defines no SystemExit"),
        (f"{tmp_path}/broken.py:reward", r"--custom-rm-path .*is not Python"),
    ]:
        with pytest.raises(ValueError, match=message):
            reward_specs(["math"], [f"{path}:inner", custom])
    specs = reward_specs(["math"], [f"{path}:inner", f"{path}:found", f"{path}:inner"], weights=[1, 2, 3, 4])
    assert [(spec.name, spec.weight) for spec in specs] == [("math", 1), ("inner", 2), ("found", 3), ("inner_2", 4)]
