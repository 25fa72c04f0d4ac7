"""`dew report` and `dew explain`: the credit of a run, as a page or in the terminal."""

from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dew.cli.app import app
from dew.cli.console import by_credit, out, print_json, printable
from dew.config import parse_yaml
from dew.errors import ConfigError, Problem

if TYPE_CHECKING:
    from dew import Rollouts
    from dew.records import AnswerRecord, GroupRecord


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
    gtpo = get_algorithm("gtpo", **own)
    credit = {"shaped": gtpo.rewards(rollouts)[0].tolist()}
    for algorithm in (get_algorithm("grpo"), get_algorithm("grpo_s"), gtpo):
        credit[algorithm.name] = algorithm.advantages(rollouts)[0].tolist()
    if answer is not None and not 1 <= answer <= len(chosen.answers):
        raise ConfigError(f"answer: {answer} is not between 1 and {len(chosen.answers)}.")
    if json:
        answers = [
            {"correct": a.correct, "tokens": a.tokens, "entropy": a.entropy}
            | {name: rows[i][: len(a.tokens)] for name, rows in credit.items()}
            for i, a in enumerate(chosen.answers)
        ]
        head = {name: getattr(chosen, name) for name in ("step", "group", "prompt", "gold")}
        print_json({**head, "answers": answers})
    elif answer is None:
        _show_group(chosen, credit)
    else:
        one = {name: rows[answer - 1] for name, rows in credit.items()}
        _show_answer(chosen, answer, one, gtpo)


def _choose(source: Path, step: int | None, group: int | None) -> "GroupRecord":
    from dew.files import stay_inside
    from dew.records import RunFolder, read_records

    if source.is_dir():
        stay_inside(source)
        files = {int(f.name.split("-")[1].split(".")[0]): f for f in RunFolder(source).record_files()}
        if not files:
            raise ConfigError(Problem(f"{source}: no token records.", remedy="Train with records_every above 0."))
        groups = read_records(files[max(files) if step is None else _recorded("step", step, files)])
    else:
        groups = read_records(source)
        if step is not None:
            _recorded("step", step, [g.step for g in groups])
            groups = [g for g in groups if g.step == step]
    numbers = [g.group for g in groups]
    return groups[0 if group is None else numbers.index(_recorded("group", group, numbers))]


def _recorded(name: str, wanted: int, recorded: Iterable[int]) -> int:
    if wanted not in recorded:
        listed = ", ".join(map(str, dict.fromkeys(recorded)))
        raise ConfigError(Problem(f"{name}: {wanted} was not recorded.", remedy=f"Choose one of: {listed}."))
    return wanted


def _rollouts(group: "GroupRecord") -> "Rollouts":
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from dew import Rollouts

    missing = [i + 1 for i, a in enumerate(group.answers) if a.entropy is None]
    if missing:
        raise ConfigError(f"answers {missing} have no recorded entropy, which GTPO and GRPO-S need (docs/records.md).")
    if not any(a.tokens for a in group.answers):
        raise ConfigError(f"group {group.group} of step {group.step} has no tokens.")
    entropy = [torch.tensor(a.entropy, dtype=torch.float32) for a in group.answers]
    mask = [torch.tensor(_live(a), dtype=torch.bool) for a in group.answers]
    return Rollouts.from_rows(
        [0] * len(group.answers),
        mask=pad_sequence(mask, batch_first=True),
        reward=torch.tensor([float(a.correct) for a in group.answers]),
        entropy=pad_sequence(entropy, batch_first=True),
        extra=torch.tensor([a.extra for a in group.answers]),
    )


def _live(answer: "AnswerRecord") -> Sequence[bool]:
    return answer.live or [True] * len(answer.tokens)


def _show_group(group: "GroupRecord", credit: dict[str, Any]) -> None:
    out.print(f"step {group.step}, group {group.group}: {printable(group.prompt.strip())}")
    if group.gold is not None:
        out.print(f"gold: {printable(group.gold)}")
    out.print(Text("advantages of the tokens, coloured by gtpo's (blue: positive, orange: negative)\n", style="dim"))
    for i, a in enumerate(group.answers):
        ranges = ""
        for name in ("grpo", "grpo_s", "gtpo"):
            values = list(compress(credit[name][i], _live(a)))
            low, high = (f"{end(values, default=0.0):+.3f}" for end in (min, max))
            ranges += f"   {name} {low if low == high else f'{low} to {high}'}"
        out.print(f"{i + 1} {'✓ correct' if a.correct else '✗ wrong  '}{ranges}")
        out.print(Padding(by_credit(a.tokens, credit["gtpo"][i][: len(a.tokens)]), (0, 0, 1, 2)))
    out.print("For one answer with the formula and its numbers, add --answer N.")


def _show_answer(group: "GroupRecord", number: int, credit: dict[str, list[float]], gtpo: Any) -> None:
    """r̃ and A of every token of one answer, with the numbers they are computed from."""
    a = group.answers[number - 1]
    outcome, side, value, sign = ("correct", "O⁺", "H", "+") if a.correct else ("wrong", "O⁻", "1/H", "−")
    over = {"column": "with a token there", "row": "this answer alone", "matrix": "all their tokens"}[gtpo.compare]
    out.print(
        f"answer {number}, {outcome}, in a group of {len(group.answers)}\n"
        f"r̃ = {sign}{gtpo.alpha1} {sign} {gtpo.alpha2} · x / mean(x), x = {value}, mean over {side}: {over}\n"
        "A = (r̃ − mean)/(std + 1e-4) over the group's tokens, tokens of the other outcome counting as 0",
    )
    if len({b.correct for b in group.answers}) == 1:
        out.print("All answers have the same outcome, so every advantage is 0.")
    table = Table(show_edge=False)
    for head in ("token", "H", "x", "x / mean", "r̃", "A gtpo", "A grpo_s", "A grpo"):
        table.add_column(head, justify="left" if head == "token" else "right")
    for t, (token, H, live) in enumerate(zip(a.tokens, a.entropy or [], _live(a), strict=True)):
        cells: list[Any] = [printable(token), f"{H:.3f}"]
        if live:
            x = max(H, 1e-6) if a.correct else 1 / max(H, 1e-6)
            r, A = credit["shaped"][t], credit["gtpo"][t]
            share = (abs(r - a.extra) - gtpo.alpha1) / gtpo.alpha2 if gtpo.alpha2 else 1.0
            cells += [f"{x:.3g}", f"{share:.3f}", f"{r:+.3f}", by_credit([f"{A:+.3f}"], [A])]
            cells += [f"{credit[name][t]:+.3f}" for name in ("grpo_s", "grpo")]
        table.add_row(*cells)
    out.print(table)
