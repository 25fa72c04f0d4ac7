"""Flags of a command line applied to a run."""

from collections.abc import Collection, Sequence
from typing import Any

from dew.config import Run, check_keys, parse_yaml
from dew.engines.permission import check_permission
from dew.engines.verl.recipe import SHARED, flat, merged
from dew.errors import ConfigError


def with_words(run: Run, words: Sequence[str], allowed: Collection[str] = ()) -> Run:
    """Flags (`--learning_rate 1e-5`) change the recipe's settings, hydra's words (`trainer.nnodes=8`) its `verl:`.

    `allowed` names what the file may bring about beyond training (engines/permission.py).
    """
    typed = [word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")]
    check_permission(run, typed, allowed)
    settings, verl = dict(run.settings), flat(run.verl)
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            settings.update([_flag(word, rest)])
        elif _is_override(word):
            key, _, value = word.partition("=")
            verl = merged(verl, {key: _value(value, word)})
        else:
            raise ConfigError(f"command line: {word!r} is not understood. Write --setting value, or verls.key=value.")
    return Run(**{**vars(run), "settings": settings, "verl": verl})


def _flag(word: str, rest: list[str]) -> tuple[str, Any]:
    """`--name value ...`, `--name=value`, `--name` for true, `--no_name` for false; takes its values off the rest."""
    name, equals, value = word[2:].partition("=")
    name, values = name.replace("-", "_"), [value] if equals else []
    while not equals and rest and not rest[0].startswith("--") and not _is_override(rest[0]):
        values.append(rest.pop(0))
    if not values and name.startswith("no_"):
        name, values = name.removeprefix("no_"), ["false"]
    check_keys([name], SHARED, source="command line")
    read = [_value(text, word) for text in values]
    return name, True if not read else read[0] if len(read) == 1 else read


def _value(text: str, word: str) -> Any:
    return parse_yaml(f"value: {text}", word)["value"]


def _is_override(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and "." in key and not word.startswith("{")
