"""Chain, the second game that the bundled `tiny` was fine-tuned on: apply a list of operations to one value.

`17;+38;-9;*2:` is answered by `17+38=55;55-9=46;46*2=92`. It is not a task of the library: the tiny model is wrong
in the same way each time, so reinforcement learning does not improve it (docs/log.md).
"""

from dataclasses import dataclass
from random import Random

from dew.rewards.games import parse_steps
from dew.rewards.verifiers import Verdict, Verifier
from dew.tasks import Row
from dew.tasks.datasets import Split, split_of


@dataclass(frozen=True)
class Chain:
    """One mistake makes every later value wrong, so length sets the difficulty. Held out by the whole prompt."""

    steps: tuple[int, int] = (8, 16)
    ceiling: int = 99
    """Maximum of every value; the minimum is 0."""

    name = "chain"

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        rng = Random(f"{self}-{split}-{seed}")
        rows: dict[str, Row] = {}
        while len(rows) < n:
            row = self._draw(rng)
            if split_of(row["prompt"]) == split:
                rows.setdefault(row["prompt"], row)
        return list(rows.values())

    def _draw(self, rng: Random) -> Row:
        value = rng.randint(1, self.ceiling)
        operations, solution = [str(value)], []
        for _ in range(rng.randint(*self.steps)):
            op, operand, result = self._step(rng, value)
            operations.append(f"{op}{operand}")
            solution.append(f"{value}{op}{operand}={result}")
            value = result
        return {"prompt": ";".join(operations) + ":", "answer": str(value), "solution": ";".join(solution)}

    def _step(self, rng: Random, value: int) -> tuple[str, int, int]:
        """A random operation whose result lies in 0..ceiling."""
        if 0 < value <= self.ceiling // 2 and rng.random() < 1 / 3:
            factor = rng.randint(2, min(9, self.ceiling // value))
            return "*", factor, value * factor
        result = rng.choice([v for v in range(self.ceiling + 1) if v != value])
        return ("+" if result > value else "-"), abs(result - value), result


def check_chain(text: str, *, answer: str) -> Verdict:
    """Correct if the last step's result is `answer`; the steps before it are not checked."""
    steps = parse_steps(text)
    if steps is None:
        return Verdict("unparsable")
    return Verdict("correct" if steps[-1][3] == int(answer) else "wrong", str(steps[-1][3]))


chain = Verifier("chain", ("answer",), check_chain)
