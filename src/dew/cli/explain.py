"""`dew explain`: the credit of one group, token by token, with the formula and its numbers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dew.cli.app import app
from dew.cli.console import BLUE, ORANGE, credited, out, print_json, printable, tinted
from dew.config import parse_yaml
from dew.errors import ConfigError

if TYPE_CHECKING:
    from dew import Rollouts
    from dew.records import GroupRecord

NAMES = ("grpo", "grpo_s", "gtpo")


@app.command()
def explain(
    source: Annotated[Path, typer.Argument(help="A run's folder, a records file, or a JSONL of groups.")],
    step: Annotated[int | None, typer.Option(help="The step; the last recorded one if left out.")] = None,
    group: Annotated[int | None, typer.Option(help="The group's number; the first one if left out.")] = None,
    answer: Annotated[int | None, typer.Option(help="Only this answer, counted from 1, with the formula.")] = None,
    settings: Annotated[str, typer.Option(help="Settings of GTPO, e.g. '{alpha2: 0.2}'.")] = "{}",
    json: Annotated[bool, typer.Option("--json", help="The numbers as JSON.")] = False,
) -> None:
    """Show who got which credit in one group, and how it was made. Nothing is trained."""
    from dew import get_algorithm

    chosen = _choose(source, step, group)
    rollouts = _rollouts(chosen)
    own = parse_yaml(f"settings: {settings}", "--settings")["settings"] or {}
    algorithms = {name: get_algorithm(name, **(own if name == "gtpo" else {})) for name in NAMES}
    credit = {name: algorithm.advantages(rollouts)[0].tolist() for name, algorithm in algorithms.items()}
    shaped = algorithms["gtpo"].rewards(rollouts)[0].tolist()
    if answer is not None and not 1 <= answer <= len(chosen.answers):
        raise ConfigError(f"answer: {answer} of {len(chosen.answers)}. Count from 1.")
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
        files = RunFolder(source).record_files()
        if not files:
            raise ConfigError(f"{source}: no token records. Train with records_every above 0.")
        wanted = [f for f in files if step is None or f.name == f"step-{step:08d}.jsonl.gz"]
        if not wanted:
            steps = ", ".join(str(int(f.name.split("-")[1].split(".")[0])) for f in files)
            raise ConfigError(f"step: {step} was not recorded. There are: {steps}.")
        groups = read_records(wanted[-1])
    else:
        groups = [g for g in read_records(source) if step is None or g.step == step]
        if not groups:
            raise ConfigError(f"step: {step} is not in {source}.")
    if group is None:
        return groups[0]
    found = [g for g in groups if g.group == group]
    if not found:
        raise ConfigError(f"group: {group} was not recorded. There are: {', '.join(str(g.group) for g in groups)}.")
    return found[0]


def _rollouts(group: "GroupRecord") -> "Rollouts":
    import torch

    from dew import Rollouts

    lacking = [i + 1 for i, a in enumerate(group.answers) if a.entropy is None]
    if lacking:
        raise ConfigError(f"answers {lacking} have no entropy recorded, which GTPO and GRPO-S need (docs/records.md).")
    T = max((len(a.tokens) for a in group.answers), default=0)
    if T == 0:
        raise ConfigError(f"group {group.group} of step {group.step} has no answer with a token: nothing to explain.")
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
    out.print(Text("advantage of each answer's tokens; coloured by gtpo's: blue earns, orange pays\n", style="dim"))
    for i, a in enumerate(group.answers):
        live = [t for t in range(len(a.tokens)) if a.live is None or a.live[t]]
        said = "   ".join(f"{name} {_span([credit[name][i][t] for t in live])}" for name in NAMES)
        out.print(f"{i + 1} {'✓ correct' if a.correct else '✗ wrong  '}   {said}")
        out.print(Padding(credited(list(a.tokens), credit["gtpo"][i][: len(a.tokens)]), (0, 0, 1, 2)))
    out.print("One answer with the formula and its numbers: --answer N")


def _span(values: list[float]) -> str:
    """One number where all tokens have the same credit, as GRPO's have."""
    low, high = (f"{end(values, default=0.0):+.3f}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def _show_answer(
    group: "GroupRecord", rollouts: "Rollouts", i: int, credit: dict[str, Any], shaped: Any, gtpo: Any
) -> None:
    """r̃ and A of every token of one answer, with what went into them."""
    a = group.answers[i]
    won = a.correct
    side, value, sign = ("O⁺", "H", "+") if won else ("O⁻", "1/H", "−")
    against = {"column": "that have a token there", "row": "this answer alone", "matrix": "all their tokens"}
    out.print(f"answer {i + 1}, {'correct' if won else 'wrong'}, in a group of {len(group.answers)}")
    out.print(
        f"r̃ = {sign}{gtpo.alpha1} {sign} {gtpo.alpha2} · x / mean(x), x = {value}, mean over {side}: "
        f"{against[gtpo.compare]}\nA = (r̃ − mean)/(std + 1e-4) over the group's tokens, the other side counting as 0",
    )
    if len({b.correct for b in group.answers}) == 1:
        out.print("All answers ended alike: there is nothing to tell apart, and every advantage is 0.")
    table = Table(show_edge=False)
    for head in ("token", "H", "x", "x / mean", "r̃", "A gtpo", "A grpo_s", "A grpo"):
        table.add_column(head, justify="left" if head == "token" else "right")
    largest = max((abs(x) for x in credit["gtpo"][i]), default=1.0) or 1.0
    for t, (token, H) in enumerate(zip(a.tokens, a.entropy or [], strict=True)):
        if not bool(rollouts.mask[0, i, t]):
            table.add_row(printable(token), f"{H:.3f}", *[""] * 6)
            continue
        floored = max(H, 1e-6)
        x = floored if won else 1 / floored
        part = abs(shaped[i][t] - a.extra) - gtpo.alpha1
        share = part / gtpo.alpha2 if gtpo.alpha2 else 1.0
        A = credit["gtpo"][i][t]
        cell = tinted(f"{A:+.3f}", abs(A) / largest, BLUE if A >= 0 else ORANGE)
        others = [f"{credit[name][i][t]:+.3f}" for name in ("grpo_s", "grpo")]
        table.add_row(printable(token), f"{H:.3f}", f"{x:.3g}", f"{share:.3f}", f"{shaped[i][t]:+.3f}", cell, *others)
    out.print(table)
