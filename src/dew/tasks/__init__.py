"""Problems with gold answers: two built-in generators, data sets, files. And a tiny model to solve them."""

from dew.tasks.base import Row, Task, demonstrations
from dew.tasks.chain import Chain
from dew.tasks.countdown import Countdown
from dew.tasks.jsonl import Jsonl, read_jsonl
from dew.tasks.overlap import without_overlap
from dew.tasks.presets import NamedSet, OwnSet
from dew.tasks.registry import task
from dew.tasks.shipped import TINY, model_folder

__all__ = [
    "TINY",
    "Chain",
    "Countdown",
    "Jsonl",
    "NamedSet",
    "OwnSet",
    "Row",
    "Task",
    "demonstrations",
    "model_folder",
    "read_jsonl",
    "task",
    "without_overlap",
]
