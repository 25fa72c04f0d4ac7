"""Chain: carry one value through a list of operations.

prompt `17;+38;-9;*2:`    solution `17+38=55;55-9=46;46*2=92`

One slip anywhere and every later value is wrong, so the length sets the difficulty. Values stay between 0
and `ceiling`. A solution has about 60 to 140 characters by default, and up to 200 with steps=(12, 22).
"""

from collections.abc import Hashable
from dataclasses import dataclass
from random import Random

from dew.errors import ConfigError
from dew.tasks.base import Row, Split, distinct, split_of


@dataclass(frozen=True)
class Chain:
    """Problems are held out by their whole list of operations."""

    steps: tuple[int, int] = (8, 16)
    """Fewest and most operations."""
    ceiling: int = 99
    """No value along the way is larger."""

    name = "chain"

    def __post_init__(self) -> None:
        fewest, most = self.steps
        object.__setattr__(self, "steps", (fewest, most))  # a YAML file brings a list
        if not 1 <= fewest <= most:
            raise ConfigError(f"chain steps={self.steps}: write (fewest, most), at least 1, such as (8, 16).")
        if self.ceiling < 2:
            raise ConfigError(f"chain ceiling={self.ceiling}: no room for any step. Known to work: 99.")

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        rng = Random(f"{self}-{split}-{seed}")
        return distinct(lambda r: self._draw(r, split), n, split=split, rng=rng, name=self.name)

    def _draw(self, rng: Random, split: Split) -> tuple[Hashable, Row] | None:
        value = rng.randint(1, self.ceiling)
        operations, solution = [str(value)], []
        for _ in range(rng.randint(*self.steps)):
            op, operand, result = self._step(rng, value)
            operations.append(f"{op}{operand}")
            solution.append(f"{value}{op}{operand}={result}")
            value = result
        prompt = ";".join(operations) + ":"
        if split_of(prompt) != split:
            return None
        return prompt, {"prompt": prompt, "answer": str(value), "solution": ";".join(solution)}

    def _step(self, rng: Random, value: int) -> tuple[str, int, int]:
        """A random operation whose result lies in 0..ceiling."""
        if 0 < value <= self.ceiling // 2 and rng.random() < 1 / 3:
            factor = rng.randint(2, min(9, self.ceiling // value))
            return "*", factor, value * factor
        result = rng.choice([v for v in range(self.ceiling + 1) if v != value])
        return ("+" if result > value else "-"), abs(result - value), result
