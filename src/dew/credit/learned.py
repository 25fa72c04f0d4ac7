"""Learned credit: a small head on the policy's hidden states predicts the outcome at every prefix. docs/papers.md.

Vᵢₜ is the predicted chance that answer i ends above the mean reward of its group (with rewards of 0 and 1: that it is
correct), from the prompt and its tokens before t. It comes from the hidden state that predicts token t, so it stands
where the entropy and the log-probability of token t stand. The head predicts before it is trained on the same answers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dew.checks import check_by_token
from dew.errors import ConfigError
from dew.ops import at_least_float32, masked_mean

POINTS = 32
"""Positions of each answer that the head is trained on, evenly spaced: neighbouring states hardly differ."""
UNITS = 64
"""Width of the head's inner layer."""
RATE, STEPS, DECAY = 3e-3, 4, 1e-2
"""Learning rate, steps per generation and weight decay of the head's AdamW."""


def learned_weights(
    value: Float[Tensor, "*G T"],
    advantages: Float[Tensor, "*G T"],
    mask: Bool[Tensor, "*G T"],
    *,
    share: float = 0.5,
) -> Float[Tensor, "*G T"]:
    """A weight for each token: large where the prediction moved towards the answer's own outcome.

        δᵢₜ = Vᵢ,ₜ₊₁ − Vᵢₜ                 what token t changed; 0 for the last, after which nothing is predicted
        pᵢₜ = max(0, sign(Aᵢₜ) δᵢₜ)        up in an answer with A > 0, down in one with A < 0
        wᵢₜ = 1 + κ (Tᵢ pᵢₜ − Pᵢ) / max(1, Pᵢ)      Pᵢ = Σₜ pᵢₜ, Tᵢ live tokens, κ = `share`

    The mean over the answer is exactly 1, so its total credit stays, and no weight is below 1 − κ, so no sign flips.
    At most κ of the credit is moved, and less if the predictions hardly move: P is compared with 1, the distance
    between the two outcomes. A constant prediction gives 1 everywhere. t + 1 is the next live token: what tool output
    changes belongs to the call before it. 0 where `mask` is False.
    """
    check_by_token(mask, value=value, advantages=advantages)
    if not 0 <= share <= 1:
        raise ConfigError(f"share={share}: the part of an answer's credit that is moved. Give 0 to 1; 0 turns it off.")
    T = mask.shape[-1]
    place = torch.where(mask, torch.arange(T, device=mask.device), T)
    after = F.pad(place, (0, 1), value=T)[..., 1:].flip(-1).cummin(-1).values.flip(-1)  # the next live token, or T
    V = at_least_float32(value)
    change = torch.where(mask & (after < T), V.gather(-1, after.clamp_max(T - 1)) - V, 0)
    p = (torch.where(mask, advantages, 0).sign() * change).clamp_min(0)
    P, count = p.sum(-1, keepdim=True), mask.sum(-1, keepdim=True)
    return torch.where(mask, 1 + share * (count * p - P) / P.clamp_min(1), 0)


# ── the head ────────────────────────────────────────────────────────────────────────────────────────────────


class OutcomeHead:
    """Two layers on normalised hidden states, with a logistic loss, for each of R replicas; and their optimizer.

    The last layer starts at 0: every prediction is ½ and every weight 1. Replicas are independent.
    """

    def __init__(self, width: int, replicas: int = 1, device: Any = None) -> None:
        first = torch.randn(width, UNITS, generator=torch.Generator().manual_seed(0)) / width**0.5
        shapes = {"bias": (1, UNITS), "last": (UNITS, 1), "last_bias": (1, 1)}
        start = {"first": first, **{name: torch.zeros(shape) for name, shape in shapes.items()}}
        self.parameters = {
            name: x.expand(replicas, *x.shape).to(device, copy=True).requires_grad_() for name, x in start.items()
        }
        self.adam = torch.optim.AdamW(self.parameters.values(), lr=RATE, weight_decay=DECAY)

    def predict(self, hidden: Float[Tensor, "R ... D"]) -> Float[Tensor, "R ..."]:
        """V at each of these states."""
        with torch.no_grad():
            return self._logits(_normalised(hidden.flatten(1, -2))).view(hidden.shape[:-1]).sigmoid()

    def fit(self, features: Float[Tensor, "R B K D"], side: Float[Tensor, "R B"]) -> None:
        """Train on K states of each answer; `side` is 1 for a better, −1 for a worse answer, 0 to leave it out."""
        finite = features.isfinite().all(-1)  # a NaN would stay in the head for good
        x = _normalised(torch.where(finite[..., None], features, 0).flatten(1, 2))
        target = (side > 0).to(x.dtype).repeat_interleave(features.shape[2], 1)
        used = (finite & (side != 0)[..., None]).flatten(1, 2)
        with torch.enable_grad():
            for _ in range(STEPS):
                losses = F.binary_cross_entropy_with_logits(self._logits(x), target, reduction="none")
                self.adam.zero_grad()
                masked_mean(losses, used, 1).sum().backward()
                self.adam.step()

    def _logits(self, x: Tensor) -> Tensor:
        p = self.parameters
        return torch.baddbmm(p["last_bias"], torch.baddbmm(p["bias"], x, p["first"]).relu(), p["last"])[..., 0]

    def state(self) -> dict[str, Any]:
        return {"parameters": {name: x.detach() for name, x in self.parameters.items()}, "adam": self.adam.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, x in state["parameters"].items():
                self.parameters[name].copy_(x)
        self.adam.load_state_dict(state["adam"])


def _normalised(hidden: Tensor) -> Tensor:
    """Models differ in the scale of their states by orders of magnitude."""
    return F.layer_norm(at_least_float32(hidden), hidden.shape[-1:])


def spaced(mask: Bool[Tensor, "*B T"]) -> Int[Tensor, "*B K"]:
    """K evenly spaced live positions of each answer, the first one included; some repeat in a short answer."""
    rank = torch.arange(POINTS, device=mask.device) * mask.sum(-1, keepdim=True) // POINTS
    return (~mask).long().argsort(dim=-1, stable=True).gather(-1, rank)


# ── how good the predictions are ────────────────────────────────────────────────────────────────────────────


def prediction_quality(
    value: Float[Tensor, "*R B T"], side: Float[Tensor, "*R B"], mask: Bool[Tensor, "*R B T"]
) -> dict[str, Float[Tensor, "*R"]]:
    """`brier`, the mean of (V − outcome)², and `auc_first`, `auc_middle`, `auc_last`: the AUC of V in each third of the
    answers. Over the live tokens of answers with a side; NaN where there are none of one kind. No skill: ¼ and ½."""
    live, better = mask & (side != 0)[..., None], (side > 0)[..., None].expand_as(mask)
    V = torch.where(live, at_least_float32(value), 0.5)
    error = torch.where(live, (V - better.to(V.dtype)).square(), 0).sum((-2, -1))
    third = 3 * (mask.cumsum(-1) - 1) // mask.sum(-1, keepdim=True).clamp_min(1)
    found = {"brier": error / live.sum((-2, -1))}
    for i, name in enumerate(("first", "middle", "last")):
        inside = live & (third == i)
        found[f"auc_{name}"] = _auc(*(x.flatten(-2) for x in (V, inside & better, inside & ~better)))
    return found


def _auc(x: Tensor, better: Tensor, worse: Tensor) -> Tensor:
    """The chance that a better one has the larger x, a tie counting ½."""
    others = torch.where(worse, x, torch.inf).sort(-1).values
    x = x.contiguous()
    below = (torch.searchsorted(others, x) + torch.searchsorted(others, x, right=True)) / 2
    return torch.where(better, below, 0).sum(-1) / (better.sum(-1) * worse.sum(-1))
