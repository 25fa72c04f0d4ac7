"""Several processes, one of which dies: the others say which one, and end.

Every process leaves a sign of life in the group's store and looks at those of the others, in a thread of its own. On
one machine a process that is no longer there is seen within two beats; one on another machine is given up when it has
been silent for a while. gloo then fails by itself, in words that name nobody; NCCL would wait for its timeout. Whoever
is still waiting after a grace period is ended.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

from dew.errors import DewError, EngineError

BEAT = 2.0
SILENCE = 40.0
"""Seconds without a sign of life from another machine."""
GRACE = 15.0
"""Seconds in which the main thread may end by itself."""
PATIENCE = 3 * BEAT
"""Seconds to find out whether a failure is another process's."""
LAST_WORDS = 500
NEIGHBOURS = 8
"""Each looks at so many, and tells all what it finds: in a large group not everybody asks for everybody."""

_calls = 0


def _here() -> str:
    """This machine, as far as process ids are concerned."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except OSError:
        return False


@dataclass
class Sign:
    """The newest sign of life of one process."""

    place: str
    pid: int
    beat: int
    ended: str | None = None
    """None while it trains; "" when it left in peace; else what it failed with."""
    seen: float = 0.0
    """When its beat last changed, by our clock."""


class RollCall:
    """Around the training of one process. Alone it does nothing.

    Failures inside that are another process's leave as an EngineError that names it.
    """

    def __init__(self, rank: int, size: int, give_up: Callable[[], Any]) -> None:
        global _calls  # noqa: PLW0603
        _calls += 1  # processes train in step, so a second training of theirs has the same number
        self._rank, self._size, self._give_up = rank, size, give_up
        self._prefix = f"dew/alive/{_calls}/"
        self._others: dict[int, Sign] = {}
        self._lost: str | None = None
        self._found, self._over = threading.Event(), threading.Event()
        self._beat, self._cut_off = 0, False

    def __enter__(self) -> "RollCall":
        if self._size > 1 and "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
            self._store = self._connect()
            self._sign()
            self._thread = threading.Thread(target=self._watch, name="dew-roll-call", daemon=True)
            self._thread.start()
        else:
            self._over.set()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if self._over.is_set():
            return
        ours = isinstance(error, DewError) or not isinstance(error, Exception)
        if not ours:
            self._found.wait(PATIENCE)
        self._over.set()
        self._thread.join(BEAT)
        self._leave(error)
        if not ours and self._lost is not None:
            raise EngineError(self._lost) from error

    def _leave(self, error: BaseException | None) -> None:
        last_words = f"{type(error).__name__}: {error}"[:LAST_WORDS] if error is not None else ""
        if self._thread.is_alive() or self._cut_off:  # there is nobody to tell
            return
        with contextlib.suppress(RuntimeError):
            self._sign(last_words)

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        while not self._over.is_set():
            try:
                self._lost = self._missing()
                self._sign()
            except RuntimeError as error:
                self._cut_off, self._lost = True, self._without_store(error)
            if self._lost is not None:
                self._found.set()
                break
            self._over.wait(BEAT)
        if self._lost is not None and not self._over.wait(GRACE):
            print(f"\nerror: {self._lost}", file=sys.stderr, flush=True)
            self._give_up()
            os._exit(1)

    @staticmethod
    def _connect() -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=SILENCE),
            wait_for_workers=False,
        )

    def _sign(self, ended: str | None = None) -> None:
        self._beat += 1
        sign = {"place": _here(), "pid": os.getpid(), "beat": self._beat, "ended": ended}
        self._store.set(f"{self._prefix}{self._rank}", json.dumps(sign))

    def _missing(self) -> str | None:
        told = f"{self._prefix}lost"
        if self._store.check([told]):
            return self._advice(self._store.get(told).decode())
        now = time.monotonic()
        for distance in range(1, min(self._size, NEIGHBOURS + 1)):
            rank = (self._rank + distance) % self._size
            key = f"{self._prefix}{rank}"
            if not self._store.check([key]):  # it has not begun
                continue
            sign, before = Sign(**json.loads(self._store.get(key)), seen=now), self._others.get(rank)
            if before is not None and before.beat == sign.beat:
                sign.seen = before.seen
            self._others[rank] = sign
            problem = self._problem(sign, now)
            if problem is not None:
                found = f"process {rank} of {self._size} (pid {sign.pid} on {sign.place.split()[0]}) {problem}"
                self._store.set(told, found)
                return self._advice(found)
        return None

    @staticmethod
    def _problem(sign: Sign, now: float) -> str | None:
        if sign.ended is not None:
            return f"failed: {sign.ended}" if sign.ended else None
        if sign.place == _here():
            return None if _runs(sign.pid) else "is gone: it was killed, or it crashed"
        silent = now - sign.seen
        return f"has been silent for {silent:.0f} s: it or its machine is gone" if silent > SILENCE else None

    def _without_store(self, error: Exception) -> str:
        """Process 0 keeps the store, or the launcher beside it does."""
        return self._advice(
            f"process 0 of {self._size} or the launcher beside it is gone, and with it the store of the group ({error})"
        )

    def _advice(self, found: str) -> str:
        return (
            f"{found}. This process, {self._rank}, cannot go on without it. Its own last output says more; signal 9 is "
            "often a machine without memory. Go on from the last checkpoint with dew resume, or "
            "resume_from_checkpoint=True."
        )
