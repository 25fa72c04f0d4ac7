"""`dew report`, `dew view` and `dew explain`: runs as an HTML page, as a page during training, in the terminal."""

import webbrowser
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dew.cli.app import app
from dew.cli.console import by_credit, out, print_json, printable
from dew.cli.flags import mapping
from dew.errors import ConfigError, DewError, Problem, RecordError
from dew.files import stay_inside
from dew.run.folder import RunFolder
from dew.run.records import AnswerRecord, GroupRecord, read_records, record_path

if TYPE_CHECKING:
    from torch import Tensor

    from dew import Algorithm, Rollouts


@app.command()
def report(
    folders: Annotated[list[Path] | None, typer.Argument(help="Run folders, or a folder of several runs.")] = None,
    records: Annotated[Path | None, typer.Option(help="A JSONL file of token records (docs/records.md).")] = None,
    output: Annotated[Path | None, typer.Option("--out", "-o", help="The HTML file to write.")] = None,
) -> None:
    """Write an HTML report on one or more runs. It shows curves and the credit of every recorded token."""
    from dew.report import build, build_from_records

    if bool(folders) == bool(records):
        what = "Give run folders or --records, not both." if folders else "No run given."
        raise ConfigError(Problem(what, remedy="Write `dew report runs/NAME`, or `dew report --records FILE.jsonl`."))
    path = build(folders or [], output) if records is None else build_from_records(records, output)
    out.print(f"{path}\nOpen it in a browser. The same content as JSON is beside it.")


@app.command()
def view(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of several runs.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Show the report in a browser, refreshed while runs train.

    The server listens on 127.0.0.1 only, under an address with a random token. Ctrl-C stops it.
    """
    from dew.report.serve import make_server

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
    answer: Annotated[int | None, typer.Option(help="Show one answer, counted from 1, with the formula.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="Compute with this algorithm (default: the run's).")] = None,
    settings: Annotated[str | None, typer.Option(help="Compute with these settings, e.g. '{alpha2: 0.2}'.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain the credit of every token in a recorded group."""
    chosen = _choose(source, step, group)
    if answer is not None and not 1 <= answer <= len(chosen.answers):
        raise ConfigError(f"answer: {answer} is not between 1 and {len(chosen.answers)}.")
    credited, rule = _credit(chosen, algorithm, mapping(settings))
    label = rule.label if rule else chosen.algorithm or "?"
    flipped = _flipped(credited)
    if json:
        names = ("correct", "tokens", "entropy", "advantage", "grpo", "shaped")
        answers = [{name: getattr(a, name) for name in names} for a in credited.answers]
        head = {name: getattr(chosen, name) for name in ("step", "group", "prompt", "gold")}
        answers = [a | {"flipped": f} for a, f in zip(answers, flipped, strict=True)]
        print_json({**head, "algorithm": label, "answers": answers})
    elif answer is None:
        _show_group(credited, label, flipped)
    else:
        _show_answer(credited, answer - 1, label, flipped, rule)


def _choose(source: Path, step: int | None, group: int | None) -> GroupRecord:
    """The most informative of the groups of a step, or with a number, or of all, as the page of `dew report` sorts
    them."""
    from dew.report.tokens import summary

    groups = _read(source, step)
    for name, wanted in (("step", step), ("group", group)):
        recorded = sorted({getattr(g, name) for g in groups})
        if wanted is not None and wanted not in recorded:
            remedy = f"Choose one of: {', '.join(map(str, recorded))}."
            raise ConfigError(Problem(f"{name}: {wanted} was not recorded.", remedy=remedy))
        groups = [g for g in groups if wanted in (None, getattr(g, name))]
    return max(groups, key=lambda g: (len({a.correct for a in g.answers}) > 1, summary(g)["telling"]))


def _read(source: Path, step: int | None) -> list[GroupRecord]:
    """The groups of a file, of a step, or a sample of all of a run's."""
    from dew.report.readers import read_sample

    if not source.is_dir():
        return read_records(source)
    stay_inside(source)
    if step is not None and record_path(source, step).exists():
        return read_records(record_path(source, step))
    files = RunFolder(source).record_files()
    if not files:
        runs = sorted(f.parent for f in source.glob("*/run.json"))
        remedy = "Train with records_every above 0. Groups that dynamic sampling drops are not recorded."
        remedy = f"Give one of its runs: {', '.join(map(str, runs))}." if runs else remedy
        raise ConfigError(Problem(f"{source}: no token records.", remedy=remedy))
    groups, _, damaged = read_sample(files)
    if not groups:
        raise RecordError(damaged[0])
    return groups


def _credit(group: GroupRecord, name: str | None, changed: dict[str, Any]) -> "tuple[GroupRecord, Algorithm | None]":
    """The group with its advantage, GRPO's, and r̃ of a rule that shapes rewards; the rule, None if unknown here.

    As recorded, unless another algorithm or other settings are given or nothing was recorded.
    """
    from dew import get_algorithm

    as_recorded = not (name or changed)
    complete = as_recorded and all(a.advantage is not None for a in group.answers)
    own: dict[str, Any] = dict(group.settings) if name in (None, group.algorithm) else {}
    try:
        if name is None and ":" in (group.algorithm or ""):  # a record may be somebody else's
            remedy = f"To compute with it, which runs that code, add --algorithm {group.algorithm}."
            raise ConfigError(Problem(f"The record names an algorithm in a file, {group.algorithm!r}.", remedy=remedy))
        rule = get_algorithm(name or group.algorithm or "gtpo", **{**own, **changed})
    except (DewError, TypeError):
        if not complete:
            raise
        rule = None  # the user's own class, unknown here: show what was recorded
    rollouts = _rollouts(group, [] if complete or rule is None else rule.signals)
    compute = {"grpo": get_algorithm("grpo").advantages} | ({"advantage": rule.advantages} if rule else {})
    if rule and rule.needs_entropy == "old":
        compute["shaped"] = rule.rewards
    answers = [a if as_recorded else replace(a, shaped=None) for a in group.answers]
    for field, function in compute.items():
        if not as_recorded or any(getattr(a, field) is None for a in answers):
            rows = function(rollouts)[0].tolist()
            answers = [replace(a, **{field: row[: len(a.tokens)]}) for a, row in zip(answers, rows, strict=True)]
    return replace(group, answers=answers), rule


def _rollouts(group: GroupRecord, needed: Sequence[str]) -> "Rollouts":
    """The group as an algorithm reads it."""
    import torch

    from dew import Rollouts

    for name in needed:
        if any(getattr(a, name, None) is None for a in group.answers):
            raise ConfigError(f"{name} was not recorded, and this algorithm needs it (docs/records.md).")
    if not any(a.tokens for a in group.answers):
        raise ConfigError(f"group {group.group} of step {group.step} has no tokens.")

    def padded(rows: Iterable[Sequence[float]]) -> "Tensor":
        tensors = [torch.tensor(row, dtype=torch.float32) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)[None]

    signals = {x: [getattr(a, x) or [0.0] * len(a.tokens) for a in group.answers] for x in ("entropy", *needed)}
    return Rollouts(
        mask=padded(map(_live, group.answers)).bool(),
        reward=torch.tensor([[float(a.reward) for a in group.answers]]),
        extra=torch.tensor([[a.extra for a in group.answers]]),
        **{name: padded(rows) for name, rows in signals.items()},
    )


def _live(answer: AnswerRecord) -> Sequence[bool]:
    return answer.live or [True] * len(answer.tokens)


def _flipped(group: GroupRecord) -> list[list[bool]]:
    """Trained tokens with credit of the wrong sign."""
    from dew.report.tokens import above_mean

    return [
        [live and A * above < 0 for live, A in zip(_live(a), a.advantage or (), strict=True)]
        for a, above in zip(group.answers, above_mean(group).tolist(), strict=True)
    ]


def _show_group(group: GroupRecord, label: str, flipped: list[list[bool]]) -> None:
    out.print(f"step {group.step}, group {group.group}: {printable(group.prompt.strip())}")
    if group.gold is not None:
        out.print(f"gold: {printable(group.gold)}")
    scale = _largest(group)
    legend = f"advantages of {label}: blue positive, orange negative, full colour = ±{scale:.3f}"
    out.print(Text(f"{legend}; underlined: the wrong sign for its answer\n", style="dim"))
    for i, a in enumerate(group.answers):
        ranges = ""
        for name, values in (("grpo", a.grpo), (label.split("(", maxsplit=1)[0], a.advantage)):
            live = list(compress(values or (), _live(a)))
            low, high = (f"{end(live, default=0.0):+.3f}" for end in (min, max))
            ranges += f"   {name} {low if low == high else f'{low} to {high}'}"
        marked = f"   {sum(flipped[i])} of the wrong sign" if any(flipped[i]) else ""
        out.print(f"{i + 1} {'✓ correct' if a.correct else '✗ wrong  '}{ranges}{marked}")
        out.print(Padding(by_credit(a.tokens, a.advantage or (), scale, flipped[i]), (0, 0, 1, 2)))
    out.print("For one answer with the formula and its numbers, add --answer N.")


def _largest(group: GroupRecord) -> float:
    return max((abs(A) for a in group.answers for A in a.advantage or ()), default=0.0)


def _show_answer(group: GroupRecord, i: int, label: str, flipped: list[list[bool]], rule: Any) -> None:
    """Entropy, shaped reward and advantages of every token of one answer, and the formula behind them."""
    a, scale = group.answers[i], _largest(group)
    out.print(f"answer {i + 1}, {'correct' if a.correct else 'wrong'}, in a group of {len(group.answers)}: {label}")
    if a.shaped is not None and hasattr(rule, "alpha2"):
        out.print(_formula(rule, a.correct))
    table = Table(show_edge=False)
    for head in ("token", "H", "r̃", "A", "A grpo", ""):
        table.add_column(head, justify="left" if head == "token" else "right")
    nothing: list[Any] = [None] * len(a.tokens)
    signals = [x or nothing for x in (a.entropy, a.shaped, a.advantage, a.grpo)]
    for token, live, flip, H, r, A, base in zip(a.tokens, _live(a), flipped[i], *signals, strict=True):
        cells: list[Any] = [printable(token), "" if H is None else f"{H:.3f}", "" if r is None else f"{r:+.3f}"]
        if live:
            cells += [by_credit([f"{A:+.3f}"], [A], scale), f"{base:+.3f}", "wrong sign" if flip else ""]
        table.add_row(*cells)
    out.print(table)


def _formula(rule: Any, correct: bool) -> str:
    side, value, sign = ("correct", "H", "+") if correct else ("wrong", "1/H", "−")
    over = {
        "column": f"the {side} answers that have a token at that position",
        "row": "this answer",
        "matrix": f"all tokens of the {side} answers",
        "turn": f"the {side} answers' tokens of the same turn",
    }[rule.compare]
    if rule.spread not in ("both", "correct" if correct else "wrong"):
        shaped = f"r̃ = {sign}({rule.alpha1} + {rule.alpha2}) on every token: entropy weights the other side alone"
    else:
        shaped = f"r̃ = {sign}({rule.alpha1} + {rule.alpha2} · x / mean(x)), x = {value}, mean over {over}"
    pools = {
        "group": "A = (r̃ − mean)/(std + 1e-4) over the group's tokens, tokens of the other outcome counting as 0",
        "joint": "A = (r̃ − mean)/(std + 1e-4) over the group's tokens",
        "sign": "A = (r̃ − mean)/(std + 1e-4) over the tokens of the same outcome",
        "outcome": "A = GRPO's advantage of the answer · |r̃| / (α₁ + α₂)",
    }
    return f"{shaped}\n{pools[rule.pool]}"
