"""`dew explain`: the credit of every token of one recorded group, in the terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
from dew.run.records import AnswerRecord, GroupRecord, read_records

if TYPE_CHECKING:
    from torch import Tensor

    from dew import Algorithm, Rollouts

Rows = list[list[float]]


@dataclass(frozen=True)
class GroupCredit:
    """A group's credit: as it was recorded, or computed with other settings."""

    label: str
    """The algorithm and the settings that differ from its defaults."""
    algorithm: "Algorithm | None"
    """None if its name is not registered here: only recorded values can be shown."""
    advantage: Rows
    shaped: Rows | None
    grpo: Rows
    flipped: list[list[bool]]


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
    credit = _credit(chosen, algorithm, mapping(settings))
    if answer is not None and not 1 <= answer <= len(chosen.answers):
        raise ConfigError(f"answer: {answer} is not between 1 and {len(chosen.answers)}.")
    if json:
        answers = []
        for i, a in enumerate(chosen.answers):
            entry: dict[str, Any] = {"correct": a.correct, "tokens": a.tokens, "entropy": a.entropy}
            entry |= {"advantage": credit.advantage[i], "grpo": credit.grpo[i], "flipped": credit.flipped[i]}
            entry |= {"value": a.value} if a.value is not None else {}
            entry |= {"shaped": credit.shaped[i]} if credit.shaped is not None else {}
            answers.append(entry)
        head = {name: getattr(chosen, name) for name in ("step", "group", "prompt", "gold")}
        print_json({**head, "algorithm": credit.label, "answers": answers})
    elif answer is None:
        _show_group(chosen, credit)
    else:
        _show_answer(chosen, answer - 1, credit)


# ── which group ─────────────────────────────────────────────────────────────────────────────────────────────


def _choose(source: Path, step: int | None, group: int | None) -> GroupRecord:
    from dew.report.readers import read_sample
    from dew.report.statistics import summary

    if source.is_dir():
        stay_inside(source)
        files = {int(f.name.split("-")[1].split(".")[0]): f for f in RunFolder(source).record_files()}
        if not files:
            runs = sorted(f.parent for f in source.glob("*/run.json"))
            remedy = "Train with records_every above 0. Groups that dynamic sampling drops are not recorded."
            remedy = f"Give one of its runs: {', '.join(map(str, runs))}." if runs else remedy
            raise ConfigError(Problem(f"{source}: no token records.", remedy=remedy))
        if step is None and group is None:
            groups, _, damaged = read_sample(list(files.values()))
            if not groups:
                raise RecordError(damaged[0])
        else:
            groups = read_records(files[max(files) if step is None else _recorded("step", step, files)])
    else:
        groups = read_records(source)
        if step is not None:
            _recorded("step", step, [g.step for g in groups])
            groups = [g for g in groups if g.step == step]
    if group is None:
        # as the page of `dew report` sorts them, those with both outcomes first
        return max(groups, key=lambda g: (len({a.correct for a in g.answers}) > 1, summary(g)["telling"]))
    numbers = [g.group for g in groups]
    return groups[numbers.index(_recorded("group", group, numbers))]


def _recorded(name: str, wanted: int, recorded: Iterable[int]) -> int:
    if wanted not in recorded:
        listed = ", ".join(map(str, dict.fromkeys(recorded)))
        raise ConfigError(Problem(f"{name}: {wanted} was not recorded.", remedy=f"Choose one of: {listed}."))
    return wanted


# ── its credit ──────────────────────────────────────────────────────────────────────────────────────────────


def _credit(group: GroupRecord, name: str | None, changed: dict[str, Any]) -> GroupCredit:
    """As recorded, unless another algorithm or other settings are given or nothing was recorded."""
    from dew import get_algorithm
    from dew.credit import wrong_sign

    as_recorded = not (name or changed)
    complete = as_recorded and all(a.advantage is not None for a in group.answers)
    own: dict[str, Any] = dict(group.settings) if name in (None, group.algorithm) else {}
    try:
        algorithm = get_algorithm(name or group.algorithm or "gtpo", **{**own, **changed})
    except (DewError, TypeError):
        if not complete:
            raise
        algorithm = None  # the user's own class, unknown here: show what was recorded
    rollouts = _rollouts(group, [] if complete or algorithm is None else algorithm.signals)

    def unpadded(x: "Tensor") -> list[list[Any]]:
        return [row[: len(a.tokens)] for row, a in zip(x[0].tolist(), group.answers, strict=True)]

    def values(field: str, compute: Any) -> Rows:
        recorded = [getattr(a, field) for a in group.answers]
        return recorded if as_recorded and None not in recorded else unpadded(compute(rollouts))

    advantage = values("advantage", algorithm and algorithm.advantages)
    assert rollouts.extra is not None
    flipped = wrong_sign(_padded(advantage)[None], rollouts.reward + rollouts.extra) & rollouts.mask
    weighted = algorithm is not None and algorithm.needs_entropy == "old"
    return GroupCredit(
        label=algorithm.label if algorithm else group.algorithm or "?",
        algorithm=algorithm,
        advantage=advantage,
        shaped=values("shaped", algorithm.rewards) if algorithm and weighted else None,
        grpo=values("grpo", get_algorithm("grpo").advantages),
        flipped=unpadded(flipped),
    )


def _rollouts(group: GroupRecord, needed: Sequence[str]) -> "Rollouts":
    """The group as an algorithm reads it."""
    import torch

    from dew import Rollouts

    for name in needed:
        if missing := [i + 1 for i, a in enumerate(group.answers) if getattr(a, name, None) is None]:
            what = f"answers {missing} have no recorded {name}, which this algorithm needs (docs/records.md)."
            raise ConfigError(what)
    if not any(a.tokens for a in group.answers):
        raise ConfigError(f"group {group.group} of step {group.step} has no tokens.")

    signals = {x: [getattr(a, x) or [0.0] * len(a.tokens) for a in group.answers] for x in ("entropy", *needed)}
    return Rollouts.from_rows(
        [0] * len(group.answers),
        mask=_padded([_live(a) for a in group.answers]).bool(),
        reward=torch.tensor([float(a.reward) for a in group.answers]),
        **{name: _padded(rows) for name, rows in signals.items()},
        extra=torch.tensor([a.extra for a in group.answers]),
    )


def _padded(rows: Sequence[Sequence[float]]) -> "Tensor":
    import torch

    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], batch_first=True)


def _live(answer: AnswerRecord) -> Sequence[bool]:
    return answer.live or [True] * len(answer.tokens)


# ── on the screen ───────────────────────────────────────────────────────────────────────────────────────────


def _show_group(group: GroupRecord, credit: GroupCredit) -> None:
    out.print(f"step {group.step}, group {group.group}: {printable(group.prompt.strip())}")
    if group.gold is not None:
        out.print(f"gold: {printable(group.gold)}")
    scale = max((abs(x) for row in credit.advantage for x in row), default=0.0)
    flipped = sum(map(sum, credit.flipped))
    legend = f"advantages of {credit.label}: blue positive, orange negative, full colour = ±{scale:.3f}"
    out.print(Text(legend + ("; underlined: the wrong sign for its answer\n" if flipped else "\n"), style="dim"))
    same: dict[Any, list[int]] = {}
    for i, a in enumerate(group.answers):
        same.setdefault((a.correct, tuple(a.tokens), tuple(credit.advantage[i])), []).append(i)
    for i, *others in same.values():
        a, ranges = group.answers[i], ""
        for name, rows in (("grpo", credit.grpo), (credit.label.split("(")[0], credit.advantage)):
            values = list(compress(rows[i], _live(a)))
            low, high = (f"{end(values, default=0.0):+.3f}" for end in (min, max))
            ranges += f"   {name} {low if low == high else f'{low} to {high}'}"
        if a.value:
            ranges += f"   predicted chance of success {a.value[0]:.2f} to {a.value[-1]:.2f}"
        marked = f"   {sum(credit.flipped[i])} of the wrong sign" if any(credit.flipped[i]) else ""
        times = f" × {1 + len(others)}" if others else ""
        out.print(f"{i + 1} {'✓ correct' if a.correct else '✗ wrong  '}{times}{ranges}{marked}")
        out.print(Padding(by_credit(a.tokens, credit.advantage[i], scale, credit.flipped[i]), (0, 0, 1, 2)))
    out.print("For one answer with the formula and its numbers, add --answer N.")


def _show_answer(group: GroupRecord, i: int, credit: GroupCredit) -> None:
    """r̃ and A of every token of one answer, with the numbers they are computed from."""
    a, rule = group.answers[i], credit.algorithm
    weighted = credit.shaped is not None and hasattr(rule, "alpha2")
    outcome = "correct" if a.correct else "wrong"
    out.print(f"answer {i + 1}, {outcome}, in a group of {len(group.answers)}: {credit.label}")
    if weighted:
        out.print(_formula(rule, a.correct))
    if not any(any(row) for row in credit.advantage):
        out.print("The answers of this group do not differ, so every advantage is 0.")
    table = Table(show_edge=False)
    if a.value:
        out.print("V: predicted chance of success before the token (docs/papers.md).")
    chance = ("V",) if a.value else ()
    for head in ("token", "H", *chance, *(("x", "x / mean", "r̃") if weighted else ()), "A", "A grpo", ""):
        table.add_column(head, justify="left" if head == "token" else "right")
    scale = max((abs(x) for row in credit.advantage for x in row), default=0.0)
    for t, (token, live) in enumerate(zip(a.tokens, _live(a), strict=True)):
        H = None if a.entropy is None else a.entropy[t]
        cells: list[Any] = [printable(token), "" if H is None else f"{H:.3f}"]
        cells += [f"{a.value[t]:.3f}"] if a.value else []
        if live:
            if weighted:
                cells += _weight_cells(rule, a, H, credit.shaped[i][t])  # type: ignore[index]
            A = credit.advantage[i][t]
            flip = "wrong sign" if credit.flipped[i][t] else ""
            cells += [by_credit([f"{A:+.3f}"], [A], scale), f"{credit.grpo[i][t]:+.3f}", flip]
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


def _weight_cells(rule: Any, a: AnswerRecord, H: float | None, r: float) -> list[str]:
    if H is None:
        return ["", "", f"{r:+.3f}"]
    x = max(H, 1e-6) if a.correct else 1 / max(H, 1e-6)
    extra = 0.0 if rule.pool == "outcome" else a.extra
    share = (abs(r - extra) - rule.alpha1) / rule.alpha2 if rule.alpha2 else 1.0
    return [f"{x:.3g}", f"{share:.3f}", f"{r:+.3f}"]
