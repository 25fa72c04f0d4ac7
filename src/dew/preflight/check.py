"""What a check says: a name, how it went, one sentence, one remedy."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dew.errors import DewError

AGAIN = "Correct it, and run dew preflight again."

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    name: str
    status: Status
    says: str
    """One sentence."""
    remedy: str = ""
    """What to change; empty where nothing need be."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The numbers behind the sentence, for programs."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ok(name: str, says: str, **facts: Any) -> Check:
    return Check(name, "ok", says, "", facts)


def warning(name: str, says: str, remedy: str, **facts: Any) -> Check:
    return Check(name, "warning", says, remedy, facts)


def failed(name: str, says: str, remedy: str, **facts: Any) -> Check:
    return Check(name, "failed", says, remedy, facts)


def skipped(name: str, why: str) -> Check:
    return Check(name, "skipped", why)


def passed(checks: Sequence[Check]) -> bool:
    """Nothing failed; warnings may stand."""
    return all(check.status != "failed" for check in checks)


def guarded(name: str, look: Callable[[], list[Check]]) -> list[Check]:
    """The checks that `look` makes; if it cannot, that it could not, and why."""
    try:
        return look()
    except DewError as error:
        return [from_text(name, str(error))]
    except Exception as error:  # whatever the libraries and the user's own functions raise is a finding, too
        reason = str(error).strip().split("\n", maxsplit=1)[0][:300]
        return [failed(name, f"It ends with {type(error).__name__}: {reason}", "Training would meet the same error.")]


def from_text(name: str, text: str) -> Check:
    """An error is written as advice: what stands last is what to do."""
    text = " ".join(line.removeprefix("- ") for line in text.strip().splitlines())
    says, full_stop, remedy = text.rstrip(". ").rpartition(". ")
    if not full_stop:
        return failed(name, text, AGAIN)
    return failed(name, f"{says}.", remedy if remedy.endswith("?") else f"{remedy}.")
