"""A study: arms × learning rates × seeds × tasks, trained in stacks that fit the device.

Its folder is a grid of run folders (`dew.compare.grid`), STUDY/TASK/ARM-lrRATE-seedN/, each with run.json,
metrics.jsonl, scores.json and, for the first seed, the tokens of some groups. They are written when a stack ends,
run.json last: a run that has one is finished. The same settings, other arms, tasks, rates or seeds: runs are added.
"""

import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from dew.compare import Result
from dew.compare.grid import Cell, open_grid
from dew.compare.results import run_folders
from dew.engines.lab.arms import parse_arms
from dew.engines.lab.stack import Replica, Settings, Stack
from dew.engines.lab.summary import load_study
from dew.engines.lab.tasks import VOCABULARY, Task, get_task
from dew.engines.lab.tiny import numerics
from dew.engines.lab.warm_start import WarmStart, cache_folder, warm_start
from dew.engines.recorder import versions
from dew.errors import ConfigError, Problem
from dew.memory import free_memory
from dew.run.folder import RunFolder, lock
from dew.run.records import GroupRecord, Json

MEMORY_SHARE = 0.7
"""Share of the free memory that a stack may take."""
STACK_SECONDS = 600.0
"""Longer stacks are split, so that little is lost when a study is interrupted."""
QUICK = Settings(prompts=16, optimizer_steps=2, generations=60, width=64, depth=2, eval_problems=64)
QUICK_TASK = "countdown-3"
PARTS = 20
"""Reports on the progress of a stack."""

Say = Callable[[str], None]
Progress = Callable[[float, str], None]
"""Gets the share of the current stack that is trained, and a line about the study."""
Trained = tuple[Sequence[Replica], list[list[Json]], list[list[GroupRecord]]]
"""The runs of a stack, and the metrics and token records of each."""


def study(
    arms: Sequence[str],
    *,
    output: Path | str,
    tasks: Sequence[str] = ("countdown-4",),
    seeds: int = 8,
    first_seed: int = 0,
    learning_rates: Sequence[float] = (5e-5,),
    settings: Settings = Settings(),  # noqa: B008
    controls: bool = True,
    device: str = "auto",
    warm_starts: Path | str | None = None,
    say: Say = print,
    progress: Progress = lambda share, line: None,
) -> list[Result]:
    """Train every arm at every learning rate with every seed on every task; the first arm is the baseline.

    An arm is written as for `dew lab`: "dapo", "gtpo(alpha2=0.5)", "gtpo@3e-5", "rules.py:MyRule" (docs/lab.md). Runs
    are kept in the folder `output`, so the same call resumes a study that was interrupted. `controls` adds to each arm
    that weights tokens the same rule without the weights. `differences` compares the arms of the result.
    """
    chosen = parse_arms(arms, learning_rates, controls=controls)
    kinds = {name: get_task(name) for name in tasks}
    if seeds < 1:
        raise ConfigError(Problem(f"seeds={seeds}: no runs.", remedy="Give at least 1; 5 or more for a verdict."))
    device, folder = _device(device), Path(output)
    on_gpu = device.startswith("cuda")
    machine = {"platform": platform.platform(), "gpu": torch.cuda.get_device_name(device) if on_gpu else None}
    facts: Json = {"settings": asdict(settings), "versions": versions("torch"), "machine": machine}
    replicas = [Replica(arm, seed) for seed in range(first_seed, first_seed + seeds) for arm in chosen]
    cells = {_cell(name, replica): replica for name in kinds for replica in replicas}
    gpu = torch.cuda.device(device if on_gpu else -1)  # Triton uses the current one
    with lock(folder), numerics(), gpu:
        todo = open_grid(folder, list(cells), asdict(settings), finished=_finished, say=say)
        load_study(folder)  # a damaged run is an error now, not after training
        if not todo:
            say(f"All {len(cells)} runs are finished.")
        for name, of_task in groupby(todo, key=lambda cell: cell.task):
            task, runs = kinds[name], [cells[cell] for cell in of_task]
            start = warm_start(task, settings.width, settings.depth, device, Path(warm_starts or cache_folder()), say)
            _check_start(folder / name, start)
            build = partial(Stack, task, start.parameters, settings=settings, device=device, recorded={first_seed})
            say(f"{name}: starts at pass@1 {start.scores['pass@1']:.3f}, pass@16 {start.scores['pass@16']:.3f}.")
            facts["warm_start"] = {"digest": start.digest, **start.scores}
            for trained, metrics, records in _train(build, runs, memory(task, settings), device, say, progress):
                homes = [_cell(name, x) for x in trained]
                rules = [x.arm.algorithm for x in trained]
                about = [facts | {"algorithm": {"name": rule.name, "settings": asdict(rule)}} for rule in rules]
                with ThreadPoolExecutor(8) as pool:  # waiting for the disk, run by run, takes seconds
                    list(pool.map(partial(write_run, folder), homes, about, metrics, records))
                _report_skipped_updates(trained, metrics, say)
        return load_study(folder)


def _cell(task: str, replica: Replica) -> Cell:
    arm = replica.arm
    return Cell(arm.label, replica.seed, task, arm.learning_rate, arm.source, arm.control)


def _finished(run: RunFolder) -> bool:
    return run.run().get("status") == "done"


def _check_start(runs: Path, start: WarmStart) -> None:
    """The runs of a task must have started from the same policy."""
    for home in run_folders(runs):
        if (old := RunFolder(home).run()["warm_start"]["digest"]) != start.digest:
            what = f"{home}: started from policy {old}, new runs would start from {start.digest}."
            remedy = "Choose another folder, or restore the warm start."
            raise ConfigError(Problem(what, "They could not be paired.", remedy))


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        known = torch.empty(0, device=name).device.type in ("cpu", "cuda")
    except (RuntimeError, AssertionError):  # an assertion where PyTorch has no CUDA
        known = False
    if not known:
        what = f"device {name!r} is not known, or PyTorch sees no such GPU."
        raise ConfigError(Problem(what, remedy="Give cpu, cuda or cuda:1, or leave --device out."))
    return name


def write_run(
    study: Path, cell: Cell, facts: Mapping[str, Any], metrics: Sequence[Json], records: Sequence[GroupRecord] = (),
    scores: Mapping[str, float] | None = None,
) -> None:  # fmt: skip
    """Write a finished run into its folder, run.json last. `facts` include the settings of the study."""
    run, settings = RunFolder(study / cell.home), facts["settings"]
    run.write_metrics(metrics)
    for step, groups in groupby(records, key=lambda group: group.step):
        run.write_records(step, groups)
    found = {name: {"value": value} for name, value in (scores or scores_of(metrics)).items()}
    entry = {"when": "after", "task": cell.task, "n_problems": settings["eval_problems"], "k": settings["eval_k"]}
    run.write_scores([{**entry, "scores": found}])
    run.write_run({"name": str(cell.home), "engine": "lab", **cell.facts(), **facts, "status": "done"})


def scores_of(metrics: Sequence[Json]) -> dict[str, float]:
    """The scores of a run; docs/lab.md defines them."""
    last = metrics[-max(1, len(metrics) // 6) :]

    def mean(lines: Sequence[Json], name: str) -> float:
        return round(fmean(line[name] for line in lines), 6)

    scores = {"area": mean(metrics, "accuracy"), "final": mean(last, "accuracy")}
    scores |= {name.removeprefix("eval/"): x for name, x in metrics[-1].items() if name.startswith("eval/")}
    scores |= {"entropy": mean(last, "entropy"), "length": mean(last, "length/mean")}
    return scores | {"flipped": mean(metrics, "credit/flipped_share")}


def _report_skipped_updates(trained: Sequence[Replica], metrics: Sequence[list[Json]], say: Say) -> None:
    runs = zip(trained, metrics, strict=True)
    skipped = Counter(x.arm.label for x, lines in runs for line in lines if not math.isfinite(line["grad_norm"]))
    for arm, n in skipped.items():
        where = "Look for a division by 0 in its loss, e.g. by the number of live tokens of a masked answer."
        say(f"{arm}: updates were skipped in {n} generations, where the gradient was NaN or infinite. {where}")


def _train(
    build: Callable[[Sequence[Replica]], Stack], todo: list[Replica], each: float, device: str, say: Say,
    progress: Progress,
) -> Iterator[Trained]:  # fmt: skip
    """Train the runs in as few stacks as fit the device, seed by seed; a stack that does not fit is split.

    `each` is the memory that a run needs.
    """
    room = max(1, int(MEMORY_SHARE * _free(device) / each))
    size = math.ceil(len(todo) / math.ceil(len(todo) / room))
    say(f"{len(todo)} runs to train, {size} at a time, about {size * each / 1e9:.1f} GB.")
    timed = False
    while todo:
        stack = sorted(todo[:size], key=lambda x: (x.arm.label, x.arm.source))  # the same algorithm side by side
        try:
            if timed:
                yield _train_stack(build(stack), len(todo) - len(stack), progress)
                todo = todo[len(stack) :]
                continue
            seconds = _time(build(stack)) / len(stack)
            size, timed = max(1, min(size, int(STACK_SECONDS / seconds))), True
            say(f"About {seconds * len(todo) / 60:.1f} min. Ctrl-C stops; the same command resumes.")
        except torch.OutOfMemoryError:
            if len(stack) == 1:
                remedy = "Lower prompts, group_size or width, or raise optimizer_steps, with --settings."
                raise ConfigError(Problem("A single run does not fit in memory.", remedy=remedy)) from None
            size = math.ceil(len(stack) / 2)
            torch.cuda.empty_cache()
            say(f"Not enough memory for {len(stack)} runs at a time; continuing with {size}.")


def _train_stack(stack: Stack, waiting: int, progress: Progress) -> Trained:
    """Train a stack to its end; `waiting` runs are trained after it."""
    began, runs, generations = time.perf_counter(), len(stack.replicas), stack.settings.generations
    for number in range(1, generations + 1):
        stack.generation(number - 1)
        if stack.settings.evaluated(number):
            stack.evaluate(number)
        part = number * PARTS // generations
        if part > (number - 1) * PARTS // generations:  # reading the accuracy waits for the device
            line = f"{stack.task.name}: {runs} runs at generation {number} of {generations}, accuracy "
            line += f"{stack.history[-1]['accuracy'].mean().item():.3f}; {waiting} runs after them; about "
            left = (time.perf_counter() - began) * ((1 + waiting / runs) * generations / number - 1)
            progress(part / PARTS, f"{line}{left / 60:.1f} min left")
    return stack.replicas, stack.metrics(), stack.records


def _time(stack: Stack) -> float:
    """Seconds that the stack will take, from the second of two generations that are thrown away."""
    settings = stack.settings
    for _ in range(2):
        began = time.perf_counter()
        stack.generation(0)
        stack.history[-1]["accuracy"].sum().item()  # waits for the device
    sampled = settings.evaluations * settings.eval_problems * settings.eval_k / settings.answers
    return (time.perf_counter() - began) * (settings.generations + 0.4 * sampled)


def memory(task: Task, settings: Settings) -> float:
    """Bytes that one run needs at its peak: weights with Adam's state, and the larger of sampling and updating."""
    D, layers, S = settings.width, settings.depth, task.prompt_length + task.tokens
    weights = 12 * D * D * layers + (2 * VOCABULARY + S) * D
    cache = settings.answers * (2 * S * D * layers + 6 * task.tokens)
    rows = math.ceil(settings.answers / settings.optimizer_steps)
    update = rows * S * (12 * D * layers + 8 * D + 4 * VOCABULARY)
    return 4.0 * (6 * weights + max(cache, update))


def _free(device: str) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else free_memory()
