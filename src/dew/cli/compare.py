"""`dew compare`: algorithms x seeds from one recipe, told apart only as far as the seeds allow."""

import json
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dew.cli.app import app
from dew.cli.children import Child, Lock, cores, finished, run_all
from dew.cli.console import err, out, print_json
from dew.cli.train import Allow
from dew.cli.watch import table
from dew.config import Run, make_run, parse_yaml, read_run, to_yaml
from dew.errors import ConfigError
from dew.files import write_atomically
from dew.records import RunFolder

if TYPE_CHECKING:
    from dew.evaluate import Comparison

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
OURS = ("algorithm", "seed", "output_dir")
"""Settings that the comparison itself gives to each run."""


@app.command(context_settings=PASS_ON)
def compare(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="A YAML file, or a recipe's name such as tiny/countdown.")],
    algorithms: Annotated[str, typer.Option(help="Names, separated by commas.")] = "gtpo,grpo_s,dapo,grpo",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds: 0, 1, 2, ...; below 5 nothing can be told.")] = 5,
    parallel: Annotated[int, typer.Option(min=0, help="Runs at a time; 0: one per core, or one on a GPU.")] = 0,
    folder: Annotated[Path | None, typer.Option("--out", "-o", help="Where the runs and the result go.")] = None,
    baseline: Annotated[str | None, typer.Option(help="What the others are held against; else the first.")] = None,
    allow: Allow = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Train several algorithms with several seeds each, and say which differences are more than noise.

    Further flags are settings of every run: `--max_steps 100`. Typed again, it goes on where it was: finished runs
    are kept, interrupted ones are resumed.
    """
    names = _algorithms(algorithms)
    baseline = names[0] if baseline is None else _algorithms(baseline)[0]
    if baseline not in names:
        raise ConfigError(f"baseline: {baseline} is not among the algorithms ({', '.join(names)}). Add it there.")
    run = _recipe(recipe, context.args)
    allowed = _allowed(run, settings_of(context.args), allow or [])
    folder = folder or Path("runs") / f"compare-{recipe.stem}"
    with Lock(folder) as lock:
        plan = _plan(run, folder)
        pairs = [(name, seed) for seed in range(seeds) for name in names]  # seed by seed: early results are balanced
        todo = [child for name, seed in pairs if (child := _child(plan, folder, name, seed, allowed)) is not None]
        _train(todo, len(pairs), parallel or _at_once(run), lock, quiet=as_json)
        result = _collect(folder, pairs, baseline)
    content = {"recipe": str(recipe), "settings": run.to_dict(), **result.to_json()}
    write_atomically(folder / "compare.json", json.dumps(content, indent=1, ensure_ascii=False).encode())
    write_atomically(folder / "compare.md", markdown(result).encode())
    page = _report(folder, pairs)
    if as_json:
        print_json(content)
        return
    out.print(f"\n{markdown(result)}", soft_wrap=True)
    out.print(f"\n{folder / 'compare.json'}\n{folder / 'compare.md'}\n{page}", soft_wrap=True)
    out.print("The page shows all curves; choose Seeds: mean ± standard deviation under Curves.")


# ── the plan ────────────────────────────────────────────────────────────────────────────────────────────────


def _algorithms(text: str) -> list[str]:
    """Names as dew spells them, each once."""
    from dew.algorithms import get_algorithm

    names = [type(get_algorithm(word.strip())).name for word in text.split(",") if word.strip()]
    if not names:
        raise ConfigError("algorithms: none given. Write e.g. --algorithms gtpo,dapo.")
    return list(dict.fromkeys(names))


def _recipe(recipe: Path, flags: Sequence[str]) -> Run:
    from dew.cli.train import recipe_path as find

    run = read_run(find(recipe))
    run = make_run({**run.to_dict(), **settings_of(flags)}, source=str(recipe))
    if run.engine == "verl":
        raise ConfigError(
            "engine: verl. The comparison trains on TRL. On a cluster start each run with dew train --engine verl, and "
            "look at them together: dew report RUN RUN."
        )
    given = [key for key in OURS if key in settings_of(flags)]
    if given:
        raise ConfigError(f"{', '.join(given)}: the comparison sets it itself. Write --algorithms, --seeds, --out.")
    return Run(**{**vars(run), "settings": {k: v for k, v in run.settings.items() if k not in OURS}})


def settings_of(flags: Sequence[str]) -> dict[str, Any]:
    """`--max_steps 100 --use_cpu` as settings: {max_steps: 100, use_cpu: True}."""
    settings: dict[str, Any] = {}
    words = list(flags)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"{word!r}: not understood. Settings are written as --name value.")
        name, given, value = word[2:].partition("=")
        if not given:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        settings.update(parse_yaml(f"{name.replace('-', '_')}: {value}", word))
    return settings


def _plan(run: Run, folder: Path) -> Path:
    """The recipe as all runs of this folder have it. Another recipe in the same folder is refused."""
    path = folder / "recipe.yaml"
    text = to_yaml(run, ["What all runs of this comparison have in common."])
    begun = any(folder.glob("*-seed*/run.json"))
    if begun and path.exists() and path.read_text() != text:
        old, new = (read_run(path).to_dict(), run.to_dict())
        changed = sorted(k for k in {**old, **new} if old.get(k) != new.get(k))
        raise ConfigError(
            f"{folder}: holds a comparison with other settings ({', '.join(changed)}). Runs of both could not be "
            "compared: choose another folder with --out."
        )
    others = [p.name for p in folder.iterdir() if p.name != ".lock"] if not path.exists() else []
    if others:
        raise ConfigError(f"{folder}: is not empty and holds no comparison. Choose another folder with --out.")
    write_atomically(path, text.encode())
    return path


def place(folder: Path, algorithm: str, seed: int) -> Path:
    return folder / f"{algorithm}-seed{seed}"


def _allowed(run: Run, typed: Collection[str], allow: Sequence[str]) -> list[str]:
    """What each run is to be told that it may do: everything that the file wants, now that it is allowed."""
    from dew.engines.permission import check_permission, wishes

    check_permission(run, typed, allow)
    return [word for name, _ in wishes(run.settings, Path()) for word in ("--allow", name)]


def _child(plan: Path, folder: Path, algorithm: str, seed: int, allowed: Sequence[str] = ()) -> Child | None:
    """What is left to do for this run: nothing, the rest, or all of it."""
    home = place(folder, algorithm, seed)
    label = home.name
    if finished(home):
        return None
    trained = RunFolder(home).run().get("status") == "done"  # but not scored: its checkpoint has no step left to take
    if not trained and any(home.glob("checkpoint-*/trainer_state.json")):
        return Child(label, ["resume", str(home), *allowed], home)
    shutil.rmtree(home, ignore_errors=True)
    given = ["--algorithm", algorithm, "--seed", str(seed), "--output_dir", str(home)]
    return Child(label, ["train", str(plan), *given, *allowed], home)


def _at_once(run: Run) -> int:
    """Small models on a CPU train one per core; a GPU belongs to one run."""
    return cores() if run.settings.get("use_cpu") else 1


# ── the runs ────────────────────────────────────────────────────────────────────────────────────────────────


def _train(todo: Sequence[Child], total: int, parallel: int, lock: int, *, quiet: bool) -> None:
    done = total - len(todo)
    if not quiet:
        at_once = f", {min(parallel, len(todo))} at a time" if todo else ""
        out.print(f"{total} runs: {done} finished, {len(todo)} to do{at_once}")

    def ended(child: Child) -> None:
        nonlocal done
        done += 1
        child.view.poll()
        if not quiet:
            out.print(f"[{done}/{total}] {child.view.line()}", soft_wrap=True)

    try:
        with _live(quiet) as show:
            run_all(todo, parallel, keep_open=[lock], tick=show, ended=ended)
    except KeyboardInterrupt:
        err.print("Interrupted; no run goes on. The same command takes it up from here.")
        raise typer.Exit(1) from None


@contextmanager
def _live(quiet: bool) -> Iterator[Any]:
    """A table of what is running, on a terminal; elsewhere a line per finished run is enough."""
    if quiet or not out.is_terminal:
        yield lambda running: None
        return
    from rich.live import Live

    with Live(console=out, refresh_per_second=2, transient=True) as live:

        def show(running: Sequence[Child]) -> None:
            for child in running:
                child.view.poll()
            live.update(table([child.view for child in running]))

        yield show


def _collect(folder: Path, pairs: Sequence[tuple[str, int]], baseline: str) -> "Comparison":
    from dew.evaluate import compare_runs, read_result

    return compare_runs([read_result(place(folder, name, seed), name, seed) for name, seed in pairs], baseline)


def _report(folder: Path, pairs: Sequence[tuple[str, int]]) -> Path:
    from dew.report import build

    by_algorithm = sorted(pairs, key=lambda pair: [name for name, _ in pairs].index(pair[0]))
    return build([place(folder, name, seed) for name, seed in by_algorithm], folder / "report.html")


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────

TITLES = {"area": "area under training accuracy"}


def markdown(result: "Comparison") -> str:
    """Two tables and a sentence: what each came to, and how far the paired seeds tell them apart."""
    titles = [TITLES.get(score, f"{score} after") for score in result.scores]
    rows = []
    for name in result.algorithms:
        values = [_spread(result.of(name, score)) for score in result.scores]
        rows.append([name, str(len(result.of(name, "area"))), *values, f"{result.groups(name):,.0f}"])
    text = _table(["algorithm", "seeds", *titles, "groups sampled per run"], rows)
    text += "\nMean ± standard deviation over seeds.\n"
    if not result.differences:
        return text
    rows = [
        [f"{d.algorithm} − {d.baseline}", title, _signed(d.difference), f"{_wins(d.by_seed)}", d.verdict]
        for d in result.differences
        for title in [TITLES.get(d.score, f"{d.score} after")]
    ]
    text += "\n" + _table(["difference", "score", "mean [95 % interval]", "seeds ahead", "verdict"], rows)
    return f"{text}\n{_sentence(result)}\n"


def _sentence(result: "Comparison") -> str:
    apart = [d for d in result.differences if not d.within_noise]
    seeds = len(result.differences[0].seeds)
    begin = f"Paired by seed ({seeds}) and by problem; intervals by bootstrap over both, widened for few seeds."
    if not apart:
        return f"{begin} Every difference is within noise: these runs do not tell the algorithms apart."
    also = " The others are within noise." if len(apart) < len(result.differences) else ""
    told = "; ".join(f"{d.verdict} in {TITLES.get(d.score, d.score)}" for d in apart)
    return (
        f"{begin} More than noise: {told}.{also} Of {len(result.differences)} intervals at 95 %, about one in "
        "twenty misses by chance alone."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{mean(values):.3f}"


def _signed(interval: Any) -> str:
    return f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def _wins(by_seed: Sequence[float]) -> str:
    return f"{sum(x > 0 for x in by_seed)} of {len(by_seed)}"
