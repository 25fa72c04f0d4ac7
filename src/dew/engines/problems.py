"""The problems that a run trains and is evaluated on, and the verifier that scores them, the same on every engine."""

import logging

from dew.errors import ConfigError, Problem
from dew.rewards import Verifier, verifier
from dew.rewards.verifiers import has_verifier
from dew.run.config import Run
from dew.tasks import Row, Task, task

HELD_OUT = 64
logger = logging.getLogger("dew")


def training_rows(run: Run) -> tuple[Task, list[Row]]:
    """The task and its training problems, without those whose gold answer does not verify against itself."""
    from dew.rewards.math import MathVerifier, usable_rows

    assert run.task is not None
    source = task(run.task, **run.task_settings)
    rows = source.rows(run.problems)
    if not isinstance(verifier_of(run), MathVerifier):
        return source, rows
    usable, bad = usable_rows(rows)
    what = f"{len(bad)} of {len(rows)} gold answers can be matched by no answer"
    what += f", e.g. {', '.join(repr(str(row['answer'])[:40]) for row in bad[:3])}."
    if not usable:
        remedy = "Name the column of the final answers (task_settings {answer: ...}), or use another verifier."
        raise ConfigError(Problem(f"{run.task}: {what}", remedy=remedy))
    if bad:
        logger.warning("%s These problems are left out.", what)
    return source, [dict(row) for row in usable]


def held_out_rows(run: Run, source: Task) -> list[Row]:
    return source.rows(run.scores.problems if run.scores else HELD_OUT, split="held_out")


def verifier_of(run: Run) -> Verifier | None:
    """The verifier that decides correctness, if the run names one or its task has one."""
    name = run.verifier or (task(run.task, **run.task_settings).name if run.task else None)
    return verifier(name) if name and (run.verifier or has_verifier(name)) else None
