"""Credit for the rows of a generation: group the rows, compute credit, and return it in the order of the rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dew.algorithms import Algorithm
from dew.algorithms import credit as groups
from dew.algorithms.base import SIGNALS
from dew.errors import ConfigError, Problem, renamed
from dew.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True)
class Signals:
    """Signals of the sampling policy that credit may read, (N, T) each; None if the algorithm does not need them."""

    entropy: Tensor | None = None
    logp: Tensor | None = None
    """Log-probabilities, also for records."""
    sum_sq: Tensor | None = None
    """Σ_v π(v)²"""
    tokens: Tensor | None = None
    """Token ids."""


@dataclass(frozen=True, kw_only=True)
class Rows(Signals):
    """What credit reads of the N answers of a generation, from all processes."""

    group: Tensor
    """(N,) group id of each row."""
    mask: Tensor
    """(N, T) True on tokens that train."""
    outcome: Tensor
    """(N,) outcome reward; NaN or infinite if there is none, which excludes the row from its group."""
    extra: Tensor
    """(N,) sum of the other rewards."""


@dataclass(frozen=True, kw_only=True)
class Credit(groups.Credit):
    """Credit by row, (N,) or (N, T). Excluded rows (no outcome, or a group in which nothing trains) have 0 and
    False."""

    scored: Tensor
    """(N,) True on rows that are not excluded."""
    shaped: Tensor | None = None
    """(N, T) token rewards before they are compared with the group; only computed for records."""

    def mixed(self, size: int) -> Tensor:
        """(P,) True on groups with signal, of `size` successive rows, any of which may be excluded."""
        return self.signal.view(-1, size).any(-1)


def outcomes(algorithm: Algorithm, rows: Rows) -> Credit:
    """Only correctness and signal, from the outcome reward, as dynamic sampling needs them. Advantages are 0."""
    return _credit_rows(rows, None, lambda x: {"correct": algorithm.correct(x), "signal": algorithm.signal(x)})


def give_credit(algorithm: Algorithm, rows: Rows, *, apart: Tensor | None = None, for_records: bool = False) -> Credit:
    """Correctness and advantages. Groups whose rows are True in `apart` get their credit separately from the others.

    `for_records` adds `shaped`, which computes the token rewards again: set it only if a record is written.
    """

    def earned(rollouts: Rollouts) -> dict[str, Tensor]:
        found = {name: x for name, x in vars(groups.give_credit(algorithm, rollouts)).items() if x is not None}
        return {**found, "shaped": algorithm.rewards(rollouts)} if for_records else found

    credit = _credit_rows(rows, apart, earned)
    if algorithm.penalises and credit.penalty is None:  # no row has an outcome
        return replace(credit, penalty=torch.zeros_like(credit.advantages))
    return credit


def differ(outcomes: Tensor) -> bool:
    """Whether there are different outcome rewards, which `check_outcomes` needs."""
    return len(outcomes[outcomes.isfinite()].unique()) > 1


def check_outcomes(
    algorithm: Algorithm, outcomes: Tensor, advantages: Tensor, names: Mapping[str, str] | None = None
) -> Problem | None:
    """Return a problem if the algorithm loses differences between the outcome rewards of the first generation in which
    they `differ`. Raise an error if nothing can be learned from them. `names`: the engine's names of the settings that
    the remedy names."""
    problem = algorithm.graded(outcomes)
    if problem is None:
        return None
    problem = replace(problem, remedy=renamed(problem.remedy, names or {}))
    above = outcomes[~outcomes.isnan()] > algorithm.threshold
    if not advantages.any() and (above.all() or not above.any()):
        raise ConfigError(replace(problem, why=f"{problem.why} Every advantage is 0: nothing can be learned."))
    return problem


def _credit_rows(rows: Rows, apart: Tensor | None, by_group: Callable[[Rollouts], dict[str, Tensor]]) -> Credit:
    """Apply `by_group` to the rows that are not excluded, as groups; return its results in the order of the rows."""
    scored = (rows.outcome + rows.extra).isfinite()
    scored = scored & any_in_group(rows.group, rows.mask.any(-1) & scored)  # not in a group in which nothing trains
    none = torch.zeros_like(scored)
    found = {"correct": none, "signal": none, "extra": torch.zeros_like(rows.extra)}
    found["advantages"] = torch.zeros(rows.mask.shape, device=rows.mask.device)
    for part in [scored] if apart is None else [scored & ~apart, scored & apart]:
        if not part.any():
            continue
        index = part.nonzero()[:, 0]
        signals = {name: getattr(rows, name) for name in SIGNALS}
        rollouts = Rollouts.from_rows(
            rows.group[index],
            mask=rows.mask[index],
            reward=rows.outcome[index],
            extra=rows.extra[index],
            **{name: x[index] for name, x in signals.items() if x is not None},
        )
        for name, x in by_group(rollouts).items():
            by_row = rollouts.to_rows(x if x.ndim > 1 else x[:, None].expand_as(rollouts.reward))
            dtype = torch.bool if x.dtype == torch.bool else torch.float32
            whole = found.get(name, torch.zeros(len(scored), *by_row.shape[1:], dtype=dtype, device=scored.device))
            found[name] = whole.index_copy(0, index, by_row.to(whole.dtype))
    return Credit(scored=scored, **found)


def any_in_group(group: Tensor, x: Tensor) -> Tensor:
    """(N,) True on the rows of groups in which x is True on at least one row."""
    return torch.isin(group, group[x])
