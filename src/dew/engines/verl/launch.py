"""A recipe as the command that trains it on verl.

    prepare(run)  ->  Launch(overrides={"data.train_batch_size": 128, ...}, batches, algorithm, notes)

Recipes use TRL's names; `recipe.py` translates the settings that both engines have. Everything else is written in
verl's own keys, under `verl:` in the recipe (nested or dotted) or as `key=value` on the command line, and takes
precedence.
"""

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dew.algorithms import Algorithm
from dew.engines.verl.recipe import DEFAULTS, OWN_REWARD, Batches, Overrides, Recipe, flat, merged
from dew.engines.verl.settings import check
from dew.errors import ConfigError, Problem, did_you_mean
from dew.run.config import Run

MAIN = ("-m", "dew.engines.verl.main")
BARE = re.compile(r"[A-Za-z_/.~][\w/.:~@%+-]*", re.ASCII)
"""Text that hydra reads as it stands; everything else is quoted."""


@dataclass(frozen=True)
class Launch:
    """A run that is ready to start."""

    run: Run
    overrides: Overrides
    batches: Batches
    algorithm: Algorithm
    notes: list[str]
    """Differences from a run on TRL."""

    def __getitem__(self, key: str) -> Any:
        """The value of verl's key, whether or not it is written with a +; None if it is not set."""
        return next((value for name, value in self.overrides.items() if name.lstrip("+") == key), None)

    @property
    def own_reward(self) -> bool:
        """Whether the user's reward function takes the place of the verifier."""
        return bool(self[OWN_REWARD] != DEFAULTS[OWN_REWARD])


def prepare(run: Run, *, resume: bool = False) -> Launch:
    """Translate the run, or raise one error with every problem."""
    recipe = Recipe(run)
    algorithm, batches = recipe.algorithm(), recipe.batches()
    overrides = merged(recipe.overrides(algorithm, batches, resume), flat(run.verl))
    problems = [*recipe.problems, *batches.problems()]
    if problems or algorithm is None:
        raise ConfigError(dict.fromkeys(problems), source=f"{run.source or 'configuration'} on verl")
    unused = [f"not used on verl: {', '.join(recipe.unused)}"] if recipe.unused else []
    return Launch(run, overrides, batches, algorithm, unused + recipe.notes)


def hydra_words(launch: Launch) -> list[str]:
    """The overrides as hydra reads them."""
    return [f"{key}={hydra_text(value)}" for key, value in launch.overrides.items()]


def hydra_text(value: Any) -> str:
    """A value in hydra's grammar."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{hydra_text(str(k))}:{hydra_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra_text, value)) + "]"
    if not isinstance(value, str):
        return str(value)
    if BARE.fullmatch(value) and value.lower() not in ("null", "true", "false", "nan", "inf"):
        return value
    return '"' + re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + m[2].replace('"', '\\"'), value) + '"'


def command(launch: Launch, python: str = sys.executable) -> list[str]:
    return [python, *MAIN, *hydra_words(launch)]


def shell_text(words: list[str]) -> str:
    """The command for a shell, one override per line."""
    head, rest = words[: 1 + len(MAIN)], words[1 + len(MAIN) :]
    return " \\\n  ".join([shlex.join(head), *map(shlex.quote, rest)])


def check_with_verl(launch: Launch) -> bool:
    """Check verl's own configuration with the overrides, as at the start of a run; False if verl is not installed."""
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        return False
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    folder = Path(spec.origin).parent / "trainer" / "config"  # importing verl would take seconds
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        try:
            config = compose("ppo_trainer", overrides=hydra_words(launch))
        except HydraException as error:
            text, new = " ".join(str(error).split()), "A key that verl does not have needs a leading +."
            if not (key := re.match(r"Could not override '(\S+)'", text)):
                raise ConfigError(Problem(f"verl refuses the configuration: {text}")) from None
            near = did_you_mean(key[1], flat(OmegaConf.to_container(compose("ppo_trainer"))), cutoff=0.9)
            raise ConfigError(Problem(f"verl has no key {key[1]!r}.", remedy=f"{near} {new}".lstrip())) from None
    check(config)
    return True
