"""Processes with time and memory limits, for the math parser (`Pool`) and for users' reward functions (`Process`).

    this process ── Process: a new interpreter, never a fork of one with threads or a GPU; answers requests itself,
                    └── or forks workers that do: in milliseconds, after importing its libraries once

All communication is JSON over sockets. If either process dies, its socket closes and the other exits. Not pebble 5.2.3,
which runs the user's script again in each worker, or loky, which has no time limit that kills a worker.
"""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO, Any

from dew.errors import Problem, RewardError
from dew.rewards.verifiers import Status
from dew.rewards.worker import encode

START_TIMEOUT = 180.0  # seconds for a process to import its libraries, on a cold and busy disk
GRACE = 0.5  # seconds to wait for a worker beyond its limit, at which the kernel kills it
TICK = 0.2  # seconds between two checks of a process's memory
LAST_LINES = 5  # lines of a process's output that are quoted if it fails

_BOOT = """
import json, sys
sys.path[:], *given = map(json.loads, sys.argv[1:])
from dew.rewards.worker import main
main(*given)
"""

INHERITED: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Objects whose `forget()` is called in a forked child, because its copies of sockets would keep processes alive."""
os.register_at_fork(after_in_child=lambda: [item.forget() for item in list(INHERITED)])


class ProcessFailed(Exception):
    """A process did not reply. The message completes the sentence "its process ..."."""


class Channel:
    """One end of a socket to another process; each message is one line of JSON."""

    def __init__(self, end: socket.socket) -> None:
        self.socket, self.requests, self._received = end, 0, b""
        self.close = self.forget = end.close
        INHERITED.add(self)

    def ask(self, request: bytes, limit: float, check: Callable[[], None] | None = None) -> Any:
        """Send `request` and return the next message. Meanwhile, `check` is called every TICK seconds and may raise.

        Raises TimeoutError after `limit` seconds, or another OSError if the process has ended.
        """
        self.requests += 1
        end = monotonic() + limit
        self.socket.settimeout(limit)
        if request:  # sending nothing would fail if the process has replied and ended
            self.socket.sendall(request)
        while b"\n" not in self._received:
            if (left := end - monotonic()) <= 0:
                raise TimeoutError
            if check:
                check()
            self.socket.settimeout(min(TICK, left) if check else left)
            with suppress(TimeoutError):
                if not (part := self.socket.recv(1 << 16)):
                    raise ConnectionResetError
                self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)


class Process:
    """A new interpreter that calls `target` ("module:function") with a socket and `arguments` (see worker.py).

    `hello` is its first message. The process is killed if it uses more than `memory` bytes during a request.
    """

    def __init__(
        self, target: str, arguments: Mapping[str, Any], *, show_output: bool = False, memory: float = math.inf
    ) -> None:
        (ours, theirs), (alive, watched) = socket.socketpair(), socket.socketpair()
        with theirs, watched:
            fds = [theirs.fileno(), watched.fileno()]
            given = [json.dumps(value) for value in (sys.path, fds, target, arguments)]
            self.popen = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", _BOOT, *given],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,  # killed with everything it started, and not interrupted by Ctrl-C
            )
        self.channel, held = Channel(ours), Channel(alive)
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._output = threading.Thread(target=_read, args=(self.popen.stdout, self._last, show_output), daemon=True)
        self._output.start()
        self.kill = weakref.finalize(self, _kill, self.popen, (self.channel, held), os.getpid())  # also called at exit
        self.memory = memory
        self.hello = self.ask(b"", START_TIMEOUT)

    def _check_memory(self) -> None:
        if (held := memory_of(self.popen.pid)) > self.memory:
            allowed = f"its limit of {self.memory / 2**30:.2f} GiB"
            raise ProcessFailed(f"used {held / 2**30:.2f} GiB of memory, more than {allowed}, and was killed")

    def ask(self, request: bytes, limit: float) -> dict[str, Any]:
        """Send `request` and return the next message, or kill the process and raise ProcessFailed."""
        try:
            return self.channel.ask(request, limit, self._check_memory)
        except ProcessFailed as failure:
            why = str(failure)
        except TimeoutError:
            why = f"did not answer within {limit:g} s and was killed"
        except OSError:
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(2)
            code = self.popen.returncode
            why = "closed its connection and was killed" if code is None else f"exited with code {code}"
            why = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else why
        self.kill()
        self._output.join(1)
        raise ProcessFailed(why + (f" (it last printed: {' | '.join(self._last)})" if self._last else ""))

    def fork(self) -> Channel:
        """Return a channel to a new worker. The process must be running `worker.fork_workers`."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.channel.socket, [b"+"], [theirs.fileno()])
        return Channel(ours)


def _kill(popen: "subprocess.Popen[bytes]", channels: Sequence[Channel], owner: int) -> None:
    for channel in channels:
        channel.close()
    if os.getpid() != owner:  # in a fork of the process that started it
        popen.returncode = 0
        return
    with suppress(OSError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()


def _read(output: IO[bytes], last: "deque[str]", show: bool) -> None:
    """Keep the last lines of a process's output, without control characters. `show` prints every line to stderr."""
    with output:
        while line := output.readline(1000).decode(errors="replace"):
            last.append("".join(c if c.isprintable() or c == "\t" else "·" for c in line.rstrip("\n")))
            if show:
                print(last[-1], file=sys.stderr)


def memory_of(pid: int) -> int:
    """Return the memory of a process and its children in bytes, or 0 on systems without /proc."""
    held, waiting = 0, [pid]
    while waiting:
        folder = Path("/proc") / str(waiting.pop())
        with suppress(OSError, ValueError, IndexError):
            held += int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            waiting += map(int, (folder / "task" / folder.name / "children").read_text().split())
    return held


class Pool:
    """Sandboxed workers, which start with the first request, are replaced when they die, and end with this process."""

    MAX_REQUESTS = 2_000
    """A worker is replaced after this many requests, because sympy's caches grow."""

    def __init__(self, target: str, remedy: str) -> None:
        """`target` calls `worker.fork_workers`; `remedy` says what to do if it cannot be imported."""
        self.target, self.remedy = target, remedy
        self.forget()
        INHERITED.add(self)

    def forget(self) -> None:
        self._lock = threading.RLock()
        self._idle: list[Channel] = []
        self._server: Process | None = None

    def start(self) -> Process:
        """Start the process that forks workers now instead of on the first request."""
        with self._lock:
            if self._server is None:
                try:
                    self._server = Process(self.target, {})
                except ProcessFailed as failure:
                    problem = f"The workers that compare answers cannot start: their process {failure}."
                    raise RewardError(Problem(problem, remedy=self.remedy)) from None
            return self._server

    def close(self) -> None:
        """Kill all processes. The next request starts them again."""
        with self._lock:
            for worker in self._idle:
                worker.close()
            self._idle.clear()
            if self._server:
                self._server.kill()
            self._server = None

    def ask_all(self, requests: Sequence[Mapping[str, Any]], limit: float) -> list[tuple[Status, str | None]]:
        """Return the result of `ask` for each request, `worker_count()` at a time."""
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="dew-verifier") as threads:
            return list(threads.map(lambda request: self.ask(request, limit), requests))

    def ask(self, request: Mapping[str, Any], limit: float) -> tuple[Status, str | None]:
        """Return a worker's (status, extracted answer). If the worker dies before the limit, retry once."""
        worker = self._take()  # may start the server, which does not count towards the limit
        end = monotonic() + limit
        for last in (False, True):
            left = max(0.05, end - monotonic())
            try:
                reply = worker.ask(encode({**request, "timer": left}), left + GRACE)
            except OSError:
                worker.close()
                if monotonic() >= end - 0.05:
                    return "timeout", None
                if not last:
                    worker = self._take(new=True)
            else:
                with self._lock:
                    if self._server and worker.requests < self.MAX_REQUESTS:
                        self._idle.append(worker)
                    else:
                        worker.close()
                return reply
        return "unparsable", None

    def _take(self, *, new: bool = False) -> Channel:
        """Return an idle worker or a new one, so that no request waits for another."""
        with self._lock:
            if self._idle and not new:
                return self._idle.pop()
            try:
                return self.start().fork()
            except OSError:  # the server was killed
                self.close()
                return self.start().fork()


def worker_count() -> int:
    """Return the number of workers: the available cores divided by the ranks of this node, at most 8."""
    return max(1, min(8, cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
