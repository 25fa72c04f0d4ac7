"""Code that runs in the processes of process.py, and the sandbox for those that parse a model's text.

The sandbox blocks what parsing never needs: running text as code, starting programs, writing files, connecting. No
known answer makes the parsers try any of this (tests/support/attacks.py has a few hundred attempts). If one does, the
interpreter raises an error and the answer is `unparsable`. A process cannot leave the sandbox.
"""

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
from types import FrameType
from typing import Any

MEMORY = 3 * 2**30  # address space of a forked worker in bytes
BLOCKED = {
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "os.fork", "os.forkpty", "pty.spawn",
    "subprocess.Popen", "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "os.utime", "os.setxattr", "os.putenv", "os.kill", "os.killpg", "shutil.rmtree", "shutil.move", "shutil.copyfile",
    "ctypes.dlopen", "ctypes.dlsym", "pickle.find_class", "webbrowser.open", "urllib.Request", "signal.pthread_kill",
    "code.__new__", "function.__new__",
}  # fmt: skip
"""Audit events (docs.python.org/3/library/audit_events.html) that are blocked with any arguments."""

GENERATED = os.path.join("sympy", "polys", "monomials.py")
"""The only file of sympy that needs `exec` to compare answers: it generates functions of integers."""

Handler = Callable[[dict[str, Any]], Any]


def main(fds: tuple[int, int], target: str, arguments: dict[str, Any]) -> None:
    """Entry point: call `target` ("module:function") with the first socket and `arguments`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel's timer kills this process; no handler, no exception
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGTERM})
    if sys.platform == "linux":  # the kernel kills this process group, even in C code, when the parent's end closes
        fcntl.fcntl(fds[1], fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fds[1], fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fds[1], fcntl.F_SETFL, fcntl.fcntl(fds[1], fcntl.F_GETFL) | fcntl.FASYNC)
    module, _, function = target.partition(":")
    getattr(import_module(module), function)(socket.socket(fileno=fds[0]), **arguments)


def encode(message: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """Encode a message between processes as one line of JSON."""
    return json.dumps(message, default=default).encode() + b"\n"


def answer_requests(channel: socket.socket, handle: Handler) -> None:
    """Reply to each request until the socket closes. The kernel kills this process if one takes `timer` seconds."""
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
    """Fork a sandboxed worker for each received socket, and exit with all of them when `control` closes.

    While no socket is waiting, the requests in `warm_up` are handled, so that workers start with filled caches.
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
    """Answer requests in the sandbox, with limited memory."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or hard > MEMORY:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    enter_sandbox()
    answer_requests(channel, handle)


# ── the sandbox ───────────────────────────────────────────────────────────────────────────────────────────────
def enter_sandbox() -> None:
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # the kernel stops C code from writing
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if violates(event, arguments):
        raise RuntimeError(f"{event} {arguments!r:.80} is blocked: no answer needs it")


def violates(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether the sandbox blocks this event. Called by an audit hook, so the code that caused it is two frames up."""
    if event in BLOCKED:
        return True
    if event == "open":
        mode, flags = arguments[1:3]
        if isinstance(mode, str):
            return any(letter in mode for letter in "wax+")
        return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if event in ("compile", "exec"):
        name = arguments[1] if event == "compile" else getattr(arguments[0], "co_filename", "<")
        name = os.fsdecode(name) if isinstance(name, str | bytes) else "<"
        from_file = not name.startswith("<") or name.startswith("<frozen ")
        return not from_file and not _expected(sys._getframe(2))
    return False


def _expected(frame: FrameType | None) -> bool:
    """Whether the frame is where sympy generates functions, or inside an import (named tuples and data classes)."""
    if frame is not None and frame.f_code.co_filename.endswith(GENERATED):
        return True
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None
