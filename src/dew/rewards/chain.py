"""Chain: carry a value through a list of operations; only the last value is judged."""

from dew.rewards.steps import read_steps
from dew.rewards.verdict import Verdict, Verifier


def check(text: str, *, answer: str) -> Verdict:
    """Correct if the last step's result is `answer`. The steps before it are the model's own business."""
    steps = read_steps(text)
    if steps is None:
        return Verdict("unparsable")
    result = str(steps[-1].result)
    return Verdict("correct" if result == answer else "wrong", result)


chain = Verifier("chain", ("answer",), check)
