"""Limits on a user's rule, given as `file.py:Class`: it may only compute, for a limited time.

It runs in the training process. If it hangs, exits or forks, the run must not look finished or leave a process behind
that holds its folder.
"""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import FunctionType
from typing import Any, NoReturn

from dew.errors import ConfigError, Problem, user_line

SECONDS = 300.0
"""Time limit of one call. A rule computes with a few tensors and takes milliseconds."""
_running = False


class _Stopped(BaseException):
    """Raised when a rule does what it must not. Not an Exception, which the rule might catch."""


class _Clean(io.TextIOBase):
    """A wrapper of standard output that replaces control characters in what the rule prints."""

    def __init__(self, to: Any) -> None:
        self._to = to

    def write(self, text: str) -> int:
        if _is_main():  # another thread may show the progress of the run
            text = "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)
        self._to.write(text)
        return len(text)

    def flush(self) -> None:
        self._to.flush()


@contextmanager
def limited(name: str) -> Iterator[None]:
    """Raise an error with this name if the block, or the decorated function, exits the process, forks or exceeds the
    time limit."""
    global _running
    if _running or not _is_main():  # signals only interrupt the main thread
        yield
        return

    def late(*_: Any) -> NoReturn:
        raise _Stopped(f"took longer than {SECONDS:g} s")

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    def fork() -> NoReturn:
        raise _Stopped("tried to fork the process")

    functions, before = (os._exit, os.fork), signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    os._exit, os.fork, _running = leave, fork, True  # type: ignore[assignment]
    try:
        with redirect_stdout(_Clean(sys.stdout)), redirect_stderr(_Clean(sys.stderr)):
            yield
    except (SystemExit, _Stopped) as error:
        what = f"tried to exit with code {error.code}" if isinstance(error, SystemExit) else str(error)
        raise ConfigError(Problem(f"{name} {what}{user_line(error)}.", remedy="Correct the rule.")) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
        (os._exit, os.fork), _running = functions, False


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def guard(cls: type, base: type) -> None:
    """Apply these limits to the methods of a user's class that override those of `base`."""
    for kind in cls.__mro__[: cls.__mro__.index(base)]:
        for name, method in list(vars(kind).items()) if not kind.__module__.startswith("dew.") else ():
            own = isinstance(method, FunctionType) and hasattr(base, name) and not hasattr(method, "__wrapped__")
            if own and not name.startswith("__"):
                setattr(kind, name, limited(f"{cls.__name__}.{name}")(method))
