"""Train in child processes, and print the progress of runs."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import typer

from dew.cli.console import out
from dew.errors import DewError, EngineError, Problem
from dew.run.folder import RunFolder
from dew.run.records import try_json

POLL = 0.5
STOP_TIMEOUT = 60.0
"""Seconds that a child process has to write its checkpoint when it is asked to stop."""
LAST_LINES = 6
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
METRICS = {  # heading: metric, format
    "reward": ("reward", "{:.3f}"),
    "accuracy": ("accuracy", "{:.3f}"),
    "entropy": ("entropy", "{:.3g}"),
    "length": ("length/mean", "{:.1f}"),
    "tokens/s": ("tokens_per_second", "{:,.0f}"),
}


@contextmanager
def followed(views: Sequence["RunView"], every: int = 1) -> Iterator[None]:
    """Print a line every `every` steps of each run, and its alarms, while the block runs."""
    for view in views:
        view.skip()
    stop = threading.Event()
    thread = threading.Thread(target=_print_progress, args=(views, every, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _print_progress(views: Sequence["RunView"], every: int, stop: threading.Event) -> None:
    ended, shown = False, dict[RunView, int]()
    while not ended:
        ended = stop.wait(POLL)
        with suppress(DewError, OSError):  # a damaged file must not end the thread
            for view in views:
                known = len(view.alarms)
                steps = {line["step"] for line in view.poll() if "step" in line} - {shown.get(view)}
                shown[view] = view.step
                lines = [view.line()] if any(step == view.steps or step % every == 0 for step in steps) else []
                for line in [*lines, *view.alarms[known:]]:
                    out.print(line)


class RunView:
    """A run's folder, read as it grows."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self.label = folder.resolve().name
        self.latest: dict[str, Any] = {}
        self.steps: int | None = None
        self.alarms: list[str] = []
        self._ends: dict[str, int] = {}
        self._times: list[tuple[int, float]] = []

    @property
    def step(self) -> int:
        return int(self.latest.get("step", 0))

    def skip(self) -> None:
        """Skip what a resumed run wrote earlier, which it may partly repeat."""
        self.poll()
        self.steps = None
        self.alarms.clear()
        self._times.clear()

    def poll(self) -> list[dict[str, Any]]:
        """Read what was written since the last call, and return the new lines of metrics."""
        lines = [_numbers(line) for line in self._new_lines("metrics.jsonl")]
        for alarm in self._new_lines("alarms.jsonl"):
            self.alarms.append(f"⚠ {self.label} step {alarm.get('step')}: {alarm.get('message')} {alarm.get('remedy')}")
        for line in lines:
            if "grad_norm" in line:  # a step that trains on nothing has no entropy
                self.latest.pop("entropy", None)
            self.latest.update(line)
            if not self._times or self.step > self._times[-1][0]:
                self._times = [*self._times[-9:], (self.step, line.get("time", time.time()))]
        if self.steps is None and lines:
            self.steps = _numbers(self.folder.run()).get("steps")
        return lines

    def _new_lines(self, name: str) -> list[dict[str, Any]]:
        path, end = self.folder.path / name, self._ends.get(name, 0)
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(end if path.stat().st_size >= end else 0)  # a run resumed without a checkpoint starts over
            *whole, rest = file.read().split(b"\n")
            self._ends[name] = file.tell() - len(rest)
        return [line for text in whole if isinstance(line := try_json(text), dict)]

    @property
    def seconds_left(self) -> float | None:
        """Estimated time left, from the last steps."""
        if self.steps is None or len(self._times) < 2:
            return None
        (first, began), (last, ended) = self._times[0], self._times[-1]
        return (self.steps - last) * (ended - began) / (last - first)

    def line(self) -> str:
        """Return progress, metrics and time left. The reward is omitted if it equals the accuracy."""
        found = {key: x for key, x in self.latest.items() if (key, x) != ("reward", self.latest.get("accuracy"))}
        metrics = [f"{head} {form.format(found[key])}" for head, (key, form) in METRICS.items() if key in found]
        left = [f"{clock(self.seconds_left)} left"] if self.seconds_left else []
        step = f"step {self.step}{f'/{self.steps}' if self.steps else ''}"
        return f"{self.label}: {'  '.join([step, *metrics, *left])}"


def clock(seconds: float) -> str:
    return str(timedelta(seconds=max(round(seconds), 0))).removeprefix("0:")


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in line.items() if isinstance(x, int | float) and abs(x) < 1e300}


# ── child processes ───────────────────────────────────────────────────────────────────────────────────────────
@dataclass
class Child:
    """A command that trains the run in `folder`, in a child process with one torch thread."""

    command: Sequence[str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @cached_property
    def view(self) -> RunView:
        return RunView(self.folder)

    @property
    def log(self) -> Path:
        """The log file, next to the run's folder, which must be empty when training starts."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
                start_new_session=True,  # only the parent gets Ctrl-C, and stops its children
                close_fds=False,  # it inherits the lock
            )

    def check(self, advice: str) -> None:
        """Raise an error if the process has ended without completing the run."""
        assert self.process is not None
        code = self.process.returncode
        if code == 0 and RunFolder(self.folder).run().get("status") != "stopped":
            return
        how = "was stopped before it finished" if code == 0 else f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by signal {-code}" + " (often: out of memory)" * (code == -signal.SIGKILL)
        text = COLOURS.sub("", self.log.read_text(errors="replace")).replace("\r", "\n")
        lines = [line for line in text.splitlines() if line.strip() and "it/s" not in line and "s/it" not in line]
        tail = "\n".join(lines[-LAST_LINES:])
        what = f"{self.folder.name} {how}. The end of its log, {self.log}:\n{tail}"
        raise EngineError(Problem(what, remedy=advice))


def run_all(
    children: Sequence[Child], parallel: int, *, ended: Callable[[Child], Any] = lambda child: None, advice: str = ""
) -> None:
    """Run the children in order, at most `parallel` at a time. A failure, Ctrl-C or SIGTERM stops them all."""
    waiting, running = list(children), list[Child]()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                running.append(waiting.pop(0))  # before it starts, so that an interrupt stops it
                running[-1].start()
            for child in [c for c in running if c.process is not None and c.process.poll() is not None]:
                running.remove(child)
                child.check(advice)
                ended(child)
            time.sleep(POLL if running else 0)
    except KeyboardInterrupt:
        raise typer.Abort(f"Interrupted; all processes are stopped. {advice}") from None
    finally:
        _stop([child.process for child in running if child.process is not None])
        signal.signal(signal.SIGTERM, before)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask the processes to stop, wait for their checkpoints, then kill them."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
