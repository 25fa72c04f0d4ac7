"""Words of a command line: TRL's flags and hydra's overrides, read and written."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dew.config import Run, check_keys, parse_yaml
from dew.engines.permission import check_permission
from dew.engines.verl.keys import KNOWN
from dew.errors import ConfigError

Overrides = dict[str, Any]
"""verl's key -> value; a leading + where verl's configuration has no such key."""

BARE = re.compile(r"[A-Za-z_/.~][\w/.:~@%+-]*", re.ASCII)
"""Text that hydra reads as it stands; everything else goes into quotes."""


def flat(nested: Mapping[str, Any], above: str = "") -> Overrides:
    """{"trainer": {"nnodes": 2}} and {"trainer.nnodes": 2} -> {"trainer.nnodes": 2}; an empty mapping is a value."""
    found: Overrides = {}
    for key, value in nested.items():
        name = f"{above}{key}"
        found.update(flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value})
    return found


def merged(translated: Overrides, own: Overrides) -> Overrides:
    """The user's word in place of ours, whether or not either has a +."""
    given = {key.lstrip("+") for key in own}
    return {**{key: value for key, value in translated.items() if key.lstrip("+") not in given}, **own}


def override(key: str, value: Any) -> str:
    return f"{key}={spelled(value)}"


def spelled(value: Any) -> str:
    """A value in hydra's grammar."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{spelled(str(k))}:{spelled(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(spelled, value)) + "]"
    if not isinstance(value, str):
        return str(value)
    if BARE.fullmatch(value) and value.lower() not in ("null", "true", "false", "nan", "inf"):
        return value
    return '"' + re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + m[2].replace('"', '\\"'), value) + '"'


def with_words(run: Run, words: Sequence[str], untrusted: bool = False) -> Run:
    """Flags (`--learning_rate 1e-5`) change the recipe's settings, hydra's words (`trainer.nnodes=8`) its `verl:`.

    `untrusted`: see engines/permission.py.
    """
    typed = [word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")]
    check_permission(run, typed, untrusted)
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
    check_keys([name], KNOWN, source="command line")
    read = [_value(text, word) for text in values]
    return name, True if not read else read[0] if len(read) == 1 else read


def _value(text: str, word: str) -> Any:
    return parse_yaml(f"value: {text}", word)["value"]


def _is_override(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and "." in key and not word.startswith("{")
