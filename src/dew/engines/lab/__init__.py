"""Train many small runs at once, paired by problems and random numbers, to see whether a credit rule helps."""

from dew.engines.lab.study import study
from dew.engines.lab.study_settings import LoraSettings, TinySettings
from dew.engines.lab.summary import differences, load_study, markdown
from dew.engines.lab.tasks import TASKS

__all__ = [
    "TASKS", "LoraSettings", "TinySettings", "differences", "load_study", "markdown", "study",
]  # fmt: skip
