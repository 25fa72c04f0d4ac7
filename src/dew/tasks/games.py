"""Generated problems: two games, the data sets of reasoning-gym, and the bundled tiny models that play countdown.

countdown            reach a target from a few numbers with + - *     `2,3,5>16:`       `3+5=8;8*2=16`
sums                 add two or more numbers, asked in a chat         `What is 47 + 85?`
reasoning_gym:NAME   a data set of reasoning-gym with its settings; needs the extra `gym`
"""

import ast
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement, count, permutations
from pathlib import Path
from random import Random
from typing import Any

from dew.errors import ConfigError, Problem, unknown, wrong_types
from dew.tasks.datasets import Split, check_split, render, split_of
from dew.tasks.rows import Row

PLAYS: dict[str, dict[str, Any]] = {"tiny": {}, "tiny6": {"numbers": 6, "largest": 9}}
"""The bundled models, with the settings of the countdown that each has learned."""
BUNDLED = {name: Path(__file__).parent / "data" / name for name in PLAYS}
"""Folders of the bundled models, each with a README.md."""
TINY = BUNDLED["tiny"]
MAX_SUMS = 2_000_000
MAX_MISSES = 20_000
"""Stop generating after this many consecutive draws without a new problem."""


def model_folder(name: str) -> str:
    """Return the argument for `from_pretrained`: the folder of a bundled model, or any other name unchanged."""
    return str(BUNDLED.get(name, name))


@dataclass(frozen=True)
class Countdown:
    """Reach a target by using each number exactly once. The split depends only on the numbers, not on order or target.

    A problem is generated from its solution: random numbers and random steps, whose last result is the target.
    """

    numbers: int = 4
    """How many numbers are given; a solution has one step fewer."""
    largest: int = 13
    ceiling: int = 99
    """Maximum of the target and of every result in the solution."""

    name = "countdown"

    def __post_init__(self) -> None:
        if wrong := wrong_types(self):
            raise ConfigError([f"{self.name} {what}" for what in wrong])
        if self.numbers < 2:
            raise ConfigError(Problem(f"numbers={self.numbers}: a step takes two numbers.", remedy="Write 3 to 6."))
        if not 2 <= self.largest <= self.ceiling:
            what = f"countdown largest={self.largest}, ceiling={self.ceiling}: needs 2 ≤ largest ≤ ceiling."
            raise ConfigError(Problem(what, remedy="The defaults are largest=13, ceiling=99."))

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        """Return n distinct problems, or fewer if no more are found, which depend only on the arguments."""
        rng = Random(f"{self}-{check_split(split)}-{seed}")
        rows: dict[Hashable, Row] = {}
        misses = 0
        while len(rows) < n and misses < MAX_MISSES:
            before = len(rows)
            if (drawn := self._draw(rng, split)) is not None:
                rows.setdefault(*drawn)
            misses = misses + 1 if len(rows) == before else 0
        if not rows and n > 0:
            what = f"countdown: no {split.replace('_', '-')} problems exist with these settings."
            raise ConfigError(Problem(what, remedy="The defaults are numbers=4, largest=13, ceiling=99."))
        return list(rows.values())

    def _draw(self, rng: Random, split: Split) -> tuple[Hashable, Row] | None:
        """Draw a random problem: its key and its row, or None if it is in the other split or invalid."""
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
    """Add numbers, for small chat models. The last number in an answer counts. a + b and b + a are in one split."""

    numbers: int = 2
    largest: int = 99
    example: bool = False
    """Whether the chat begins with a solved sum."""
    tuning: bool = False
    """Whether to hold out an eighth of the training problems instead of the test problems, to tune settings on."""

    name = "sums"

    def __post_init__(self) -> None:
        if wrong := wrong_types(self):
            raise ConfigError([f"{self.name} {what}" for what in wrong])
        if self.numbers < 1 or self.largest < 1:
            raise ConfigError(f"sums numbers={self.numbers}, largest={self.largest}: give at least 1.")

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        """Return n distinct problems, or all if there are fewer, in an order that depends only on the seed."""
        check_split(split)
        if self.largest**self.numbers > MAX_SUMS:
            what = f"sums numbers={self.numbers}, largest={self.largest}: more than {MAX_SUMS:,} problems."
            raise ConfigError(Problem(what, remedy="Lower one of them."))
        keys: Iterable[tuple[int, ...]] = combinations_with_replacement(range(1, self.largest + 1), self.numbers)
        if self.tuning:
            keys = (key for key in keys if split_of(key) == "train")
        more = ("tuning",) if self.tuning else ()
        found = sorted({terms for key in keys if split_of((*key, *more)) == split for terms in permutations(key)})
        Random(f"Sums(largest={self.largest})-{seed}").shuffle(found)
        return [self._row(terms) for terms in found[: max(0, n)]]

    def _row(self, terms: tuple[int, ...]) -> Row:
        text, total = " + ".join(map(str, terms)), sum(terms)
        solved = [{"role": "user", "content": "What is 23 + 45?"}, {"role": "assistant", "content": "23 + 45 = 68"}]
        prompt = [*(solved if self.example else []), {"role": "user", "content": f"What is {text}?"}]
        return {"prompt": prompt, "answer": str(total), "solution": f"{text} = {total}"}


# ── reasoning-gym ───────────────────────────────────────────────────────────────────────────────────────────
PREFIX = "reasoning_gym:"
CHUNK = 200
"""Number of problems generated with one seed, before the next seed is used."""
INSTRUCTION = "Write your final answer between <answer> and </answer>."


class Gym:
    """One data set of reasoning-gym. Problems are held out by a hash of their question, so the splits never overlap.

    `graded`: the reward is reasoning-gym's score instead of 1 for a score of 1 and 0 otherwise. `size`: maximum number
    of training problems. `template`: as in `dew.tasks.datasets` (default: a chat message that asks for <answer>). Other
    settings are passed to the data set.
    """

    def __init__(
        self, name: str, *, graded: bool = False, size: int = 2000, template: str | None = None, **settings: Any
    ) -> None:
        self.name, self._graded, self._size, self._template, self._settings = name, graded, size, template, settings
        render(template or "chat", "")  # raises if it is unknown
        self._dataset(0)

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        """Return n distinct problems, or fewer if there are no more, which depend only on the arguments."""
        check_split(split)
        rows: dict[str, Row] = {}
        last = 0
        for i, entry in self._entries(seed):
            if len(rows) >= (min(n, self._size) if split == "train" else n) or i - last > 10 * CHUNK:
                break
            if split_of(question := entry["question"]) == split and question not in rows:
                rows[question], last = self._row(entry), i
        return list(rows.values())

    def _entries(self, seed: int) -> Iterator[tuple[int, dict[str, Any]]]:
        seeds = Random(f"{self.name}-{seed}")
        for start in count(0, CHUNK):
            yield from enumerate(self._dataset(seeds.randrange(2**31)), start)

    def _row(self, entry: dict[str, Any]) -> Row:
        question, plain = entry["question"], {k: v for k, v in entry["metadata"].items() if _is_plain(v)}
        prompt: Any = [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}]
        written = {**entry, "metadata": plain, "graded": self._graded}
        return {
            "prompt": prompt if self._template is None else render(self._template, question),
            "problem": question,
            "answer": entry["answer"],
            "entry": repr(written),  # preserves tuples and sets, and every row has the same type
        }

    def _dataset(self, seed: int) -> Any:
        name = self.name.removeprefix(PREFIX)
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError:
            what = f"The task {self.name} needs reasoning-gym."
            raise ConfigError(Problem(what, remedy="Run: pip install 'dew-rl[gym]'.")) from None
        if name not in DATASETS:
            raise ConfigError(unknown(f"reasoning-gym has no data set {name!r}.", name, DATASETS))
        try:
            return reasoning_gym.create_dataset(name, seed=seed, size=CHUNK, **self._settings)
        except (TypeError, AssertionError, ValueError) as error:
            settings = ", ".join(x for x in DATASETS[name][1].__dataclass_fields__ if x not in ("seed", "size"))
            remedy = f"Its settings are those of reasoning-gym: {settings}."
            raise ConfigError(Problem(f"Task {self.name}: {error}.", remedy=remedy)) from None


def _is_plain(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False
