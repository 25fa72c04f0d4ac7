"""Verifiers of the arithmetic games: countdown, sums, and TinyZero's countdown (`equation`).

Answers are parsed by these grammars; nothing is evaluated as code.

countdown: answer = step (";" step)*    step = number op number "=" number    op = + | - | *
equation: sum = product ([+-] product)*    product = atom ([*/] atom)*    atom = number | "(" sum ")" | "-" atom
"""

import operator
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from dew.rewards.extract import find_answer
from dew.rewards.verifiers import Verdict, Verifier

_NUMBER = r"(-?(?:0|[1-9][0-9]{0,8}))"  # one spelling per number, and short enough to parse quickly
_STEP = re.compile(rf"{_NUMBER}([-+*]){_NUMBER}={_NUMBER}")
_TOKEN = re.compile(r"\d{1,9}|[-+*/()]")
_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def parse_steps(text: str) -> list[tuple[int, str, int, int]] | None:
    """The steps of an answer, each (left, operator, right, result); None if any part is not a step."""
    matches = [_STEP.fullmatch(part) for part in text.strip().split(";")]
    steps = [(int(m[1]), m[2], int(m[3]), int(m[4])) for m in matches if m]
    return steps if len(steps) == len(matches) else None


def check_countdown(text: str, *, numbers: Sequence[Any], answer: Any) -> Verdict:
    """Correct if every step holds and uses two available numbers, and only `answer` is left at the end.

    A step's result can be used once by a later step, like a given number.
    """
    steps = parse_steps(text)
    if steps is None:
        return Verdict("unparsable")
    available = Counter(int(n) for n in numbers)
    for left, op, right, result in steps:
        available.subtract((left, right))
        if _APPLY[op](left, right) != result or min(available.values()) < 0:
            return Verdict("wrong", text.strip())
        available[result] += 1
    reached = +available == Counter([int(answer)])
    return Verdict("correct" if reached else "wrong", text.strip())


def check_sum(text: str, *, answer: Any) -> Verdict:
    """Correct if the last number of the text is `answer`."""
    found = re.findall(r"\d+", text.replace(",", ""))
    if not found:
        return Verdict("unparsable")
    last = found[-1].lstrip("0")[:20]
    return Verdict("correct" if last == str(answer) else "wrong", last)


def check_equation(text: str, *, numbers: Sequence[Any], answer: Any) -> Verdict:
    """Correct if the expression uses exactly `numbers` and equals `answer`. A trailing `= 98` is ignored."""
    found = find_answer(text)
    if found is None or not found.marked or len(found.text) > 200:
        return Verdict("unparsable")
    expression = found.text.split("=")[0].strip().strip("$` ")
    expression = expression.replace("×", "*").replace("÷", "/").replace(r"\times", "*")
    tokens = _TOKEN.findall(expression)
    spelled = re.sub(r"\s", "", expression)
    try:
        value = _evaluate(rest := [*tokens, ""])
        if rest != [""] or "".join(tokens) != spelled:
            raise ValueError("not one expression")
    except (ValueError, ZeroDivisionError):
        return Verdict("unparsable", expression or None)
    used = Counter(int(token) for token in tokens if token.isdecimal())
    right = value == Fraction(str(answer)) and used == Counter(int(n) for n in numbers)
    return Verdict("correct" if right else "wrong", spelled)


def _evaluate(tokens: list[str], operators: tuple[str, ...] = ("+-", "*/")) -> Fraction:
    """The value of the sum, product or atom that `tokens` start with; its tokens are removed."""
    if operators:
        value = _evaluate(tokens, operators[1:])
        while tokens[0] and tokens[0] in operators[0]:
            value = _APPLY[tokens.pop(0)](value, _evaluate(tokens, operators[1:]))
        return value
    token = tokens.pop(0) if tokens[0] else ""
    if token == "-":
        return -_evaluate(tokens, ())
    if token == "(":
        value = _evaluate(tokens)
        if tokens[0] == ")":
            tokens.pop(0)
            return value
    if token.isdecimal():
        return Fraction(token)
    raise ValueError(f"unexpected {token!r}")


countdown = Verifier("countdown", ("numbers", "answer"), check_countdown)
sums = Verifier("sums", ("answer",), check_sum)
equation = Verifier("equation", ("numbers", "answer"), check_equation)
