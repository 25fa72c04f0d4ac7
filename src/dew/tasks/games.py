"""The built-in games, whose problems are generated, and the bundled tiny models that were fine-tuned on countdown.

countdown   reach a target from a few numbers with + - *     `2,3,5>16:`       `3+5=8;8*2=16`
sums        add two numbers, asked in a chat                 `What is 47 + 85?`
"""

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from dew.errors import ConfigError, Problem
from dew.tasks.base import Row, Split, check_split, split_of

BUNDLED = {name: Path(__file__).parent / "data" / name for name in ("tiny", "tiny6")}
"""The bundled models; the README.md in each folder describes it."""
TINY = BUNDLED["tiny"]
MAX_MISSES = 20_000
"""Stop generating after this many draws in a row without a new problem."""


def model_folder(name: str) -> str:
    """The argument for `from_pretrained`: the folder of a bundled model, any other name unchanged."""
    return str(BUNDLED.get(name, name))


@dataclass(frozen=True)
class Countdown:
    """Every number is used exactly once. The split depends on the numbers alone, regardless of order and target.

    A problem is generated from its solution: random numbers, random steps, and the last result is the target.
    """

    numbers: int = 4
    """How many numbers are given; a solution has one step fewer."""
    largest: int = 13
    ceiling: int = 99
    """Maximum of the target and of every result in the solution."""

    name = "countdown"

    def __post_init__(self) -> None:
        if self.numbers < 2:
            raise ConfigError(Problem(f"numbers={self.numbers}: a step takes two numbers.", remedy="Write 3 to 6."))
        if not 2 <= self.largest <= self.ceiling:
            what = f"countdown largest={self.largest}, ceiling={self.ceiling}: needs 2 ≤ largest ≤ ceiling."
            raise ConfigError(Problem(what, remedy="The defaults are largest=13, ceiling=99."))

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        """n distinct problems, determined by the arguments; fewer rows are a prefix of more."""
        rng = Random(f"{self}-{check_split(split)}-{seed}")
        rows: dict[Hashable, Row] = {}
        misses = 0
        while len(rows) < n and misses < MAX_MISSES:
            before = len(rows)
            if (drawn := self._draw(rng, split)) is not None:
                rows.setdefault(*drawn)
            misses = misses + 1 if len(rows) == before else 0
        if len(rows) < n:
            what = f"only {len(rows)} of {n} distinct {split.replace('_', '-')} problems exist with these settings."
            raise ConfigError(Problem(f"countdown: {what}", remedy="Ask for fewer, or change them."))
        return list(rows.values())

    def _draw(self, rng: Random, split: Split) -> tuple[Hashable, Row] | None:
        """What identifies a random problem, and its row; None if it belongs to the other split or is invalid."""
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
        prompt = f"{','.join(map(str, numbers))}>{target}:"
        row = {"prompt": prompt, "answer": str(target), "numbers": numbers, "solution": ";".join(steps)}
        return (identity, target), row


@dataclass(frozen=True)
class Sums:
    """For small chat models: the last number of an answer counts. Held out by the two numbers in any order."""

    largest: int = 99

    name = "sums"

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        """n distinct problems, or all if there are fewer, in an order that depends only on the seed."""
        check_split(split)
        pairs = [(a, b) for a in range(1, self.largest + 1) for b in range(1, self.largest + 1)]
        pairs = [pair for pair in pairs if split_of(tuple(sorted(pair))) == split]
        Random(f"{self}-{seed}").shuffle(pairs)
        return [self._row(*pair) for pair in pairs[: max(0, n)]]

    def _row(self, a: int, b: int) -> Row:
        prompt = [{"role": "user", "content": f"What is {a} + {b}?"}]
        return {"prompt": prompt, "answer": str(a + b), "solution": f"{a} + {b} = {a + b}"}
