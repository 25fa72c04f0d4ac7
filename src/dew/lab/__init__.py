"""Many small paired training runs at once: does a credit rule help, on the same problems with the same random numbers?"""

from dew.lab.study import QUICK, QUICK_TASK, Progress, Study, load_study, study
from dew.lab.summary import Difference, best_rates, differences, markdown
from dew.lab.tasks import TASKS
from dew.lab.train import Settings

__all__ = [
    "QUICK", "QUICK_TASK", "TASKS", "Difference", "Progress", "Settings", "Study", "best_rates", "differences",
    "load_study", "markdown", "study",
]  # fmt: skip
