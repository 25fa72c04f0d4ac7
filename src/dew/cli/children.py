"""Several trainings at once, each a process of its own with one torch thread, seen to their end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from dew.cli.watch import RunView
from dew.errors import ConfigError, EngineError
from dew.records import RunFolder

TICK = 0.5
PATIENCE = 60.0
"""Seconds that a child may take to write its checkpoint when it is asked to stop."""
LAST_LINES = 6


@dataclass
class Child:
    """One `dew train` or `dew resume`."""

    label: str
    arguments: Sequence[str]
    folder: Path
    program: Sequence[str] = (sys.executable, "-m", "dew.cli")
    process: subprocess.Popen[bytes] | None = None
    view: RunView = field(init=False)

    def __post_init__(self) -> None:
        self.view = RunView(self.folder, self.label)

    @property
    def log(self) -> Path:
        """Beside the run's folder, which must be empty when training begins."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def start(self, keep_open: Sequence[int] = ()) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*self.program, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
                start_new_session=True,  # Ctrl-C reaches the parent, who asks the children
                pass_fds=tuple(keep_open),
            )

    def last_words(self) -> str:
        text = self.log.read_text(errors="replace").replace("\r", "\n") if self.log.exists() else ""
        lines = [line for line in text.splitlines() if line.strip() and "it/s]" not in line and "?it/s" not in line]
        return "\n".join(lines[-LAST_LINES:])

    def check(self) -> None:
        """It has ended: well, or with a message that says why not."""
        assert self.process is not None
        code = self.process.returncode
        if code == 0 and finished(self.folder):
            return
        how = (
            f"was killed by signal {-code} (9 is often: out of memory)" if code < 0 else f"ended with exit code {code}"
        )
        if code == 0:
            how = "was stopped before its end"
        raise EngineError(f"{self.label} {how}. Its last words, all of them in {self.log}:\n{self.last_words()}")


def finished(folder: Path) -> bool:
    """True if a run came to its end and, where it is to be scored, was scored."""
    run = RunFolder(folder)
    whens = [entry.get("when") for entry in run.scores()]
    return run.run().get("status") == "done" and (not whens or "after" in whens)


class Lock:
    """One command at a time works in a folder. Children inherit it, so that orphans of a killed parent hold it too."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".lock"

    def __enter__(self) -> int:
        import fcntl

        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(
                f"{self._path.parent}: another command, or a training that it left behind, is at work here. Wait for "
                "it, or choose another folder with --out."
            ) from None
        return self._file.fileno()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()


def run_all(
    children: Sequence[Child],
    parallel: int,
    *,
    keep_open: Sequence[int] = (),
    tick: Callable[[Sequence[Child]], Any] = lambda running: None,
    ended: Callable[[Child], Any] = lambda child: None,
) -> None:
    """Start the children in order, at most `parallel` at a time. One that fails, or Ctrl-C, ends them all."""
    waiting, running = list(children), list[Child]()
    with ExitStack() as stack:
        stack.enter_context(_terminated_as_interrupted())
        stack.callback(lambda: _stop(running))
        while waiting or running:
            while waiting and len(running) < parallel:
                child = waiting.pop(0)
                running.append(child)  # first, so that an interruption finds it
                child.start(keep_open)
            for child in [c for c in running if c.process is not None and c.process.poll() is not None]:
                running.remove(child)
                child.check()
                ended(child)
            tick(running)
            time.sleep(TICK if running else 0)


def _stop(running: Sequence[Child]) -> None:
    """Ask, wait for the checkpoint, and do not wait for ever."""
    processes = [child.process for child in running if child.process is not None]
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()


class _terminated_as_interrupted:
    """SIGTERM is Ctrl-C while children run."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
