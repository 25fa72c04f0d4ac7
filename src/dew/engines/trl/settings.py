"""From a run's settings to TRL's dataclasses, through TRL's own parser."""

import argparse
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import Field, dataclass, fields, replace
from typing import Any

import torch
from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from dew.engines.trl.config import DewConfig
from dew.errors import ConfigError, Problem, did_you_mean
from dew.run.config import Run, check_keys
from dew.run.permission import check_permission


@dataclass(frozen=True)
class Parsed:
    """A run as TRL's dataclasses."""

    run: Run
    script: Any
    args: DewConfig
    model: Any
    mixture: Any
    """TRL's `datasets:`, a list of data sets to mix."""

    @property
    def data(self) -> str:
        """What the run trains on, for messages."""
        mixed = ", ".join(source.path for source in self.mixture.datasets)
        return self.run.task or mixed or self.script.dataset_name or ""


CLASSES = (GRPOScriptArguments, DewConfig, ModelConfig, DatasetMixtureConfig)
"""The dataclasses of all settings."""


def setting_fields() -> list[Field[Any]]:
    return [f for kind in CLASSES for f in fields(kind) if f.init]


def parse(run: Run, typed: Mapping[str, str] | None = None, *, dry: bool = False, untrusted: bool = False) -> Parsed:
    """TRL's dataclasses for a run's settings.

    `typed`: which of them were typed on the command line, and the text. `dry` accepts a config for a GPU on a machine
    that has none. `untrusted`: see engines/permission.py.
    """
    typed, file = typed or {}, run.source or "config"
    known = [f.name for f in setting_fields()]
    check_keys([name for name in run.settings if name in typed], known, source="command line")
    check_keys(run.settings, known, source=file)
    both = f"{file} with the command line" if typed else file
    check_permission(run, typed, untrusted)
    run.set_environment()
    parser = TrlParser(CLASSES, exit_on_error=False)
    actions = {action.dest: action for action in reversed(parser._actions)}  # --x, not its --no_x
    settings, problems, wrong = {}, [], set()
    for name, value in run.settings.items():
        try:
            settings[name] = _convert(parser, actions[name], value, typed.get(name))
        except argparse.ArgumentError as error:
            advice = did_you_mean(str(value), map(str, actions[name].choices or ()))
            problems.append(Problem(f"{name}: {error.message}.", remedy=advice))
            wrong.add("command line" if name in typed else file)
    if problems:
        raise ConfigError(problems, source=wrong.pop() if len(wrong) == 1 else both)
    parser.set_defaults_with_config(**deepcopy(settings))  # TRL changes `datasets` in place
    if dry and not torch.cuda.is_available():
        parser.set_defaults_with_config(use_cpu=True)
    try:
        script, args, model, mixture = parser.parse_args_into_dataclasses(args=[], look_for_args_file=False)
    except ConfigError as error:
        raise ConfigError(error.problems, source=both) from None
    except Exception as error:  # of a dozen kinds, from TRL, transformers, accelerate and their dependencies
        kind = "" if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: "
        raise ConfigError(f"{kind}{error}", source=both) from error
    if not model.model_name_or_path:
        advice = "Name a model folder, a hub model, or `tiny`, the model that comes with dew."
        raise ConfigError(Problem("model_name_or_path is missing.", remedy=advice), source=file)
    parsed = Parsed(replace(run, settings=settings), script, args, model, mixture)
    if not parsed.data:
        remedy = "Write `task: countdown` (or a .jsonl file) or TRL's `dataset_name:` or `datasets:`."
        raise ConfigError(Problem("nothing to train on.", remedy=remedy), source=file)
    return parsed


def _convert(parser: Any, action: Any, value: Any, text: str | None) -> Any:
    """One value in its type; `text` is what was typed for it. Mappings and unusual types are left to TRL."""
    kind = action.type.__name__  # TRL wraps some types
    simple = action.choices or kind in ("int", "float", "str", "string_to_bool")
    if value is None or isinstance(value, Mapping) or not simple:
        return value
    if action.nargs == "+":
        return parser._get_values(action, [str(x) for x in (value if isinstance(value, list) else [value])])
    if kind == "str" and not action.choices:
        return value if isinstance(value, str | bool | list) else text or str(value)  # --run_name 1.10 is text
    if kind == "int" and isinstance(value, float) and value.is_integer():
        return int(value)
    return parser._get_values(action, [str(value)])
