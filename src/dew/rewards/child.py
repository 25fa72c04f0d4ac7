"""The near end of a reward function's process: started, asked, watched, ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO, Any

TICK = 0.2
"""Seconds between two looks at the process while it works."""
PRINTED = 200
"""Lines of the function's own printing that are passed on; of the rest only the last ones are kept."""
LAST_LINES = 5
REPLY = 1 << 28
"""Bytes of one reply: beyond it the process is not answering but flooding."""

_HOST = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from dew.rewards.host import serve
serve(int(sys.argv[1]), sys.argv[3], int(sys.argv[4]))
"""


class Ended(Exception):
    """The process did not answer; the text says what became of it, to follow "its process"."""


class Child:
    """One process that holds one reward function."""

    def __init__(self, path: str, memory: float | None, seed: int) -> None:
        self.owner = os.getpid()
        self.memory = memory or half_of_memory()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _HOST, str(theirs.fileno()), json.dumps(sys.path), path, str(seed)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,  # whatever it starts ends with it, and ^C is this process's to handle
            )
        self._rest = b""
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        assert self._process.stdout is not None
        self._printing = threading.Thread(target=_pass_on, args=(self._process.stdout, self._last), daemon=True)
        self._printing.start()
        self._finalize = weakref.finalize(self, _end, self._process, self._channel, self.owner)

    def ask(self, job: bytes, limit: float) -> dict[str, Any]:
        self._send(job, limit)
        return self.hear(limit)

    def hear(self, limit: float) -> dict[str, Any]:
        """The next reply, within `limit` seconds and the memory it may hold."""
        end = monotonic() + limit
        while b"\n" not in self._rest:
            if (left := end - monotonic()) <= 0:
                raise Ended(f"has not answered for {limit:g} s and was ended")
            self._check_memory()
            self._channel.settimeout(min(TICK, left))
            try:
                part = self._channel.recv(1 << 20)
            except TimeoutError:
                if self._process.poll() is None:
                    continue
                part = b""
            except OSError:
                part = b""
            if not part:
                raise Ended(self._death())
            self._rest += part
            if len(self._rest) > REPLY:
                raise Ended(f"answered with more than {REPLY:,} bytes and was ended")
        self._check_memory()
        line, _, self._rest = self._rest.partition(b"\n")
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise Ended("answered with something that is not an answer")
        return reply

    def end(self) -> str:
        """End it and whatever it started; what it printed last, to follow a sentence."""
        self._finalize()
        self._printing.join(1)
        return f" It last printed: {' | '.join(self._last)}" if self._last else ""

    def _send(self, job: bytes, limit: float) -> None:
        try:
            self._channel.settimeout(limit)
            self._channel.sendall(job)
        except OSError:
            raise Ended(self._death() if self._process.poll() is not None else "does not take its work") from None

    def _check_memory(self) -> None:
        if (held := memory_of(self._process.pid)) > self.memory:
            raise Ended(
                f"holds {held / 2**30:.2f} GiB, more than the {self.memory / 2**30:.2f} GiB that it may, and was ended"
            )

    def _death(self) -> str:
        try:
            code = self._process.wait(2)
        except subprocess.TimeoutExpired:
            return "closed its line and was ended"
        self._printing.join(1)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended by itself with exit code {code}"
        return how + (f" (it last printed: {' | '.join(self._last)})" if self._last else "")


def _end(process: "subprocess.Popen[bytes]", channel: socket.socket, owner: int) -> None:
    channel.close()
    if os.getpid() != owner:  # a fork of the process that started it
        process.returncode = 0
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _pass_on(printed: IO[bytes], last: "deque[str]") -> None:
    """To standard error, so that it disturbs nobody who reads standard output; no longer than is useful."""
    told = 0
    while line := printed.readline(1000):
        text = line.decode(errors="replace").rstrip("\n")
        last.append(text)
        told += 1
        if told <= PRINTED:
            text = "".join(c if c.isprintable() or c == "\t" else "·" for c in text)
            print(text if told < PRINTED else f"{text}\n(no more of what this reward prints)", file=sys.stderr)


def memory_of(pid: int) -> int:
    """Bytes that a process and its children hold in memory, where the system tells it (Linux); else 0."""
    held, waiting = 0, [pid]
    while waiting:
        home = Path("/proc") / str(waiting.pop())
        try:
            held += int((home / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            waiting += map(int, (home / "task" / home.name / "children").read_text().split())
        except (OSError, ValueError, IndexError):
            continue
    return held


def half_of_memory() -> float:
    """Half of what the machine, or the container, has."""
    try:
        all_of_it = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return float("inf")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            all_of_it = min(all_of_it, float(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return all_of_it / 2
