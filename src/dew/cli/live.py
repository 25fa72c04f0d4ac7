"""Live view of runs through the files they write: a table and coloured answers on a terminal, else plain lines."""

import threading
import time
from collections import deque
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
from dew.records import GroupRecord, RunFolder, read_records, try_json

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
    """Show runs while the block runs. Without a terminal: a line every `every` steps, and alarms."""
    if out.is_terminal:
        with Live(get_renderable=lambda: screen(views()), console=out, refresh_per_second=2, transient=transient):
            yield
        return
    for view in views():
        view.poll()  # what a resumed run wrote before is not printed again
    stop = threading.Event()
    thread = threading.Thread(target=_print_progress, args=(views, every, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _print_progress(views: Callable[[], Sequence["RunView"]], every: int, stop: threading.Event) -> None:
    ended = False
    while not ended:
        ended = stop.wait(POLL)
        with suppress(DewError, OSError):  # a damaged file must not end the thread
            for view in views():
                last, known = view.step, len(view.alarms)
                steps = [line["step"] for line in view.poll() if line.get("step", 0) > last]
                lines = [view.line()] if any(step == view.steps or step % every == 0 for step in steps) else []
                for line in [*lines, *view.alarms[known:]]:
                    out.print(line, soft_wrap=True)


class RunView:
    """A run's folder, read as it grows."""

    def __init__(self, folder: Path | str, label: str | None = None) -> None:
        self.folder = RunFolder(folder)
        self.label = label or self.folder.path.name
        self.latest: dict[str, Any] = {}
        self.steps: int | None = None
        self.alarms: list[str] = []
        self._ends: dict[str, int] = {}
        self._times: deque[tuple[int, float]] = deque(maxlen=10)

    @property
    def step(self) -> int:
        return int(self.latest.get("step", 0))

    def poll(self) -> list[dict[str, Any]]:
        """Read what was written since the last call; return the new lines of metrics."""
        lines = [_numbers(line) for line in self._new_lines("metrics.jsonl")]
        for alarm in self._new_lines("alarms.jsonl"):
            self.alarms.append(f"⚠ {self.label} step {alarm.get('step')}: {alarm.get('message')} {alarm.get('remedy')}")
        for line in lines:
            self.latest.update(line)
            if not self._times or self.step > self._times[-1][0]:
                self._times.append((self.step, line.get("time", time.time())))
        if self.steps is None and lines:
            self.steps = _numbers(self.folder.run()).get("steps")
        return lines

    def _new_lines(self, name: str) -> list[dict[str, Any]]:
        """The complete lines written since the last call."""
        path, start = self.folder.path / name, self._ends.get(name, 0)
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(start)
            *whole, rest = file.read().split(b"\n")
            self._ends[name] = file.tell() - len(rest)
        return [line for text in whole if isinstance(line := try_json(text), dict)]

    @property
    def seconds_left(self) -> float | None:
        """Estimated from the last steps."""
        if self.steps is None or len(self._times) < 2:
            return None
        (first, began), (last, ended) = self._times[0], self._times[-1]
        return (self.steps - last) * (ended - began) / (last - first)

    def newest_group(self) -> GroupRecord | None:
        """Of the newest recorded groups, one with correct and wrong answers if there is one."""
        files = self.folder.record_files()
        try:
            return max(read_records(files[-1]), key=lambda group: len({a.correct for a in group.answers}), default=None)
        except (DewError, IndexError):  # still being written, or no records yet
            return None

    def line(self) -> str:
        """The latest step as one plain line."""
        shown = [
            f"{head} {form.format(self.latest[key])}" for head, (key, form) in COLUMNS.items() if key in self.latest
        ]
        return f"{self.label}: step {self.step}{f'/{self.steps}' if self.steps else ''}  {'  '.join(shown)}"


def screen(views: Sequence[RunView]) -> RenderableType:
    """Progress, time left and metrics of each run, recent alarms, and some answers of the first run's newest group."""
    table = Table(show_edge=False, pad_edge=False)
    for head in ("run", "step", "left", *COLUMNS):
        table.add_column(head, justify="left" if head == "run" else "right")
    parts: list[RenderableType] = [table]
    for view in views:
        view.poll()
        left = view.seconds_left
        cells = [form.format(view.latest[key]) if key in view.latest else "" for key, form in COLUMNS.values()]
        step = f"{view.step}/{view.steps}" if view.steps else "starting"
        table.add_row(view.label, step, "" if left is None else clock(left), *cells)
        parts += map(Text, view.alarms[-2:])
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


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    """The finite numbers of a line."""
    return {key: x for key, x in line.items() if isinstance(x, int | float) and abs(x) < 1e300}
