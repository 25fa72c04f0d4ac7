"""A user's reward function: calls with checked return values and readable errors, and functions given by path
(`rewards.py:score`, `package.rewards:score` or TRL's `package.rewards.score`).

A function given by path runs in its own process with time and memory limits (process.py). If it exceeds them, the
answers of the batch get None, with a warning; the third such batch in a row is an error. So are exceptions and wrong
types, immediately.
"""

import asyncio
import inspect
import json
import logging
import math
import pkgutil
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import date, time
from decimal import Decimal
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from reprlib import repr as short_repr
from traceback import format_exception_only
from types import SimpleNamespace
from typing import Any

import psutil

from dew.errors import ConfigError, Problem, RewardError, did_you_mean, user_line
from dew.rewards.process import INHERITED, Process, ProcessFailed
from dew.rewards.verifiers import Completion, Verifier
from dew.rewards.worker import answer_requests, encode

Rewards = list[float | None]

NOT_FINITE = math.inf  # replaces every infinity and NaN that a function returned, because NaN means None in TRL
TIMEOUT = 600.0  # seconds per batch
MAX_FAILURES = 3  # consecutive failed batches that end the run

log = logging.getLogger("dew.rewards")


# ── one call ────────────────────────────────────────────────────────────────────────────────────────────────
def reward_name(reward: Any) -> str:
    """Return its name in TRL: that of the function, of a callable's class, or the last part of a model's path."""
    while isinstance(reward, partial):
        reward = reward.func
    path = reward if isinstance(reward, str) else getattr(getattr(reward, "config", None), "_name_or_path", None)
    return str(getattr(reward, "__name__", type(reward).__name__)) if path is None else path.split("/")[-1]


def describe_batch(completions: Sequence[Any], prompts: Sequence[Any] | None) -> str:
    first = f", the first {completions[0]!r:.200}" if completions else ""
    prompt = f" for the prompt {prompts[0]!r:.120}" if prompts else ""
    return f"It was scoring {len(completions)} answers{first}{prompt}."


@contextmanager
def reported(name: str, completions: Sequence[Any], prompts: Sequence[Any] | None) -> Iterator[None]:
    """Turn any exception of the block into a RewardError that names the function and the batch."""
    batch = describe_batch(completions, prompts)
    try:
        yield
    except RewardError as error:
        raise RewardError([replace(problem, why=problem.why or batch) for problem in error.problems]) from error
    except (Exception, SystemExit) as error:  # sys.exit() in a reward function must not end the run silently
        what = f"The reward {name} failed: {describe(error)}{user_line(error)}."
        remedy = "Catch this error, and return None for answers that cannot be scored."
        if f"{name}() got an unexpected keyword argument" in str(error):
            remedy = "Add **kwargs to its parameters: it gets all columns of the data, and what TRL adds."
        elif "string indices must be integers" in str(error):
            remedy = "It reads chat messages, but answers to prompts that are text are text."
        raise RewardError(Problem(what, batch, remedy)) from error


def call_reward(name: str, function: Callable[..., Any], completions: Sequence[Any], /, **columns: Any) -> Rewards:
    """Call a reward function as TRL does (awaiting a coroutine) and return its rewards."""
    n = len(completions)  # before the function can change the list
    with reported(name, completions, columns.get("prompts")):
        values = function(completions=completions, **columns)
        if inspect.iscoroutine(values):
            values = asyncio.run(values)
        return as_rewards(name, values, n)


def describe(error: BaseException) -> str:
    """Describe an exception in one short line."""
    return " ".join("".join(format_exception_only(error)).split())[:300]


def as_rewards(name: str, values: Any, n: int) -> Rewards:
    """Return `values` as a list of n numbers or None (no reward). Raises RewardError for anything else."""
    listed = hasattr(values, "__iter__") and not isinstance(values, str | bytes | Mapping | Set)
    if not listed or getattr(values, "ndim", 1) != 1:
        raise _returned(name, values)
    found = list(islice(values, n + 1))  # a generator may be endless
    if len(found) != n:
        count = f"more than {n}" if len(found) > n else len(found)
        problem = f"The reward {name} returned {count} rewards for {n} answers."
        raise RewardError(Problem(problem, remedy="Return one per answer, in the same order."))
    return [None if value is None else _number(name, value) for value in found]


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes) or getattr(value, "ndim", 0) != 0:
            raise TypeError
        number = float(value)
    except Exception:  # __float__ is the user's and may raise anything
        raise _returned(name, value) from None
    return number if math.isfinite(number) else NOT_FINITE


def _returned(name: str, value: Any) -> RewardError:
    problem = f"The reward {name} returned {type(value).__name__} {short_repr(value)}."
    return RewardError(Problem(problem, remedy="Return a list: for each answer a number, or None for no reward."))


# ── by path, in a separate process ──────────────────────────────────────────────────────────────────────────
def is_user_function(name: str) -> bool:
    """Whether a name is a path to user code: `module:function`, `file.py:function` or `module.function`."""
    return ":" in name or "." in name


def required_columns(function: Callable[..., Any]) -> Sequence[str]:
    """Return the columns that the data must have: its `columns`, or its parameters without a default."""
    if isinstance(function, Verifier | UserFunction):
        return function.columns
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty]


class UserFunction:
    """A user's function in its own process, called as TRL calls reward functions.

    Its file or module is looked up in the working folder, in `folders`, then on sys.path.
    """

    def __init__(
        self, path: str, timeout: float = TIMEOUT, memory: float | None = None, seed: int = 0,
        folders: Sequence[str | Path] = (),
    ) -> None:  # fmt: skip
        where, _, name = path.rpartition(":" if ":" in path else ".")
        if not where or not name.isidentifier() or path.endswith(".py"):
            remedy = "Write module:function or file.py:function."
            raise ConfigError(Problem(f"reward {path!r} does not name a function.", remedy=remedy))
        self.path, self.name, self.timeout, self.seed = path, name, timeout, seed
        self.__name__ = name  # the name under which TRL logs the reward
        self.memory = memory or psutil.virtual_memory().total / 2
        self.folders = list(dict.fromkeys(str(Path(folder).absolute()) for folder in (Path.cwd(), *folders)))
        self._where = _find_file(where, self.folders) if where.endswith(".py") else where
        self._failures = 0
        self.forget()
        self._process: Process | None = self._start()
        INHERITED.add(self)

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._process = None

    def __call__(self, completions: Sequence[Completion], **columns: Any) -> Rewards:
        request = self._request(completions, columns)
        with self._lock:
            process = self._process or self._start()
            self._process = None  # after Ctrl-C, its late reply would be mistaken for the reply to the next request
            try:
                reply = process.ask(request, self.timeout)
            except ProcessFailed as failure:
                batch = describe_batch(completions, columns.get("prompts"))
                self._count_failure(f"The reward {self.name}: its process {failure}. {batch}")
                return [None] * len(completions)
            self._process, self._failures = process, 0
        if "problem" in reply:
            raise RewardError(Problem(**reply["problem"]))
        for function, name, value in reply["logged"]:
            columns[function](name, value)
        return reply["rewards"]

    def _start(self) -> Process:
        arguments = {"where": self._where, "name": self.name, "seed": self.seed, "folders": self.folders}
        try:
            process = Process("dew.rewards.user_function:serve", arguments, show_output=True, memory=self.memory)
        except ProcessFailed as failure:
            raise ConfigError(f"reward {self.path!r} cannot be loaded: its process {failure}.") from None
        if "problem" in process.hello:
            process.kill()
            raise ConfigError(Problem(**process.hello["problem"]))
        self.columns: list[str] = process.hello["columns"]
        return process

    def _request(self, completions: Sequence[Completion], columns: Mapping[str, Any]) -> bytes:
        sent = {name: value for name, value in columns.items() if name != "environments" and not callable(value)}
        if (state := columns.get("trainer_state")) is not None:
            sent["trainer_state"] = {k: v for k, v in vars(state).items() if isinstance(v, int | float | str)}
        logs = [name for name in ("log_extra", "log_metric") if callable(columns.get(name))]
        for name, value in sent.items():
            try:
                encode(value, _as_text)
            except (TypeError, ValueError) as error:
                problem = f"The column {name!r} cannot be sent to the process of the reward {self.name}: {error}."
                remedy = "Remove that column from the data, or pass the function itself to DewTrainer in Python."
                raise RewardError(Problem(problem, remedy=remedy)) from None
        return encode({"completions": completions, "columns": sent, "logs": logs}, _as_text)

    def _count_failure(self, message: str) -> None:
        self._failures += 1
        if self._failures < MAX_FAILURES:
            log.warning("%s These answers get no reward (%d of %d in a row).", message, self._failures, MAX_FAILURES)
            return
        remedy = "Return None for answers that cannot be scored in time, or raise reward_timeout or reward_memory."
        raise RewardError(Problem(message, f"The run stops after {self._failures} failed batches in a row.", remedy))


def _find_file(where: str, folders: Sequence[str]) -> str:
    found = next((file for folder in (*folders, *sys.path) if (file := Path(folder, where)).is_file()), None)
    if found is None:
        nearby = [file.name for folder in folders for file in Path(folder, where).parent.glob("*.py")]
        hint = did_you_mean(Path(where).name, nearby)
        raise ConfigError(Problem(f"reward file {where!r}: no such file in {' or '.join(folders)}.", remedy=hint))
    return str(found.absolute())


def _as_text(value: Any) -> str:
    """Convert dates, exact decimals and paths, which data sets may contain, to text."""
    if isinstance(value, date | time | Decimal | Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not text, a number, a list or a mapping of those")


# ── in the function's process ───────────────────────────────────────────────────────────────────────────────
def serve(channel: socket.socket, where: str, name: str, seed: int, folders: list[str]) -> None:
    """Entry point: load the function, then call it for each request."""
    with suppress(OSError):  # if memory runs out, the kernel kills this process before the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    random.seed(seed)
    try:
        function = _load(where, name, folders)
    except ConfigError as error:
        channel.sendall(encode({"problem": asdict(error.problems[0])}))
        return
    channel.sendall(encode({"columns": required_columns(function)}))
    answer_requests(channel, lambda request: _call(function, name, request))


def _load(where: str, name: str, folders: list[str]) -> Callable[..., Any]:
    sys.path[:0] = [str(Path(where).parent), *folders] if where.endswith(".py") else folders
    try:
        if where.endswith(".py"):
            spec = spec_from_file_location(Path(where).stem, where)
            assert spec and spec.loader
            module = module_from_spec(spec)
            sys.modules.setdefault(spec.name, module)  # needed by data classes
            spec.loader.exec_module(module)
        else:
            module = import_module(where)
    except BaseException as error:
        known = [module.name for module in pkgutil.iter_modules(folders)]
        remedy = did_you_mean(where.partition(".")[0], known) if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(Problem(f"reward {where!r} cannot be imported: {describe(error)}.", remedy=remedy)) from None
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        listed = f"It has: {', '.join(there) or 'none'}."
        raise ConfigError(Problem(f"reward {where!r} has no function {name!r}.", listed, did_you_mean(name, there)))
    return function


def _call(function: Callable[..., Any], name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return rewards and values to log, or a problem."""
    columns, logged = request["columns"], []

    def record(log: str, key: str, value: Any) -> None:  # fail here if a value cannot be sent
        logged.append(json.loads(json.dumps([log, key, value], default=float)))

    columns |= {log: partial(record, log) for log in request["logs"]}
    if columns.get("trainer_state") is not None:
        columns["trainer_state"] = SimpleNamespace(**columns["trainer_state"])
    try:
        return {"rewards": call_reward(name, function, request["completions"], **columns), "logged": logged}
    except RewardError as error:
        return {"problem": asdict(error.problems[0])}
