"""Countdown: reach the target from the given numbers, each used exactly once."""

from collections import Counter
from collections.abc import Sequence

from dew.rewards.steps import read_steps
from dew.rewards.verdict import Verdict, Verifier


def check(text: str, *, numbers: Sequence[int], answer: str) -> Verdict:
    """Correct if every step holds, takes two numbers that are still there, and the last one left is `answer`.

    A step's result may be taken once by a later step, like a number that was given.
    """
    steps = read_steps(text)
    if steps is None:
        return Verdict("unparsable")
    there = Counter(numbers)
    for step in steps:
        there.subtract((step.left, step.right))
        if not step.holds or min(there.values()) < 0:
            return Verdict("wrong", text.strip())
        there[step.result] += 1
    reached = +there == Counter([int(answer)])
    return Verdict("correct" if reached else "wrong", text.strip())


countdown = Verifier("countdown", ("numbers", "answer"), check)
