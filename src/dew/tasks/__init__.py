"""Problems with gold answers: two built-in generators, and JSONL files. And a tiny model to solve them."""

from dew.tasks.base import Row, Task, demonstrations
from dew.tasks.chain import Chain
from dew.tasks.countdown import Countdown
from dew.tasks.jsonl import Jsonl, read_jsonl
from dew.tasks.registry import task
from dew.tasks.shipped import TINY, model_folder

__all__ = [
    "TINY",
    "Chain",
    "Countdown",
    "Jsonl",
    "Row",
    "Task",
    "demonstrations",
    "model_folder",
    "read_jsonl",
    "task",
]
