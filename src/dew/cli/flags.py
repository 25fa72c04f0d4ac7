"""The config of a command: a file or a bundled recipe, with settings from the command line (`--learning_rate 1e-5`)."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dew.errors import ConfigError, Problem, did_you_mean, quoted
from dew.rewards.user_function import is_user_function
from dew.run.config import Run, Settings, flat, make_run, merged, parse_yaml, read_run

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For commands that accept settings as additional flags."""
UNTRUSTED = "Allow only plain training settings in the file; others must also be given as flags."
Untrusted = Annotated[bool, typer.Option("--untrusted", help=UNTRUSTED)]
OVERRIDE = re.compile(r"\+{0,2}\w+(\.\w+)+=.*", re.DOTALL)
NO_VALUE = re.compile(rf"--.*|-[a-zA-Z]|{OVERRIDE.pattern}", re.DOTALL)
Typed = dict[str, str]
"""Name -> text of every setting on the command line; verl's keys as `verl.trainer.nnodes`."""


def recipe_files() -> dict[str, Path]:
    """Return {name: file}. Recipes are inside the package in a wheel, and at the root of a checkout."""
    packaged = Path(__file__).parents[1] / "recipes"
    folder = packaged if packaged.is_dir() else Path(__file__).parents[3] / "recipes"
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.yaml"))}


def recipe_file(name: str, kind: str = "recipe") -> Path:
    """Return the file of a recipe. `kind`: what the name may refer to, for the error message."""
    known = recipe_files()
    if name not in known:
        advice = did_you_mean(name, known) or "`dew recipes` lists the recipes."
        raise ConfigError(Problem(f"There is no {kind} {name!r}.", remedy=advice))
    return known[name]


def load_run(config: Path, words: Sequence[str]) -> tuple[Run, Typed]:
    """Load a file or a bundled recipe with settings from the command line; return the run and these settings."""
    if config.is_dir():
        advice = f"Give a file or a recipe. To resume: dew resume {quoted(config)}; to compare runs: dew report RUN RUN"
        raise ConfigError(Problem(f"{config} is a folder, not a config file.", remedy=advice))
    run = read_run(config if config.exists() else recipe_file(str(config), "config file or recipe"))
    if "actor_rollout_ref" in run.settings:
        start = "python -m dew.engines.verl.main --config-dir FOLDER --config-name NAME"
        what = f"{run.source} is a configuration of verl itself."
        raise ConfigError(Problem(what, remedy=f"Start it with `{start}` (docs/verl.md)."))
    settings, typed = parse_flags(words)
    keys = {**run.to_dict(), **settings}
    make_run(keys, source="command line")  # the file alone had no error
    if "verl" in settings:
        keys["verl"] = merged(flat(run.verl), flat(settings["verl"]))
        if keys["engine"] != "verl":
            what = f"{', '.join(settings['verl']) or 'verl'}: set for verl, but this run trains on {keys['engine']}."
            raise ConfigError(Problem(what, remedy="Add --engine verl, or remove it."), source="command line")
    for name in ("algorithm", "output_dir", "model_name_or_path", "dataset_name"):
        if isinstance(keys.get(name), bool | list | dict):
            problem = Problem(f"{name}: {keys[name]!r} is not a name.", remedy=f"Write --{name} NAME.")
            raise ConfigError(problem, source="command line" if name in typed else run.source)
    for name in ("reward_funcs", "algorithm"):
        if name in keys:
            keys[name] = _located(keys[name], Path("." if name in typed else run.source or ".").parent)
    if (folder := keys.get("output_dir")) is not None:
        text = folder if isinstance(folder, str) else typed.get("output_dir", str(folder))  # `-o 007` is not 7
        keys["output_dir"] = os.path.expanduser(text)
    return make_run(keys, source=run.source), typed


def parse_flags(words: Sequence[str]) -> tuple[Settings, Typed]:
    """Parse command-line words into settings, and return also the text of each.

    `--key value`, `--key=value`, several words for a list, a bare `--key` for true, `--no_key` for false. Hydra's
    `a.b=value` and `+a.b=value` become `{"verl": {"a.b": value}}`. Values are YAML 1.2 scalars, lists or mappings.
    """
    settings: Settings = {}
    typed: Typed = {}
    rest = ["--output_dir" if word in ("-o", "--out") else word for word in words]
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if OVERRIDE.fullmatch(word):
            settings["verl"] = {**settings.get("verl", {}), name: _value(text)}
            typed[f"verl.{name}"] = text
            continue
        if not word.startswith("--"):
            advice = "Write settings as --name value; for verl also as key.key=value."
            raise ConfigError(Problem(f"command line: {word!r} is not understood.", remedy=advice))
        name, texts = name[2:].replace("-", "_"), [text] if equals else []
        while not equals and rest and not NO_VALUE.fullmatch(rest[0]):
            texts.append(rest.pop(0))
        if not texts:
            name, texts = (name[3:], ["false"]) if name.startswith("no_") else (name, ["true"])
        settings[name] = _value(texts[0]) if len(texts) == 1 else [_value(text) for text in texts]
        typed[name] = " ".join(texts)
    return settings, typed


def mapping(text: str | None, flag: str = "--settings", example: str = "{numbers: 3}") -> dict[str, Any]:
    value = parse_yaml(f"settings: {text or '{}'}", flag)["settings"]
    if not isinstance(value, dict):
        raise ConfigError(Problem(f"{flag} {text} is not a mapping.", remedy=f"Write e.g. '{example}'."))
    return value


def _value(text: str) -> Any:
    """Parse a number, true, false, null, a list, a mapping or quoted text; anything else is plain text."""
    try:
        value = parse_yaml(f"value: {text}")["value"]
    except (ConfigError, KeyError):
        return text
    as_typed = isinstance(value, str) and not text.startswith(("'", '"'))
    return text if as_typed or "\n" in text or text.startswith("#") else value


def _located(code: Any, folder: Path) -> Any:
    """Make the path in `file.py:name` absolute, so that `dew resume` finds it from any folder."""
    if isinstance(code, list):
        return [_located(name, folder) for name in code]
    module, _, attribute = str(code).rpartition(":" if ":" in str(code) else ".")
    file = Path(module if module.endswith(".py") else f"{module.replace('.', '/')}.py")
    here, beside = file.is_file() and module.endswith(".py"), not file.exists() and (folder / file).is_file()
    found = (file if here else folder / file).resolve()
    return f"{found}:{attribute}" if is_user_function(str(code)) and (here or beside) else code
