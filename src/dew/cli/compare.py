"""`dew compare`: several algorithms with several seeds each, and which differences are larger than noise."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dew.cli.app import app
from dew.cli.console import out, print_json, signed
from dew.cli.flags import PASS_ON, Typed, Untrusted, check_settings, load_run
from dew.cli.runs import Child, live, lock, run_all
from dew.errors import ConfigError, Problem
from dew.files import write_atomically
from dew.rewards.process import cores
from dew.run.config import Run, read_run, to_yaml
from dew.run.folder import RunFolder
from dew.run.permission import check_permission

if TYPE_CHECKING:
    from dew.compare.comparison import Comparison

PER_RUN = ("algorithm", "seed", "output_dir")
"""Settings that the comparison chooses for each run."""


@app.command(context_settings=PASS_ON)
def compare(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="A YAML file, or a recipe name such as tiny/countdown.")],
    algorithms: Annotated[str, typer.Option(help="Names or file.py:Class, comma-separated.")] = "gtpo,grpo_s,dapo,grpo",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds; fewer than 5 cannot show a difference.")] = 5,
    first_seed: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    parallel: Annotated[int, typer.Option(min=0, help="Parallel runs; 0: one per core, or one on a GPU.")] = 0,
    folder: Annotated[Path | None, typer.Option("--out", "-o", help="Folder (default runs/compare-RECIPE).")] = None,
    baseline: Annotated[str | None, typer.Option(help="Baseline algorithm (default: the first).")] = None,
    untrusted: Untrusted = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare algorithms over several seeds.

    Differences are paired by seed and by problem. Further flags are settings of every run: `--max_steps 100`.
    Re-run the same command to resume: finished runs are kept, interrupted ones are resumed.
    """
    run, typed = load_run(recipe, context.args)
    run = _without_per_run(run, typed)
    check_settings(run, typed)
    check_permission(run, typed, untrusted)
    names = _algorithms(algorithms, run.settings.get("algorithm_kwargs"))
    baseline = next(iter(_algorithms(baseline) if baseline else names))
    if baseline not in names:
        advice = f"Choose one of: {', '.join(names)}."
        raise ConfigError(Problem(f"baseline: {baseline} is not among the algorithms.", remedy=advice))
    from dew.compare import compare_runs, read_result
    from dew.report import build

    folder = folder or Path("runs") / f"compare-{recipe.stem}"
    chosen = range(first_seed, first_seed + seeds)
    pairs = [(name, seed) for seed in chosen for name in names]  # seed by seed: early results are balanced
    homes = {(name, seed): folder / f"{name}-seed{seed}" for name, seed in pairs}
    with lock(folder):
        config = _write_config(run, folder)
        _check_rules(names, folder)
        children = [child for pair in pairs if (child := _child(config, homes[pair], names[pair[0]], pair[1]))]
        at_once = parallel or (cores() if run.settings.get("use_cpu") else 1)  # a GPU takes one run
        _train(children, len(pairs), at_once, quiet=as_json)
        result = compare_runs([read_result(homes[pair], *pair) for pair in pairs], baseline)
        content = {"recipe": str(recipe), "settings": run.to_dict(), **result.to_json()}
        write_atomically(folder / "compare.json", json.dumps(content, indent=1, ensure_ascii=False).encode())
        write_atomically(folder / "compare.md", markdown(result).encode())
        page = build([folder])
    if as_json:
        print_json(content)
        return
    out.print(f"\n{markdown(result)}\n{folder / 'compare.json'}\n{folder / 'compare.md'}\n{page}")
    out.print("The page shows the verdicts, the curves of all arms, and the credit of every recorded token.")


def _algorithms(text: str, settings: Any = None) -> dict[str, str]:
    """Name -> what `--algorithm` takes: the name as dew spells it, or file.py:Class. `settings`: algorithm_kwargs."""
    from dew.algorithms import get_algorithm

    found: dict[str, str] = {}
    for word in map(str.strip, text.split(",")):
        name = get_algorithm(word, **(settings if isinstance(settings, dict) else {})).name
        value = word if ":" in word else name
        if name in found:
            what = f"algorithms: {found[name]} and {value} have the same name, {name!r}."
            raise ConfigError(Problem(what, remedy="Give each algorithm once, and each class a name of its own."))
        found[name] = value
    return found


def _without_per_run(run: Run, typed: Typed) -> Run:
    """The run without the settings that differ from run to run."""
    if run.engine == "verl":
        advice = "On a cluster, start each run with `dew train --engine verl`, then `dew report RUN RUN`."
        raise ConfigError(Problem("engine: verl. `dew compare` trains on TRL.", remedy=advice))
    if run.trainer == "dpo":
        advice = "Start each run with `dew train`, then `dew report RUN RUN`."
        raise ConfigError(Problem("trainer: dpo. It has no algorithms to compare.", remedy=advice))
    if given := ", ".join(key for key in PER_RUN if key in typed):
        advice = "Use --algorithms, --seeds and --out."
        raise ConfigError(Problem(f"{given}: `dew compare` sets this for each run.", remedy=advice))
    return replace(run, settings={k: v for k, v in run.settings.items() if k not in PER_RUN})


def _write_config(run: Run, folder: Path) -> Path:
    """Write the config that all runs share; refuse a folder that holds anything else."""
    path, remedy = folder / "recipe.yaml", "Choose another folder with --out."
    if not path.exists() and any(p.name != ".lock" for p in folder.iterdir()):
        raise ConfigError(Problem(f"{folder} is not empty and holds no comparison.", remedy=remedy))
    old, new = read_run(path).to_dict() if path.exists() else {}, run.to_dict()
    changed = ", ".join(sorted(key for key in {**old, **new} if old.get(key) != new.get(key)))
    if changed and any(folder.glob("*-seed*/run.json")):
        raise ConfigError(Problem(f"{folder} holds a comparison with other settings ({changed}).", remedy=remedy))
    write_atomically(path, to_yaml(run, ["The config shared by all runs of this comparison."]).encode())
    return path


def _check_rules(names: Mapping[str, str], folder: Path) -> None:
    """Keep a digest of each of your own rules; refuse a rule whose code has changed since its runs were trained."""
    from dew.algorithms import get_algorithm
    from dew.algorithms.own import source_digest

    path = folder / "rules.json"
    old = json.loads(path.read_bytes()) if path.exists() else {}
    new = {name: source_digest(type(get_algorithm(word))) for name, word in names.items() if ":" in word}
    changed = [name for name in new if old.get(name, new[name]) != new[name] and any(folder.glob(f"{name}-seed*"))]
    if changed:
        folders = ", ".join(str(folder / f"{name}-seed*") for name in changed)
        remedy = f"Delete {folders} to train them again, or choose another folder with --out."
        raise ConfigError(Problem(f"The code of {', '.join(changed)} has changed since its runs.", remedy=remedy))
    write_atomically(path, json.dumps(old | new).encode())


def _child(config: Path, home: Path, algorithm: str, seed: int) -> Child | None:
    """The process that starts or resumes this run; None if the run is finished."""
    if RunFolder(home).finished():
        return None
    if any(home.glob("checkpoint-*/trainer_state.json")):
        return Child(["resume", str(home)], home)
    shutil.rmtree(home, ignore_errors=True)
    flags = ["--algorithm", algorithm, "--seed", str(seed), "--output_dir", str(home)]
    return Child(["train", str(config), *flags], home)


def _train(children: Sequence[Child], total: int, parallel: int, *, quiet: bool) -> None:
    say: Callable[[str], None] = (lambda _: None) if quiet else out.print
    at_once = f", {min(parallel, len(children))} at a time" if children else ""
    say(f"{total} run{'s' * (total > 1)}: {total - len(children)} finished, {len(children)} to do{at_once}")
    numbers = count(total - len(children) + 1)

    def ended(child: Child) -> None:
        child.view.poll()
        say(f"[{next(numbers)}/{total}] {child.view.line()}")

    screen = live(lambda: [child.view for child in children if child.running], transient=True)
    with screen if out.is_terminal and not quiet else nullcontext():
        run_all(children, parallel, ended=ended, advice="Re-run the same command to resume.")


def markdown(result: "Comparison") -> str:
    """The mean of each algorithm, the paired differences, and a sentence on which of them exceed noise."""
    from dew.report.findings import score_title, seeds_verdict

    rows = []
    for name in result.algorithms:
        values = [result.of(name, score) for score in result.scores]
        rows.append([name, str(len(values[0])), *map(_mean_and_std, values), f"{result.groups(name):,.0f}"])
    text = _table(["algorithm", "seeds", *map(score_title, result.scores), "groups sampled per run"], rows)
    text += "\nMean ± standard deviation over seeds.\n"
    if not result.differences:
        return text
    rows = []
    for d in result.differences:
        ahead = f"{sum(x > 0 for x in d.by_seed)} of {len(d.by_seed)}"
        rows.append([f"{d.algorithm} − {d.baseline}", score_title(d.score), signed(d.difference), ahead, d.verdict])
    text += "\n" + _table(["difference", "score", "mean [95 % interval]", "seeds ahead", "verdict"], rows)
    text += f"\nPaired by seed ({len(d.seeds)}) and by problem; bootstrap intervals over both, widened for few seeds. "
    return f"{text}{seeds_verdict(result.to_json()['differences'])}\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *rows])


def _mean_and_std(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{mean(values):.3f}"
