"""The code that runs in the processes of process.py."""

import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from dew.rewards.sandbox import enter_sandbox

MEMORY = 3 * 2**30
"""Bytes of address space of a forked worker."""

Handler = Callable[[dict[str, Any]], Any]


def main(fds: tuple[int, int], target: str, arguments: dict[str, Any]) -> None:
    """Entry point: call `target` ("module:function") with the first socket and `arguments`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles ^C
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel's timer kills this process; no handler, no exception
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGTERM})
    if sys.platform == "linux":  # the kernel kills this process group, even in C code, when the parent's end closes
        fcntl.fcntl(fds[1], fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fds[1], fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fds[1], fcntl.F_SETFL, fcntl.fcntl(fds[1], fcntl.F_GETFL) | fcntl.FASYNC)
    module, _, function = target.partition(":")
    getattr(import_module(module), function)(socket.socket(fileno=fds[0]), **arguments)


def encode(message: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """A message between processes: one line of JSON."""
    return json.dumps(message, default=default).encode() + b"\n"


def answer_requests(channel: socket.socket, handle: Handler) -> None:
    """Reply to each request until the socket closes. The kernel kills this process `timer` seconds into a request."""
    pid = os.getpid()
    for line in channel.makefile("rb"):
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request.get("timer", 0))
        reply = handle(request)
        if os.getpid() != pid:  # the handler forked: only the original process replies
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.sendall(encode(reply))


def fork_workers(control: socket.socket, handle: Handler, warm_up: Sequence[dict[str, Any]]) -> None:
    """Fork a sandboxed worker for each socket received; exit with all of them when `control` closes.

    The requests in `warm_up` are handled while no socket is waiting, so that workers start with filled caches.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    control.sendall(encode({}))
    requests = list(warm_up)
    while True:
        while requests and not select.select([control], [], [], 0)[0]:
            handle(requests.pop(0))
            gc.freeze()
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:  # the parent is gone
            os.killpg(0, signal.SIGKILL)
        if os.fork() == 0:
            control.close()
            try:
                run_worker(socket.socket(fileno=fds[0]), handle)
            finally:
                os._exit(0)
        os.close(fds[0])


def run_worker(channel: socket.socket, handle: Handler) -> None:
    """Answer requests with limited memory, in the sandbox."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or hard > MEMORY:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    enter_sandbox()
    answer_requests(channel, handle)
