"""Run the benchmark of docs/benchmark.md in pieces, and write its page.

    python scripts/benchmark.py status                        what is finished and what is missing
    python scripts/benchmark.py run STAGE [TASK ...] --model FOLDER --limit-seconds 500
    python scripts/benchmark.py page                          docs/benchmark-results.md and its images

`run` trains the next runs of a stage for about that long, and adds them to --data as an archive. Re-run the same
command until nothing is missing. A stack that was interrupted continues if --work is still there. Once you have seen
how many runs fit into the time, --runs-at-once saves measuring larger stacks.
Stages: start, replication, stage1, screen, stage2, stage3; the later ones follow from the earlier ones' results. Data
sets are those of `dew train` (DEW_DATA). --model is for tasks with the same model; its folder should have the model's
name.
"""

import argparse
import gzip
import json
import os
from contextlib import chdir
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmark_page import page
from benchmark_stages import missing, points, texts

from dew.compare.grid import runs_inside
from dew.errors import ConfigError, DewError, Problem
from dew.files import write_atomically
from dew.report import benchmark as b

DOCS = Path(__file__).parents[1] / "docs"
FILES = ("run.json", "metrics.jsonl", "scores.json")
say = partial(print, flush=True)


def pack(work: Path, data: Path) -> list[Path]:
    """Write an archive of the finished runs of each study in `work` that are in none yet."""
    written = []
    for folder in sorted(path.parent for path in work.glob("*/grid.json")):
        old = sorted((data / folder.name).glob("*.jsonl.gz"))
        packed = {name for archive in old for name in b.archived(archive)}
        homes = [home.relative_to(folder) for home in runs_inside(folder)]
        names = [str(home / name) for home in homes if str(home / FILES[0]) not in packed for name in FILES]
        if names:
            path = data / folder.name / f"{len(old) + 1:03}.jsonl.gz"
            lines = [json.dumps({"file": x, "text": (folder / x).read_text()}) + "\n" for x in ["grid.json", *names]]
            write_atomically(path, gzip.compress("".join(lines).encode(), mtime=0))
            written.append(path)
    return written


def run(options: argparse.Namespace) -> None:
    began, data, work = perf_counter(), options.data.resolve(), options.work.resolve()
    tasks = options.tasks or list(b.STAGES[options.stage].seeds)
    models = {b.TASKS[task].model for task in tasks}
    if options.model and len(models) > 1:
        what = f"--model {options.model} for tasks with different models: {', '.join(sorted(models))}."
        raise ConfigError(Problem(what, remedy="Name the tasks of one model, e.g. run stage2 A B --model FOLDER"))
    if "DEW_DATA" in os.environ:
        os.environ["DEW_DATA"] = str(Path(os.environ["DEW_DATA"]).resolve())

    def keep() -> None:
        for path in pack(work, data):
            say(f"{path}: {path.stat().st_size / 1e3:.0f} kB")

    for task in tasks:
        runs = b.read(data, work)
        keep()  # what a call finished that was killed
        left, every = options.limit_seconds + began - perf_counter(), points(options.stage, task, runs)
        chosen = [x for x in every if not options.rules or x[0] in options.rules]
        todo = [x for x in missing(options.stage, task, runs) if x[:2] in chosen]
        say(f"{options.stage}-{task}: {len(todo)} runs are missing.")
        if not todo or left <= 0:
            continue
        model = Path(options.model or "").resolve()
        local = options.model is not None and model.is_dir()
        with chdir(model.parent if local else "."):  # run.json has the model's name, not this machine's path
            b.train(
                options.stage,
                task,
                texts(chosen),
                work / f"{options.stage}-{task}",
                model=model.name if local else options.model or b.TASKS[task].model,
                limit_seconds=left,
                runs_at_once=options.runs_at_once,
                say=lambda line: (keep(), say(line)),
            )
        keep()


def status(data: Path) -> None:
    with TemporaryDirectory() as folder:
        runs = b.read(data, Path(folder))
        for stage, task in ((stage, task) for stage, of in b.STAGES.items() for task in of.seeds):
            try:
                todo = missing(stage, task, runs)
                arms = ", ".join(dict.fromkeys(f"{arm}@{rate:g}" for arm, rate, _ in todo))
                text = f"{len(todo)} missing{': ' if arms else ''}{arms}"
            except ConfigError as error:
                text = error.problems[0].what
            print(f"{stage}-{task}: {len(runs.get(f'{stage}-{task}', ()))} runs, {text}")


def write_page(data: Path) -> None:
    with TemporaryDirectory() as folder:
        text, images = page(b.read(data, Path(folder)))
    (DOCS / "benchmark-results.md").write_text(text)
    for name, image in images.items():
        (DOCS / "images" / name).write_text(image)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "status", "page"])
    parser.add_argument("stage", nargs="?", choices=list(b.STAGES), default="start")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="default: all of the stage")
    parser.add_argument("--data", type=Path, default=b.COMMITTED, help="folder of archives (docs/results/benchmark)")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark"), help="folder of the studies")
    parser.add_argument("--model", help="folder of the tasks' model (default: its name on the hub)")
    parser.add_argument("--rules", nargs="+", help="of the stage, e.g. dapo dew gtpo (default: all)")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    parser.add_argument("--runs-at-once", type=int, help="of a stack (default: as many as fit into memory and time)")
    options = parser.parse_args()
    known = b.STAGES[options.stage].seeds
    if not set(options.tasks) <= known.keys():
        parser.error(f"{options.stage} has the tasks {', '.join(known)}")
    data = options.data
    commands = {"run": lambda: run(options), "status": lambda: status(data), "page": lambda: write_page(data)}
    try:
        commands[options.command]()
    except DewError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
