"""Blocks what a process that parses a model's text never needs: run text as code, start programs, write, connect.

No known answer makes the parsers try (tests/support/attacks.py has a few hundred attempts). If one ever does, the
interpreter raises here and the answer is `unparsable`. A process cannot leave the sandbox.
"""

import os
import resource
import sys
from types import FrameType
from typing import Any

BLOCKED = {
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "os.fork", "os.forkpty", "pty.spawn",
    "subprocess.Popen", "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "os.utime", "os.setxattr", "os.putenv", "os.kill", "os.killpg", "shutil.rmtree", "shutil.move", "shutil.copyfile",
    "ctypes.dlopen", "ctypes.dlsym", "pickle.find_class", "webbrowser.open", "urllib.Request", "signal.pthread_kill",
    "code.__new__", "function.__new__",
}  # fmt: skip
"""Audit events (docs.python.org/3/library/audit_events.html) that are blocked whatever their arguments."""

GENERATED = os.path.join("sympy", "polys", "monomials.py")
"""The one place where sympy needs `exec` to compare answers: it generates functions of integers."""


def enter_sandbox() -> None:
    """Sandbox this process from now on."""
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # the kernel stops C code from writing
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if violates(event, arguments):
        raise RuntimeError(f"{event} {arguments!r:.80} is blocked: no answer needs it")


def violates(event: str, arguments: tuple[Any, ...]) -> bool:
    """True if the sandbox blocks this event. Called by an audit hook: two frames up is the code that caused it."""
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
    """True where sympy generates its functions, and during imports (named tuples and data classes)."""
    if frame is not None and frame.f_code.co_filename.endswith(GENERATED):
        return True
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None
