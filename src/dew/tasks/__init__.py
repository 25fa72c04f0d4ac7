"""Problems with gold answers: two built-in generators, and JSONL files."""

from dew.tasks.base import Row, Task, demonstrations
from dew.tasks.chain import Chain
from dew.tasks.countdown import Countdown
from dew.tasks.jsonl import Jsonl, read_jsonl
from dew.tasks.registry import task

__all__ = ["Chain", "Countdown", "Jsonl", "Row", "Task", "demonstrations", "read_jsonl", "task"]
