"""The files of dew that one batch passes through, in the order in which it reaches them, by tracing one.

python scripts/batch_path.py trl    one generation, update and record of the TRL engine
python scripts/batch_path.py lab    one generation of the lab
"""

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "dew"


@contextmanager
def traced() -> Iterator[dict[str, str]]:
    """File -> the first function of it that is called, in order."""
    found: dict[str, str] = {}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(SOURCE)) and not frame.f_code.co_name.startswith("<module"):
            found.setdefault(str(Path(path).relative_to(SOURCE)), frame.f_code.co_name)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def trl() -> dict[str, str]:
    """From the start of a training step, in which TRL samples a generation, to the line of metrics."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import trl_tiny

    found: dict[str, str] = {}

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with traced() as files:
                result = function(*args, **kwargs)
            found.update({name: first for name, first in files.items() if name not in found})
            return result

        return call

    with tempfile.TemporaryDirectory() as folder:
        trainer = trl_tiny.trainer(Path(folder), algorithm="gtpo", records_every=1, max_steps=1)
        trainer.training_step = watched(trainer.training_step)
        trainer._maybe_log_save_evaluate = watched(trainer._maybe_log_save_evaluate)
        trainer.train()
    return found


def lab() -> dict[str, str]:
    import torch

    from dew.engines.lab import TASKS, TinySettings
    from dew.engines.lab.arms import parse_arms
    from dew.engines.lab.stack import Replica, Stack
    from dew.engines.lab.tasks import generator
    from dew.engines.lab.tiny import TinyPolicies, new_policy

    arm = parse_arms(["gtpo"], [1e-4], controls=False)[0]
    task = replace(TASKS["countdown-3"], verdict=lambda answers, facts: answers[:, 0] % 2 == 0)  # untrained: no signal
    start = new_policy(32, 1, task.prompt_length + task.tokens, generator("weights"))
    policies = TinyPolicies(start, torch.tensor([arm.learning_rate]))
    stack = Stack(task, policies, [Replica(arm, 0)], TinySettings(prompts=2, group_size=8, width=32, depth=1), "cpu")
    with traced() as found:
        stack.generation(0)
    return found


if __name__ == "__main__":
    engines = {"trl": trl, "lab": lab}
    if sys.argv[1:2] not in ([name] for name in engines):
        sys.exit(f"Give one of: {', '.join(engines)}.")
    for number, (file, function) in enumerate(engines[sys.argv[1]]().items(), start=1):
        print(f"{number:3}  {file:32} {function}")
