"""Algorithms of your own: `my_module:MyRule` or `my_rules.py:MyRule`."""

import hashlib
import sys
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from dew.algorithms.base import Algorithm
from dew.errors import ConfigError, Problem, did_you_mean


def own_class(name: str) -> type[Algorithm]:
    """The class that `module:Class` or `file.py:Class` names; modules may lie in the working folder."""
    where, _, attribute = name.rpartition(":")
    try:
        module = _of_file(str(Path(where).resolve()), _digest(Path(where))) if where.endswith(".py") else _named(where)
    except Exception as error:  # the module is the user's and may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        what = f"algorithm={name!r} cannot be imported ({reason})."
        raise ConfigError(Problem(what, remedy="Write module:Class or file.py:Class.")) from error
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        rules = [n for n, x in vars(module).items() if isinstance(x, type) and issubclass(x, Algorithm)]
        own = [n for n in rules if getattr(module, n).__module__ == module.__name__]
        remedy = f"{did_you_mean(attribute, own)} {'It has: ' + ', '.join(own) if own else 'It has none'}.".lstrip()
        raise ConfigError(Problem(f"{where} has no class {attribute!r} derived from dew.Algorithm.", remedy=remedy))
    if not isinstance(vars(found).get("name"), str):
        remedy = 'Write name: ClassVar[str] = "mine" in the class.'
        raise ConfigError(Problem(f"{name}: class {attribute} has no name of its own.", remedy=remedy))
    return found


def source_digest(cls: type[Algorithm]) -> str:
    """Digest of the file that a class was defined in."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return _digest(Path(file)) if file else ""


def _named(module: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return import_module(module)


@cache
def _of_file(path: str, digest: str) -> ModuleType:
    """The same module until the file changes."""
    name = f"dew_own_{Path(path).stem}"
    spec = spec_from_file_location(name, path)
    assert spec and spec.loader, path
    if str(Path(path).parent) not in sys.path:
        sys.path.insert(0, str(Path(path).parent))
    module = sys.modules[name] = module_from_spec(spec)  # data classes look their module up
    spec.loader.exec_module(module)
    return module


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
