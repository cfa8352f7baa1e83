"""Say in three lines what the demo did, where its results lie and what to try next.

    python examples/arithmetic/summary.py RUN_DIR SECONDS

SECONDS is what GRPO took, start-up included.
"""

import argparse
import json
from pathlib import Path


def summary(run: Path, seconds: int) -> str:
    """Three lines about the run folder `run`, whose GRPO took `seconds`.

    Raises ValueError when its metrics hold no evaluation before and after the training.
    """
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    evaluations = [row for row in rows if "eval/accuracy" in row]
    if len(evaluations) < 2:
        raise ValueError(f"{path}: {len(evaluations)} evaluations, at least 2 are needed")
    first, last = evaluations[0], evaluations[-1]
    arguments = json.loads((run / "arguments.json").read_text(encoding="utf-8"))["arguments"]
    moved = sum(row.get("switch/bytes_moved", 0) for row in rows)
    control = "RUN=runs/control bash launch/demo.sh --debug-permute-rewards"
    return (
        f"What happened: accuracy {first['eval/accuracy']:.2f} -> {last['eval/accuracy']:.2f} (answers sampled at "
        f"temperature {arguments['eval_temperature']:g}) on {last['eval/n']:.0f} problems that no step has seen, after "
        f"{last['step']} steps of GRPO in {seconds} s; {moved:.0f} bytes of weights moved between training and "
        "generation.\n"
        f"Where it is: curves in {run}/curves.png, figures in {run}/metrics.jsonl, the model in {run}/hf (Hugging Face "
        "form).\n"
        f"What to try next: `{control}` gives every answer the reward of another, and nothing is learned; problems and "
        "sizes are variables in launch/demo.sh."
    )


def main() -> None:
    """Read the command line and print the lines."""
    parser = argparse.ArgumentParser(description="Three lines about the demo's run folder.")
    parser.add_argument("run", type=Path)
    parser.add_argument("seconds", type=int, help="seconds that GRPO took")
    options = parser.parse_args()
    print(summary(options.run, options.seconds))


if __name__ == "__main__":
    main()
