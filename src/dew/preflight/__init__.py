"""Checks before a run: `preflight(read_run("my.yaml"), answers=128)`. `machine.doctor` checks the installation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from dew.errors import DewError, Problem
from dew.run.config import Run

T = TypeVar("T")
Status = Literal["ok", "warning", "failed", "skipped"]
EMPTY_REMEDY = "Return 0 for an empty answer; otherwise the policy can learn to write nothing."


@dataclass(frozen=True)
class Check:
    status: Status
    name: str
    says: str
    remedy: str = ""


ok, warning, failed, skipped = (partial(Check, status) for status in get_args(Status))


def graded(name: str, says: str, remedy: str, *, warn: bool, fail: bool = False) -> Check:
    """Return a failed check, a warning, or ok, which has no remedy."""
    return Check("failed" if fail else "warning" if warn else "ok", name, says, remedy * (warn or fail))


def from_problem(name: str, problem: Problem) -> Check:
    return failed(name, " ".join(problem.says.split()), problem.remedy or "Fix this, then run dew preflight again.")


def passed(checks: Sequence[Check]) -> bool:
    return all(check.status != "failed" for check in checks)


def attempt(name: str, function: Callable[..., T], *args: Any) -> tuple[T | None, list[Check]]:
    """Call the function and return (result, []), or (None, failed checks) if it raises."""
    try:
        return function(*args), []
    except DewError as error:
        return None, [from_problem(name, problem) for problem in error.problems]
    except Exception as error:  # libraries and the user's own functions may raise anything
        says = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
        return None, [failed(name, says, "Training would stop with the same error.")]


def guarded(name: str, check: Callable[..., Check | list[Check]], *args: Any) -> list[Check]:
    result, failures = attempt(name, check, *args)
    if result is None:
        return failures
    return result if isinstance(result, list) else [result]


def preflight(
    run: Run, typed: Mapping[str, str] | None = None, *, answers: int = 128, untrusted: bool = False,
    say: Callable[[str], None] = print,
) -> list[Check]:  # fmt: skip
    """Check a run. `answers`: how many to sample (0 on verl). `typed`, `untrusted`: see run/permission.py."""
    if run.engine == "verl":
        from dew.preflight.verl import check_run as check_verl

        return check_verl(run, typed or {}, untrusted)
    from dew.preflight.trl import check_run

    return check_run(run, typed, answers, untrusted, say)
