"""Infinities and NaNs: the step is skipped and counted, and three in a row stop the run.

    found in      when                                                reported with
    rewards       a generation is scored                              the reward function, the prompt
    logits        the sampling policy is scored; the update           the prompt, if found while scoring
    entropy       the same
    advantages    credit is computed                                  the prompt
    gradient      the update, after it was reduced over processes

Every process looks at the same gathered numbers, so all of them skip together. A skipped step leaves weights and
optimizer unchanged; the step number, the schedule and the prompts advance.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dew.errors import EngineError, Problem

PATIENCE = 3
"""Skipped steps in a row that stop the run. A generation counts once, however many steps are trained on it."""

LOGITS, ENTROPY, ADVANTAGES, REWARD = 1, 2, 3, 4
"""What is not finite in an answer; REWARD + i: the reward by function number i."""


def nonfinite_rows(logp: Tensor | None, entropy: Tensor | None, mask: Tensor) -> Tensor:
    """(B,) what is not finite on a row's live tokens: 0 (nothing), LOGITS or ENTROPY."""
    places = torch.zeros(len(mask), dtype=torch.long, device=mask.device)
    for x, place in ((entropy, ENTROPY), (logp, LOGITS)):  # logits last: entropy comes from them
        if x is not None:
            places[(~x.isfinite() & mask).any(-1)] = place
    return places


def describe(places: Tensor, names: Sequence[str], table: Sequence[dict[Any, Any]]) -> str | None:
    """What is not finite in a generation, by (N,) places: 0 (nothing), LOGITS, ENTROPY, ADVANTAGES, REWARD + i."""
    found = places.nonzero()[:, 0].tolist()
    if not found:
        return None
    named = {LOGITS: "logits", ENTROPY: "entropy", ADVANTAGES: "advantages"}
    named |= {REWARD + i: f"reward {name!r}" for i, name in enumerate(names)}
    first, prompt = named[int(places[found[0]])], table[found[0]].get(("prompt",))
    return f"{first}: {len(found)} of {len(places)} answers, the first to the prompt {prompt!r:.200}"


def finite_only(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Without infinities and NaNs: one would spoil every mean that it enters."""
    return {name: x for name, x in numbers.items() if not isinstance(x, float) or math.isfinite(x)}


class NonFinite:
    """Decides which steps are skipped, and stops the run after three in a row."""

    def __init__(self) -> None:
        self.generation: str | None = None
        """What is not finite in the current generation."""
        self.update: list[str] = []
        """Where the current update has live tokens that are not finite."""
        self._row: list[str] = []
        self._counted: str | None = None

    def check(self, step: int, norm: float, *, scaled: bool) -> str | None:
        """Why the step must be skipped, or None. Raises when it is one too many.

        `scaled`: in fp16 a loss scaler overflows until it has found its scale. Such a step is skipped, but does not
        count towards stopping the run.
        """
        found = self.generation or "; ".join(self.update) or (None if math.isfinite(norm) else f"gradient: norm {norm}")
        if found is None:
            self._row, self._counted = [], None
            return None
        only_gradient = self.generation is None and not self.update
        again = self.generation is not None and self.generation == self._counted
        if not again and not (scaled and only_gradient):
            self._row.append(f"step {step}, {found}")
            self._counted = self.generation
        if len(self._row) >= PATIENCE:
            listed = "".join(f"\n- {line}" for line in self._row)
            what = f"{PATIENCE} steps in a row had an infinity or a NaN and were skipped; the weights are unchanged."
            remedy = (
                "Rewards: check the reward function. Advantages: look for a division by 0 in the rule. Logits or "
                "gradient: resume from an earlier checkpoint, lower the learning rate, and train in bf16, not fp16."
            )
            raise EngineError(Problem(f"{what}{listed}\n", remedy=remedy))
        return found

    def state(self) -> dict[str, Any]:
        return {"generation": self.generation, "row": self._row, "counted": self._counted}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.generation, self._row, self._counted = state["generation"], list(state["row"]), state["counted"]
