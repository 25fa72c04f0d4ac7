"""A time limit for a reward function that runs in this process: a callable from Python cannot be sent to another one.

At the limit an alarm interrupts the function and a RewardError is raised. If it cannot be interrupted, because it holds
the interpreter's lock in C code or swallows every exception, the process exits GRACE seconds later with a traceback of
every thread.
"""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from dew.errors import Problem, RewardError

GRACE = 30.0
"""Seconds between the alarm and the end of the process."""
_exit_timer = threading.Lock()
"""Held while faulthandler's timer runs; a process has only one."""


class _Expired(BaseException):
    """Not an Exception, so that `except Exception` in the function does not swallow it."""


def _expire(*_: Any) -> None:
    raise _Expired


@contextmanager
def time_limit(name: str, seconds: float) -> Iterator[None]:
    """Limit the block to `seconds`. If it forks, the copy exits at the end of the block."""
    pid = os.getpid()
    with ExitStack() as stack:
        if sys.__stderr__ is not None and _exit_timer.acquire(blocking=False):
            stack.callback(_exit_timer.release)
            stack.callback(faulthandler.cancel_dump_traceback_later)
            faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=sys.__stderr__)
        in_use = signal.getsignal(signal.SIGALRM) not in (signal.SIG_DFL, signal.SIG_IGN) or any(
            signal.getitimer(signal.ITIMER_REAL)
        )
        if threading.current_thread() is threading.main_thread() and not in_use:
            stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, _expire))
            stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # repeated, in case the first one is swallowed
        try:
            yield
        except _Expired:
            remedy = "Return None for answers it cannot score in time, or raise reward_timeout."
            raise RewardError(
                Problem(f"The reward {name} did not return within {seconds:g} s.", remedy=remedy)
            ) from None
        finally:
            if os.getpid() != pid:
                os._exit(1)
