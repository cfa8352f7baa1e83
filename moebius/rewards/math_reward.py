r"""The math reward: 1.0 when the answer in a response is the gold answer, otherwise 0.0.

**Where the answer is.** The first of these that applies; the prompt is never looked at:

1. A response that mentions `\boxed` or `\fbox` answers with its last box that is filled and closed: `\boxed{...}` with
   balanced braces, or `\boxed 3` with a plain number. If no box is, there is no answer and the response is wrong.
2. What follows the last `####` on the same line, or on the next line that is not blank: all of it where it holds no
   words, else the number it starts with (`#### 42 clips`). Otherwise it was a heading (`#### Step 3`): the one before.
3. A response that is one LaTeX expression without words, such as `\sqrt{17}`, is the answer. Else it is the last
   number, such as `1,234`, `$1,234.00`, `2/3`, `28 percent`; or, where that number lies in a formula between `$...$`,
   `\(...\)` or `\[...\]`, the formula. A number glued to letters (`H2O`) or raised (`cm^2`) does not count.

The gold answer is the label's last box, else what follows its last `####` (GSM8K has the solution before it), else all
of the label. A response that is the gold answer letter for letter is right without these rules.

**What counts as equal.** The same text; or the same value by math-verify, gold first. That comparison is one-way: the
gold `-2 \le x \le 7` accepts `x \in [-2,7]`, the gold `x \in [-2,7]` does not accept `-2 \le x \le 7`. Plain numbers
are compared here, as math-verify does: exactly, or rounded to six decimals where one has a decimal point. A percentage
stands for its number and for its hundredth: `28%` equals `28` and `0.28`; two percentages must have the same number.
Currency signs, thousands separators, units (`18 dollars`, `90^\circ`) and what precedes a last `=` are dropped. Answers
of more than 300 characters are wrong.

Nothing here limits time: some short answers keep sympy busy for ever, so `RewardPool` runs this in processes that it
can kill.
"""

import logging
import re
from collections import deque
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sympy import Basic, MatrixBase

MAX_ANSWER_CHARACTERS = 300
ROUNDING_DECIMALS = 6  # the default of math_verify.verify, so that both paths agree

_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+"
_CURRENCY = r"(?:\\?[$€£¥₹])"
_NUMBER = re.compile(
    # Not 2 of H2O, cm^2, x_2, 1.2: neither a letter nor an index or power sign before it, no number cut in two.
    r"(?<![A-Za-z^\d])(?<!\d\.)(?<![A-Za-z]_)(?<![\^_]\{)"
    # A minus sign belongs to the number unless it stands between two terms.
    rf"(?:(?<![\w)\]}}])[-−+])?{_CURRENCY}?[-−]?"
    rf"(?:\\[dtc]?frac\{{-?\d+\}}\{{\d+\}}|(?:\d+\s)?\d+/\d+|{_DIGITS})(?:\s?(?:\\?%|percent\b))?"
)
_LATEX_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|\\.")
_WORD = re.compile(r"(?:^|[\s(*\"'])[^\W\d_]{2,}(?:$|[\s).,:;!?*\"'-])")
_FORMULA = re.compile(r"\\\((.+?)\\\)|\\\[(.+?)\\\]|\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+)(?<!\\)\$", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_EQUALS = re.compile(r"(?<![<>!:\\])=")
_LIST = re.compile(r"[,;](?!\d{3})|\b(?:and|or)\b")

_TO_DROP = re.compile(r"\\[,!;:$]|[$€£¥₹]|\*\*|\^\s*\{?\s*\\circ\s*\}?|°")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_PERCENT = re.compile(r"\s*(?:\\?%|\bpercent(?:age)?\b)$")
_UNIT = re.compile(r"(?<=[\d.])\s+[A-Za-z]{3}[A-Za-z\s.]*$")
# Words after a number that change its value.
_NOT_UNITS = re.compile(
    r"\b(?:pi|sqrt|times|over|dozen|hundred|thousand|million|billion|trillion|infty)\b", re.IGNORECASE
)
_PLAIN = re.compile(r"([-+]?)\s*(?:(?:(\d+)\s+)?(\d+)\s*/\s*(\d+)|(\d{1,3}(?:,\d{3})+|\d+)?(\.\d*)?)")


class PlainNumber(NamedTuple):
    """A number as it was written: `28.5%` is (57/2, decimal, percent)."""

    value: Fraction
    decimal: bool
    percent: bool


def score_math(response: str, label: str) -> float:
    """1.0 when the response's answer equals the label's by the rules of this module, else 0.0.

    Raises:
        ValueError: the label holds no gold answer.
    """
    gold = extract_gold(label)
    if not gold:
        raise ValueError(f"the label {label[:200]!r} holds no answer")
    if response.strip() == gold:
        return 1.0
    answer = extract_answer(response)
    return 0.0 if answer is None else float(same_answer(gold, answer))


def extract_gold(label: str) -> str:
    """The gold answer of a label: its box, else what follows its last `####`, else all of it."""
    boxed = _last_box(label)
    return boxed if boxed else label.rpartition("####")[2].strip()


def extract_answer(response: str) -> str | None:
    """The answer of a response by the rules of this module; None where it holds none."""
    if _BOX.search(response):
        return _last_box(response)
    marked = _after_hashes(response)
    if marked is not None:
        return marked
    text = response.strip()
    if len(text) <= MAX_ANSWER_CHARACTERS and "\\" in text and "\n" not in text and not _has_words(text):
        return text
    return _last_number(text)


def same_answer(gold: str, answer: str) -> bool:
    """Whether an extracted answer equals the gold one. One-way: gold comes first."""
    if gold == answer:
        return True
    if max(len(gold), len(answer)) > MAX_ANSWER_CHARACTERS:
        return False
    gold_number = plain_number(gold)
    answer_number = plain_number(answer)
    if gold_number is not None and answer_number is None:
        answer_number = _right_hand_side(answer)
    if gold_number is not None and answer_number is not None:
        return _same_number(gold_number, answer_number)
    return _verify(gold, answer)


def plain_number(text: str) -> PlainNumber | None:
    r"""The value of an integer, decimal, fraction or mixed number with its currency sign, per cent or unit.

    `1{,}234`, `\$1,234.00`, `\frac12`, `2\frac{1}{2}`, `28 percent`, `18\text{ dollars}`; None for anything else.
    """
    text = _TO_DROP.sub("", text.replace("{,}", ",").replace("−", "-").replace("\\ ", " "))
    text = _TEXT.sub(r" \1", text).strip().rstrip(".,;:")
    text = _FRACTION.sub(lambda found: " {}/{}".format(*(group for group in found.groups() if group)), text)
    without_percent = _PERCENT.sub("", text)
    number = without_percent if _NOT_UNITS.search(without_percent) else _UNIT.sub("", without_percent)
    found = _PLAIN.fullmatch(number.strip())
    if found is None:
        return None
    sign, whole, numerator, denominator, integer, decimals = found.groups()
    if denominator is not None:
        if int(denominator) == 0:
            return None
        value = int(whole or 0) + Fraction(int(numerator), int(denominator))
    elif integer or len(decimals or "") > 1:
        value = Fraction((integer or "0").replace(",", "") + (decimals or ""))
    else:
        return None
    return PlainNumber(-value if sign == "-" else value, bool(decimals), without_percent != text)


def _last_box(text: str) -> str | None:
    """Contents of the last box that is filled and closed, or None."""
    closing = _closing_braces(text)
    for box in reversed(list(_BOX.finditer(text))):
        if box.end() in closing:
            contents = text[box.end() + 1 : closing[box.end()]].strip()
            if contents:
                return contents
        elif number := _NUMBER.match(text, box.end()):
            return number.group()
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """Position of the closing brace for that of every brace which is closed, in one pass; escaped ones do not count."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def _after_hashes(text: str) -> str | None:
    """What follows the last `####` that has an answer after it, or None."""
    for part in reversed(text.split("####")[1:]):
        line = part.lstrip().partition("\n")[0].rstrip()[: MAX_ANSWER_CHARACTERS + 1]
        if line and not _has_words(line):
            return line
        if number := _NUMBER.match(line):
            return number.group()
    return None


def _has_words(text: str) -> bool:
    """Whether words of two or more letters stand outside LaTeX commands and their text arguments."""
    return _WORD.search(_LATEX_COMMAND.sub(" ", text)) is not None


def _last_number(text: str) -> str | None:
    """The last number of a text, or the formula without words that it lies in; None without a number."""
    last = deque(_NUMBER.finditer(text), maxlen=1)
    if not last:
        return None
    number = last.pop()
    # Formulas are looked for near the number only, so that the time stays linear in the length of the text.
    start = max(0, number.start() - MAX_ANSWER_CHARACTERS)
    for formula in _FORMULA.finditer(text, start, number.end() + MAX_ANSWER_CHARACTERS):
        contents = formula.group(formula.lastindex or 0)
        if formula.start() < number.end() <= formula.end() and not _has_words(contents):
            return contents
    return number.group()


def _right_hand_side(text: str) -> PlainNumber | None:
    """The number after the last `=` of `x = 3 + 4 = 7`; None for a list such as `x = 1, y = 2`."""
    parts = _EQUALS.split(text)
    if len(parts) == 1 or _LIST.search("=".join(parts[:-1])):
        return None
    return plain_number(parts[-1])


def _same_number(gold: PlainNumber, answer: PlainNumber) -> bool:
    """Equality of two plain numbers, with the rules for decimals and percentages."""
    readings = [(gold.value, answer.value)]
    if gold.percent and not answer.percent:
        readings.append((gold.value / 100, answer.value))
    elif answer.percent and not gold.percent:
        readings.append((gold.value, answer.value / 100))
    if gold.decimal or answer.decimal:
        readings = [(round(left, ROUNDING_DECIMALS), round(right, ROUNDING_DECIMALS)) for left, right in readings]
    return any(left == right for left, right in readings)


def _verify(gold: str, answer: str) -> bool:
    """math-verify's comparison of two LaTeX expressions, without its timers: signals only work in main threads."""
    from math_verify import verify

    return verify(_parse(gold), _parse(answer), timeout_seconds=None)


# One gold answer meets all samples of its prompt.
@lru_cache(maxsize=256)
def _parse(text: str) -> "list[Basic | MatrixBase | str]":
    """math-verify's reading of one LaTeX expression: sympy's and the normalised text."""
    from math_verify import LatexExtractionConfig, parse

    # It warns in every process that its timers are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    formula = " ".join(text.replace("\\$", "").replace("$", "").split())
    for left, right in (("\\(", "\\)"), ("\\[", "\\]")):
        formula = formula.removeprefix(left).removesuffix(right)
    return parse(f"${formula}$", [LatexExtractionConfig()], parsing_timeout=0)
