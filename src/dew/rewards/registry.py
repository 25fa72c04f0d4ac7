"""Verifiers by name; each is imported when it is asked for."""

from difflib import get_close_matches
from importlib import import_module

from dew.errors import ConfigError
from dew.rewards.verdict import Verifier

VERIFIERS = {
    "countdown": "dew.rewards.countdown:countdown",
    "chain": "dew.rewards.chain:chain",
    "math": "dew.rewards.math:math",
    "equation": "dew.rewards.equation:equation",
}
"""Name -> module:attribute. A built-in task and its verifier have the same name."""
VERIFIERS |= dict.fromkeys(("gsm8k", "math500", "aime24", "aime25", "amc23", "dapo17k"), VERIFIERS["math"])
VERIFIERS["countdown-tinyzero"] = VERIFIERS["equation"]


def verifier(name: str) -> Verifier:
    """The verifier of that name."""
    if name not in VERIFIERS:
        near = get_close_matches(name, VERIFIERS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(VERIFIERS)}."
        raise ConfigError(f"No verifier is called {name!r}. {hint}")
    module, attribute = VERIFIERS[name].split(":")
    return getattr(import_module(module), attribute)
