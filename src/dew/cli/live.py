"""Live view of runs through the files they write: a table and coloured answers on a terminal, else plain lines."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dew.cli.console import by_credit, out
from dew.errors import DewError
from dew.records import GroupRecord, RunFolder, read_records

COLUMNS = {  # heading: metric, format
    "reward": ("reward", "{:.3f}"),
    "accuracy": ("accuracy", "{:.3f}"),
    "entropy": ("entropy", "{:.3f}"),
    "length": ("length/mean", "{:.1f}"),
    "kept": ("groups/kept", "{:.0f}"),
    "mixed": ("groups/mixed_share", "{:.0%}"),
    "tokens/s": ("tokens_per_second", "{:,.0f}"),
}
ANSWERS_SHOWN = 3
POLL = 0.5


@contextmanager
def live(views: Callable[[], Sequence["RunView"]], *, every: int = 1, transient: bool = False) -> Iterator[None]:
    """Show runs while the block runs. Without a terminal: a line every `every` steps, and alarms; 0: nothing."""
    if out.is_terminal:
        with Live(get_renderable=lambda: screen(views()), console=out, refresh_per_second=2, transient=transient):
            yield
        return
    stop = threading.Event()

    def follow() -> None:
        ended = False
        while not ended:
            ended = stop.wait(POLL)
            with suppress(DewError, OSError):  # a damaged file must not end the thread
                _print_progress(views(), every)

    for view in views():
        view.poll()  # what a resumed run wrote before is not printed again
    thread = threading.Thread(target=follow, daemon=True)
    if every:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if every:
            thread.join()


def _print_progress(views: Sequence["RunView"], every: int) -> None:
    for view in views:
        known, last = len(view.alarms), view.step
        steps = [line["step"] for line in map(_numbers, view.poll()) if line.get("step", 0) > last]
        if any(step == view.steps or step % every == 0 for step in steps):
            out.print(view.line(), soft_wrap=True)
        for alarm in view.alarms[known:]:
            out.print(_alarm(view, alarm), soft_wrap=True)


def _alarm(view: "RunView", alarm: dict[str, Any]) -> str:
    return f"⚠ {view.label} step {alarm.get('step')}: {alarm.get('message')} {alarm.get('remedy')}"


class RunView:
    """A run's folder, read as it grows."""

    def __init__(self, folder: Path | str, label: str | None = None) -> None:
        self.folder = RunFolder(folder)
        self.label = label or self.folder.path.name
        self.latest: dict[str, Any] = {}
        self.steps: int | None = None
        self.alarms: list[dict[str, Any]] = []
        self._read = 0
        self._alarms_read = 0
        self._times: list[tuple[int, float]] = []

    @property
    def step(self) -> int:
        return int(self.latest.get("step", 0))

    def poll(self) -> list[dict[str, Any]]:
        """Read what was written since the last call; return the new lines of metrics."""
        lines, self._read = _new_lines(self.folder.path / "metrics.jsonl", self._read)
        alarms, self._alarms_read = _new_lines(self.folder.path / "alarms.jsonl", self._alarms_read)
        self.alarms += alarms
        for line in map(_numbers, lines):
            self.latest.update(line)
            if not self._times or line.get("step", 0) > self._times[-1][0]:
                self._times = [*self._times[-9:], (line.get("step", 0), line.get("time", time.time()))]
        if self.steps is None and lines:
            self.steps = _numbers(self.folder.run()).get("steps")
        return lines

    @property
    def seconds_left(self) -> float | None:
        """Estimated from the last steps."""
        recent = self._times
        if self.steps is None or len(recent) < 2:
            return None
        (first, began), (last, ended) = recent[0], recent[-1]
        return (self.steps - last) * (ended - began) / max(last - first, 1)

    def newest_group(self) -> GroupRecord | None:
        """Of the newest recorded groups, the one whose credit differs most between tokens."""
        files = self.folder.record_files()
        try:
            return max(read_records(files[-1]), key=_contrast) if files else None
        except DewError:  # still being written
            return None

    def line(self) -> str:
        """The latest step as one plain line."""
        shown = [
            f"{head} {form.format(self.latest[key])}" for head, (key, form) in COLUMNS.items() if key in self.latest
        ]
        return f"{self.label}: step {self.step}{f'/{self.steps}' if self.steps else ''}  {'  '.join(shown)}"


def table(views: Sequence[RunView]) -> Table:
    """Progress, time left and the main metrics, one row per run."""
    grid = Table(show_edge=False, pad_edge=False)
    grid.add_column("run")
    for head in ("step", "left", *COLUMNS):
        grid.add_column(head, justify="right")
    for view in views:
        left = view.seconds_left
        cells = [form.format(view.latest[key]) if key in view.latest else "" for key, form in COLUMNS.values()]
        step = f"{view.step}/{view.steps}" if view.steps else "starting"
        grid.add_row(view.label, step, "" if left is None else clock(left), *cells)
    return grid


def screen(views: Sequence[RunView]) -> RenderableType:
    """The whole view: the table, recent alarms, and some answers of the first run's newest recorded group."""
    for view in views:
        view.poll()
    parts: list[RenderableType] = [table(views)]
    parts += [Text(_alarm(view, alarm)) for view in views for alarm in view.alarms[-2:]]
    group = views[0].newest_group() if views else None
    if group is not None:
        legend = "blue: positive credit, orange: negative"
        parts.append(Text(f"\nstep {group.step}  {group.prompt.strip()}   {legend}", style="dim"))
        for answer in group.answers[:ANSWERS_SHOWN]:
            mark = Text("✓ " if answer.correct else "✗ ")
            parts.append(mark + by_credit(answer.tokens, answer.advantage or [0.0] * len(answer.tokens)))
    return Group(*parts)


def clock(seconds: float) -> str:
    minutes, rest = divmod(max(round(seconds), 0), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _contrast(group: GroupRecord) -> float:
    spreads = [max(map(abs, a.advantage)) - min(map(abs, a.advantage)) for a in group.answers if a.advantage]
    return sum(spreads) / len(spreads) if spreads else 0.0


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    """The finite numbers of a line; steps as integers."""
    numbers = {k: v for k, v in line.items() if isinstance(v, int | float) and abs(v) < 1e300}
    return {k: int(v) if k in ("step", "steps") else v for k, v in numbers.items()}


def _new_lines(path: Path, start: int) -> tuple[list[dict[str, Any]], int]:
    """Complete lines after byte `start`, and where they end."""
    if not path.exists():
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        chunk = file.read()
    end = chunk.rfind(b"\n") + 1
    lines = []
    for line in chunk[:end].splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            lines.append(value)
    return lines, start + end
