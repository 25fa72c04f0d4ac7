"""Supported versions of verl. tests/verl/test_compat.py lists every part of verl that dew depends on."""

from importlib.metadata import PackageNotFoundError, version

from dew.errors import EngineError, Problem

OLDEST, TOO_NEW = (0, 9), (0, 10)
TESTED = "0.9.1"


def require_verl() -> None:
    """Raise one clear error unless a supported verl is installed."""
    try:
        found = version("verl")
    except PackageNotFoundError:
        remedy = "On every node: pip install 'dew-rl[verl]'. `dew train ... --dry-run` works without it."
        raise EngineError(Problem("verl is not installed.", remedy=remedy)) from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not OLDEST <= numbers < TOO_NEW:
        why = "The trainer that passes on the old policy's entropy depends on internals of that release."
        what = f"verl {found} is installed; dew works with verl 0.9."
        raise EngineError(Problem(what, why, f"Run pip install 'verl=={TESTED}'."))
