"""A recipe's settings with TRL's defaults, read with every problem collected."""

import json
from typing import Any

from dew.algorithms import Algorithm, get_algorithm
from dew.config import Run
from dew.engines.verl.keys import DEFAULTS, OUTCOME, REFUSED
from dew.engines.verl.words import Overrides
from dew.errors import ConfigError


class Reader:
    """The recipe's settings with TRL's defaults; collects problems and notes instead of stopping at the first."""

    def __init__(self, run: Run, own: Overrides) -> None:
        self.run, self.given = run, run.settings
        self.own = {key.lstrip("+"): value for key, value in own.items()}
        self.problems: list[str] = []
        self.notes: list[str] = []

    def __call__(self, name: str, kind: type | tuple[type, ...] | None = None) -> Any:
        value = self.given.get(name)
        if value is None:
            return DEFAULTS.get(name)
        if kind is not None and not _is(value, kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            self.problems.append(f"{name}={value!r}: expected {' or '.join(k.__name__ for k in kinds)}.")
            return DEFAULTS.get(name)
        return value

    def number(self, name: str) -> Any:
        return self(name, (int, float))

    def count(self, name: str) -> int:
        """A whole number of at least 1."""
        value = self(name, int)
        if value is not None and value >= 1:
            return int(value)
        if value is not None:
            self.problems.append(f"{name}={value}: at least 1.")
        return 1

    def whole(self, key: str, default: int) -> int:
        """A whole number under `verl:`."""
        value = self.own.get(key, default)
        if not _is(value, int) or value < 1:
            self.problems.append(f"{key}={value!r}: a whole number of at least 1.")
            return default
        return int(value)

    def algorithm(self) -> Algorithm | None:
        name, settings = self("algorithm", str), self("algorithm_kwargs") or {}
        if isinstance(settings, str):
            try:
                settings = json.loads(settings)
            except ValueError:
                settings = None
        if not isinstance(settings, dict):
            self.problems.append("algorithm_kwargs: expected settings such as {alpha2: 0.2}.")
            return None
        try:
            return get_algorithm(name, **{"max_tokens": self("max_completion_length", int), **settings})
        except ConfigError as error:
            self.problems += str(error).splitlines()
            return None

    def refuse(self) -> None:
        """Name every setting that verl cannot follow."""
        for name, (neutral, instead) in REFUSED.items():
            value = self.given.get(name)
            if value is None or value in neutral:
                continue
            if name == "reward_funcs" and "reward.custom_reward_function.path" in self.own:
                continue
            self.problems.append(f"{name}={value!r}: {instead}.")
        if not self("model_name_or_path"):
            self.problems.append("model_name_or_path is missing. Name a model folder, a hub model, or `tiny`.")
        if self.run.task is None:
            self.problems.append(
                "task is missing: verl reads the problems that dew prepares. Write e.g. task: dapo17k."
            )
        outcome = self.given.get(OUTCOME)
        if outcome is not None and outcome != self.run.verifier and self.run.task not in (outcome, None):
            self.notes.append(f"{OUTCOME}={outcome!r}: on verl the verifier decides")


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
