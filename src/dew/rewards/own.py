"""A reward function of one's own, by import path or file: `my_package.rewards:score`, `rewards.py:score`.

It runs in a process of its own (host.py), so that a function that hangs, grows without end or brings the
interpreter down costs a batch of rewards and not the run:

    time      a batch has `timeout` seconds; then the process is ended, whatever it is busy with
    memory    the process may hold `memory` bytes; beyond that it is ended
    failures  a batch that was ended so is left out (None for each answer), and told; three in a row are an error

An exception, a wrong length or a wrong type is a mistake in the function, and an error at once.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from dew.errors import ConfigError, RewardError
from dew.rewards.child import Child, Ended
from dew.rewards.returned import Rewards
from dew.rewards.verdict import Completion

TIMEOUT = 600.0
"""Seconds for one batch."""
START = 180.0
"""Seconds that the function's module may take to load."""
PATIENCE = 3
"""Batches in a row that may be left out before the run ends."""
UNSENT = ("environments",)
"""What TRL hands over and no other process can have."""

log = logging.getLogger("dew.rewards")


class OwnReward:
    """A user's function, called as TRL calls it, bounded, and checked on the way back."""

    def __init__(self, path: str, *, timeout: float = TIMEOUT, memory: float | None = None, seed: int = 0) -> None:
        where, _, name = path.rpartition(":")
        if not where or not name.isidentifier():
            raise ConfigError(f"reward {path!r}: write module:function, or file.py:function.")
        if not timeout > 0:
            raise ConfigError(
                f"reward_timeout={timeout}: seconds for one batch, more than 0. {TIMEOUT:g} is the default."
            )
        if where.endswith(".py") and not Path(where).is_file():
            raise ConfigError(f"reward file {where!r}: there is no such file (looked from {Path.cwd()}).")
        self.path, self.name, self.timeout, self.seed = path, name, timeout, seed
        self.memory = memory
        self._failures = 0
        self._child: Child | None = None
        self._start()

    @property
    def __name__(self) -> str:  # what TRL calls the reward in its logs
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to another process it is the same function, in a process of that one's own."""
        return load_reward, (self.path, self.timeout, self.memory, self.seed)

    def __call__(self, completions: Sequence[Completion], **columns: Any) -> Rewards:
        if self._child is None or self._child.owner != os.getpid():
            self._start()
        assert self._child is not None
        try:
            reply = self._child.ask(self._job(completions, columns), self.timeout)
        except Ended as why:
            self._child.end()
            self._child = None
            return self._left_out(str(why), completions, columns)
        self._failures = 0
        self._replay(reply.get("logged", []), columns)
        if "error" in reply:
            raise RewardError(f"{reply['error']} {_asked(completions, columns)}")
        return reply["rewards"]

    def _start(self) -> None:
        self._child = Child(self.path, self.memory, self.seed)
        try:
            hello = self._child.hear(START)
        except Ended as why:
            said = self._child.end()
            raise ConfigError(f"reward {self.path!r} cannot be loaded: its process {why}.{said}") from None
        if "error" in hello:
            self._child.end()
            raise ConfigError(hello["error"])
        self.required: list[str] = hello["required"]

    def _job(self, completions: Sequence[Completion], columns: Mapping[str, Any]) -> bytes:
        state = columns.get("trainer_state")
        sent = {name: value for name, value in columns.items() if name not in UNSENT and not callable(value)}
        if state is not None:
            sent["trainer_state"] = {k: v for k, v in vars(state).items() if isinstance(v, int | float | str)}
        job = {
            "completions": completions,
            "columns": sent,
            "logs": [name for name in ("log_extra", "log_metric") if name in columns],
            "limit": self.timeout,
        }
        try:
            return json.dumps(job, default=_plain).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"The reward {self.name} runs in a process of its own, and a column cannot be sent there: {error}. "
                "Leave that column out of the data, or pass the function itself to DewTrainer from Python."
            ) from None

    def _left_out(self, why: str, completions: Sequence[Completion], columns: Mapping[str, Any]) -> Rewards:
        self._failures += 1
        message = f"The reward {self.name}: its process {why}. {_asked(completions, columns)}"
        if self._failures >= PATIENCE:
            raise RewardError(
                f"{message} That was {self._failures} batches in a row, and the run ends. Let the function give up by "
                "itself and return None where it cannot judge, or raise reward_timeout or reward_memory."
            )
        log.warning("%s These answers are left out (%d of %d in a row).", message, self._failures, PATIENCE)
        return [None] * len(completions)

    @staticmethod
    def _replay(logged: list[list[Any]], columns: Mapping[str, Any]) -> None:
        for function, name, value in logged:
            if callable(columns.get(function)):
                columns[function](name, value)


def load_reward(path: str, timeout: float = TIMEOUT, memory: float | None = None, seed: int = 0) -> OwnReward:
    """The function behind `module:function` or `file.py:function`, in its process."""
    return OwnReward(path, timeout=timeout, memory=memory, seed=seed)


def _plain(value: Any) -> str:
    if isinstance(value, date | time | Decimal | Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not text, a number, a list or a mapping of those")


def _asked(completions: Sequence[Completion], columns: Mapping[str, Any]) -> str:
    prompts = columns.get("prompts") or [None]
    about = f", the first to the prompt {prompts[0]!r:.120}" if prompts[0] is not None else ""
    return f"It was judging {len(completions)} completions{about}."
