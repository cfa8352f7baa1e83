"""Write the demo's problems: additions as text, in three files that share no problem.

    python examples/arithmetic/make_data.py OUT_DIR [--min-number 10] [--max-number 99] [--slip-rate 0.6] [--shots 0]

warmup.jsonl holds {"prompt": "12+29=", "response": "41"} for supervised steps; rl.jsonl and eval.jsonl hold
{"prompt": "17+25=", "label": "42"} for GRPO and its evaluation.

The responses of warmup.jsonl come from a careless teacher who forgets many a carry, as in 12+29=31; all labels are
right. A model taught so knows its digits but carries only sometimes: about half of its answers are wrong however
long it trains, and that is what the reward can mend.

With --shots 3 the prompts of rl.jsonl and eval.jsonl begin with three solved additions, one a line: that is how a model
that was trained on other text learns what is asked.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path


def split_problems(numbers: range, sizes: Sequence[int], seed: int) -> list[list[tuple[int, int]]]:
    """Deal the additions a + b with a and b in `numbers` into disjoint, shuffled splits of the given sizes.

    a + b and b + a never fall into different splits.

    Raises ValueError when there are fewer problems than the sizes ask for.
    """
    # A split that ends between a + b and b + a wastes the second.
    if min(sizes) < 1 or sum(sizes) + len(sizes) > len(numbers) ** 2:
        raise ValueError(
            f"--min-number {numbers.start} --max-number {numbers.stop - 1} make {len(numbers) ** 2} additions; "
            f"wanted: {' + '.join(map(str, sizes))} rows, 1 or more for each file, and {len(sizes)} additions to spare"
        )
    generator = random.Random(seed)
    pairs = [(a, b) for a in numbers for b in range(a, numbers.stop)]
    generator.shuffle(pairs)
    splits: list[list[tuple[int, int]]] = []
    for size in sizes:
        split: list[tuple[int, int]] = []
        while len(split) < size:
            a, b = pairs.pop()
            split += [(a, b)] if a == b else [(a, b), (b, a)]
        split = split[:size]
        generator.shuffle(split)
        splits.append(split)
    return splits


def careless_sum(a: int, b: int, slip_rate: float, generator: random.Random) -> int:
    """a + b, digit by digit, each carry forgotten with probability `slip_rate`."""
    total, carry, place = 0, 0, 1
    while a or b or carry:
        carry, digit = divmod(a % 10 + b % 10 + carry, 10)
        total += digit * place
        if carry and generator.random() < slip_rate:
            carry = 0
        a, b, place = a // 10, b // 10, place * 10
    return total


def with_shots(rows: Sequence[tuple[int, int]], solved: Sequence[tuple[int, int]]) -> list[dict[str, str]]:
    """Prompts and labels of `rows`, each prompt behind the `solved` additions."""
    shots = "".join(f"{a}+{b}={a + b}\n" for a, b in solved)
    return [{"prompt": f"{shots}{a}+{b}=", "label": str(a + b)} for a, b in rows]


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_data(
    out_dir: Path,
    numbers: range = range(10, 100),
    slip_rate: float = 0.6,
    warmup_rows: int = 4000,
    rl_rows: int = 3000,
    eval_rows: int = 1000,
    seed: int = 0,
    shots: int = 0,
) -> None:
    """Write warmup.jsonl, rl.jsonl and eval.jsonl into `out_dir` (made when missing).

    The `shots` solved additions come from the warm-up's problems.

    Raises ValueError as split_problems does.
    """
    warmup, rl, evaluation = split_problems(numbers, (warmup_rows, rl_rows, eval_rows), seed)
    generator = random.Random(seed)
    taught = [(a, b, careless_sum(a, b, slip_rate, generator)) for a, b in warmup]
    out_dir.mkdir(parents=True, exist_ok=True)
    write_jsonl(out_dir / "warmup.jsonl", [{"prompt": f"{a}+{b}=", "response": str(answer)} for a, b, answer in taught])
    write_jsonl(out_dir / "rl.jsonl", with_shots(rl, warmup[:shots]))
    write_jsonl(out_dir / "eval.jsonl", with_shots(evaluation, warmup[:shots]))


def main() -> None:
    """Read the command line and write the files."""
    parser = argparse.ArgumentParser(description="Write addition problems as warmup.jsonl, rl.jsonl and eval.jsonl.")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--min-number", type=int, default=10, help="smallest summand")
    parser.add_argument("--max-number", type=int, default=99, help="largest summand")
    parser.add_argument("--slip-rate", type=float, default=0.6, help="share of carries that the warm-up forgets")
    parser.add_argument("--warmup-rows", type=int, default=4000, help="problems with a worked response")
    parser.add_argument("--rl-rows", type=int, default=3000, help="problems for reinforcement learning")
    parser.add_argument("--eval-rows", type=int, default=1000, help="problems for evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shots", type=int, default=0, help="solved additions before each RL and evaluation problem")
    options = parser.parse_args()
    numbers = range(options.min_number, options.max_number + 1)
    rows = (options.warmup_rows, options.rl_rows, options.eval_rows)
    make_data(options.out_dir, numbers, options.slip_rate, *rows, options.seed, options.shots)


if __name__ == "__main__":
    main()
