"""Answers written as steps, `3+5=8;8*2=16`: read by a grammar, never evaluated as code.

answer = step (";" step)*      step = number op number "=" number      op = + | - | *
"""

import operator
import re
from dataclasses import dataclass

_NUMBER = r"(-?(?:0|[1-9][0-9]{0,8}))"  # one spelling per number, and none that costs time to read
_STEP = re.compile(rf"{_NUMBER}([-+*]){_NUMBER}={_NUMBER}")
_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True)
class Step:
    left: int
    op: str
    right: int
    result: int

    @property
    def holds(self) -> bool:
        return _APPLY[self.op](self.left, self.right) == self.result


def read_steps(text: str) -> list[Step] | None:
    """The steps of an answer, or None if any of it is not a step. Outer white space does not count."""
    found = [_STEP.fullmatch(part) for part in text.strip().split(";")]
    matches = [m for m in found if m]
    if len(matches) < len(found):
        return None
    return [Step(int(m[1]), m[2], int(m[3]), int(m[4])) for m in matches]
