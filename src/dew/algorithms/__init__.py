"""The algorithms by name. To add one, define a class with a new name and pass it to `register_algorithm`, or name its
file or module: `my_rules.py:MyRule`, `my_module:MyRule`.
"""

import ast
import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin

from dew.algorithms.base import Algorithm, Part, Whose
from dew.algorithms.baselines import (
    CISPO,
    DAPO,
    DPPO,
    GEPO,
    GMPO,
    GRPO,
    GSPO,
    QAE,
    SAPO,
    TRL,
    DrGRPO,
    MaxRL,
    ReinforcePP,
    WReinforce,
)
from dew.algorithms.credit import give_credit
from dew.algorithms.entropy_weighted import DEW, GRPOS, GTPO
from dew.algorithms.token_weighted import FIPO, OTB, STARE, STEER, ClipCov, EntropyAdvantage, ForkingTokens, KLCov
from dew.algorithms.user_rules import guard, limited
from dew.errors import ConfigError, Problem, did_you_mean, type_hints, unknown, user_line

__all__ = [
    "CISPO", "DAPO", "DEFAULT_ALGORITHM", "DEW", "DPPO", "ENGINE_ALGORITHM", "FIPO", "GEPO", "GMPO", "GRPO", "GRPOS",
    "GSPO", "GTPO", "OTB", "QAE", "SAPO", "STARE", "STEER", "TRL", "Algorithm", "ClipCov", "DrGRPO", "EntropyAdvantage",
    "ForkingTokens", "KLCov", "MaxRL", "Part", "ReinforcePP", "WReinforce", "algorithm_classes", "get_algorithm",
    "give_credit", "list_algorithms", "register_algorithm", "source_digest", "split_algorithm",
]  # fmt: skip

DEFAULT_ALGORITHM = "dew"
"""Used if a config names no algorithm: it can train on graded rewards, and cannot flip the sign of an advantage."""
ENGINE_ALGORITHM = TRL.name
"""The engine's own advantages and loss."""

DECORATOR = "Decorate the class with @dataclass(frozen=True, kw_only=True)."

_BY_NAME: dict[str, type[Algorithm]] = {}


def register_algorithm(cls: type[Algorithm]) -> type[Algorithm]:
    """Register an algorithm under its name. Also works as a class decorator."""
    _BY_NAME[_key(cls.name)] = cls
    return cls


def list_algorithms() -> list[str]:
    """Names of the registered algorithms."""
    return list(algorithm_classes())


def algorithm_classes() -> dict[str, type[Algorithm]]:
    """Every registered algorithm by its name."""
    return {cls.name: cls for cls in _BY_NAME.values()}


def get_algorithm(name: str, /, **settings: Any) -> Algorithm:
    """Return an algorithm by name, with its paper's settings unless given: `get_algorithm("gtpo", alpha2=0.2)`.

    The name may include settings, `gtpo(alpha2=0.2,pool=outcome)`, as in `Algorithm.label`. `my_module:MyRule` and
    `my_rules.py:MyRule` name a class of your own.
    """
    name, settings = split_algorithm(name, settings)
    cls = _own_class(name) if ":" in name else _BY_NAME.get(_key(name))
    if cls is None:
        also = "For a class of your own, write file.py:Class."
        raise ConfigError(unknown(f"algorithm={name!r} is not known.", name, list_algorithms(), also))
    if ":" in name and (other := _BY_NAME.get(_key(cls.name))) and other.__module__ != cls.__module__:
        raise ConfigError(Problem(f"{name}: its name {cls.name!r} is taken.", remedy="Give the class another name."))
    known = [f.name for f in fields(cls)]
    wrong = [unknown(f"{cls.name} has no setting {s!r}.", s, known) for s in settings if s not in known]
    unset = [f.name for f in fields(cls) if f.default is f.default_factory is MISSING and f.name not in settings]
    wrong += [Problem(f"{cls.name} needs the setting {s!r}.", remedy="Give it a default in the class.") for s in unset]
    if wrong:
        raise ConfigError(wrong)
    hints = type_hints(cls)
    takes_tuple = {s for s in settings if any(get_origin(hint) is tuple for hint in (hints[s], *get_args(hints[s])))}
    tuples = {s: tuple(value) for s, value in settings.items() if s in takes_tuple and isinstance(value, list)}
    return cls(**{**settings, **tuples})  # config files can only give lists


def split_algorithm(text: str, given: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Split `gtpo(alpha2=0.5)` or `rules.py:MyRule(keep=0.1)` into name and settings, merged with those `given`.

    Values are Python literals, YAML's true, false and null, or words without quotes.
    """
    unreadable = Problem(f"algorithm={text!r} cannot be read.", remedy="Write NAME or NAME(setting=value,...).")
    found = re.fullmatch(r"\s*([^()]+?)\s*(\(.*\))?\s*", text, re.DOTALL)
    if found is None:
        raise ConfigError(unreadable)
    try:
        call = ast.parse(f"f{found[2] or '()'}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError
        pairs = [(str(k.arg), k.value) for k in call.keywords]
        settings = {
            name: WORDS.get(x.id, x.id) if isinstance(x, ast.Name) else ast.literal_eval(x) for name, x in pairs
        }
    except (SyntaxError, ValueError):
        raise ConfigError(unreadable) from None
    given = given or {}
    if len(settings) < len(pairs):
        raise ConfigError(Problem(f"{text!r} gives a setting twice.", remedy="Keep one of them."))
    if twice := [name for name, value in settings.items() if given.get(name, value) != value]:
        what = f"{text!r} and the other settings (algorithm_kwargs) give {', '.join(twice)} different values."
        raise ConfigError(Problem(what, remedy="Give it once."))
    return found[1], {**given, **settings}


WORDS = {"true": True, "false": False, "null": None}


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


# ── classes of your own ─────────────────────────────────────────────────────────────────────────────────────
def _own_class(name: str) -> type[Algorithm]:
    """Import the class `module:Class` or `file.py:Class`. Modules may be in the working directory."""
    where, _, attribute = name.rpartition(":")
    try:
        with limited(name):
            if where.endswith(".py"):
                module = _of_file(str(Path(where).resolve()), Path(where).read_bytes())
            else:
                if str(Path.cwd()) not in sys.path:
                    sys.path.insert(0, str(Path.cwd()))
                module = import_module(where)
    except ConfigError:
        raise
    except Exception as error:  # the module is the user's and may raise anything
        line = user_line(error)
        reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        not_found = isinstance(error, OSError | ImportError) and not line
        remedy = "Write module:Class or file.py:Class." if not_found else ""
        reason = f"there is no {where}" if isinstance(error, FileNotFoundError) and not_found else reason
        what = f"algorithm={name!r} cannot be imported ({reason}{line})."
        raise ConfigError(Problem(what, remedy=DECORATOR if "frozen dataclass" in reason else remedy)) from error
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        rules = [n for n, x in vars(module).items() if isinstance(x, type) and issubclass(x, Algorithm)]
        own = [n for n in rules if getattr(module, n).__module__ == module.__name__]
        remedy = f"{did_you_mean(attribute, own)} It has: {', '.join(own)}.".lstrip() if own else ""
        raise ConfigError(Problem(f"{where} has no class {attribute!r} derived from dew.Algorithm.", remedy=remedy))
    if problems := _problems(found):
        raise ConfigError([Problem(f"{name}: {what}", remedy=remedy) for what, remedy in problems.items()])
    guard(found, Algorithm)
    found.written = name
    return found


def _problems(cls: type[Algorithm]) -> dict[str, str]:
    """Problems with a user's class, and what to write instead."""
    found = {}
    if not isinstance(vars(cls).get("name"), str):
        found[f"class {cls.__name__} has no name of its own."] = 'Write e.g. name = "mine" in the class.'
    if cls.advantages is Algorithm.advantages:
        found[f"class {cls.__name__} has no credit."] = "Define advantages(self, rollouts), or derive it from DAPO."
    if cls.penalises and cls.penalties is Algorithm.penalties:
        found[f"class {cls.__name__} has penalises = True, but no penalties."] = "Define penalties(self, rollouts, A)."
    for method, given in ((cls.advantages, ["self", "rollouts"]), (cls.loss, ["self", "logp", "part", "advantages"])):
        try:
            signature(method).bind(*given, **({"count": None} if method is cls.loss else {}))
        except TypeError as error:
            own = f"{cls.__name__}.{method.__name__}{signature(method)}"
            right = ", ".join([*given, *(["*", "count=None"] if method is cls.loss else [])])
            found[f"{own} cannot be called as dew calls it ({error})."] = f"Write def {method.__name__}({right})."
    try:
        signature(cls).bind(**{f.name: None for f in fields(cls) if f.init})
    except TypeError as error:
        remedy = "Remove it, and write your settings as fields of a data class."
        found[f"{cls.__name__}.__init__ does not take all settings of the class ({error})."] = remedy
    if cls.needs_entropy not in get_args(Whose):
        remedy = 'Write "old" for the entropy of the policy that sampled, "current" for the one being trained, or "no".'
        found[f"needs_entropy={cls.needs_entropy!r} is not known."] = remedy
    settings, known = {f.name for f in fields(cls)}, {f.name for f in fields(Algorithm)}
    for setting in sorted(x for x in settings - known if hasattr(Algorithm, x)):
        found[f"its setting {setting!r} clashes with an attribute of dew.Algorithm."] = "Rename the setting."
    hints = {x: hint for x, hint in type_hints(cls).items() if x in vars(cls).get("__annotations__", {})}
    if any("ClassVar" not in str(hint) and x not in settings for x, hint in hints.items()):
        found[f"class {cls.__name__} has settings, but is not a data class."] = DECORATOR
    return found


def source_digest(cls: type[Algorithm]) -> str:
    """Digest of the file that defines a class, ignoring comments, layout and algorithms it is not based on."""
    module = sys.modules.get(cls.__module__)
    if not (file := getattr(module, "__file__", None)):
        return ""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    classes = {name: x for name, x in vars(module).items() if isinstance(x, type) and issubclass(x, Algorithm)}
    tree.body = [x for x in tree.body if not isinstance(x, ast.ClassDef) or issubclass(cls, classes.get(x.name, cls))]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


@cache
def _of_file(path: str, content: bytes) -> ModuleType:
    """Import a file as a module; cached until its content changes."""
    name = f"dew_own_{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"  # stems may be equal
    spec = spec_from_file_location(name, path)
    assert spec and spec.loader, path
    if str(Path(path).parent) not in sys.path:
        sys.path.insert(0, str(Path(path).parent))
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


for _cls in (DEW, GTPO, GRPOS, GRPO, DAPO, DrGRPO, GSPO, ForkingTokens, EntropyAdvantage, CISPO, SAPO, MaxRL, QAE,
             WReinforce, ReinforcePP, ClipCov, KLCov, STEER, OTB, GMPO, DPPO, GEPO, STARE, FIPO, TRL):  # fmt: skip
    register_algorithm(_cls)
