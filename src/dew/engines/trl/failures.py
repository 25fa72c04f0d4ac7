"""What ends a run or costs it a step: infinities and NaNs, a full disk, another process that ended.

An infinity or a NaN skips the step, which is counted; three in a row stop the run.

    found in      when                                                reported with
    rewards       a generation is scored                              the reward function, the prompt
    logits        the sampling policy is scored; the update           the prompt, if found while scoring
    entropy       the same
    advantages    credit is computed                                  the prompt
    gradient      the update, after it was reduced over processes

Every process looks at the same gathered numbers, so all of them skip together. A skipped step leaves weights and
optimizer unchanged; the step number, the schedule and the prompts advance.
"""

import errno
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dew.errors import DewError, EngineError, Problem

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


# ── errors from outside the run ─────────────────────────────────────────────────────────────────────────────

FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""What the system, or a library that writes weights, reports."""
ALMOST_NOTHING = 1 << 20
DISCONNECTED = re.compile(r"gloo|NCCL|ProcessGroup|TCPStore|[Cc]onnection (closed|reset|refused)|Broken pipe")


def disk_full(error: BaseException, folder: Path | str) -> EngineError | None:
    """The error of a run whose disk is full; None if `error` has another cause.

    torch reports only that writing failed, so the free space on the disk counts too.
    """
    free = shutil.disk_usage(folder).free if Path(folder).is_dir() else ALMOST_NOTHING
    full = any(text in str(error) for text in FULL)
    if not full and (free >= ALMOST_NOTHING or not isinstance(error, OSError | RuntimeError)):
        return None
    what, why = f"{folder}: the disk is full, and the run stopped.", "Earlier checkpoints are complete."
    remedy = f"Free some space, then run: dew resume {folder}. save_total_limit and records_every limit its size."
    return EngineError(Problem(what, why, remedy))


def process_lost(error: BaseException, rank: int, processes: int) -> EngineError | None:
    """The error of a process whose connection to another one broke; None if `error` has another cause.

    The launcher (torchrun, accelerate launch) stops the remaining processes and names the one that failed first.
    """
    if processes == 1 or not isinstance(error, RuntimeError) or not DISCONNECTED.search(str(error)):
        return None
    what = f"Process {rank} of {processes} lost the connection to another process, which failed or was killed."
    why = "Signal 9 often means that the machine ran out of memory."
    remedy = "See the output of the process that the launcher names, then run dew resume."
    return EngineError(Problem(what, why, remedy))


def explain(error: BaseException, folder: str, rank: int, processes: int) -> EngineError | None:
    """An error that says what to do about `error`; None if it already does, or if its cause is not known."""
    if isinstance(error, DewError):
        return None
    return disk_full(error, folder) or process_lost(error, rank, processes)
