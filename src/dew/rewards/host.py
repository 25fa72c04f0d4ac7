"""The far end of child.py: a process that loads one reward function and calls it, batch after batch."""

import asyncio
import inspect
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from dew.errors import ConfigError, DewError
from dew.rewards.returned import as_rewards, told

GRACE = 2.0
"""Seconds after a batch's limit when the kernel ends this process, should nobody be left to do it."""


def serve(fd: int, path: str, seed: int) -> None:
    """Load the function, say so, then answer until the line is closed."""
    channel = socket.socket(fileno=fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _first_to_go()
    random.seed(seed)
    try:
        function = load(path)
    except BaseException as error:
        _send(channel, {"error": str(error) if isinstance(error, DewError) else f"reward {path!r}: {told(error)}."})
        return
    _send(channel, {"required": required(function)})
    name = path.rpartition(":")[2]
    for line in channel.makefile("rb"):
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, job["limit"] + GRACE)
        here = os.getpid()
        reply = answer(function, name, job)
        if os.getpid() != here:  # the function forked and came back twice: the copy has nothing to say
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(channel, reply)


def answer(function: Callable[..., Any], name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Rewards, or one sentence about what went wrong, and what the function wanted logged."""
    completions, columns = job["completions"], job["columns"]
    logged: list[list[Any]] = []
    for log in job["logs"]:
        columns[log] = lambda key, value, log=log: logged.append([log, str(key), value])
    if "trainer_state" in columns:
        columns["trainer_state"] = SimpleNamespace(**columns["trainer_state"])
    n = len(completions)
    try:
        values = function(completions=completions, **columns)
        if inspect.isawaitable(values):
            values = asyncio.run(_awaited(values))
        reply: dict[str, Any] = {"rewards": as_rewards(name, values, n)}
    except DewError as error:
        reply = {"error": str(error)}
    except BaseException as error:  # SystemExit too: a reward does not end a run
        given = ", ".join(f"{column}=[...]" for column in columns)
        reply = {
            "error": f"The reward {name} failed: {told(error)}{_where(error)}. It is called as "
            f"{name}(completions=[...], {given}) and returns a number each; catch what can go wrong and return None "
            "where it cannot judge."
        }
    return {**reply, "logged": logged}


async def _awaited(values: Any) -> Any:
    return await values


def _where(error: BaseException) -> str:
    """The line of the user's file that raised it."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(str(Path(__file__).parent)):
            place = f" ({Path(code.co_filename).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place


def _send(channel: socket.socket, reply: dict[str, Any]) -> None:
    try:
        channel.sendall(json.dumps(reply, default=float).encode() + b"\n")
    except (TypeError, ValueError) as error:  # something that was to be logged
        channel.sendall(json.dumps({"error": f"what the reward logs cannot be sent: {told(error)}."}).encode() + b"\n")


def _first_to_go() -> None:
    """Where memory runs out, the kernel ends this process rather than the training."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


# ── the function ────────────────────────────────────────────────────────────────────────────────────────────


def load(path: str) -> Callable[..., Any]:
    """The function behind `module:function` or `file.py:function`."""
    where, _, name = path.rpartition(":")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(f"reward {path!r}: {where} has no function {name!r}. It has: {', '.join(there) or 'none'}.")
    return function


def required(function: Callable[..., Any]) -> list[str]:
    """The columns that it cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty]


def _from_module(name: str) -> ModuleType:
    try:
        return import_module(name)
    except BaseException as error:
        raise ConfigError(
            f"reward module {name!r} cannot be imported: {told(error)}. Is it installed, or on PYTHONPATH? A file is "
            "given with its ending: file.py:function."
        ) from error


def _from_file(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # what its classes and dataclasses look for
    sys.path.insert(0, str(path.parent.resolve()))  # what the file imports from its own folder
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise ConfigError(f"reward file {str(path)!r} fails to load: {told(error)}.") from error
    return module
