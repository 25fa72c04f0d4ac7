"""`dew report`, `dew view` and `dew explain`: show runs as an HTML page, as a live page, or in the terminal."""

import time
import webbrowser
from collections.abc import Sequence
from itertools import compress
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from dew.cli.app import app
from dew.cli.console import by_credit, out, printable
from dew.errors import ConfigError, Problem, RecordError, quoted
from dew.files import stay_inside
from dew.run.folder import RunFolder
from dew.run.records import GroupRecord, read_records, record_path


@app.command()
def report(
    folders: Annotated[list[Path] | None, typer.Argument(help="Run folders, or a folder of several runs.")] = None,
    records: Annotated[Path | None, typer.Option(help="A JSONL file of token records (docs/records.md).")] = None,
    output: Annotated[Path | None, typer.Option("--out", "-o", help="The HTML file to write.")] = None,
    compare: Annotated[list[str] | None, typer.Option(help="Another rule to compare, e.g. rules.py:Mine.")] = None,
) -> None:
    """Write an HTML report on one or more runs. It shows curves and the credit of every recorded token."""
    from dew.report import build, build_from_records

    if bool(folders) == bool(records):
        what = "Give run folders or --records, not both." if folders else "No run given."
        raise ConfigError(Problem(what, remedy="Write `dew report runs/NAME`, or `dew report --records FILE.jsonl`."))
    rules = compare or []
    path = build(folders or [], output, rules) if records is None else build_from_records(records, output, rules)
    out.print(f"{path}\nOpen it in a browser. The .json file next to it has the same content.")


@app.command()
def view(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of several runs.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Show the report in a browser, refreshed while runs train.

    The server listens on 127.0.0.1 only, under an address with a random token. Ctrl-C stops it.
    """
    from dew.report.readers import has_run
    from dew.report.serve import make_server

    waiting = [folder for folder in folders if not folder.is_file() and not has_run(folder)]
    if waiting:
        out.print(f"Waiting for a run in {', '.join(map(str, waiting))}. Ctrl-C stops.")
    while not all(has_run(folder) for folder in waiting):
        time.sleep(0.5)
    server, address = make_server(folders, port)
    with server:
        out.print(f"{address}\nThe page updates as the runs train. Only this machine can open it. Ctrl-C stops it.")
        if browser:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            out.print("Stopped.")


@app.command()
def explain(
    source: Annotated[Path, typer.Argument(help="A run folder, a records file, or a JSONL of groups.")],
    step: Annotated[int | None, typer.Option(help="Step (default: of the most informative group).")] = None,
    group: Annotated[int | None, typer.Option(help="Group (default: the most informative one of the step).")] = None,
) -> None:
    """Show the recorded credit of every token in a group."""
    from dew.report.tokens import summary

    groups = _read(source, step)
    for name, wanted in (("step", step), ("group", group)):
        recorded = sorted({getattr(g, name) for g in groups})
        if wanted is not None and wanted not in recorded:
            remedy = f"Choose one of: {', '.join(map(str, recorded))}."
            raise ConfigError(Problem(f"{name}: {wanted} was not recorded.", remedy=remedy))
        groups = [g for g in groups if wanted in (None, getattr(g, name))]
    _show_group(max(groups, key=lambda g: (len({a.correct for a in g.answers}) > 1, summary(g)["telling"])))


ENDS = 200
"""Tokens that `dew explain` shows of the beginning and of the end of a long answer."""


def _read(source: Path, step: int | None) -> list[GroupRecord]:
    """Return the groups of a file or of a step, or a sample of a run's groups."""
    from dew.compare.grid import runs_inside
    from dew.report.readers import read_run, read_sample

    if not source.is_dir():
        return read_records(source)
    stay_inside(source)
    if step is not None and record_path(source, step).exists():
        return read_records(record_path(source, step))
    files = RunFolder(source).record_files()
    if not files:
        of_lab = RunFolder(source).run().get("engine") == "lab"  # which records the first seed
        inside = runs_inside(source.parent if of_lab else source)
        runs = [run for run in inside if RunFolder(run).record_files()]
        if not runs:
            read_run(source, 0)  # an error if it is not a run
        remedy = "Train with records_every above 0. Groups that dynamic sampling drops are not recorded."
        if not RunFolder(source).run():
            remedy = "TRL alone writes none. Before trainer.train(), call dew.watch(trainer)."
        remedy = f"Give a run that has some, e.g. dew explain {quoted(runs[0])}" if runs else remedy
        raise ConfigError(Problem(f"{source}: no token records.", remedy=remedy))
    groups, _, damaged = read_sample(files)
    if not groups:
        raise RecordError(damaged[0])
    return groups


def _show_group(group: GroupRecord) -> None:
    from dew.report.tokens import above_mean

    out.print(f"step {group.step}, group {group.group}: {printable(group.prompt.strip())}")
    if group.gold is not None:
        out.print(f"gold: {printable(group.gold)}")
    scale = max((abs(A) for a in group.answers for A in a.advantage or () if isfinite(A)), default=0.0)
    rule = group.algorithm or "the run"
    legend = f"advantages of {rule}: blue positive, orange negative, full colour = ±{scale:.3f}"
    legend += "; underlined: the wrong sign for its answer"
    if not any(a.advantage for a in group.answers):
        legend = f"no advantages of {rule} were recorded"
    out.print(Text(f"{legend}\n", style="dim"))
    for number, (a, above) in enumerate(zip(group.answers, above_mean(group).tolist(), strict=True), start=1):
        live = a.live or [True] * len(a.tokens)
        credit = [A if isfinite(A) else 0.0 for A in a.advantage or [0.0] * len(a.tokens)]
        flipped = [trains and A * above < 0 for trains, A in zip(live, credit, strict=True)]
        line = f"{number} {'✓ correct' if a.correct else '✗ wrong  '}"
        for name, values in (("grpo", a.grpo), (group.algorithm or "advantage", a.advantage)):
            if trained := _known(values, live):
                low, high = (f"{end(trained):+.3f}" for end in (min, max))
                line += f"   {name} {low if low == high else f'{low} to {high}'}"
        out.print(line + f"   {sum(flipped)} of the wrong sign" * any(flipped))
        # Significant digits: in wrong answers, 1/H of small entropies matters.
        if a.entropy and (H := _known(a.entropy, live)):
            most = max(compress(range(len(credit)), live), key=lambda t: abs(credit[t]))
            largest = f"   largest: '{printable(a.tokens[most])}' {credit[most]:+.3f}, entropy {a.entropy[most]:.3g}"
            out.print(Text(f"  entropy {min(H):.3g} to {max(H):.3g}{largest * (len(set(credit)) > 1)}", style="dim"))
        shown, left_out = [*zip(a.tokens, credit, flipped, strict=True)], len(credit) - 2 * ENDS
        if left_out > 0:
            shown[ENDS:-ENDS] = [(f" … {left_out:,} tokens … ", 0.0, False)]
        out.print(Padding(by_credit(shown, scale), (0, 0, 1, 2)))


def _known(values: Sequence[float] | None, live: Sequence[bool]) -> list[float]:
    """Return the values of the trained tokens, without those that are null in the records."""
    return [x for x in compress(values or (), live) if isfinite(x)]
