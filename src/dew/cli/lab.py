"""`dew lab`: does a credit rule help? Many paired runs at once, of small policies or of LoRA adapters on a model."""

from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from dew.cli.app import app
from dew.cli.console import out, show_markdown
from dew.cli.flags import mapping
from dew.errors import ConfigError, Problem, unknown
from dew.files import write_atomically

QUICK_RATE = 2e-3
TOO_FEW = "Two seeds cannot decide anything: this shows what a study looks like. Use --seeds 8 or more for a verdict."


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
        bool, typer.Option("--controls", help="Add every weighted arm without weights, and with permuted ones.")
    ] = False,
    settings: Annotated[str | None, typer.Option(help="Other settings, e.g. '{group_size: 8, rank: 32}'.")] = None,
    output: Annotated[Path | None, typer.Option("--out", "-o", help="Folder (default runs/lab[-quick]).")] = None,
    benchmark: Annotated[bool, typer.Option("--benchmark", help="Train your rules as docs/benchmark.md does.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Two seeds of a tiny model: minutes on a CPU.")] = False,
) -> None:
    """Compare credit rules over many training runs, paired by seed.

    The first arm is the baseline. --task and --learning-rate may be repeated. Re-run the same command to resume;
    runs of further arms, tasks, rates and seeds are added to the same folder. `dew report` turns it into a page.
    """
    if not arms and not quick:
        raise ConfigError(Problem("No arms given.", remedy="Give the baseline first, e.g. dew lab dapo gtpo"))
    if quick:
        out.print(TOO_FEW)
    if benchmark:
        if task or reward or seeds or first_seed or settings:
            remedy = "Leave out all but --model, --learning-rate, --out and --quick."
            raise ConfigError(Problem("--benchmark has its own task, seeds and settings.", remedy=remedy))
        return _benchmark(arms or ["dew"], model, learning_rate, output, quick)
    if quick:
        model, task = model or "tiny", task or ["countdown"]
    given = mapping(settings, example="{group_size: 8}")
    of_task = given.pop("task_settings", {})
    if not model and (reward or of_task):
        remedy = "Name a model with --model, or leave it out."
        raise ConfigError(Problem("--reward and task_settings are for language models.", remedy=remedy))
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
    out.print(f"\n{folder / 'summary.md'}\nA page with curves and tokens: dew report {folder}")


def _settings(given: dict[str, Any], model: str | None, quick: bool) -> Any:
    """Those that were typed, and the defaults of the kind of policy."""
    from dew.engines.lab.study_settings import QUICK, LoraSettings, TinySettings

    kind = QUICK if quick else LoraSettings() if model else TinySettings()
    known = [*(field.name for field in fields(kind)), "task_settings"]
    if wrong := [unknown(f"--settings: {name!r} is not known.", name, known) for name in given if name not in known]:
        raise ConfigError(wrong)
    return replace(kind, **given)


def _benchmark(
    rules: list[str], model: str | None, rates: list[float] | None, output: Path | None, quick: bool
) -> None:
    """Stage 1 of the benchmark for the learning rates, unless one is given, then stage 2 on its first task."""
    from dew.compare import verdicts
    from dew.engines.lab.arms import parse_arms
    from dew.engines.lab.study_settings import QUICK
    from dew.report import benchmark

    folder = output or Path("runs") / ("benchmark-quick" if quick else "benchmark-own")
    how: dict[str, Any] = {"say": out.print, **({"model": model} if model else {})}
    if quick:
        how |= {"model": model or "tiny", "tasks": ["countdown"], "task_settings": {}, "seeds": 2, "settings": QUICK}
    rates = rates or ([QUICK_RATE] if quick else list(benchmark.RATES))
    arms = {x: parse_arms([x], rates, controls=False)[0].label for x in dict.fromkeys([benchmark.BASELINE, *rules])}
    texts = list(arms)
    if len(rates) > 1:
        tried = benchmark.train("stage1", "A-train", texts, folder / "stage1", learning_rates=rates, **how)
        best = {arm: max(of, key=of.__getitem__) for arm, of in benchmark.rate_means(tried).items()}
        texts = [x if "@" in x else f"{x}@{best[label]:g}" for x, label in arms.items()]
    found = benchmark.train("stage2", "A", texts, folder / "stage2", learning_rates=rates, controls=True, **how)
    placebos = {arm: of[0].placebo for arm, of in benchmark.by_arm(found).items() if arm in arms.values()}
    alpha = benchmark.alpha_of("stage2", "A", min(map(len, benchmark.by_arm(found).values())))
    own = [replace(row, arm=f"{row.arm} (yours)") for row in benchmark.compare(found, placebos, alpha=alpha)]
    with TemporaryDirectory() as work:
        others = benchmark.stage_rows("stage2", "A", benchmark.read(benchmark.COMMITTED, Path(work)))
    note = "Your rows are last." if others else "No runs of the benchmark are here: these are yours alone."
    said = verdicts([row.than_baseline["pass@1"] for row in own if row.verdict])
    text = "\n\n".join([*said, note, benchmark.table([*others, *own]), benchmark.ABOUT])
    write_atomically(folder / "benchmark.md", f"{text}\n".encode())
    show_markdown(text)
    out.print(f"\n{folder / 'benchmark.md'}\nA page with curves and intervals: dew report {folder / 'stage2'}")
