"""The other end of pool.py: a process that has math-verify at hand and forks workers. Never imported elsewhere."""

import gc
import json
import logging
import os
import select
import signal
import socket
from typing import Any

from dew.rewards.confine import confine

MEMORY = 3 * 2**30
"""Bytes of address space of a worker: an answer that wants more is not one."""


_WARM_UP = (
    (r"\frac{1}{2} + x", True, r"x + \sqrt{4}/4"),
    (r"(3, \frac{\pi}{2})", True, r"[0, 1)"),
    (r"\{1, 2\}", True, "2, 1"),
    ("so $x = 3$ and 1/2 are both", False, "3"),
    ("y = 2x + 3", True, "2x - y + 3 = 0"),
    (r"\sin^2 x + \cos^2 x", True, "1"),
)
"""Fills the parser's and sympy's tables while no one asks, so that the workers forked later need not."""


def serve(fd: int) -> None:
    """Fork a worker for every socket that comes down the line; end with all of them when the line is closed."""
    control = socket.socket(fileno=fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is the asking process's to handle
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that end leave no zombies
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the timer ends the process; no handler, no exception
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGTERM})
    logging.disable(logging.CRITICAL)
    try:
        from dew.rewards.reading import judge
    except Exception as error:
        control.sendall(f"{type(error).__name__}: {error}"[:2000].encode())
        return
    control.sendall(b"ready")
    warm_up = list(_WARM_UP)
    while True:
        while warm_up and not select.select([control], [], [], 0)[0]:
            judge(*warm_up.pop(0))
            gc.freeze()
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:  # the asking process is gone: end every worker at once, whatever it is at, and this one
            os.killpg(0, signal.SIGKILL)
        if os.fork() == 0:
            control.close()
            try:
                _work(socket.socket(fileno=fds[0]), judge)
            finally:
                os._exit(0)
        os.close(fds[0])


def _work(channel: socket.socket, judge: Any) -> None:
    """Answer job after job until the socket is closed, or until the kernel's timer ends this process."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or hard > MEMORY:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    confine()
    for line in channel.makefile("rb"):
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, job["limit"])
        try:
            reply = judge(job["answer"], job["marked"], job["gold"])
        except BaseException:  # a parser's SystemExit is not ours to heed
            reply = ("unparsable", None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.sendall(json.dumps(reply).encode() + b"\n")
