"""A bound for a function that must run in this process: what is passed from Python, and cannot be sent elsewhere.

At the limit an alarm interrupts the function, and that is a RewardError. A function that cannot be interrupted,
because it holds the interpreter's lock in C code or swallows everything, ends the process some seconds later
from a thread that needs no lock, after showing where every thread stands.
"""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dew.errors import RewardError

GRACE = 30.0
"""Seconds after the limit when a function that could not be interrupted ends the process."""


class _TimeIsUp(BaseException):
    """Not an Exception, so that `except Exception` in the function does not swallow it."""


@contextmanager
def bounded(name: str, seconds: float) -> Iterator[None]:
    """Run the block for so long at most; and in one process only, should it fork."""
    here = os.getpid()
    with _last_resort(seconds + GRACE), _alarm(seconds):
        try:
            yield
        except _TimeIsUp:
            raise RewardError(
                f"The reward {name} has not returned for {seconds:g} s. Let it give up by itself and return None where "
                "it cannot judge, or raise reward_timeout."
            ) from None
        finally:
            if os.getpid() != here:  # it forked, and its copy must not go on training
                os._exit(1)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    free = signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, signal.SIG_IGN) and not any(
        signal.getitimer(signal.ITIMER_REAL)
    )
    if threading.current_thread() is not threading.main_thread() or not free:  # the last resort remains
        yield
        return

    def ring(*_: Any) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again each second, in case the first was swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Armed:
    lock = threading.Lock()
    depth = 0


@contextmanager
def _last_resort(seconds: float) -> Iterator[None]:
    stderr = sys.__stderr__
    with _Armed.lock:
        _Armed.depth += 1
        if _Armed.depth == 1 and stderr is not None:
            faulthandler.dump_traceback_later(seconds, exit=True, file=stderr)
    try:
        yield
    finally:
        with _Armed.lock:
            _Armed.depth -= 1
            if _Armed.depth == 0:
                faulthandler.cancel_dump_traceback_later()
