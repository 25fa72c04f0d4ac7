"""The folder of a run, which the engines write and the report and other commands read.

    runs/NAME/  run.json  config.yaml  metrics.jsonl  alarms.jsonl  scores.json
                records/step-00000120.jsonl.gz

Files are written atomically (`dew.files`), logs line by line. Incomplete lines of a killed run are skipped.
docs/records.md documents every field.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from dew.errors import ConfigError, Problem, RecordError, quoted
from dew.files import read_whole, remove, sweep, sync, write_atomically
from dew.run.records import SCHEMA, GroupRecord, Json, check_schema, read_records, to_json, try_json, write_records

MODEL_FILES = ("config.json", "adapter_config.json")
RUN_AGAIN = "Run it again: dew train THIS_FILE --output_dir NEW_FOLDER"
"""The first line of the config.yaml in a run folder."""
STATE = "trainer_state.json"
"""The file of transformers without which a run cannot resume from a checkpoint."""
VERLS_LATEST = "latest_checkpointed_iteration.txt"
"""verl's file with the step of its last complete checkpoint."""
SILENCE = 600.0
"""A run without a lock file has ended after this many seconds plus ten times its usual step time without a step."""
is_main_process = os.environ.get("RANK", "0") == "0"
"""False in all but one of the processes that torchrun or accelerate started."""
T = TypeVar("T", Json, list[Json])


class RunFolder:
    """The files of one run. The folder is created by the first write."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.skipped: dict[str, str] = {}
        """One sentence for each log in which damaged lines were skipped."""

    def write_run(self, facts: Mapping[str, Any]) -> None:
        """Update entries of run.json, e.g. `write_run({"status": "done"})`."""
        write_atomically(self.path / "run.json", to_json({"schema": SCHEMA, **self.run(), **facts}, indent=1))

    def write_scores(self, scores: Sequence[Mapping[str, Any]]) -> None:
        write_atomically(self.path / "scores.json", to_json([dict(score) for score in scores], indent=1))

    def write_metrics(self, lines: Iterable[Mapping[str, Any]]) -> None:
        write_atomically(self.path / "metrics.jsonl", b"".join(to_json(dict(line)) for line in lines))

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        self._append("metrics.jsonl", metrics)

    def append_alarm(self, alarm: Mapping[str, Any]) -> None:
        self._append("alarms.jsonl", alarm)

    def write_records(self, step: int, groups: Iterable[GroupRecord], keep: int = 0) -> int:
        """Write a step's groups. Above `keep` files (0: no limit), every second one except the newest is deleted."""
        written = write_records(self.path, step, groups)
        files = self.record_files()
        for path in files[1:-1:2] if 0 < keep < len(files) else []:
            path.unlink(missing_ok=True)
        return written

    def sync(self) -> None:
        for path in self.path.glob("*.jsonl"):
            sync(path)

    def run(self) -> Json:
        return self._load("run.json", dict)

    def alive(self) -> bool:
        """Whether a process is still training here: it holds the lock, or it wrote a step recently."""
        path = self.path / ".lock"
        if not path.exists():  # written by another program, or copied from elsewhere
            times = [line["time"] for line in self.metrics() if isinstance(line.get("time"), int | float)]
            usual = (times[-1] - times[0]) / len(times) if times else 0.0
            return not times or time.time() - times[-1] < SILENCE + 10 * usual
        with path.open() as file:
            return not _take(file, shared=True)

    def scores(self) -> list[Json]:
        return self._load("scores.json", list)

    def checkpoints(self) -> dict[int, Path]:
        """Return {step: folder}, newest first."""
        found = [(path.name.partition("-")[2], path) for path in self.path.glob("checkpoint-*")]
        return dict(sorted(((int(step), path) for step, path in found if step.isdecimal()), reverse=True))

    def resumable(self) -> list[Path]:
        """Return the checkpoints that have a `STATE`, newest first."""
        return [path for path in self.checkpoints().values() if (path / STATE).is_file()]

    def model(self) -> Path | None:
        """Return the final model: `model/`, the lab's `adapter/`, the folder itself (if saved there from Python), or
        the newest checkpoint."""
        places = [self.path / "model", self.path / "adapter", self.path, *self.resumable()[:1]]
        return next((path for path in places if any((path / name).is_file() for name in MODEL_FILES)), None)

    def used(self) -> bool:
        """Whether a run has trained here. Step 0 does not count: it is the evaluation before training."""
        return any(line["step"] for line in self.metrics()) or any(self.path.glob("checkpoint-*"))

    def clear(self, *, whole: bool = True) -> None:
        """Delete what a run wrote; with `whole=False`, only what it wrote while training."""
        written = ["metrics.jsonl", "alarms.jsonl", "records", "checkpoint-*"]
        if whole:
            written += ["run.json", "config.yaml", "scores.json", "answers-*.json", "report.*", "model"]
        if whole and (self.path / "verl.yaml").is_file():
            written += ["verl.yaml", "train.sh", "data", "checkpoints"]
        for path in [path for pattern in written for path in self.path.glob(pattern)]:
            remove(path)

    def finished(self) -> bool:
        """Whether the run is trained, its model is saved and, if it has scores, the final evaluation is done."""
        scored = not (self.path / "scores.json").exists() or any(x.get("when") == "after" for x in self.scores())
        return self.run().get("status") == "done" and (self.path / "model").is_dir() and scored

    def metrics(self) -> list[Json]:
        """Return one entry per step, in order. If a resumed run repeated a step, its last values count."""
        steps: dict[int, Json] = {}
        for line in self._log("metrics.jsonl"):
            steps.setdefault(line["step"], {}).update(line)
        return [steps[step] for step in sorted(steps)]

    def alarms(self) -> list[Json]:
        """Return alarms in step order, without duplicates from a resumed run."""
        latest = {(line.get("step", 0), str(line.get("alarm"))): line for line in self._log("alarms.jsonl", step=0)}
        return [latest[key] for key in sorted(latest, key=lambda key: key[0])]

    def record_files(self) -> list[Path]:
        return sorted((self.path / "records").glob("step-*.jsonl.gz"))

    def records(self) -> Iterator[GroupRecord]:
        for path in self.record_files():
            yield from read_records(path)

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / name).open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(end - 1, 0))
            if file.read(1) not in (b"\n", b""):  # the last line of a killed run: end it if it is whole, else remove it
                file.seek(0)
                last = file.read().rpartition(b"\n")[2]
                if isinstance(try_json(last), dict):
                    file.write(b"\n")
                else:
                    file.truncate(end - len(last))
            file.write(to_json(dict(line)))

    def _read(self, name: str) -> bytes | None:
        path = self.path / name
        return read_whole(path) if path.exists() else None

    def _log(self, name: str, step: int | None = None) -> list[Json]:
        """Return the lines that are JSON objects with a step; `step` is the default of those that have none."""
        content = self._read(name) or b""
        values = [try_json(line) for line in content.splitlines() if line.strip()]
        if values and not content.endswith(b"\n") and not isinstance(values[-1], dict):
            values.pop()  # it may still be being written
        objects = [value for value in values if isinstance(value, dict)]
        if values and not objects:
            raise RecordError(f"{self.path / name}: no line is a JSON object.")
        whole = [line for line in objects if isinstance(line.get("step", step), int)]
        if damaged := len(values) - len(whole):
            self.skipped[name] = f"{self.path / name}: skipped damaged lines ({damaged} of {len(values)})."
        return whole

    def _load(self, name: str, kind: type[T]) -> T:
        content = self._read(name)
        value = kind() if content is None else try_json(content)
        if not isinstance(value, kind) or not all(isinstance(entry, dict) for entry in value if kind is list):
            remedy = "Copy it again, or delete it."
            raise RecordError(Problem(f"{self.path / name}: not the JSON that dew writes.", remedy=remedy))
        if isinstance(value, dict):
            check_schema(value, f"{self.path / name}: ")
        return value


def algorithm_of(facts: Json) -> tuple[Any, Any]:
    """Return name and settings of the algorithm in run.json, in which other programs may write only a name."""
    algorithm = facts.get("algorithm")
    return (algorithm.get("name"), algorithm.get("settings")) if isinstance(algorithm, dict) else (algorithm, None)


def make_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(Problem(f"{folder} is a file, not a folder.", remedy="Choose another folder."))
    folder.mkdir(parents=True, exist_ok=True)


def claim(folder: Path, overwrite: bool) -> None:
    """Make the folder of a new run. Raise an error if it is `occupied`."""
    make_folder(folder)
    sweep(folder)
    if problem := occupied(folder, overwrite):
        raise ConfigError(problem)


def occupied(folder: Path, overwrite: bool = False) -> Problem | None:
    """Return a problem if the folder holds anything, except a run that the caller will delete: with `overwrite`, or if
    it failed before it wrote more than its settings."""
    content = sorted(path.name for path in folder.iterdir() if path.name != ".lock") if folder.is_dir() else []
    if not content:
        return None
    config = folder / "config.yaml"  # if dew did not write it, the folder is the user's own
    by_dew = config.is_file() and config.read_bytes().startswith(f"# {RUN_AGAIN}".encode())
    if not by_dew and not any((folder / name).is_file() for name in ("run.json", "verl.yaml")):
        what = f"{folder} is not empty and does not hold a run. It has {', '.join(content[:3])}."
        return Problem(what, remedy="Choose another folder.")
    if not overwrite and not {*content} <= {"config.yaml", "run.json"}:  # it made a step
        remedy = f"Resume the run (dew resume {quoted(folder)}), choose another folder, or add --overwrite."
        return Problem(f"{folder} already holds a run.", remedy=remedy)
    return None


def _take(file: IO[Any], *, shared: bool = False) -> bool:
    """Lock an open file until it is closed. Return False if another process has locked it."""
    import fcntl  # not on Windows

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def hold(folder: Path) -> IO[Any] | None:
    """Lock the folder until the returned file is closed, for `alive`. None if a command has already locked it."""
    with suppress(OSError, ImportError):
        make_folder(folder)
        file = (folder / ".lock").open("w")
        if _take(file):
            return file
        file.close()
    return None


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Allow one command at a time per folder. Child processes inherit the lock and keep it if the parent is killed."""
    if not is_main_process:  # only one of several training processes holds the lock
        yield
        return
    make_folder(folder)
    with (folder / ".lock").open("w") as file:
        taken = _take(file)
        if not taken:  # `alive` may have locked it briefly
            time.sleep(0.05)
            taken = _take(file)
        if not taken:
            what = f"{folder} is in use by another command, or by a training process that it left behind."
            raise ConfigError(Problem(what, remedy="Wait for it, or choose another folder."))
        os.set_inheritable(file.fileno(), True)
        yield
