"""`dew compare` and `dew lab`: compare algorithms over several seeds.

`dew compare` trains on TRL, one process per run; `dew lab` trains many small policies, or LoRA adapters, at once.
"""

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import count, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dew.cli.app import app
from dew.cli.console import out, show_markdown
from dew.cli.flags import PASS_ON, Typed, Untrusted, load_run, mapping
from dew.cli.runs import Child, followed, run_all
from dew.errors import ConfigError, Problem, quoted, unknown
from dew.files import write_atomically
from dew.rewards.process import cores
from dew.run.config import Run, to_yaml
from dew.run.folder import RunFolder, lock
from dew.run.records import finite

if TYPE_CHECKING:
    from dew.compare import Result
    from dew.compare.grid import Cell

PER_RUN = ("algorithm", "seed", "output_dir")
"""Settings that the comparison chooses for each run."""
CONFIG = "recipe.yaml"
DEW = (sys.executable, "-m", "dew")
BETWEEN = re.compile(r",(?![^()]*(?:\([^()]*\)[^()]*)*\))")
"""Commas between algorithms, but not inside `gtpo(pool=outcome,entropy_clip=(0.01,5))`."""


@app.command(context_settings=PASS_ON)
def compare(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="A YAML file, or a recipe name such as tiny/countdown.")],
    algorithms: Annotated[
        str, typer.Option(help="NAME, 'NAME(setting=value)' or file.py:Class, comma-separated, the baseline first.")
    ] = "dapo,gtpo,grpo_s,grpo",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds; fewer than 5 cannot show a difference.")] = 5,
    first_seed: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    parallel: Annotated[int, typer.Option(min=0, help="Parallel runs; 0: one per CPU core, or one on a GPU.")] = 0,
    folder: Annotated[Path | None, typer.Option("--out", "-o", help="Folder (default runs/compare-RECIPE).")] = None,
    untrusted: Untrusted = False,
) -> None:
    """Compare algorithms over several seeds.

    Differences from the first algorithm are paired by seed. Other flags are settings of every run: `--max_steps 100`.
    Re-run the same command to resume: finished runs are kept, interrupted ones are resumed.
    """
    words = [*takewhile(lambda word: not word.startswith("-"), context.args)]
    if words and not recipe.is_dir():
        remedy = f"Write --algorithms {quoted(','.join(words))}."
        raise ConfigError(Problem(f"{' '.join(words)}: not understood.", remedy=remedy))
    run, typed = load_run(recipe, context.args)
    run = without_per_run(run, typed)
    names = _algorithms(algorithms, run.algorithm_settings)
    from dew.engines.trl.launch import parse

    for algorithm in names.values():  # on the CPU, because the GPU is for the runs
        own = {"algorithm": algorithm, "use_cpu": True}
        parse(replace(run, settings=run.settings | own), typed | dict.fromkeys(own, ""), untrusted=untrusted)
    from dew.compare import compare_runs
    from dew.compare.verdicts import summary
    from dew.report import build

    folder, baseline = folder or Path("runs") / f"compare-{recipe.stem}", next(iter(names))
    at_once = parallel or (cores() if run.settings.get("use_cpu") else 1)  # one run per GPU
    with lock(folder):
        results = train_grid(run, folder, names, range(first_seed, first_seed + seeds), at_once)
        differences = compare_runs(results, baseline)
        text = summary(results, differences)
        content = {
            "recipe": str(recipe),
            "settings": run.to_dict(),
            "baseline": baseline,
            "runs": [result.to_json() for result in results],
            "differences": finite([difference.to_json() for difference in differences]),
        }
        write_atomically(folder / "compare.json", json.dumps(content, indent=1, ensure_ascii=False).encode())
        write_atomically(folder / "compare.md", text.encode())
        page = build([folder])
    out.print()
    show_markdown(text)
    out.print(f"\n{folder / 'compare.json'}\n{folder / 'compare.md'}\n{page}")


def _algorithms(text: str, settings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return {label: argument for `--algorithm`}. `settings`: algorithm_kwargs."""
    from dew.algorithms import get_algorithm

    found: dict[str, str] = {}
    for word in map(str.strip, BETWEEN.split(text)):
        get_algorithm(word, **(settings or {}))
        label = get_algorithm(word).label
        if label in found:
            what = f"algorithms: {found[label]} and {word} have the same name, {label!r}."
            raise ConfigError(Problem(what, remedy="Give each algorithm once, and each class a unique name."))
        found[label] = word
    return found


def without_per_run(run: Run, typed: Typed) -> Run:
    """Remove the settings that differ between runs."""
    if run.engine == "verl":
        advice = "On a cluster, start each run with `dew train --engine verl`, then `dew report RUN RUN`."
        raise ConfigError(Problem("engine: verl. `dew compare` trains on TRL.", remedy=advice))
    if given := ", ".join(key for key in PER_RUN if key in typed):
        advice = "Use --algorithms, --seeds and --out."
        raise ConfigError(Problem(f"{given}: `dew compare` sets this for each run.", remedy=advice))
    return replace(run, settings={k: v for k, v in run.settings.items() if k not in PER_RUN})


def train_grid(
    run: Run, folder: Path, algorithms: Mapping[str, str], seeds: Sequence[int], parallel: int, *, every: int = 0
) -> list["Result"]:
    """Train every algorithm (label -> argument for `--algorithm`) with every seed, and return the results.

    Finished runs are kept. `every`: print a line every so many steps of each run; 0: when a run ends.
    """
    from dew.algorithms import get_algorithm, source_digest
    from dew.compare import read_result
    from dew.compare.grid import Cell, open_grid

    sources = {name: source_digest(type(get_algorithm(word))) for name, word in algorithms.items() if ":" in word}
    cells = [Cell(name, seed, source=sources.get(name, "")) for seed in seeds for name in algorithms]
    todo = open_grid(folder, cells, run.to_dict(), say=out.print)  # seed by seed, to balance early results
    write_atomically(folder / CONFIG, to_yaml(run, ["The config shared by all runs of this comparison."]).encode())
    children = [_child(folder, cell, algorithms[cell.arm]) for cell in todo]
    cell_of = {folder / cell.home: cell for cell in todo}
    total, at_once = len(cells), f", {min(parallel, len(todo))} at a time" if todo else ""
    out.print(f"{total} run{'s' * (total > 1)}: {total - len(todo)} finished, {len(todo)} to do{at_once}")
    if todo and not every:
        out.print(f"To follow them: dew view {quoted(folder)}")
    numbers = count(total - len(todo) + 1)

    def ended(child: Child) -> None:
        RunFolder(child.folder).write_run(cell_of[child.folder].facts())
        child.view.poll()
        if not every:
            out.print(f"[{next(numbers)}/{total}] {child.view.line()}")

    with followed([child.view for child in children], every) if every else nullcontext():
        run_all(children, parallel, ended=ended, advice="Re-run the same command to resume.")
    return [read_result(folder / cell.home, arm=cell.arm, seed=cell.seed) for cell in cells]


def _child(folder: Path, cell: "Cell", algorithm: str) -> Child:
    home = folder / cell.home
    if RunFolder(home).resumable():
        return Child([*DEW, "resume", str(home)], home)
    shutil.rmtree(home, ignore_errors=True)
    flags = ["--algorithm", algorithm, "--seed", str(cell.seed), "--output_dir", str(home)]
    return Child([*DEW, "train", str(folder / CONFIG), *flags], home)


# ── dew lab ─────────────────────────────────────────────────────────────────────────────────────────────────
QUICK_RATE = 2e-3
ALONE = "Only your rows: the benchmark's runs have another model or task, or are not here (docs/results/benchmark)."
BESIDE_OTHERS = """The p-values of your rows are corrected over them alone. The benchmark's runs started from a 4-bit
file of the model, converted to bfloat16: unless yours did too, compare differences from DAPO, not pass@1."""
TOO_FEW = "Two seeds cannot decide anything: this shows what a study looks like."


@app.command()
def lab(
    arms: Annotated[list[str] | None, typer.Argument(help="dapo, gtpo(alpha2=0.5), gtpo@3e-5, rules.py:Class.")] = None,
    model: Annotated[str | None, typer.Option(help="Train LoRA adapters on this model: folder or hub name.")] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="countdown-3, -4 (default), -6, -8, addition-8, -14; any with --model.")
    ] = None,
    reward: Annotated[str | None, typer.Option(help="With --model: a verifier, or file.py:function.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds per arm (default 8); a verdict needs 5.")] = None,
    first_seed: Annotated[int, typer.Option(min=0, help="First seed; use other seeds to confirm a result.")] = 0,
    learning_rate: Annotated[
        list[float] | None, typer.Option(help="Learning rate of all arms (default 5e-5; 4e-5 with --model).")
    ] = None,
    controls: Annotated[
        bool, typer.Option("--controls", help="Add each weighting arm without weights and with permuted weights.")
    ] = False,
    settings: Annotated[str | None, typer.Option(help="Other settings, e.g. '{group_size: 8, rank: 32}'.")] = None,
    output: Annotated[Path | None, typer.Option("--out", "-o", help="Folder (default runs/lab[-quick]).")] = None,
    benchmark: Annotated[bool, typer.Option("--benchmark", help="Train your rules as docs/benchmark.md does.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Two seeds of a tiny model: minutes on a CPU.")] = False,
) -> None:
    """Compare credit rules over many training runs, paired by seed.

    The first arm is the baseline. --task and --learning-rate may be repeated. Re-run the same command to resume;
    with more arms, tasks, rates or seeds, it adds runs to the same folder. `dew report` turns it into a page.
    """
    if not arms and not quick:
        raise ConfigError(Problem("No arms given.", remedy="Give the baseline first, e.g. dew lab dapo gtpo"))
    if quick and not seeds:
        out.print(TOO_FEW if benchmark else f"{TOO_FEW} Use --seeds 8 or more for a verdict.")
    if benchmark:
        if task or reward or seeds or first_seed or settings:
            remedy = "Use it only with --model, --learning-rate, --out and --quick."
            raise ConfigError(Problem("--benchmark has its own task, seeds and settings.", remedy=remedy))
        return _benchmark(arms or ["dew"], model, learning_rate, output, quick)
    if quick:
        model, task = model or "tiny", task or ["countdown"]
    given = mapping(settings, example="{group_size: 8}")
    of_task = given.pop("task_settings", {})
    if not isinstance(of_task, dict):
        remedy = "Write e.g. '{task_settings: {numbers: 3}}'."
        raise ConfigError(Problem(f"--settings: task_settings {of_task} is not a mapping.", remedy=remedy))
    if not model and (reward or of_task):
        raise ConfigError(Problem("--reward and task_settings are for language models.", remedy="Add --model."))
    from dew.engines.lab import markdown, study

    folder = output or Path("runs") / ("lab-quick" if quick else "lab")
    found = study(
        arms or ["dapo", "dew"], output=folder, model=model, tasks=task or ["gsm8k" if model else "countdown-4"],
        reward=reward, task_settings=of_task, seeds=seeds or (2 if quick else 8), first_seed=first_seed,
        learning_rates=learning_rate or [QUICK_RATE if quick else 4e-5 if model else 5e-5], controls=controls,
        settings=_settings(given, model, quick), say=out.print,
    )  # fmt: skip
    text = markdown(found)
    write_atomically(folder / "summary.md", f"{text}\n".encode())
    out.print()
    show_markdown(text)
    out.print(f"\n{folder / 'summary.md'}\nA page with curves and tokens: dew report {quoted(folder)}")


def _settings(given: dict[str, Any], model: str | None, quick: bool) -> Any:
    """Return the given settings, with defaults for the kind of policy."""
    from dew.engines.lab.study_settings import QUICK, LoraSettings, TinySettings

    kind = QUICK if quick else LoraSettings() if model else TinySettings()
    known = [*(field.name for field in fields(kind)), "task_settings"]
    if wrong := [unknown(f"--settings: {name!r} is not known.", name, known) for name in given if name not in known]:
        raise ConfigError(wrong)
    return replace(kind, **given)


def _benchmark(
    rules: list[str], model: str | None, rates: list[float] | None, output: Path | None, quick: bool
) -> None:
    """Choose learning rates as in stage 1 of the benchmark, unless they are given or known; then train stage 2."""
    import torch

    from dew.compare import verdicts
    from dew.engines.lab.arms import RATE, parse_arms
    from dew.engines.lab.study_settings import QUICK
    from dew.report import benchmark

    folder = output or Path("runs") / ("benchmark-quick" if quick else "benchmark-own")
    how: dict[str, Any] = {"say": out.print, **({"model": model} if model else {})}
    if quick:
        rates = rates or [QUICK_RATE]
        how |= {"model": model or "tiny", "tasks": ["countdown"], "task_settings": {}, "seeds": 2, "settings": QUICK}
    elif not torch.cuda.is_available():
        out.print("There is no GPU, and on a CPU this takes days. --quick is a trial of minutes.")
    known = not quick and Path(model or benchmark.QWEN).name == Path(benchmark.QWEN).name
    with TemporaryDirectory() as work:
        others = benchmark.stage_rows("stage2", "A", benchmark.read(benchmark.COMMITTED, Path(work)) if known else {})
    own_rate = f"@{rates[0]:g}" if rates and len(rates) == 1 else ""
    rate = f"@{others[0].runs[0].learning_rate:g}" if others and not rates else own_rate
    texts = [x if RATE.search(x) else x + own_rate for x in rules if x != benchmark.BASELINE]
    arms = {x: parse_arms([x], benchmark.RATES, controls=False)[0].label for x in [benchmark.BASELINE + rate, *texts]}
    if len(set(arms.values())) < len(arms):
        raise ConfigError(Problem("A rule is given twice.", remedy="Give each rule once; dapo is added."))

    def choose(points: list[str]) -> dict[str, float]:
        tried = benchmark.train("stage1", "A-train", points, folder / "stage1", **how)
        return {arm: max(of, key=of.__getitem__) for arm, of in benchmark.rate_means(tried, how.get("seeds")).items()}

    if tuned := [x for x in arms if not RATE.search(x)]:
        points = [f"{x}@{rate:g}" for x in tuned for rate in rates or benchmark.RATES]
        best = choose(points)
        if not rates:
            best = choose([*points, *(f"{x}@{benchmark.THIRD[best[arms[x]]]:g}" for x in tuned)])
        arms = {f"{x}@{best[label]:g}" if x in tuned else x: label for x, label in arms.items()}
    found = benchmark.train("stage2", "A", list(arms), folder / "stage2", controls=True, **how)
    placebos = {arm: of[0].placebo for arm, of in benchmark.by_arm(found).items() if arm in arms.values()}
    _, alpha = benchmark.look("stage2", "A", min(map(len, benchmark.by_arm(found).values())))
    own = benchmark.compare(found, placebos, alpha=alpha)
    own = [replace(row, arm=f"{benchmark.title(row.arm, own)} (yours)") for row in own]
    said = verdicts([row.than_baseline["pass@1"] for row in own if row.verdict])
    text = "\n\n".join([*said, BESIDE_OTHERS if others else ALONE, ""])
    whole = f"{text}{benchmark.table([*others, *own])}\n\n{benchmark.ABOUT}\n"
    write_atomically(folder / "benchmark.md", whole.encode())
    show_markdown(text + benchmark.table(own))
    out.print(f"\nAll rules: {folder / 'benchmark.md'}\nA page with curves: dew report {quoted(folder / 'stage2')}")
