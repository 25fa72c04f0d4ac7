"""Processes that judge answers, each under a time limit that really holds.

Nothing inside Python can stop a parser that is busy in C or swallows exceptions, and signals reach the main
thread alone. So each verdict is made in a process of its own whose kernel timer ends it at the limit:

    this process ── nursery, has imported math-verify once ── workers, forked from it in milliseconds

The nursery is a fresh interpreter, so nothing is ever forked from a process with threads or a GPU. Whoever
asks may be in any thread, in a daemonic process, in a child of a fork. Every link is a socket: when this
process ends, however it ends, the others read the end of their socket and end too.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from dew.errors import ConfigError, RewardError

Job = dict[str, Any]
Reply = list[Any]

GRACE = 0.5
"""Seconds after the limit, when the kernel ends the worker, until it is given up even if it has not ended."""
START = 120.0
"""Seconds that the nursery may take to import math-verify, on a cold and busy disk."""

_NURSERY = """
import json, sys, types
sys.path[:] = json.loads(sys.argv[2])
dew = types.ModuleType("dew")  # the name alone: the package itself would import torch
dew.__path__ = [sys.argv[3]]
sys.modules["dew"] = dew
from dew.rewards.nursery import serve
serve(int(sys.argv[1]))
"""


class Worker:
    """One forked process, at the other end of a socket."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.jobs = 0

    def ask(self, job: Job, limit: float) -> Reply | None:
        """Its reply, or None if the worker ended or is given up."""
        end = monotonic() + limit + GRACE
        self.jobs += 1
        try:
            self.channel.settimeout(limit + GRACE)
            self.channel.sendall(json.dumps({**job, "limit": limit}).encode() + b"\n")
            reply = b""
            while not reply.endswith(b"\n"):
                self.channel.settimeout(max(0.001, end - monotonic()))
                part = self.channel.recv(65536)
                if not part:
                    return None
                reply += part
            return json.loads(reply)
        except OSError:  # also a time-out
            return None

    def close(self) -> None:
        self.channel.close()


class Pool:
    """Workers that are started when first needed, replaced when they end, and gone when this process is."""

    KEEP = 2_000
    """Jobs after which a worker is replaced, so that sympy's caches do not grow for ever."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = Lock()
        self._idle: list[Worker] = []
        self._nursery: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def ask(self, job: Job, limit: float) -> Reply | None:
        """The worker's reply; None if there was none within `limit`. A worker that crashed is replaced once."""
        worker = self._take()  # may have to start the nursery, which is not the answer's fault
        end = monotonic() + limit
        for last in (False, True):
            reply = worker.ask(job, max(0.05, end - monotonic()))
            self._give(worker, alive=reply is not None)
            if reply is not None or monotonic() >= end - 0.05:
                return reply
            if not last:
                worker = self._take(fresh=True)
        return ["crashed", None]

    def start(self) -> None:
        """Start the nursery now rather than with the first verdict; half a second on an idle machine."""
        with self._lock:
            self._start()

    def ask_all(self, jobs: Sequence[Job], limit: float) -> list[Reply | None]:
        """As many at a time as the pool is large; the limit is each one's own."""
        if len(jobs) < 2:
            return [self.ask(job, limit) for job in jobs]
        with ThreadPoolExecutor(min(self.size, len(jobs)), thread_name_prefix="dew-verdict") as threads:
            return list(threads.map(lambda job: self.ask(job, limit), jobs))

    def _take(self, *, fresh: bool = False) -> Worker:
        """An idle worker or a new one: no one waits for somebody else's verdict."""
        with self._lock:
            if self._idle and not fresh:
                return self._idle.pop()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._start(), [b"+"], [theirs.fileno()])
                except OSError:  # the nursery was killed; start another
                    self._stop()
                    socket.send_fds(self._start(), [b"+"], [theirs.fileno()])
            return Worker(ours)

    def _give(self, worker: Worker, *, alive: bool) -> None:
        with self._lock:
            if alive and len(self._idle) < self.size and worker.jobs < self.KEEP and self._control:
                self._idle.append(worker)
            else:
                worker.close()

    def _start(self) -> socket.socket:
        """The line to the nursery, which is started now if it is not there."""
        if self._control:
            return self._control
        ours, theirs = socket.socketpair()
        with theirs:
            home = str(Path(__file__).parents[1])
            arguments = [str(theirs.fileno()), json.dumps(sys.path), home]
            self._nursery = subprocess.Popen(
                [sys.executable, "-P", "-c", _NURSERY, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,  # so that the nursery can end its workers together, and ^C does not reach them
            )
        self._control = ours
        ours.settimeout(START)
        try:
            hello = ours.recv(4096).decode()
        except OSError:
            hello = f"nothing heard of it for {START:.0f} s"
        if hello != "ready":
            self._stop()
            raise RewardError(
                f"The processes that judge answers do not start: {hello or 'the interpreter ended at once'}.\n"
                'They need math-verify: pip install "dew-rl[math]".'
            )
        return ours

    def _stop(self) -> None:
        """End everything. Closing the sockets is what ends the processes; the rest is tidying up."""
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        if self._control:
            self._control.close()
        if self._nursery:
            try:
                self._nursery.wait(2)
            except subprocess.TimeoutExpired:
                self._nursery.kill()
                self._nursery.wait()
        self._control = self._nursery = None

    def close(self) -> None:
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """In a forked child: let go of the parent's sockets without touching its processes."""
        for worker in self._idle:
            worker.close()
        if self._control:
            self._control.close()
        if self._nursery:
            self._nursery.returncode = 0  # not ours to wait for


class _Here:
    """What belongs to this process and is not inherited by its forks."""

    pool: Pool | None = None
    lock = Lock()


def pool() -> Pool:
    """This process's pool. It costs nothing until it is asked something."""
    with _Here.lock:
        if _Here.pool is None:
            _Here.pool = Pool(default_size())
        return _Here.pool


def default_size() -> int:
    """DEW_VERIFIERS, or the cores that this process may count on: at most 8, shared with its sister ranks."""
    given = os.environ.get("DEW_VERIFIERS")
    if given is not None:
        if not given.isdecimal() or int(given) < 1:
            raise ConfigError(f"DEW_VERIFIERS={given!r}: how many answers are judged at a time, 1 or more.")
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(8, cores // max(1, int(ranks) if ranks.isdecimal() else 1)))


def shutdown() -> None:
    """End the pool's processes now. The next verdict starts them again."""
    with _Here.lock:
        closing, _Here.pool = _Here.pool, None
    if closing:
        closing.close()


def _after_fork() -> None:
    if _Here.pool:
        _Here.pool.forget()
    _Here.pool, _Here.lock = None, Lock()


atexit.register(shutdown)
os.register_at_fork(after_in_child=_after_fork)
