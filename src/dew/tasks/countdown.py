"""Countdown: reach a target from a few numbers with + - *, in steps.

prompt `2,3,5>16:`    one of its solutions `3+5=8;8*2=16`

Every number is used exactly once. Drawn by playing the game backwards: random numbers, random steps, and
whatever comes out last is the target. So each problem can be solved, and its solution is a demonstration.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from random import Random

from dew.errors import ConfigError
from dew.tasks.base import Row, Split, distinct, split_of


@dataclass(frozen=True)
class Countdown:
    """Problems are held out by their numbers: those met in training never come up in held-out problems."""

    numbers: int = 4
    """How many numbers are given; a solution has one step less."""
    largest: int = 13
    """The numbers are drawn from 1 to this."""
    ceiling: int = 99
    """No demonstrated result, and no target, is larger."""

    name = "countdown"

    def __post_init__(self) -> None:
        if self.numbers < 2:
            raise ConfigError(f"countdown numbers={self.numbers}: a step takes two numbers. Write 3 to 6.")
        if not 2 <= self.largest <= self.ceiling:
            raise ConfigError(
                f"countdown largest={self.largest}, ceiling={self.ceiling}: numbers run from 1 to `largest`, "
                "which is at least 2 and at most `ceiling`. Known to work: largest=13, ceiling=99."
            )

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        rng = Random(f"{self}-{split}-{seed}")
        return distinct(lambda r: self._draw(r, split), n, split=split, rng=rng, name=self.name)

    def _draw(self, rng: Random, split: Split) -> tuple[Hashable, Row] | None:
        numbers = [rng.randint(1, self.largest) for _ in range(self.numbers)]
        identity = tuple(sorted(numbers))
        if split_of(identity) != split:
            return None
        steps = []
        pool = list(numbers)
        while len(pool) > 1:
            left, right = sorted((pool.pop(rng.randrange(len(pool))) for _ in range(2)), reverse=True)
            op, result = rng.choice((("+", left + right), ("-", left - right), ("*", left * right)))
            if not 0 < result <= self.ceiling:
                return None
            steps.append(f"{left}{op}{right}={result}")
            pool.append(result)
        target = pool[0]
        row = {
            "prompt": f"{','.join(map(str, numbers))}>{target}:",
            "answer": str(target),
            "numbers": numbers,
            "solution": ";".join(steps),
        }
        return (identity, target), row
