"""How fast the math reward is, and the cases of section 4 that need the whole way through a worker."""

import json
import random
from pathlib import Path

import pytest
from reward_pools import item, math_pool

from moebius.rewards.math_reward import extract_gold

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not beside the repository")
def test_ten_thousand_answers() -> None:
    """Right and wrong solutions, boxes and sentences, by two workers; the rate is printed."""
    labels = [json.loads(line)["answer"] for file in sorted(GSM8K.glob("*.jsonl")) for line in file.open()]
    draw = random.Random(0)
    items, expected = [], []
    for number in range(10_000):
        label, other = draw.sample(labels, 2)
        gold = extract_gold(label)
        right = number % 2 == 0
        answer = gold if right else f"{int(gold.replace(',', '')) + 1}"
        forms = (rf"So it is \boxed{{{answer}}}.", f"She has {answer} dollars left.", f"#### {answer}\nDone.", label)
        response = forms[draw.randrange(4 if right else 3)]
        items.append(item(response, label, other))
        expected.append(float(right))
    with math_pool(num_workers=2) as pool:
        pool.wait_until_ready()
        result = pool.score(items)
    print(f"{len(items) / result.seconds:.0f} answers/s by 2 workers")
    assert result.rewards == expected
    assert len(items) / result.seconds > 1000


def test_boxes_of_prompts_end_to_end() -> None:
    """case 4.09: the three responses to a prompt that asks for a box and shows the answer in one."""
    prompt = r"What is 6 * 7? Answer in \boxed{}, as in \boxed{42}. "
    responses = ["42", r"Answer: \boxed{42}", r"Mark your solution with \boxed ", "", "I do not know"]
    with math_pool() as pool:
        result = pool.score([item(response, "42", prompt) for response in responses])
    assert (result.rewards, result.errors) == ([1.0, 1.0, 0.0, 0.0, 0.0], 0)
