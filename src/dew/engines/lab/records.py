"""Token records of a run: the answers of some groups, with the credit of each token."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dew.algorithms import Algorithm
from dew.credit import grpo_advantages
from dew.engines.lab.tasks import GeneratedTask, Problems
from dew.rollouts import Rollouts
from dew.run.records import AnswerRecord, GroupRecord

if TYPE_CHECKING:
    from dew.engines.lab.text import TextTask

GROUPS = 2
"""Groups in a record."""


def group_records(
    task: "GeneratedTask | TextTask", step: int, algorithm: Algorithm, problems: Problems, rows: dict[str, Tensor]
) -> list[GroupRecord]:
    """Of some groups of a generation, those with signal first. `rows` have axes (P, G[, T])."""
    signal, given = rows["signal"], {name: rows[name] for name in ("mask", "reward", *algorithm.signals)}
    rollouts, shaped = Rollouts(**given), torch.zeros_like(rows["advantages"])
    if signal.any():  # the others do not train
        shaped[signal] = algorithm.rewards(Rollouts(**{name: x[signal] for name, x in given.items()})).float()
    correct, extra = algorithm.correct(rollouts), algorithm.extra(rollouts)
    plain = grpo_advantages(rows["reward"] + extra)
    by_token = {"entropy": rows["entropy"], "logp": rows["logp"], "shaped": shaped, "advantage": rows["advantages"]}
    found = []
    for p in (~signal).int().argsort(stable=True)[:GROUPS].tolist():
        answers = []
        for g, length in enumerate(rollouts.lengths[p].tolist()):
            tokens = rows["tokens"][p, g, :length].tolist()
            own: dict[str, Any] = {name: x[p, g, :length].tolist() for name, x in by_token.items()}
            answers.append(
                AnswerRecord(
                    tokens=task.symbols(tokens),
                    correct=bool(correct[p, g]),
                    reward=float(rows["reward"][p, g]),
                    extra=float(extra[p, g]),
                    truncated=not task.ends(tokens[-1]),
                    grpo=[float(plain[p, g])] * length,
                    **own,
                )
            )
        prompt, gold = task.describe(problems[p])
        found.append(GroupRecord(step, p, prompt, answers, gold, algorithm.name, asdict(algorithm)))
    return found
