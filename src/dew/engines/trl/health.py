"""Numbers that are none: the step is skipped and counted, and three in a row stop the run.

    seen in       when                                              named
    rewards       a generation is judged                            the function, the prompt
    logits        the sampling policy is scored; the update         the prompt, where it was scored
    entropy       the same
    gradient      the update, after all processes added theirs

Every process looks at the same gathered numbers, so all skip alike. A skipped step leaves weights and optimizer as they
are; the step number, the schedule and the prompts go on.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dew.errors import EngineError

PATIENCE = 3
"""So many in a row stop the run. A generation counts once, however many steps are trained on it."""

LOGITS, ENTROPY = 1, 2
PLACES = {LOGITS: "logits", ENTROPY: "entropy"}


def row_faults(logp: Tensor | None, entropy: Tensor | None, mask: Tensor) -> Tensor:
    """(B,) what is not finite on a row's live tokens: 0 nothing, LOGITS or ENTROPY."""
    fault = torch.zeros(len(mask), dtype=torch.long, device=mask.device)
    for x, place in ((entropy, ENTROPY), (logp, LOGITS)):  # logits last: entropy comes from them
        if x is not None:
            fault[(~x.isfinite() & mask).any(-1)] = place
    return fault


def token_faults(logp: Tensor, entropy: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How many live tokens of a micro-batch are not finite, by place; stays on the device."""
    seen = {"logits": logp, "entropy": entropy}
    return {place: (~x.detach().isfinite() & mask).sum() for place, x in seen.items()}


def finite_only(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Without the numbers that are none: one would spoil every mean that it enters."""
    return {name: x for name, x in numbers.items() if not isinstance(x, float) or math.isfinite(x)}


class Health:
    """What was seen, and how often in a row."""

    def __init__(self) -> None:
        self.generation: str | None = None
        """What is wrong with the generation at hand."""
        self._row: list[str] = []
        self._counted: str | None = None

    def begin(self) -> None:
        """A new generation."""
        self.generation = None

    def look(self, faults: Tensor, bad: Tensor, names: Sequence[str], prompts: Sequence[Any]) -> None:
        """At a generation's rows: (N,) faults of their tokens, (N, F) True where a reward is no number."""
        rows, functions = (faults > 0) | bad.any(1), bad.any(0)
        count, *flags = torch.cat((rows.sum()[None], functions.long())).tolist()  # the one trip from the device
        if not count or self.generation is not None:
            return
        first = int(rows.nonzero()[0, 0])
        place = PLACES.get(int(faults[first]))
        if place is None:
            place = "reward " + ", ".join(repr(name) for name, flag in zip(names, flags, strict=True) if flag)
        self.generation = f"{place}: {count} of {len(rows)} answers, the first to the prompt {prompts[first]!r:.200}"

    def judge(self, step: int, places: Sequence[str], norm: float, *, scaled: bool) -> str | None:
        """Why a step must be skipped, or None. Raises when it is one too many.

        `scaled`: a loss that is scaled up for fp16 overflows now and then until its scale is found. Such a step is
        skipped, but it is no sign of anything.
        """
        seen = self.generation or "; ".join(places) or (None if math.isfinite(norm) else f"gradient: norm {norm}")
        if seen is None:
            self._row, self._counted = [], None
            return None
        only_gradient = self.generation is None and not places
        again = self.generation is not None and self.generation == self._counted
        if not again and not (scaled and only_gradient):
            self._row.append(f"step {step}, {seen}")
            self._counted = self.generation
        if len(self._row) >= PATIENCE:
            raise EngineError(
                f"{PATIENCE} steps in a row had an infinity or a NaN and were skipped; the weights are those before "
                f"them.\n" + "\n".join(f"- {line}" for line in self._row) + "\n"
                "Rewards: look at the function. Logits or gradient: go back to an earlier checkpoint, lower the "
                "learning rate, and train in bf16 rather than fp16."
            )
        return seen

    def state(self) -> dict[str, Any]:
        return {"generation": self.generation, "row": self._row, "counted": self._counted}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.generation, self._row, self._counted = state["generation"], list(state["row"]), state["counted"]
