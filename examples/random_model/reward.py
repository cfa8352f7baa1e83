"""A reward that every response gets some of: the share of its words with an even number."""

import re


def even_share(prompt: str, response: str, label: str, **metadata: object) -> float:
    """Between 0 and 1; 0 for a response without words."""
    numbers = [int(number) for number in re.findall(r"t(\d+)", response)]
    return sum(number % 2 == 0 for number in numbers) / len(numbers) if numbers else 0.0
