"""Run folders and child processes: claim and lock a folder, train in several processes at once."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dew.cli.live import RunView
from dew.errors import ConfigError, EngineError, Problem
from dew.files import sweep
from dew.records import RunFolder

POLL = 0.5
PATIENCE = 60.0
"""Seconds a child may take to write its checkpoint after it was asked to stop."""
LAST_LINES = 6
DEMO_FILES = {"report.html", "report.json", "grpo", "gtpo", "grpo.log", "gtpo.log"}
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def claim(folder: Path, overwrite: bool) -> None:
    """Make sure that `folder` is empty. With `overwrite`, delete it if it holds a run or a demo."""
    if folder.is_dir():
        sweep(folder)
    content = {path.name for path in folder.iterdir()} - {".lock"} if folder.exists() else set()
    if not content:
        return
    is_run = bool(content & {"config.yaml", "verl.yaml"})
    if not overwrite:
        resume = f"Resume it (dew resume {folder}), choose" if is_run else "Choose"
        raise ConfigError(Problem(f"{folder} is not empty.", remedy=f"{resume} another folder, or add --overwrite."))
    if not is_run and not content <= DEMO_FILES:
        listed = ", ".join(sorted(content)[:3])
        what = f"{folder} contains files that dew did not write ({listed}, ...) and is not emptied."
        raise ConfigError(Problem(what, remedy="Choose another folder."))
    shutil.rmtree(folder)


@contextmanager
def lock(folder: Path) -> Iterator[int]:
    """One command at a time per folder. Children inherit the lock, so orphans of a killed parent hold it too."""
    import fcntl  # not on Windows

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            what = f"{folder} is in use by another command, or by a training process that it left behind."
            raise ConfigError(Problem(what, remedy="Wait for it, or choose another folder.")) from None
        yield file.fileno()


def finished(folder: Path) -> bool:
    """True if a run is complete: trained and, if it is evaluated at all, evaluated after training."""
    run = RunFolder(folder)
    whens = [entry.get("when") for entry in run.scores()]
    return run.run().get("status") == "done" and (not whens or "after" in whens)


@dataclass
class Child:
    """One `dew train` or `dew resume` in a process of its own, with one torch thread."""

    arguments: Sequence[str]
    folder: Path
    program: Sequence[str] = (sys.executable, "-m", "dew.cli")
    process: subprocess.Popen[bytes] | None = None

    @cached_property
    def view(self) -> RunView:
        return RunView(self.folder)

    @property
    def log(self) -> Path:
        """Beside the run's folder, which must be empty when training starts."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def start(self, keep_open: Sequence[int] = ()) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.program, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
                start_new_session=True,  # Ctrl-C reaches the parent, which stops its children
                pass_fds=tuple(keep_open),
            )

    def check(self) -> None:
        """Called once it has ended: raise an error unless the run is complete."""
        assert self.process is not None
        code = self.process.returncode
        if code == 0 and RunFolder(self.folder).run().get("status") != "stopped":
            return
        how = "was stopped before it finished" if code == 0 else f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by signal {-code}" + " (often: out of memory)" * (code == -signal.SIGKILL)
        text = COLOURS.sub("", self.log.read_text(errors="replace")).replace("\r", "\n")
        lines = [line for line in text.splitlines() if line.strip() and "it/s" not in line]
        tail = "\n".join(lines[-LAST_LINES:])
        raise EngineError(f"{self.folder.name} {how}. The end of its log, {self.log}:\n{tail}")


def run_all(
    children: Sequence[Child],
    parallel: int,
    *,
    keep_open: Sequence[int] = (),
    ended: Callable[[Child], Any] = lambda child: None,
    advice: str = "",
) -> None:
    """Run the children in order, at most `parallel` at a time. A failure, Ctrl-C or SIGTERM stops them all."""
    waiting, running = list(children), list[Child]()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                running.append(waiting.pop(0))  # first, so that an interruption finds it
                running[-1].start(keep_open)
            for child in [c for c in running if c.process is not None and c.process.poll() is not None]:
                running.remove(child)
                child.check()
                ended(child)
            time.sleep(POLL if running else 0)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted; all processes are stopped. {advice}") from None
    finally:
        _stop([child.process for child in running if child.process is not None])
        signal.signal(signal.SIGTERM, before)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask the processes to stop, wait for their checkpoints, then kill them."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
