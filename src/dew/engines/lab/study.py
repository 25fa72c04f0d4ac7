"""A study: arms × learning rates × seeds × tasks, trained in stacks that fit the device, kept in one folder.

The folder holds `study.json`, rewritten after each stack of runs, and `summary.md`:

    format      1
    settings    what all runs share: group_size, prompts, optimizer_steps, generations, width, depth, eval_problems,
                eval_k, evaluations
    arms        the labels in the order they were given, the baseline first
    tasks       task -> {"warm_start": digest, "pass@1", "pass@16", "steps"}: the policy that its runs started from
    versions    dew, torch, python, device
    runs        one object per finished run:
        task, arm, learning_rate, seed
        algorithm, algorithm_settings   the registered name, and all settings
        control                         the label of the same arm without weights on tokens, or null
        source                          digest of the file of a user's rule, or ""
        warm_start                      digest of the policy it started from
        scores      {"area", "final", "pass@1", "pass@k", "entropy", "length", "flipped"}; docs/lab.md defines them
        curves      {"accuracy", "entropy", "length", "flipped", "signal", "gradient"}: a number per
                    generation, null where not defined
        evaluations [{"generation", "pass@1", "pass@k"}, ...] on held-out problems

The same settings, other arms, tasks, rates or seeds: the runs are added to the folder. `load_study` merges folders.
"""

import json
import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dew import __version__
from dew.engines.lab.arms import Arm, parse_arms
from dew.engines.lab.stack import Replica, Settings, Stack
from dew.engines.lab.tasks import VOCABULARY, Task, get_task
from dew.engines.lab.tiny import numerics
from dew.engines.lab.warm_start import WarmStart, cache_folder, warm_start
from dew.errors import ConfigError, Problem, RecordError
from dew.files import read_whole, write_atomically
from dew.memory import free_memory

FORMAT = 1
FILE = "study.json"
MAX_FILE = 1 << 30
MEMORY_SHARE = 0.8
"""Share of the free memory that a stack may take."""
STACK_SECONDS = 600.0
"""Longer stacks are split, so that little is lost when a study is interrupted."""
QUICK = Settings(prompts=16, optimizer_steps=2, generations=60, width=64, depth=2, eval_problems=64)
QUICK_TASK = "countdown-3"


@dataclass(frozen=True)
class Study:
    """Settings and runs, as in study.json."""

    settings: Settings
    arms: list[str] = field(default_factory=list)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """How far a study is."""

    task: str
    runs: int
    """Runs that train at the moment."""
    generation: int
    generations: int
    accuracy: float
    """Mean over the runs."""
    finished: int
    total: int
    seconds_left: float


Say = Callable[[str], None]


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
    cuda_graphs: bool = False,
    warm_starts: Path | str | None = None,
    say: Say = print,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Study:
    """Train every arm at every learning rate with every seed on every task; the first arm is the baseline.

    An arm is written as for `dew lab`: "dapo", "gtpo(alpha2=0.5)", "gtpo@3e-5", "rules.py:MyRule" (docs/lab.md). Runs
    are kept in the folder `output`, so the same call resumes a study that was interrupted. `controls` adds to each arm
    that weights tokens the same rule without the weights. `cuda_graphs` samples and judges with fewer launches: the
    same numbers, more memory. `differences` compares the arms of the result.
    """
    chosen = parse_arms(arms, learning_rates, controls=controls)
    kinds = [get_task(name) for name in dict.fromkeys(tasks)]
    if seeds < 1:
        raise ConfigError(Problem(f"seeds={seeds}: no runs.", remedy="Give at least 1; 5 or more for a verdict."))
    device = _device(device)
    if cuda_graphs and not device.startswith("cuda"):
        raise ConfigError(Problem("CUDA graphs need a GPU.", remedy="Leave --cuda-graphs out."))
    folder = Path(output)
    found = _open(folder, settings)
    found.arms[:] = dict.fromkeys([*found.arms, *(arm.label for arm in chosen)])
    if found.arms[0] != chosen[0].label:
        say(f"Compared with {found.arms[0]}, the first arm of {folder}; for another baseline, choose another folder.")
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    found.versions.update(dew=__version__, torch=torch.__version__, python=platform.python_version(), device=name)
    _drop_changed(found, chosen, say)
    replicas = [Replica(arm, seed) for seed in range(first_seed, first_seed + seeds) for arm in chosen]
    gpu = torch.cuda.device(device if device.startswith("cuda") else -1)  # Triton and CUDA graphs use the current one
    with numerics(), gpu:
        for task in kinds:
            start = warm_start(task, settings.width, settings.depth, device, Path(warm_starts or cache_folder()), say)
            _same_start(found, task.name, {"warm_start": start.digest, **start.scores}, folder)
            done = {_key(run) for run in found.runs}
            todo = [x for x in replicas if (task.name, x.arm.label, x.arm.learning_rate, x.seed) not in done]
            if not todo:
                say(f"{task.name}: all {len(replicas)} runs are finished.")
                continue
            for stack, curves in _train(task, start, todo, settings, device, cuda_graphs, say, progress, len(replicas)):
                runs = [_run(task, start, x, c, settings) for x, c in zip(stack, curves, strict=True)]
                found.runs.extend(runs)
                content = {"format": FORMAT, **asdict(found)}
                write_atomically(folder / FILE, json.dumps(content, default=str).encode())
                _report_skipped_updates(runs, say)
    return found


def load_study(*folders: Path | str) -> Study:
    """The study in a folder, or several studies with the same settings and warm starts as one."""
    if not folders:
        raise ConfigError("load_study needs at least one folder.")
    found, *others = map(_read, map(Path, folders))
    for folder, other in zip(folders[1:], others, strict=True):
        _same_settings(found.settings, other.settings, folder)
        for task, facts in other.tasks.items():
            _same_start(found, task, facts, folder)
        known = {_key(run) for run in found.runs}
        found.runs.extend(run for run in other.runs if _key(run) not in known)
        found.arms[:] = dict.fromkeys([*found.arms, *other.arms])
    return found


def _read(folder: Path) -> Study:
    path = folder / FILE
    if not path.exists():
        raise ConfigError(Problem(f"{folder}: holds no study.", remedy=f"Give a folder with {FILE}."))
    try:
        content = json.loads(read_whole(path, MAX_FILE))
        version = content.pop("format")
        found = Study(**{**content, "settings": Settings(**content["settings"])}) if version == FORMAT else None
    except (ValueError, KeyError, TypeError):
        raise RecordError(Problem(f"{path}: not a study; it is damaged.", remedy="Delete it.")) from None
    if found is None:
        raise RecordError(Problem(f"{path}: format {version}, expected {FORMAT}.", remedy="Update dew."))
    return found


# ── checks ──────────────────────────────────────────────────────────────────────────────────────────────────


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


def _open(folder: Path, settings: Settings) -> Study:
    """The study in the folder, which must have the same settings, or a new one in an empty folder."""
    if (folder / FILE).exists():
        found = load_study(folder)
        _same_settings(found.settings, settings, str(folder))
        return found
    folder.mkdir(parents=True, exist_ok=True)  # now, not after training
    if any(path.name != ".lock" for path in folder.iterdir()):
        what = f"{folder} is not empty and holds no study."
        raise ConfigError(Problem(what, remedy="Choose another folder with --out."))
    return Study(settings)


def _same_settings(old: Settings, new: Settings, folder: Path | str) -> None:
    was, now = asdict(old), asdict(new)
    changed = ", ".join(f"{name} {was[name]} and {now[name]}" for name in was if was[name] != now[name])
    if changed:
        what = f"{folder} holds a study with other settings ({changed})."
        raise ConfigError(Problem(what, remedy="Choose another folder with --out."))


def _same_start(found: Study, task: str, facts: dict[str, Any], folder: Path | str) -> None:
    """Add the warm start of a task to the study, which must not have another one."""
    old, new = found.tasks.setdefault(task, facts)["warm_start"], facts["warm_start"]
    if old != new:
        what = f"{folder}: runs of {task} started from policy {old}, others from {new}."
        raise ConfigError(Problem(what, "They cannot be paired.", "Choose another folder, or restore the warm start."))


def _drop_changed(found: Study, arms: Sequence[Arm], say: Say) -> None:
    """Drop the runs of rules whose code has changed since."""
    sources = {arm.label: arm.source for arm in arms}
    old = [run for run in found.runs if run["source"] != sources.get(run["arm"], run["source"])]
    if old:
        names = ", ".join(dict.fromkeys(run["arm"] for run in old))
        say(f"The code of {names} has changed: the {len(old)} runs of the old code are dropped.")
        found.runs[:] = [run for run in found.runs if run not in old]


def _key(run: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(run[name] for name in ("task", "arm", "learning_rate", "seed"))


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────


def _train(
    task: Task, start: WarmStart, todo: list[Replica], settings: Settings, device: str, cuda_graphs: bool, say: Say,
    progress: Callable[[Progress], None], total: int,
) -> Iterator[tuple[list[Replica], list[dict[str, Any]]]]:  # fmt: skip
    """Train the runs in as few stacks as fit the device, seed by seed; a stack that does not fit is split."""
    each = memory(task, settings, cuda_graphs)
    build = partial(Stack, task, start.parameters, settings=settings, device=device, cuda_graphs=cuda_graphs)
    room = max(1, int(MEMORY_SHARE * _free(device) / each))
    size = math.ceil(len(todo) / math.ceil(len(todo) / room))
    say(
        f"{task.name}: starts at pass@1 {start.scores['pass@1']:.3f}, pass@16 {start.scores['pass@16']:.3f}. "
        f"{len(todo)} of {total} runs to train, {size} at a time, about {size * each / 1e9:.1f} GB."
    )
    seconds: float | None = None
    while todo:
        stack = sorted(todo[:size], key=lambda x: (x.arm.label, x.arm.source))  # the same algorithm side by side
        try:
            if seconds is None:
                seconds = _time(build(stack)) / len(stack)
                size = max(1, min(size, int(STACK_SECONDS / seconds)))
                say(f"About {_duration(seconds * len(todo))}. Ctrl-C stops; the same command resumes.")
                continue
            began = time.perf_counter()
            after = seconds * (len(todo) - len(stack))
            yield stack, _train_stack(build(stack), progress, total - len(todo), total, after)
            seconds = (time.perf_counter() - began) / len(stack)
            todo = todo[len(stack) :]
        except torch.OutOfMemoryError:
            if len(stack) == 1:
                remedy = "Lower --prompts, --group-size or --width, or raise --optimizer-steps."
                raise ConfigError(Problem("A single run does not fit in memory.", remedy=remedy)) from None
            size = math.ceil(len(stack) / 2)
            torch.cuda.empty_cache()
            say(f"Not enough memory for {len(stack)} runs at a time; continuing with {size}.")


def _train_stack(
    runs: Stack, progress: Callable[[Progress], None], finished: int, total: int, seconds_after: float
) -> list[dict[str, Any]]:
    """The curves of a stack's runs. `seconds_after` is the time that the stacks after it will take."""
    generations, size, began = runs.settings.generations, len(runs.replicas), time.perf_counter()
    for number in range(1, generations + 1):
        runs.generation(number - 1)
        if runs.settings.evaluated(number):
            runs.evaluate(number)
        if number % 5 == 0 or number == generations:  # reading the accuracy waits for the device
            accuracy = runs.history["accuracy"][-1].mean().item()
            seconds_left = (time.perf_counter() - began) * (generations / number - 1) + seconds_after
            progress(Progress(runs.task.name, size, number, generations, accuracy, finished, total, seconds_left))
    return runs.results()


def _report_skipped_updates(runs: Sequence[dict[str, Any]], say: Say) -> None:
    skipped = Counter(run["arm"] for run in runs for x in run["curves"].get("gradient", [None]) if x is None)
    for arm, n in skipped.items():
        where = "Look for a division by 0 in its loss, e.g. by the number of live tokens of a masked answer."
        say(f"{arm}: updates were skipped in {n} generations, where the gradient was NaN or infinite. {where}")


def _time(runs: Stack) -> float:
    """Seconds that the stack will take, from its first generations, which are trained and thrown away."""
    settings = runs.settings
    runs.generation(0)
    runs.history["accuracy"][-1].sum().item()  # waits for the device
    began = time.perf_counter()
    runs.generation(0)
    runs.history["accuracy"][-1].sum().item()
    sampled = settings.evaluations * settings.eval_problems * settings.eval_k / settings.answers
    return (time.perf_counter() - began) * (settings.generations + 0.4 * sampled)


def memory(task: Task, settings: Settings, cuda_graphs: bool = False) -> float:
    """Bytes that one run needs at its peak: weights with Adam's state, and the larger of sampling and updating.

    A CUDA graph keeps its memory, so with `cuda_graphs` it is both.
    """
    D, layers, S = settings.width, settings.depth, task.prompt_length + task.tokens
    weights = 12 * D * D * layers + (2 * VOCABULARY + S) * D
    cache = settings.answers * (2 * S * D * layers + 6 * task.tokens)
    rows = math.ceil(settings.answers / settings.optimizer_steps)
    update = rows * S * (12 * D * layers + 8 * D + 4 * VOCABULARY)
    return 4.0 * (6 * weights + (cache + update if cuda_graphs else max(cache, update)))


def _free(device: str) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else free_memory()


def _duration(seconds: float) -> str:
    units = ((3600, "h"), (60, "min"), (1, "s"))
    size, unit = next((x for x in units if seconds > 1.7 * x[0]), units[-1])
    return f"{seconds / size:.0f} {unit}"


def _run(task: Task, start: WarmStart, x: Replica, curves: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """A finished run, as in study.json."""
    last = max(1, settings.generations // 6)

    def mean(values: list[float]) -> float:
        return round(sum(values) / len(values), 6)

    evaluated = [g for g in range(1, settings.generations + 1) if settings.evaluated(g)]
    passes = {name: curves.pop(name) for name in ("pass@1", "pass@k")}
    scores = {"area": mean(curves["accuracy"]), "final": mean(curves["accuracy"][-last:])}
    scores |= {name: values[-1] for name, values in passes.items()}
    scores |= {name: mean(curves[name][-last:]) for name in ("entropy", "length")}
    scores |= {"flipped": mean(curves["flipped"])}
    return {
        "task": task.name,
        "arm": x.arm.label,
        "learning_rate": x.arm.learning_rate,
        "seed": x.seed,
        "algorithm": x.arm.algorithm.name,
        "algorithm_settings": asdict(x.arm.algorithm),
        "control": x.arm.control,
        "source": x.arm.source,
        "warm_start": start.digest,
        "scores": scores,
        "curves": curves,
        "evaluations": [
            {"generation": g, "pass@1": one, "pass@k": k}
            for g, one, k in zip(evaluated, passes["pass@1"], passes["pass@k"], strict=True)
        ],
    }
