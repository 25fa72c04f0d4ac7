"""The problems that a run trains on and the verifier that scores them, the same on every engine."""

import logging

from dew.config import Run
from dew.errors import ConfigError, Problem
from dew.rewards import Verifier, verifier
from dew.tasks import Row, Task, task

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
    if bad:
        shown = ", ".join(repr(str(row["answer"])[:40]) for row in bad[:3])
        if not usable:
            what = f"{run.task}: none of the {len(bad)} gold answers can be matched by any answer, e.g. {shown}."
            remedy = "Name the column of the final answers (task_settings {answer: ...}), or use another verifier."
            raise ConfigError(Problem(what, remedy=remedy))
        logger.warning("%d problems are left out: no answer can match their gold answer, e.g. %s.", len(bad), shown)
    return source, [dict(row) for row in usable]


def verifier_of(run: Run) -> Verifier | None:
    """The verifier that decides correctness, if the run names one or its task has one."""
    name = run.verifier or (task(run.task, **run.task_settings).name if run.task else None)
    return verifier(name) if name else None
