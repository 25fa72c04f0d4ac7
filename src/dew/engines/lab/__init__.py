"""Many small training runs at once, paired by problems and random numbers, to see whether a credit rule helps."""

from dew.engines.lab.study import study
from dew.engines.lab.summary import differences, load_study, markdown
from dew.engines.lab.tasks import TASKS
from dew.engines.lab.tiny import TinySettings

__all__ = [
    "TASKS", "TinySettings", "differences", "load_study", "markdown", "study",
]  # fmt: skip
