"""The credit that other rules would give to the recorded groups, for comparing two rules in the page.

The page itself computes GRPO, GRPO-S and GTPO, to show their numbers step by step. The credit of every other rule is
computed here, by the rule itself, with the recorded groups of a step as the batch.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from dew.errors import DewError, Problem, ShapeError
from dew.run.records import GroupRecord, Json

if TYPE_CHECKING:
    from dew.algorithms import Algorithm
    from dew.rollouts import Rollouts

METHODS = {"gtpo": "GTPO", "dew": "GTPO", "grpos": "GRPO-S", "grpo": "GRPO", "dapo": "GRPO"}
PLAIN: dict[str, tuple[Any, ...]] = {
    "compare": ("column", "row", "matrix", "turn"), "scope": ("group",), "credit": ("grpo",), "placebo": (False,),
}  # fmt: skip
"""Settings that the page's formulas support. A group's record may lack any of them."""
DIGITS = 3
log = logging.getLogger(__name__)

Batch = list[tuple[int, GroupRecord]]
"""Groups of one step, each with its number."""
Values = list[float | list[float]]
"""For each answer of a group, one number, or one per token if they differ."""


def method_of(name: str | None, settings: Mapping[str, Any]) -> str | None:
    """Return the page's formula that computes this rule, or None if there is none."""
    plain = all(settings.get(key) is None or settings[key] in known for key, known in PLAIN.items())
    return METHODS.get("".join(filter(str.isalpha, str(name).lower()))) if plain else None


def credit_by_rule(
    runs: Sequence[Sequence[GroupRecord]], given: Sequence[str] = ()
) -> tuple[list[Json], dict[int, dict[int, Values]]]:
    """Return the rules that can be compared, {label, method, settings}, and the credit of those without a method.

    They are the registered rules, those of the groups, and those `given` (`gtpo(alpha2=0.5)`, `rules.py:Mine`). Rules
    with the same credit in all groups are merged. Credit is {group number over all runs: {rule number: values}}.
    """
    from dew.algorithms import get_algorithm

    asked = {rule.label: rule for rule in map(get_algorithm, given)}
    numbered = enumerate(group for groups in runs for group in groups)
    batches = [batch for groups in runs for batch in _batches([next(numbered) for _ in groups])]
    rules = _rules([group for _, batch in batches for _, group in batch], asked.values()) if batches else {}
    found: dict[str, Json] = {}
    by_group: dict[int, dict[int, Values]] = {}
    for label, rule in rules.items():
        method, credit = method_of(rule.name, asdict(rule)), dict[int, Values]()
        if method in (None, "GRPO"):
            for rollouts, batch in batches:
                credit.update(_credit(rule, rollouts, batch, label in asked))
        if method or credit:
            asked.pop(label, None)
        key = json.dumps(credit) if credit else label
        if key in found:
            found[key]["label"] += f", {label}"
        elif method or credit:
            for n, values in credit.items() if method is None else ():
                by_group.setdefault(n, {})[len(found)] = values
            found[key] = {"label": label, "method": method, "settings": asdict(rule)}
    for label in asked:
        log.warning(f"{label} is not in Compare: it has a loss of its own, or reads what the records do not hold.")
    return list(found.values()), by_group


def _rules(groups: Sequence[GroupRecord], given: "Iterable[Algorithm]") -> "dict[str, Algorithm]":
    from dew.algorithms import Algorithm, get_algorithm, list_algorithms

    found = list(map(get_algorithm, list_algorithms()))
    own = {json.dumps([g.algorithm, dict(g.settings)], sort_keys=True, default=str): g for g in groups}
    found += filter(None, (recorded_rule(g.algorithm, g.settings) for g in own.values()))
    found += given
    # The losses of the others change the credit depending on the policy being trained.
    fits = [a for a in found if type(a).loss is Algorithm.loss and not (a.engine_loss or a.penalises)]
    return {a.label: replace(a, overlong="none") for a in fits}  # that penalty is in the records' `extra`


def recorded_rule(name: Any, settings: Any) -> "Algorithm | None":
    """Return the registered rule that a run's files name. They are untrusted data, so code is never imported."""
    from dew.algorithms import algorithm_classes, get_algorithm

    if not isinstance(settings, Mapping) or (cls := algorithm_classes().get(str(name))) is None:
        return None
    known = {f.name for f in fields(cls)}
    with suppress(DewError, TypeError):
        return get_algorithm(cls.name, **{k: v for k, v in settings.items() if k in known})
    return None


def _batches(groups: Batch) -> "Iterator[tuple[Rollouts, Batch]]":
    usable = [(n, g) for n, g in groups if g.size and all(np.isfinite(a.reward + a.extra) for a in g.answers)]
    for _, same in groupby(usable, key=lambda pair: pair[1].step):
        batch = list(same)
        yield _rollouts([group for _, group in batch]), batch


def _rollouts(groups: Sequence[GroupRecord]) -> "Rollouts":
    import torch

    from dew.checks import ROUNDING
    from dew.rollouts import PADDING, Rollouts

    rows = [(p, j, answer) for p, group in enumerate(groups) for j, answer in enumerate(group.answers)]
    shape = len(groups), max(len(g.answers) for g in groups), max(len(answer.tokens) for *_, answer in rows)
    by_token = {name: np.zeros(shape) for name in ("mask", "entropy", "logp", "tokens")}
    by_answer = {"reward": np.zeros(shape[:2]), "extra": np.zeros(shape[:2]), "rows": np.full(shape[:2], PADDING)}
    ids: dict[str, int] = {}
    for row, (p, j, answer) in enumerate(rows):
        tokens = [ids.setdefault(token, len(ids)) for token in answer.tokens]
        live = True if answer.live is None else answer.live
        signals: Json = {"mask": live, "entropy": answer.entropy, "logp": answer.logp, "tokens": tokens}
        for name, values in signals.items():
            by_token[name][p, j, : len(tokens)] = np.nan if values is None else values
        for name, value in (("reward", answer.reward), ("extra", answer.extra), ("rows", row)):
            by_answer[name][p, j] = value
    mask = by_token.pop("mask") > 0
    sign = {"entropy": 1, "logp": -1, "tokens": 1}  # records may come from anywhere
    given = {name: x[mask] * sign[name] for name, x in by_token.items()}
    known = [name for name, x in given.items() if np.isfinite(x).all() and (x >= -ROUNDING).all()]
    recorded = {name: torch.from_numpy(by_token[name]) for name in known}
    recorded |= {name: torch.from_numpy(x) for name, x in by_answer.items()}
    return Rollouts(**recorded | {"mask": torch.from_numpy(mask), "tokens": recorded["tokens"].long()})


def _credit(rule: "Algorithm", rollouts: "Rollouts", batch: Batch, asked: bool) -> Iterator[tuple[int, Values]]:
    """Yield the credit of each group of a batch, or nothing if a signal that the rule needs was not recorded."""
    from dew.algorithms.credit import DIVISION, advantages_of

    if rule.needs_entropy == "current" or any(getattr(rollouts, name) is None for name in rule.signals):
        return
    exact, mask = advantages_of(rule, rollouts).numpy(), rollouts.mask.numpy()
    if asked and not np.isfinite(exact[mask]).all():
        raise ShapeError(Problem(f"{rule.name}: some advantages are NaN or infinite.", remedy=DIVISION))
    exact = np.nan_to_num(exact)
    size = 10.0 ** (DIGITS - 1 - np.floor(np.log10(np.abs(np.where(exact == 0, 1.0, exact)))))
    credit = np.round(exact * size) / size
    low, high = np.where(mask, credit, np.inf).min(-1), np.where(mask, credit, -np.inf).max(-1)
    for p, (n, group) in enumerate(batch):
        lengths, same = [len(answer.tokens) for answer in group.answers], low[p] == high[p]
        yield n, [float(low[p, j]) if same[j] else credit[p, j, :T].tolist() for j, T in enumerate(lengths)]
