"""Rollouts: P problems x G answers x T tokens, with shapes checked once.

Engines have flat rows, each with a group id, in any order and with groups of any size; credit needs whole
groups. `Rollouts.from_rows` groups the rows, `to_rows` returns results in the order of the rows.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dew.checks import check_by_token, check_finite, check_logp, check_tensors
from dew.errors import Problem, ShapeError
from dew.ops import at_least_float32

PADDING = -1
BY_TOKEN = ("tokens", "logp", "entropy", "sum_sq")


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Whole groups of answers. Ragged groups are padded with masked answers, ragged answers with masked tokens."""

    mask: Bool[Tensor, "P G T"]
    """True on tokens that the policy sampled and that train. Values elsewhere are never read."""
    reward: Float[Tensor, "P G"]
    """The outcome reward of each answer, which decides O⁺ and O⁻. Leave out answers without one."""
    tokens: Int[Tensor, "P G T"] | None = None
    logp: Float[Tensor, "P G T"] | None = None
    """Log-probability of each token under the policy that sampled it."""
    entropy: Float[Tensor, "P G T"] | None = None
    """Entropy of that policy at each token, in nats, at the sampling temperature."""
    sum_sq: Float[Tensor, "P G T"] | None = None
    """Σ_v π(v)² of that policy at each token."""
    extra: Float[Tensor, "P G"] | None = None
    """Sum of other rewards (format, length), added to the outcome. It does not affect O⁺ and O⁻."""
    rows: Int[Tensor, "P G"] | None = None
    """The row of each answer, −1 on padding. None: answers are rows in order, without padding."""

    def __post_init__(self) -> None:
        others = {name: getattr(self, name) for name in (*BY_TOKEN, "reward", "extra", "rows")}
        _check_shapes(self.mask, others, "(P, G, T)", "(P, G)")
        object.__setattr__(self, "mask", check_by_token(self.mask))
        check_logp(self.logp, self.mask)
        for name in ("reward", "extra"):
            if (x := others[name]) is not None:
                check_finite(name, x, self.present)
                object.__setattr__(self, name, at_least_float32(x))

    @property
    def present(self) -> Bool[Tensor, "P G"]:
        """True on answers, False on the padding of a ragged group."""
        return torch.ones_like(self.reward, dtype=torch.bool) if self.rows is None else self.rows != PADDING

    @property
    def live(self) -> Bool[Tensor, "P G"]:
        """True on answers that have at least one token to train on."""
        return self.mask.any(-1)

    @property
    def lengths(self) -> Int[Tensor, "P G"]:
        return self.mask.sum(-1)

    def correct(self, threshold: float = 0.5) -> Bool[Tensor, "P G"]:
        """O⁺: the present answers whose outcome reward is above the threshold."""
        return (self.reward > threshold) & self.present

    @classmethod
    def from_rows(
        cls, group: Int[Tensor, " B"] | Sequence[Hashable], *, mask: Bool[Tensor, "B T"], reward: Float[Tensor, " B"],
        tokens: Int[Tensor, "B T"] | None = None, logp: Float[Tensor, "B T"] | None = None,
        entropy: Float[Tensor, "B T"] | None = None, sum_sq: Float[Tensor, "B T"] | None = None,
        extra: Float[Tensor, " B"] | None = None,
    ) -> "Rollouts":  # fmt: skip
        """Group rows by id. Rows may be in any order; groups are in the order in which their ids first appear."""
        given = {"reward": reward, "extra": extra, "tokens": tokens, "logp": logp, "entropy": entropy, "sum_sq": sum_sq}
        _check_shapes(mask, given, "(B, T)", "(B,)")
        each = group.flatten().tolist() if isinstance(group, Tensor) else group
        names: list[Any] = [i.tolist() if isinstance(i, Tensor) else i for i in each]  # equal tensors hash differently
        if wrong := [type(i).__name__ for i in names if not isinstance(i, Hashable)]:
            raise ShapeError(f"a group id is of type {wrong[0]}. Give a number or text, the same to all of its rows.")
        seen: dict[Hashable, int] = {}
        ids = torch.tensor([seen.setdefault(i, len(seen)) for i in names], dtype=torch.long, device=mask.device)
        if len(ids) != len(mask):
            raise ShapeError(f"{len(ids)} group ids for {len(mask)} rows of mask {tuple(mask.shape)}: one id per row.")
        if len(ids) == 0:
            raise ShapeError("no rows: a batch of rollouts needs at least one answer.")
        rows = pad_sequence(ids.argsort(stable=True).split(ids.bincount().tolist()), True, PADDING)  # in their order
        grouped = {name: x[rows.clamp_min(0)] for name, x in {"mask": mask, **given}.items() if x is not None}
        for x in grouped.values():
            x[rows == PADDING] = 0
        if len(dead := rows[~grouped["mask"].flatten(1).any(-1), 0]):
            what = f"group {names[int(dead[0])]!r} has no live token in any row ({len(dead)} such groups)."
            remedy = "Drop padding rows before building Rollouts, or check for a mask that is all False."
            raise ShapeError(Problem(what, "There is nothing to train on.", remedy))
        return cls(**grouped, rows=rows)

    def to_rows(self, x: Tensor) -> Tensor:
        """(P, G, ...) -> (B, ...), in the order of the original rows."""
        if x.shape[:2] != self.reward.shape:
            raise ShapeError(f"to_rows got shape {tuple(x.shape)}, expected (P, G, ...) = {tuple(self.reward.shape)}.")
        if self.rows is None:
            return x.flatten(0, 1)
        rows = self.rows.flatten()
        return x.flatten(0, 1)[rows.argsort()[(rows == PADDING).sum() :]]  # padding, −1, sorts first

    def as_one_group(self) -> "Rollouts":
        """The whole batch as a single group (1, P·G, T): what `scope="batch"` compares within."""
        every = {f.name: x for f in fields(self) if (x := getattr(self, f.name)) is not None}
        every.setdefault("rows", torch.arange(self.reward.numel(), device=self.reward.device).view_as(self.reward))
        return Rollouts(**{name: x.flatten(0, 1).unsqueeze(0) for name, x in every.items()})


def _check_shapes(mask: Tensor, tensors: Mapping[str, Tensor | None], by_token: str, by_answer: str) -> None:
    """Report every tensor with a wrong shape: the mask's for values per token, the mask's without T per answer."""
    check_tensors(mask=mask, **{name: x for name, x in tensors.items() if x is not None})
    if mask.ndim != len(by_token.split()):
        raise ShapeError(f"mask has shape {tuple(mask.shape)}, expected {by_token}.")
    problems = []
    for name, x in tensors.items():
        expected, axes = (mask.shape, by_token) if name in BY_TOKEN else (mask.shape[:-1], by_answer)
        if x is not None and x.shape != expected:
            problems.append(f"{name} has shape {tuple(x.shape)}, expected {axes} = {tuple(expected)}.")
    if problems:
        raise ShapeError("\n".join(problems))
