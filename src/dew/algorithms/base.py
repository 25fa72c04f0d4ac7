"""One frozen dataclass per algorithm: its settings, its credit and its loss.

    advantages(rollouts) -> (P, G, T)                 once per batch of rollouts, on whole groups
                                                      = credit of the answer x weight of the token
    loss(logp, part, advantages, ...) -> loss, stats  per micro-batch of rows

An engine calls these two methods and does not know which algorithm it runs. `GTPO()` has the paper's settings; any
other setting is explicit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, ClassVar, Literal, get_args, get_origin

import torch
from torch import Tensor

from dew.checks import unmet
from dew.credit import group_overlong, group_relative, has_signal, soft_overlong
from dew.errors import ConfigError, Problem, ShapeError, type_hints, wrong_types
from dew.losses import Ratio, Reduce, Surrogate, policy_loss
from dew.rollouts import Rollouts

Stats = dict[str, Tensor]
Count = float | Tensor | None
Whose = Literal["no", "old", "current"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of a micro-batch, (B, T) each. `old_logp` is the sampling policy's, `entropy` the current policy's."""

    mask: Tensor
    old_logp: Tensor
    ref_logp: Tensor | None = None
    weight: Tensor | None = None
    entropy: Tensor | None = None
    penalty: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What all algorithms share: settings, `advantages(rollouts)` for whole groups, `loss` for a micro-batch."""

    name: ClassVar[str]
    """Its name for `get_algorithm` and in configuration files."""
    needs_entropy: ClassVar[Whose] = "no"
    """Which entropy it reads: none ("no"), the sampling policy's ("old") or the trained policy's ("current")."""
    needs_logp: ClassVar[bool] = False
    """Whether its credit reads the sampling policy's log-probabilities."""
    needs_sum_sq: ClassVar[bool] = False
    """Whether its credit reads Σ_v π(v)² of the sampling policy."""
    needs_tokens: ClassVar[bool] = False
    """Whether its credit reads the token ids."""
    penalises: ClassVar[bool] = False
    """Whether `penalties` gives its loss a penalty on single tokens."""
    ratio: ClassVar[Ratio] = "token"
    reduce: ClassVar[Reduce] = "tokens"
    scale: ClassVar[bool] = True
    """Whether advantages are divided by the standard deviation of the rewards."""
    fixed_divisor: ClassVar[bool] = False
    """Whether `divisor` is a constant per answer (the generation budget) instead of the number of live tokens."""
    engine_loss: ClassVar[bool] = False
    """Whether the engine's own advantages and loss are used, with all of its settings. `advantages` and `loss` then
    only describe them for records and metrics."""
    paper: ClassVar[Mapping[str, str] | None] = None
    """title, id (arXiv) and citation (BibTeX), for the model card."""
    verl_estimator: ClassVar[str | None] = None
    """verl's own advantage estimator, if it and verl's own loss train exactly this algorithm. Not valid for subclasses,
    which may change the algorithm."""
    written: ClassVar[str] = ""
    """`file.py:Class`, if a class of the user's own was found by it."""

    threshold: float = 0.5
    """An answer is correct (O⁺) if its outcome reward is above this."""
    clip_low: float = 0.2
    """ε_low: below a ratio of 1 − ε_low, tokens of wrong answers get no gradient."""
    clip_high: float = 0.28
    """ε_high: above a ratio of 1 + ε_high, tokens of correct answers get no gradient."""
    surrogate: Surrogate = "clip"
    """How the loss uses the ratio: "clip" as in PPO, "cispo" (clip its weight and keep every token's gradient),
    "sapo" (a soft gate, without clip_low and clip_high), "geo_mean" (the geometric mean of clipped token ratios), or
    "dppo_tv" and "dppo_kl" (drop tokens whose probability has moved by more than clip_low or clip_high)."""
    tau_pos: float = 1.0
    """SAPO: temperature of the gate where the advantage is positive."""
    tau_neg: float = 1.05
    """SAPO: temperature of the gate elsewhere; a larger one fades tokens out sooner."""
    kl_coef: float = 0.0
    """β of the KL term towards a reference policy. 0 disables it."""
    dynamic_sampling: bool = False
    """Replace groups that are all correct or all wrong by further prompts, until the batch is full."""
    max_rounds: int = 4
    """Maximum rounds of dynamic sampling; after that, training uses the groups found so far."""
    oversample: float = 1.0
    """Batches of prompts per round of dynamic sampling. 2 or 3 saves rounds, but needs that many times the memory."""
    overlong: Literal["none", "soft", "group"] = "none"
    """Length penalty: "soft" as in DAPO (needs max_tokens and overlong_buffer), "group" relative to the group."""
    max_tokens: int | None = None
    """The generation budget, in tokens. Soft overlong and Dr. GRPO need it; engines fill it in."""
    overlong_buffer: int | None = None
    """Soft overlong: the number of tokens before max_tokens over which the penalty grows to −1."""
    overlong_gamma: float = 0.75
    """Group overlong: a group is easy if at least this share of its answers is correct."""
    placebo: bool = False
    """Permute the credit of the tokens within each answer, as a control: the same weights on the wrong tokens."""

    def __post_init__(self) -> None:
        if problems := wrong_types(self) or [*_wrong_choices(self), *self.problems()]:
            raise ConfigError([f"{self.name}: {p}" for p in problems])

    def problems(self) -> list[str]:
        """Problems with the settings, each with a remedy. Types and choices have been checked before."""
        soft, buffer, limit = self.overlong == "soft", self.overlong_buffer, self.max_tokens
        fits = not soft or buffer is None or limit is None or 0 < buffer <= limit
        gates = f"tau_pos={self.tau_pos}, tau_neg={self.tau_neg}: temperatures of the gate."
        return unmet(
            (0 <= self.clip_low <= 1, f"clip_low={self.clip_low}: the smallest ratio is 1 - clip_low. Give 0 to 1."),
            (self.clip_high >= 0, f"clip_high={self.clip_high}: the largest ratio is 1 + clip_high. Give >= 0."),
            (0 < self.tau_pos < inf and 0 < self.tau_neg < inf, f"{gates} Give numbers > 0; the paper: 1.0 and 1.05."),
            (self.kl_coef >= 0, f"kl_coef={self.kl_coef}: a negative KL term pushes the policy away. 0 disables it."),
            (self.max_rounds >= 1, f"max_rounds={self.max_rounds}: at least one round of sampling is needed."),
            (self.oversample >= 1, f"oversample={self.oversample}: a round takes at least a batch. Give >= 1."),
            (not soft or buffer is not None, "overlong='soft' needs overlong_buffer, e.g. a quarter of max_tokens."),
            (fits, f"overlong_buffer={buffer} with max_tokens={limit}. Give 0 < overlong_buffer <= max_tokens."),
            (0.5 <= self.overlong_gamma <= 1, f"overlong_gamma={self.overlong_gamma}: give 0.5 to 1, e.g. 0.75."),
        )

    @property
    def no_loss_without_advantage(self) -> bool:
        """Whether answers whose advantages are all 0 have no loss, so that an engine may skip them."""
        return not self.kl_coef and type(self).loss is Algorithm.loss

    @property
    def plain_loss(self) -> bool:
        """Whether its loss is PPO's clip on token ratios, averaged over tokens or answers, as in other trainers."""
        other = self.penalises or self.fixed_divisor or self.engine_loss or type(self).loss is not Algorithm.loss
        return self.ratio == "token" and self.surrogate == "clip" and not other and not self.needs_sum_sq

    @property
    def label(self) -> str:
        """`gtpo(alpha2=0.5,pool=joint)`: the name and the settings that differ from the defaults, except max_tokens."""
        return self.text()

    def text(self, **changed: Any) -> str:
        """The label with some settings changed, to paste after `algorithm:`."""
        own = {f.name: x for f in fields(self) if (x := getattr(self, f.name)) != f.default and f.name != "max_tokens"}
        settings = [f"{name}={str(value).replace(' ', '')}" for name, value in (own | changed).items()]
        name = (changed and self.written) or self.name
        return f"{name}({','.join(settings)})" if settings else name

    def warnings(self) -> list[str]:
        """Settings that are allowed but rarely intended, each with a remedy."""
        return []

    @property
    def uses_threshold(self) -> bool:
        """Whether credit or dynamic sampling depends on which answers are above `threshold`."""
        return self.dynamic_sampling or self.overlong == "group"

    def graded(self, outcomes: Tensor) -> Problem | None:
        """A problem if the threshold loses differences between these outcome rewards; None if it does not."""
        values = outcomes[~outcomes.isnan()].double().round(decimals=5).unique()
        binary = len(values) == 2 and values[0] <= self.threshold < values[1]
        if not self.uses_threshold or len(values) < 2 or binary:
            return None
        shown = ", ".join(f"{x:g}" for x in values[:4].tolist()) + (", ..." if len(values) > 4 else "")
        changes: list[dict[str, Any]] = [{"pool": "outcome"}, {"dynamic_sampling": False}]
        between = self.threshold if values[0] <= self.threshold < values[-1] else values.median().item()
        possible = [x for x in changes if hasattr(self, next(iter(x))) and not replace(self, **x).uses_threshold]
        loss = f"{self.name} only distinguishes correct answers, above the threshold, from wrong ones: other "
        why, aim = loss + "differences are lost.", "To train on the differences"
        if possible == changes[1:]:  # credit uses the differences
            why, aim = "Dynamic sampling drops groups whose answers are all above or all below it.", "To keep them"
        return Problem(
            f"The outcome reward has {len(values)} different values ({shown}); the threshold is {self.threshold:g}.",
            why,
            f"{aim}, write `algorithm: {self.text(**possible[0]) if possible else 'dew'}`. If a "
            f"threshold tells correct from wrong answers, write it: `algorithm: {self.text(threshold=between)}`"
            ". If another reward decides, set outcome_reward.",
        )

    @property
    def signals(self) -> list[str]:
        """Names of the SIGNALS that its credit reads."""
        needs = (self.needs_entropy == "old", self.needs_logp, self.needs_sum_sq, self.needs_tokens)
        return [name for name, needed in zip(SIGNALS, needs, strict=True) if needed]

    def control(self) -> "Algorithm | None":
        """The same algorithm without token weights, to isolate their effect; None if it has no token weights."""
        return None

    def correct(self, rollouts: Rollouts) -> Tensor:
        """(P, G) True on correct answers (O⁺), by the outcome reward alone."""
        return rollouts.correct(self.threshold)

    def signal(self, rollouts: Rollouts) -> Tensor:
        """(P,) True on groups to learn from, which dynamic sampling keeps: those with a correct and a wrong answer that
        train or, if the threshold is not used, with different outcome rewards."""
        if self.uses_threshold:
            return has_signal(self.correct(rollouts), rollouts.live)
        return (group_relative(rollouts.reward, rollouts.live) != 0).any(-1)

    def extra(self, rollouts: Rollouts) -> Tensor:
        """(P, G) sum of what is added to the outcome: other rewards and the overlong penalty."""
        extra = torch.zeros_like(rollouts.reward) if rollouts.extra is None else rollouts.extra
        if self.overlong == "group":
            correct = self.correct(rollouts)
            return extra + group_overlong(rollouts.lengths, correct, rollouts.live, gamma=self.overlong_gamma)
        if self.overlong == "none":
            return extra
        if self.max_tokens is None or self.overlong_buffer is None:
            raise ConfigError(f"{self.name}: overlong='soft' needs max_tokens and overlong_buffer.")
        return extra + soft_overlong(rollouts.lengths, limit=self.max_tokens, buffer=self.overlong_buffer)

    def rewards(self, rollouts: Rollouts) -> Tensor:
        """(P, G, T) reward of each token, before normalisation within the group."""
        total = torch.where(rollouts.present, rollouts.reward + self.extra(rollouts), 0)
        return spread(total, rollouts)

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """(P, G, T) credit of each token, 0 where the mask is False."""
        raise NotImplementedError

    def penalties(self, rollouts: Rollouts, advantages: Tensor) -> Tensor:
        """(P, G, T) coefficient of |log w| in each token's loss, if `penalises`."""
        raise NotImplementedError

    def divisor(self, tokens: int, sequences: int) -> float:
        """The divisor of the loss of a batch with this many live tokens and answers. Masked answers count, so that the
        weight of an answer does not depend on how many others were truncated."""
        return float(tokens if self.reduce == "tokens" else sequences)

    def loss(self, logp: Tensor, part: Part, advantages: Tensor, *, count: Count = None) -> tuple[Tensor, Stats]:
        """The loss of some rows. `count` is `divisor(...)` of the whole batch: only then do the parts sum to its loss.

        Optimizer steps share the divisor of a generation equally, so that a token has the same weight in every step.
        """
        if self.penalises and part.penalty is None:
            raise ShapeError(f"{self.name} needs penalty= in its Part: the rows of give_credit(...).penalty.")
        if count is None:
            count = self.divisor(int(part.mask.sum()), len(part.mask)) or 1.0
        names = ("ratio", "reduce", "clip_low", "clip_high", "surrogate", "tau_pos", "tau_neg", "kl_coef")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        given |= {"ref_logp": part.ref_logp if self.kl_coef else None, "weight": part.weight, "penalty": part.penalty}
        return policy_loss(logp, part.old_logp, advantages, part.mask, count=count, **given)


def spread(per_answer: Tensor, rollouts: Rollouts) -> Tensor:
    """(P, G) -> (P, G, T): the same value at each live token of an answer, 0 elsewhere."""
    return torch.where(rollouts.mask, per_answer.unsqueeze(-1), 0)


def _wrong_choices(settings: Algorithm) -> list[str]:
    """Errors for settings whose value is not among those of the annotated Literal."""
    hints = {x: get_args(hint) for x, hint in type_hints(type(settings)).items() if get_origin(hint) is Literal}
    wrong = {name: value for name in hints if (value := getattr(settings, name)) not in hints[name]}
    return [f"{x}={v!r} is not known. Choose one of: {', '.join(map(str, hints[x]))}." for x, v in wrong.items()]


SIGNALS = {
    "entropy": "the sampling policy's entropy of each token",
    "logp": "the sampling policy's log-probability of each token",
    "sum_sq": "the sampling policy's sum of squared probabilities of each token",
    "tokens": "the token ids",
}


def recorded(algorithm: Algorithm, rollouts: Rollouts, name: str) -> Tensor:
    """One of the SIGNALS, (P, G, T); raises if the engine did not record it."""
    x = getattr(rollouts, name)
    if x is None:
        raise ShapeError(f"{algorithm.name} needs {SIGNALS[name]}: build the Rollouts with {name}= per token.")
    return x
