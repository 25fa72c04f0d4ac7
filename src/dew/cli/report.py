"""`dew report` and `dew explain`: the credit of a run, as a page or in the terminal."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dew.cli.app import app
from dew.cli.console import BLUE, ORANGE, by_credit, out, print_json, printable, tinted
from dew.config import parse_yaml
from dew.errors import ConfigError, Problem

if TYPE_CHECKING:
    from dew import Rollouts
    from dew.records import GroupRecord


@app.command()
def report(
    folders: Annotated[list[Path] | None, typer.Argument(help="Run folders of dew, or of plain TRL.")] = None,
    records: Annotated[Path | None, typer.Option(help="A JSONL of token records instead (docs/records.md).")] = None,
    output: Annotated[Path | None, typer.Option("--out", "-o", help="The HTML file to write.")] = None,
) -> None:
    """Write an HTML report on one or more runs. It shows curves and the credit of every recorded token."""
    from dew.report import build, build_from_records

    if not folders and records is None:
        usage = "`dew report runs/NAME`, or `dew report --records FILE.jsonl`."
        raise ConfigError(Problem("The run is missing.", remedy=usage))
    path = build(folders or [], output) if records is None else build_from_records(records, output)
    out.print(f"{path}\nOpen it in a browser. The same content as JSON is beside it.", soft_wrap=True)


NAMES = ("grpo", "grpo_s", "gtpo")


@app.command()
def explain(
    source: Annotated[Path, typer.Argument(help="A run folder, a records file, or a JSONL of groups.")],
    step: Annotated[int | None, typer.Option(help="Step (default: the last recorded one).")] = None,
    group: Annotated[int | None, typer.Option(help="Group number (default: the first).")] = None,
    answer: Annotated[int | None, typer.Option(help="Show one answer, counted from 1, with the formula.")] = None,
    settings: Annotated[str, typer.Option(help="Settings of GTPO, e.g. '{alpha2: 0.2}'.")] = "{}",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain the credit of every token in a recorded group."""
    from dew import get_algorithm

    chosen = _choose(source, step, group)
    rollouts = _rollouts(chosen)
    own = parse_yaml(f"settings: {settings}", "--settings")["settings"] or {}
    algorithms = {name: get_algorithm(name, **(own if name == "gtpo" else {})) for name in NAMES}
    credit = {name: algorithm.advantages(rollouts)[0].tolist() for name, algorithm in algorithms.items()}
    shaped = algorithms["gtpo"].rewards(rollouts)[0].tolist()
    if answer is not None and not 1 <= answer <= len(chosen.answers):
        raise ConfigError(f"answer: {answer} is not between 1 and {len(chosen.answers)}.")
    if json:
        print_json(_as_json(chosen, credit, shaped))
    elif answer is None:
        _show_group(chosen, credit)
    else:
        _show_answer(chosen, rollouts, answer - 1, credit, shaped, algorithms["gtpo"])


def _choose(source: Path, step: int | None, group: int | None) -> "GroupRecord":
    from dew.files import stay_inside
    from dew.records import RunFolder, read_records

    if source.is_dir():
        stay_inside(source)
        files = {int(f.name.split("-")[1].split(".")[0]): f for f in RunFolder(source).record_files()}
        if not files:
            raise ConfigError(Problem(f"{source}: no token records.", remedy="Train with records_every above 0."))
        groups = read_records(files[_pick("step", step, files, max(files))])
    else:
        groups = read_records(source)
        if step is not None:
            _pick("step", step, [g.step for g in groups], step)
            groups = [g for g in groups if g.step == step]
    number = _pick("group", group, [g.group for g in groups], groups[0].group)
    return next(g for g in groups if g.group == number)


def _pick(name: str, wanted: int | None, recorded: Iterable[int], default: int) -> int:
    if wanted is not None and wanted not in recorded:
        listed = ", ".join(map(str, dict.fromkeys(recorded)))
        raise ConfigError(Problem(f"{name}: {wanted} was not recorded.", remedy=f"Choose one of: {listed}."))
    return default if wanted is None else wanted


def _rollouts(group: "GroupRecord") -> "Rollouts":
    import torch

    from dew import Rollouts

    missing = [i + 1 for i, a in enumerate(group.answers) if a.entropy is None]
    if missing:
        raise ConfigError(f"answers {missing} have no recorded entropy, which GTPO and GRPO-S need (docs/records.md).")
    T = max((len(a.tokens) for a in group.answers), default=0)
    if T == 0:
        raise ConfigError(f"group {group.group} of step {group.step} has no tokens.")
    shape = (len(group.answers), T)
    entropy, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for i, a in enumerate(group.answers):
        entropy[i, : len(a.tokens)] = torch.tensor(list(a.entropy or []))
        mask[i, : len(a.tokens)] = True if a.live is None else torch.tensor(list(a.live))
    reward = torch.tensor([float(a.correct) for a in group.answers])
    extra = torch.tensor([a.extra for a in group.answers])
    return Rollouts.from_rows([0] * len(group.answers), mask=mask, reward=reward, entropy=entropy, extra=extra)


def _as_json(group: "GroupRecord", credit: dict[str, Any], shaped: Any) -> Any:
    answers = [
        {
            "correct": a.correct,
            "tokens": a.tokens,
            "entropy": a.entropy,
            "shaped": shaped[i][: len(a.tokens)],
            **{name: credit[name][i][: len(a.tokens)] for name in NAMES},
        }
        for i, a in enumerate(group.answers)
    ]
    return {"step": group.step, "group": group.group, "prompt": group.prompt, "gold": group.gold, "answers": answers}


def _show_group(group: "GroupRecord", credit: dict[str, Any]) -> None:
    out.print(f"step {group.step}, group {group.group}: {printable(group.prompt.strip())}")
    if group.gold is not None:
        out.print(f"gold: {printable(group.gold)}")
    out.print(Text("advantages of the tokens, coloured by gtpo's (blue: positive, orange: negative)\n", style="dim"))
    for i, a in enumerate(group.answers):
        live = [t for t in range(len(a.tokens)) if a.live is None or a.live[t]]
        ranges = "   ".join(f"{name} {_range([credit[name][i][t] for t in live])}" for name in NAMES)
        out.print(f"{i + 1} {'✓ correct' if a.correct else '✗ wrong  '}   {ranges}")
        out.print(Padding(by_credit(a.tokens, credit["gtpo"][i][: len(a.tokens)]), (0, 0, 1, 2)))
    out.print("For one answer with the formula and its numbers, add --answer N.")


def _range(values: list[float]) -> str:
    """One number if all tokens have the same credit, as with GRPO."""
    low, high = (f"{end(values, default=0.0):+.3f}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def _show_answer(
    group: "GroupRecord", rollouts: "Rollouts", i: int, credit: dict[str, Any], shaped: Any, gtpo: Any
) -> None:
    """r̃ and A of every token of one answer, with the numbers they are computed from."""
    a = group.answers[i]
    outcome, side, value, sign = ("correct", "O⁺", "H", "+") if a.correct else ("wrong", "O⁻", "1/H", "−")
    over = {"column": "with a token there", "row": "this answer alone", "matrix": "all their tokens"}[gtpo.compare]
    out.print(f"answer {i + 1}, {outcome}, in a group of {len(group.answers)}")
    out.print(
        f"r̃ = {sign}{gtpo.alpha1} {sign} {gtpo.alpha2} · x / mean(x), x = {value}, mean over {side}: {over}\n"
        "A = (r̃ − mean)/(std + 1e-4) over the group's tokens, tokens of the other outcome counting as 0",
    )
    if len({b.correct for b in group.answers}) == 1:
        out.print("All answers have the same outcome, so every advantage is 0.")
    table = Table(show_edge=False)
    for head in ("token", "H", "x", "x / mean", "r̃", "A gtpo", "A grpo_s", "A grpo"):
        table.add_column(head, justify="left" if head == "token" else "right")
    largest = max((abs(x) for x in credit["gtpo"][i]), default=1.0) or 1.0
    for t, (token, H) in enumerate(zip(a.tokens, a.entropy or [], strict=True)):
        cells: list[Any] = [printable(token), f"{H:.3f}"]
        if bool(rollouts.mask[0, i, t]):
            floored = max(H, 1e-6)
            share = (abs(shaped[i][t] - a.extra) - gtpo.alpha1) / gtpo.alpha2 if gtpo.alpha2 else 1.0
            A = credit["gtpo"][i][t]
            cells += [f"{floored if a.correct else 1 / floored:.3g}", f"{share:.3f}", f"{shaped[i][t]:+.3f}"]
            cells += [tinted(f"{A:+.3f}", abs(A) / largest, BLUE if A >= 0 else ORANGE)]
            cells += [f"{credit[name][i][t]:+.3f}" for name in ("grpo_s", "grpo")]
        table.add_row(*cells)
    out.print(table)
