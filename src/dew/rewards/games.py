"""Verifiers of generated problems: countdown, sums, TinyZero's countdown (`equation`) and reasoning-gym's data sets.

Answers to the games are parsed with these grammars; nothing is evaluated as code.

countdown: answer = step (";" step)*    step = number op number "=" number    op = + | - | *
equation: sum = product ([+-] product)*    product = atom ([*/] atom)*    atom = number | "(" sum ")" | "-" atom
"""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

from dew.errors import ConfigError, Problem
from dew.rewards.extract import MAX_LENGTH, after_thinking, find_answer, in_tag, last_boxed
from dew.rewards.normalize import clean, write_number
from dew.rewards.verifiers import Verdict, Verifier

_NUMBER = r"(-?(?:0|[1-9][0-9]{0,8}))"  # without leading zeros, and short enough to parse quickly
_STEP = re.compile(rf"{_NUMBER}([-+*]){_NUMBER}={_NUMBER}")
_TOKEN = re.compile(r"\d{1,9}|[-+*/()]")
_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def parse_steps(text: str) -> list[tuple[int, str, int, int]] | None:
    """Return the steps of an answer as (left, operator, right, result), or None if any part is not a step."""
    matches = [_STEP.fullmatch(part) for part in text.strip().split(";")]
    steps = [(int(m[1]), m[2], int(m[3]), int(m[4])) for m in matches if m]
    return steps if len(steps) == len(matches) else None


def check_countdown(text: str, *, numbers: Sequence[Any], answer: Any) -> Verdict:
    """Correct if every step is right and uses two available numbers, and only `answer` is left at the end.

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
    found = re.findall(r"\d+(?:\.\d+)?", text.replace(",", ""))
    if not found:
        return Verdict("unparsable")
    last = Fraction("0" + found[-1].lstrip("0")[:20])
    right = last == Fraction(str(answer).replace(",", ""))
    return Verdict("correct" if right else "wrong", write_number(last))


def check_equation(text: str, *, numbers: Sequence[Any], answer: Any) -> Verdict:
    """Correct if the expression uses exactly `numbers` and equals `answer`. A trailing `= 98` is ignored."""
    found = find_answer(text)
    if found is None or not found.marked or len(found.text) > 200:
        return Verdict("unparsable")
    expression = re.sub(r"\\(?:left|right|[,;!])", "", clean(found.text).split("=")[0].strip())
    expression = re.sub(r"\\(times|cdot|div) ?", lambda sign: "/" if sign[1] == "div" else "*", expression)
    expression = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))", expression)
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
    """Evaluate the sum, product or atom at the start of `tokens`, and remove its tokens."""
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


# ── reasoning-gym ───────────────────────────────────────────────────────────────────────────────────────────
#
# A score of 1 is correct. Several of its scorers run the model's text as code (`eval`, or sympy's `parse_expr`, which
# uses it). They are replaced here or not supported.

Entry = dict[str, Any]


def _equation(answer: str, entry: Entry) -> float:
    facts = entry["metadata"]
    target = facts.get("target", 24)
    return float(check_equation(f"<answer>{answer}</answer>", numbers=facts["numbers"], answer=target).correct)


OWN: dict[str, Callable[[str, Entry], float]] = {
    **dict.fromkeys(
        # the original of the last accepts any text if the answer is "True" or "False"
        ("string_insertion", "spiral_matrix", "binary_matrix", "game_of_life_halting"),
        lambda answer, entry: float(answer == entry["answer"].strip()),
    ),
    "n_queens": lambda answer, entry: float(answer in map(str.strip, entry["metadata"]["valid_answers"])),
    **dict.fromkeys(("countdown", "puzzle24"), _equation),
}
"""dew's replacements for scorers of reasoning-gym."""
REFUSED = ("polynomial_multiplication", "simple_integration", "intermediate_integration")


@cache
def gym_verifier(name: str) -> Verifier:
    """Return the verifier of a data set, `reasoning_gym:NAME`."""
    dataset = name.partition(":")[2]
    if dataset in REFUSED:
        what = f"The scorer of {name} runs the model's text as code (sympy's parse_expr), so dew does not use it."
        raise ConfigError(Problem(what, remedy="Choose another data set, or write your own reward function."))
    score = OWN.get(dataset)

    def check(text: str, *, entry: str) -> Verdict:
        facts = ast.literal_eval(entry)
        text = in_tag(after_thinking(text))
        answer = (last_boxed(text) or text).strip()
        if not answer or len(answer) > MAX_LENGTH:
            return Verdict("unparsable", value=0.0)
        value = (score or _theirs(dataset))(answer, facts)
        return Verdict("correct" if value >= 1 else "wrong", answer, float(value) if facts["graded"] else None)

    return Verifier(name, ("entry",), check)


@cache
def _theirs(dataset: str) -> Callable[[str, Entry], float]:
    import reasoning_gym

    score = reasoning_gym.create_dataset(dataset, seed=0, size=1).score_answer

    def scored(answer: str, entry: Entry) -> float:
        try:
            return float(score(answer, entry))
        except Exception:  # several scorers fail on answers in an unexpected form
            return 0.0

    return scored
