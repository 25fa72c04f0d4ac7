"""Train a study: arms × learning rates × seeds × tasks, in stacks that fit the device.

The study's folder is a grid of run folders (`dew.compare.grid`), STUDY/TASK/ARM-lrRATE-seedN/. Each has run.json,
metrics.jsonl, scores.json, for a language model the adapter, and for the first seed the tokens of some groups. They are
written when a stack ends, run.json last, so a run with a run.json is finished. Calls with the same settings and other
arms, tasks, rates or seeds add runs. An interrupted stack resumes from STUDY/.stack.pt.
"""

import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dew.compare import Result
from dew.compare.grid import Cell, open_grid, runs_inside
from dew.engines.lab.arms import parse_arms
from dew.engines.lab.stack import Replica, Stack, scores_of
from dew.engines.lab.study_settings import LoraSettings, Settings, TinySettings
from dew.engines.lab.summary import load_study
from dew.engines.lab.tasks import VOCABULARY, GeneratedTask, get_task
from dew.engines.lab.tiny import TinyPolicies, numerics
from dew.engines.lab.warm_start import warm_start
from dew.engines.recorder import versions
from dew.errors import ConfigError, Problem
from dew.files import cache_folder
from dew.memory import free_memory
from dew.run.folder import RunFolder, lock
from dew.run.records import AnswerRecord, GroupRecord, Json

MEMORY_SHARE = 0.8
"""Share of the free memory that a stack may take."""
CHECKPOINT_SECONDS = 30.0
"""Minimum seconds between checkpoints of a stack."""
CHECKPOINT_SHARE = 0.02
"""Maximum share of the time spent on writing checkpoints: that of a large stack takes gigabytes."""
CHECKPOINT = ".stack.pt"
PARTS = 10
"""Progress lines per stack."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Start:
    """The initial policies of the runs of a task, and what a stack of them needs."""

    policies: Callable[[Sequence[Replica]], Any]
    task: Any
    facts: Json
    """Written to run.json. Runs with the same `digest` started from the same policy."""
    each: float
    """Bytes that one run needs at its peak."""
    shared: float = 0.0
    """Bytes that all runs of a stack need together."""


def study(
    arms: Sequence[str], *, output: Path | str, tasks: Sequence[str] = ("countdown-4",), model: str | None = None,
    seeds: int = 8, first_seed: int = 0, learning_rates: Sequence[float] = (5e-5,), settings: Settings | None = None,
    reward: str | None = None, task_settings: Mapping[str, Any] | None = None, controls: bool = False,
    limit_seconds: float = math.inf, device: str = "", runs_at_once: int | None = None, say: Say = print,
) -> list[Result]:  # fmt: skip
    """Train every arm at every learning rate with every seed on every task; the first arm is the baseline.

    Arms are written as for `dew lab`: "dapo", "gtpo(alpha2=0.5)", "gtpo@3e-5", "rules.py:MyRule" (docs/lab.md). Runs
    are kept in the folder `output`, so the same call resumes an interrupted study. `controls` adds two arms for each
    arm that weights tokens: the same rule without weights, and with the weights of each answer permuted. Use
    `differences` to compare the arms of the result. Training stops after about `limit_seconds`; call again to finish
    the rest. `runs_at_once`: maximum runs in a stack (default: as many as fit into memory). `device`: e.g. "cuda:1"
    (default: a GPU if there is one).

    With a `model`, a folder or a name on the Hub, runs train LoRA adapters on it, `settings` are `LoraSettings`, and
    `tasks`, `task_settings` and `reward` are those of `dew train`. Without a model, runs train small policies.
    """
    until = time.perf_counter() + limit_seconds
    chosen = parse_arms(arms, learning_rates, controls=controls)
    if seeds < 1:
        raise ConfigError(Problem(f"seeds={seeds}: no runs.", remedy="Give at least 1; 5 or more for a verdict."))
    device, folder = device or ("cuda" if torch.cuda.is_available() else "cpu"), Path(output)
    settings = settings or (TinySettings() if model is None else LoraSettings())
    about = asdict(settings)
    if model is None:
        for name in tasks:
            get_task(name)  # raises if it is unknown
        begin = partial(_small_policies, settings, device, say)
    else:
        from dew.engines.lab.lora import load_base

        about |= {"model": model, "reward": reward, "task": task_settings}
        begin = partial(_adapters, settings, device, load_base(model, device), about)
    replicas = [Replica(arm, seed) for seed in range(first_seed, first_seed + seeds) for arm in chosen]
    cells = {_cell(name, replica): replica for name in tasks for replica in replicas}
    training = _Training(folder, settings, device, {first_seed}, about, say, until, runs_at_once)
    gpu = torch.cuda.device(device if device.startswith("cuda") else -1)  # Triton uses the current one
    with lock(folder), numerics(), gpu:
        todo = open_grid(folder, list(cells), about, finished=lambda run: run.run().get("status") == "done", say=say)
        load_study(folder)  # report a damaged run now, not after training
        if not todo:
            say(f"All {len(cells)} runs are finished.")
        for name, of_task in groupby(todo, key=lambda cell: cell.task):
            if time.perf_counter() < until:
                training.run(name, begin(name), [cells[cell] for cell in of_task])
        return load_study(folder)


def _small_policies(settings: Any, device: str, say: Say, name: str) -> Start:
    task = get_task(name)
    parameters, facts = warm_start(task, settings, device, cache_folder("lab"), say)
    say(f"{name}: starts at pass@1 {facts['pass@1']:.3f}, pass@16 {facts['pass@16']:.3f}.")
    return Start(lambda runs: TinyPolicies(parameters, _rates(runs, device)), task, facts, memory(task, settings))


def _adapters(settings: Any, device: str, base: Any, about: Json, name: str) -> Start:
    from dew.engines.lab.lora import LoraPolicies
    from dew.engines.lab.text import TextTask

    task = TextTask(name, base, settings.max_new_tokens, settings.eval_problems, about["reward"], about["task"])
    ended = task.ended if device != "cpu" else None

    def policies(replicas: Sequence[Replica]) -> LoraPolicies:
        seeds, squares = [x.seed for x in replicas], any(x.arm.algorithm.needs_sum_sq for x in replicas)
        return LoraPolicies(base, task.prompts, seeds, _rates(replicas, device), settings, ended, squares)

    facts = {"digest": base.digest, "model": about["model"], "problems": task.digest}
    return Start(policies, task, facts, *base.memory(settings))


def _rates(replicas: Sequence[Replica], device: str) -> Tensor:
    return torch.tensor([x.arm.learning_rate for x in replicas], device=device)


def _cell(task: str, replica: Replica) -> Cell:
    arm = replica.arm
    return Cell(arm.label, replica.seed, task, arm.learning_rate, arm.source, arm.control, arm.placebo)


def _check_start(runs: Path, new: Json) -> None:
    """Raise if finished runs of the task started from another policy, or trained on other problems."""
    for home in runs_inside(runs):
        old = RunFolder(home).run()["warm_start"]
        if old["digest"] != new["digest"]:
            what = f"{home}: started from policy {old['digest']}, new runs would start from {new['digest']}."
        elif old.get("problems", new.get("problems")) != new.get("problems"):  # older runs do not say
            what = f"{home}: trained on other problems, because the data of the task have changed since."
        else:
            continue
        raise ConfigError(Problem(what, "They could not be paired.", "Choose another folder with --out."))


def write_run(
    study: Path, cell: Cell, facts: Mapping[str, Any], metrics: Sequence[Json], records: Sequence[GroupRecord] = (),
    solved: Sequence[Sequence[int]] = (),
) -> None:  # fmt: skip
    """Write a finished run into its folder, run.json last. `facts` include the settings of the study.

    `solved`: number of correct answers to each held-out problem, at each evaluation.
    """
    run, settings = RunFolder(study / cell.home), facts["settings"]
    run.write_metrics(metrics)
    for step, groups in groupby(records, key=lambda group: group.step):
        run.write_records(step, groups)
    found = {name: {"value": value} for name, value in scores_of(metrics, "model" in settings).items()}
    problems = len(solved[0]) if solved else settings["eval_problems"]  # a data set may have fewer
    entry = {"when": "after", "task": cell.task, "n_problems": problems, "k": settings["eval_k"]}
    run.write_scores([{**entry, "scores": found, "solved": [list(counts) for counts in solved]}])
    run.write_run({"name": str(cell.home), "engine": "lab", **cell.facts(), **facts, "status": "done"})


@dataclass(frozen=True)
class _Training:
    folder: Path
    settings: Settings
    device: str
    recorded: set[int]
    """Seeds whose runs keep records of tokens."""
    about: Json
    say: Say
    until: float
    """When to stop training, on the clock of `time.perf_counter`."""
    most: int | None
    """Maximum runs in a stack."""

    def run(self, task: str, start: Start, todo: list[Replica]) -> None:
        """Train the runs seed by seed, in as few stacks as memory allows; a stack that runs out of memory is split."""
        _check_start((self.folder / _cell(task, todo[0]).home).parent, start.facts)
        room = max(1, int((MEMORY_SHARE * _free(self.device) - start.shared) / start.each))
        size = math.ceil(len(todo) / math.ceil(len(todo) / min(room, self.most or len(todo))))
        memory = (start.shared + size * start.each) / 1e9
        runs = f"{len(todo)} runs to train, {size} at a time, about {memory:.1f} GB"
        self.say(f"{runs}. Ctrl-C stops; the same command resumes.")
        made = json.dumps([self.about, start.facts], default=str)
        seconds = 0.0  # per run; not known yet
        while todo and time.perf_counter() + seconds * min(size, len(todo)) < self.until:
            before = _checkpoint(self.folder, task, todo, made)
            replicas = before["replicas"] if before else todo[:size]
            replicas = sorted(replicas, key=lambda x: (x.arm.label, x.arm.source))  # equal algorithms are neighbours
            began = time.perf_counter()
            try:
                stack = Stack(start.task, start.policies(replicas), replicas, self.settings, self.device, self.recorded)
                if not self.train(stack, task, made, len(todo) - len(replicas), before):
                    return
                took = time.perf_counter() - began
                seconds = seconds if before else took / len(replicas)
                self.write(stack, task, start.facts, took)
                del stack
                todo = [x for x in todo if x not in replicas]
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                if len(replicas) == 1:
                    what = f"A single run does not fit in memory; {_free(self.device) / 1e9:.1f} GB are free."
                    remedy = "Stop other programs on the GPU, or lower prompts, group_size or pass_tokens (--settings)."
                    raise ConfigError(Problem(what, remedy=remedy)) from None
                size = math.ceil(len(replicas) / 2)
                (self.folder / CHECKPOINT).unlink(missing_ok=True)
                self.say(f"Not enough memory for {len(replicas)} runs at a time; continuing with {size}.")

    def train(self, stack: Stack, task: str, made: str, waiting: int, before: Json | None) -> bool:
        """Train a stack, from the checkpoint `before` if given. `made`: the settings and the start, as text. `waiting`:
        the number of runs to train after it.

        Return False if time ran out before the end; a checkpoint is kept.
        """
        began, runs, generations = time.perf_counter(), len(stack.replicas), stack.settings.generations
        if before:
            stack.load(before["state"])
        first, saved, pause = len(stack.history) + 1, began, CHECKPOINT_SECONDS
        for number in range(first, generations + 1):
            for text in stack.generation(number - 1):
                self.say(text)
            if stack.settings.evaluated(number):
                stack.evaluate(number)
            if number * PARTS // generations > (number - 1) * PARTS // generations:
                accuracy = stack.history[-1]["accuracy"].mean().item()  # waits for the device
                each = (time.perf_counter() - began) / (number - first + 1)
                left = each * ((1 + waiting / runs) * generations - number) / 60
                line = f"{stack.task.name}: generation {number} of {generations}, accuracy {accuracy:.3f}; "
                self.say(f"{line}{f'{waiting} more runs to train; ' * (waiting > 0)}{left:.1f} min left")
            now = time.perf_counter()
            if number < generations and (now > self.until or now - saved > pause):
                _save(self.folder, task, stack, made)
                saved = time.perf_counter()
                pause = max(CHECKPOINT_SECONDS, (saved - now) / CHECKPOINT_SHARE)
                if now > self.until:
                    return False
        return True

    def write(self, stack: Stack, task: str, start: Json, seconds: float) -> None:
        """Write the runs of a finished stack into their folders."""
        gpu = torch.cuda.get_device_name(self.device) if self.device.startswith("cuda") else None
        ended = datetime.now(UTC)
        began = ended - timedelta(seconds=seconds)
        facts: Json = {"settings": self.about, "versions": versions("torch"), "warm_start": start}
        facts |= {"machine": {"platform": platform.platform(), "gpu": gpu}}
        facts |= {"started": began.isoformat(timespec="seconds"), "finished": ended.isoformat(timespec="seconds")}

        def write(i: int) -> None:
            cell, rule = _cell(task, stack.replicas[i]), stack.replicas[i].arm.algorithm
            own = {"algorithm": {"name": rule.name, "settings": asdict(rule)}, "uses_threshold": rule.uses_threshold}
            if hasattr(stack.policies, "save"):
                stack.policies.save(i, self.folder / cell.home / "adapter")
            solved = [counts[i].tolist() for counts in stack.solved]
            write_run(self.folder, cell, facts | own, metrics[i], stack.records[i], solved=solved)

        metrics = stack.metrics()
        with ThreadPoolExecutor(8) as pool:  # one run after the other would wait seconds for the disk
            list(pool.map(write, range(len(stack.replicas))))
        (self.folder / CHECKPOINT).unlink(missing_ok=True)
        for arm, runs in groupby(zip(stack.replicas, metrics, strict=True), key=lambda run: run[0].arm.label):
            of = [line["grad_norm"] for _, lines in runs for line in lines]
            if n := sum(not math.isfinite(norm) for norm in of):
                where = "Look for a division by 0 in its loss, e.g. by the number of live tokens of a masked answer."
                self.say(f"{arm}: updates skipped in {n} of {len(of)} generations: NaN or infinite gradient. {where}")
            if not any(of):
                self.say(f"{arm}: nothing was trained: the gradient was 0 in every generation of every run.")


def _save(folder: Path, task: str, stack: Stack, made: str) -> None:
    kept = folder / f"{CHECKPOINT}.new"
    torch.save({"runs": [_key(task, x) for x in stack.replicas], "made": made, "state": stack.state()}, kept)
    kept.replace(folder / CHECKPOINT)


def _checkpoint(folder: Path, task: str, todo: Sequence[Replica], made: str) -> Json | None:
    """The checkpoint of an interrupted stack, if all of its runs are in `todo` and `made` as now."""
    path, by_key = folder / CHECKPOINT, {_key(task, x): x for x in todo}
    if not path.exists():
        return None
    try:
        with torch.serialization.safe_globals([GroupRecord, AnswerRecord]):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # the file is damaged: train the stack from the start
        return None
    if not set(found.get("runs", [""])) <= by_key.keys() or found.get("made") != made:
        return None
    return {**found, "replicas": [by_key[key] for key in found["runs"]]}


def _key(task: str, replica: Replica) -> str:
    """The run in a checkpoint, which must not resume with other code of a user's rule."""
    cell = _cell(task, replica)
    return f"{cell.home} {cell.source}"


def memory(task: GeneratedTask, settings: TinySettings) -> float:
    """Peak bytes of one run: weights with Adam's state, plus the larger of sampling and updating."""
    D, layers, S = settings.width, settings.depth, task.prompt_length + task.tokens
    weights = 12 * D * D * layers + (2 * VOCABULARY + S) * D
    cache = settings.answers * (2 * S * D * layers + 6 * task.tokens)
    rows = math.ceil(settings.answers / settings.optimizer_steps)
    update = rows * S * (12 * D * layers + 8 * D + 4 * VOCABULARY)
    return 4.0 * (6 * weights + max(cache, update))


def _free(device: str) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else free_memory()
