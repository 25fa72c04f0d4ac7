"""A reward function of one's own, by import path or file: `my_package.rewards:score`, `rewards.py:score`."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from dew.errors import ConfigError, RewardError
from dew.rewards.verdict import Completion


@dataclass(frozen=True)
class OwnReward:
    """A user's function, called as TRL calls it and checked on the way back."""

    name: str
    function: Callable[..., Any]

    @property
    def __name__(self) -> str:  # what TRL calls the reward in its logs
        return self.name

    def __call__(self, completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        try:
            rewards = self.function(completions=completions, **columns)
        except Exception as error:
            raise RewardError(
                f"The reward {self.name} failed: {type(error).__name__}: {error}. It is called as "
                f"{self.name}(completions=[...], {', '.join(f'{c}=[...]' for c in columns)}) and returns a number each."
            ) from error
        return self._checked(rewards, len(completions))

    def _checked(self, rewards: Any, n: int) -> list[float | None]:
        try:
            found = list(rewards)
        except TypeError:
            raise RewardError(
                f"The reward {self.name} returned {rewards!r}: return a list, one number per completion."
            ) from None
        if len(found) != n:
            raise RewardError(f"The reward {self.name} returned {len(found)} rewards for {n} completions.")
        for i, reward in enumerate(found):
            if reward is None:  # TRL: this reward has nothing to say about this row
                continue
            try:
                found[i] = float(reward)
            except (TypeError, ValueError):
                found[i] = math.nan
            if not math.isfinite(found[i]):
                raise RewardError(
                    f"The reward {self.name} returned {reward!r} for completion {i}: return a finite number, "
                    "or None where it does not apply."
                )
        return found


def load_reward(path: str) -> OwnReward:
    """The function behind `module:function` or `file.py:function`."""
    where, _, name = path.rpartition(":")
    if not where or not name.isidentifier():
        raise ConfigError(f"reward {path!r}: write module:function, or file.py:function.")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(f"reward {path!r}: {where} has no function {name!r}. It has: {', '.join(there) or 'none'}.")
    return OwnReward(name, function)


def _from_module(name: str) -> ModuleType:
    try:
        return import_module(name)
    except Exception as error:
        raise ConfigError(
            f"reward module {name!r} cannot be imported: {type(error).__name__}: {error}. "
            "Is it installed, or on PYTHONPATH? A file is given with its ending: file.py:function."
        ) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"reward file {str(path)!r}: there is no such file (looked from {Path.cwd()}).")
    spec = spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    beside = str(path.parent.resolve())  # what the file imports from its own folder
    sys.path.insert(0, beside)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"reward file {str(path)!r} fails to load: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.remove(beside)
    return module
