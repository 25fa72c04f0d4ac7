"""A run, as a file describes it: what dew knows itself, and what it hands on to the engine.

Files are YAML, flat, and may be any GRPO configuration of TRL. Keys of dew's own:

    engine          trl (default) or verl
    task            countdown, chain, a named data set, or a file of problems; instead of dataset_name
    task_settings   settings of that task
    problems        how many problems of the task to train on
    verifier        what judges answers, if not the task's own
    scores          evaluate before and after training: {problems, k, max_new_tokens, temperature}; false: do not
    verl            keys that only verl has, nested or dotted; read with engine: verl alone
"""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import yaml

from dew.errors import ConfigError

Settings = dict[str, Any]
ENGINES = ("trl", "verl")


@dataclass(frozen=True)
class Scoring:
    """How a run is scored before and after training, on held-out problems."""

    problems: int = 128
    """How many held-out problems."""
    k: int = 16
    """Answers to each."""
    temperature: float = 1.0
    max_new_tokens: int | None = None
    """Left out: the run's max_completion_length."""


@dataclass(frozen=True)
class Run:
    """What dew knows of a run. `settings` is the engine's, in TRL's words; `verl` is what only verl has words for."""

    engine: str = "trl"
    """Who trains: trl or verl."""
    task: str | None = None
    """Built-in task, named data set or file of problems; None where the engine's own data keys are used."""
    task_settings: Settings = field(default_factory=dict)
    """Settings of the task, e.g. {numbers: 3}."""
    problems: int = 4096
    """How many problems of the task to train on."""
    verifier: str | None = None
    """What judges answers; None: the task's own."""
    scores: Scoring | None = None
    """Evaluate before and after training."""
    verl: Settings = field(default_factory=dict)
    """verl's own keys, e.g. {trainer.nnodes: 8}; TRL never sees them."""
    settings: Settings = field(default_factory=dict)
    """Everything else, for the engine."""
    source: str | None = None
    """The file that it came from, for messages."""

    def __post_init__(self) -> None:
        problems = []
        if self.engine not in ENGINES:
            problems.append(f"engine: {self.engine!r} is not known. Choose one of: {', '.join(ENGINES)}.")
        if self.problems < 1:
            problems.append(f"problems: {self.problems}. At least one problem is needed to train on.")
        if problems:
            raise ConfigError(_where(self.source, problems))

    def to_dict(self) -> Settings:
        """The whole run as a file would say it."""
        own = {name: getattr(self, name) for name in OWN_KEYS if getattr(self, name) not in (None, {})}
        if self.scores is not None:
            own["scores"] = {f.name: getattr(self.scores, f.name) for f in fields(self.scores)}
        return {**own, **self.settings}


KINDS = {"engine": str, "task": str, "problems": int, "verifier": str, "task_settings": dict, "verl": dict}
OWN_KEYS = tuple(f.name for f in fields(Run) if f.name not in ("settings", "source"))


def read_run(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Run:
    """The run that a YAML file describes, with some keys replaced."""
    return make_run({**read_yaml(path), **(overrides or {})}, source=str(path))


def make_run(keys: Mapping[str, Any], *, source: str | None = None) -> Run:
    """Sort a flat file's keys into dew's own and the engine's."""
    own = {k: v for k, v in keys.items() if k in OWN_KEYS}
    problems = [
        f"{key}: expected {kind.__name__}, got {own[key]!r}."
        for key, kind in KINDS.items()
        if own.get(key) is not None and (not isinstance(own[key], kind) or isinstance(own[key], bool))
    ]
    try:
        own["scores"] = _scoring(own.get("scores"))
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError(_where(source, problems))
    given = {k: v for k, v in own.items() if v is not None}
    return Run(**given, settings={k: v for k, v in keys.items() if k not in OWN_KEYS}, source=source)


def _scoring(value: Any) -> Scoring | None:
    if value is None or value is False:
        return None
    if value is True:
        return Scoring()
    if not isinstance(value, Mapping):
        raise ConfigError(f"scores: expected true, false or settings such as {{problems: 128, k: 16}}, got {value!r}.")
    known = [f.name for f in fields(Scoring)]
    unknown = [f"scores.{k} is not known.{nearest(k, known)}" for k in value if k not in known]
    if unknown:
        raise ConfigError("\n".join(unknown))
    return Scoring(**value)


def check_keys(keys: Iterable[str], known: Iterable[str], *, source: str | None = None) -> None:
    """Name every unknown key, the one that was probably meant, and the file."""
    known = [*known, *OWN_KEYS]
    unknown = [f"{key} is not a setting.{nearest(key, known)}" for key in keys if key not in known]
    if unknown:
        raise ConfigError(_where(source, unknown))


def nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else " Leave it out, or see `dew train --keys` for all."


def _where(source: str | None, problems: list[str]) -> str:
    return "\n".join([f"{source}:", *(f"- {p}" for p in problems)]) if source else "\n".join(problems)


# ── YAML as people mean it ──────────────────────────────────────────────────────────────────────────────────


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: 1e-6 is a number, `no` a word and 3:20 text; a key that stands twice is a mistake."""

    yaml_implicit_resolvers: ClassVar = {}  # type: ignore[misc]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        twice = sorted(key for key, times in keys.items() if times > 1)
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"{', '.join(twice)} stands twice; keep one", node.start_mark
            )
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+."),
    ("merge", r"^<<$", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def read_yaml(path: str | Path) -> Settings:
    """The mapping in a YAML file, or one clear error."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. `dew recipes` lists those that come with dew.") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read ({reason}).") from None
    return parse_yaml(text, str(path))


LARGEST = 200_000
"""Characters of a configuration, and values in it once aliases are written out: no one means more."""


def parse_yaml(text: str, source: str = "configuration") -> Settings:
    if len(text) > LARGEST:
        raise ConfigError(f"{source}: {len(text):,} characters. A configuration has at most {LARGEST:,}.")
    try:
        value = yaml.load(text, Loader=_Loader)
        _check_size(value)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(f"{source}: not YAML{line} ({reason}).") from None
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
        raise ConfigError(f"{source}: expected lines such as `learning_rate: 1e-6`, got a {type(value).__name__}.")
    return value


def _check_size(value: Any) -> None:
    """Aliases of aliases of aliases, or one that holds itself, are small in a file and endless outside it."""
    waiting, seen = [value], 0
    while waiting:
        found = waiting.pop()
        seen += 1
        if seen > LARGEST:
            raise ValueError("its aliases, written out, have no end; write each value once")
        if isinstance(found, dict):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, list | tuple | set):
            waiting += found


def to_yaml(run: Run, header: Iterable[str] = ()) -> str:
    """A file that describes this run again; `header` lines become comments."""
    comments = "".join(f"# {line}\n" for line in header)
    return comments + yaml.dump(run.to_dict(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Plain blocks; text that either YAML would read as something else stands in quotes."""

    yaml_implicit_resolvers: ClassVar = {  # type: ignore[misc]
        first: yaml.SafeDumper.yaml_implicit_resolvers.get(first, []) + _Loader.yaml_implicit_resolvers.get(first, [])
        for first in {**yaml.SafeDumper.yaml_implicit_resolvers, **_Loader.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(tuple, lambda dumper, value: dumper.represent_list(list(value)))
