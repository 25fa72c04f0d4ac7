"""The task interface: a source of problems, with a fixed split into training and held-out problems."""

from collections.abc import Hashable
from hashlib import blake2b
from typing import Any, Literal, Protocol

from dew.errors import ConfigError

Row = dict[str, Any]
"""One problem: `prompt`, gold `answer`, further gold columns, a worked `solution` if known."""
Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 1 / 8


class Task(Protocol):
    """Problems with gold answers. The verifier of the same name (`dew.rewards.verifier`) scores answers."""

    @property
    def name(self) -> str: ...

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        """n distinct problems, determined by the arguments; fewer rows are a prefix of more."""
        ...


def last_message(value: Any) -> Any:
    """The text of the last message of a chat; any other value unchanged."""
    if isinstance(value, list) and value and isinstance(value[-1], dict) and "content" in value[-1]:
        return value[-1]["content"]
    return value


def split_of(key: Hashable) -> Split:
    """The split of a problem, by a hash of what identifies it: independent of any seed."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return "held_out" if int.from_bytes(digest) < HELD_OUT_SHARE * 2**64 else "train"


def check_split(split: Split) -> Split:
    if split not in ("train", "held_out"):
        raise ConfigError(f"split={split!r}: a task has the splits 'train' and 'held_out'.")
    return split
