"""What a process that reads a model's text may not do: run text as code, start a program, write, delete, connect.

The parsers do none of this for any answer that is known (tests/support/attacks.py asks them a few hundred questions).
Should one of them ever be talked into it, the interpreter refuses here, once and for all, and the answer is
`unparsable`. Called in the workers of nursery.py alone: a process cannot be freed again.
"""

import os
import sys
from types import FrameType
from typing import Any

ENDED = {
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "os.fork", "os.forkpty", "pty.spawn",
    "subprocess.Popen", "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "os.utime", "os.setxattr", "os.putenv", "os.kill", "os.killpg", "shutil.rmtree", "shutil.move", "shutil.copyfile",
    "ctypes.dlopen", "ctypes.dlsym", "pickle.find_class", "webbrowser.open", "urllib.Request", "signal.pthread_kill",
    "code.__new__", "function.__new__",
}  # fmt: skip
"""Events (docs.python.org/3/library/audit_events.html) that end in a refusal, whatever their arguments."""

GENERATES = os.path.join("sympy", "polys", "monomials.py")
"""sympy's one use of `exec` on the way to a verdict: it writes functions of integers alone, as many as variables."""


class Refused(RuntimeError):
    """The text of an answer was about to have an effect."""


def confine() -> None:
    """From here on, in this process."""
    import resource

    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # and if C code were to write, the kernel refuses
    sys.addaudithook(_look)


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ENDED:
        raise Refused(event)
    if event == "open" and _writes(*arguments[1:3]):
        raise Refused(f"open {arguments[0]!r:.80} to write")
    if event == "compile" and _from_text(arguments[1]) and not _known(sys._getframe(1)):
        raise Refused("compile text")
    if event == "exec" and _from_text(getattr(arguments[0], "co_filename", "<")) and not _known(sys._getframe(1)):
        raise Refused("run text")


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _from_text(filename: Any) -> bool:
    """True for code that stands in no file."""
    name = os.fsdecode(filename) if isinstance(filename, str | bytes) else "<"
    return name.startswith("<") and not name.startswith("<frozen ")


def _known(frame: FrameType | None) -> bool:
    """True where sympy generates its functions, and while a module is imported (named tuples and data classes)."""
    if frame is not None and frame.f_code.co_filename.endswith(GENERATES):
        return True
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
