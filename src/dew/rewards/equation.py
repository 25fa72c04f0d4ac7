"""TinyZero's countdown: one equation in `<answer>` tags, each number used exactly once.

sum = product ([+-] product)*      product = atom ([*/] atom)*      atom = number | "(" sum ")" | "-" atom

Read by that grammar into exact fractions; nothing is evaluated as code.
"""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from dew.rewards.answers import find_answer
from dew.rewards.verdict import Verdict, Verifier

LONGEST = 200
_TOKEN = re.compile(r"\s*(\d{1,9}|[-+*/()])")


class _Unreadable(Exception):
    """Not an equation, or a division by zero."""


def check(text: str, *, numbers: Sequence[int], answer: Any) -> Verdict:
    """Correct if the expression uses exactly `numbers` and its value is `answer`. `= 98` at its end is ignored."""
    found = find_answer(text)
    if found is None or not found.marked or len(found.text) > LONGEST:
        return Verdict("unparsable")
    expression = (
        found.text.split("=")[0].strip().strip("$` ").replace("×", "*").replace("÷", "/").replace(r"\times", "*")
    )
    try:
        value, used = _evaluate(expression)
    except _Unreadable:
        return Verdict("unparsable", expression or None)
    right = value == Fraction(str(answer)) and used == Counter(int(n) for n in numbers)
    return Verdict("correct" if right else "wrong", re.sub(r"\s", "", expression))


def _evaluate(expression: str) -> tuple[Fraction, Counter[int]]:
    """(value, numbers used)."""
    tokens, at = [], 0
    while at < len(expression.rstrip()):
        match = _TOKEN.match(expression, at)
        if not match:
            raise _Unreadable
        tokens.append(match[1])
        at = match.end()
    tokens.append("")
    value = _sum(tokens)
    if tokens != [""]:
        raise _Unreadable
    return value, Counter(int(n) for n in re.findall(r"\d+", expression))


def _sum(tokens: list[str]) -> Fraction:
    value = _product(tokens)
    while tokens[0] in ("+", "-"):
        sign = tokens.pop(0)
        value = value + _product(tokens) if sign == "+" else value - _product(tokens)
    return value


def _product(tokens: list[str]) -> Fraction:
    value = _atom(tokens)
    while tokens[0] in ("*", "/"):
        sign, other = tokens.pop(0), _atom(tokens)
        if sign == "/" and other == 0:
            raise _Unreadable
        value = value * other if sign == "*" else value / other
    return value


def _atom(tokens: list[str]) -> Fraction:
    token = tokens.pop(0) if tokens[0] else ""
    if token.isdecimal():
        return Fraction(token)
    if token == "-":
        return -_atom(tokens)
    if token == "(":
        value = _sum(tokens)
        if tokens[0] == ")":
            tokens.pop(0)
            return value
    raise _Unreadable


equation = Verifier("equation", ("numbers", "answer"), check)
