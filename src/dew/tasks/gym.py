"""The procedural data sets of reasoning-gym as tasks: `task("reasoning_gym:leg_counting", max_animals=5)`.

The verifier of the same name (`dew.rewards.gym`) scores answers. Needs the extra `gym`.
"""

import ast
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

from dew.errors import ConfigError, Problem, unknown
from dew.tasks.base import Row, Split, check_split, split_of
from dew.tasks.datasets import render

PREFIX = "reasoning_gym:"
CHUNK = 200
"""Problems per data set: the next one has another seed."""
INSTRUCTION = "Write your final answer between <answer> and </answer>."


class Gym:
    """One data set of reasoning-gym. A problem is held out by a hash of its question, so the splits never overlap.

    `graded`: the reward is reasoning-gym's score instead of 1 for a score of 1 and 0 otherwise. `size`: most training
    problems. `template`: as in `dew.tasks.datasets`; by default a chat message that asks for <answer>. Further settings
    are those of the data set.
    """

    def __init__(
        self, name: str, *, graded: bool = False, size: int = 2000, template: str | None = None, **settings: Any
    ) -> None:
        self.name, self._graded, self._size, self._template, self._settings = name, graded, size, template, settings
        render(template or "chat", "")  # raises if it is unknown
        self._dataset(0)

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        """n distinct problems, or fewer if there are no more, determined by the arguments."""
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
            "entry": repr(written),  # tuples and sets stay what they are, and every row has the same type
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
