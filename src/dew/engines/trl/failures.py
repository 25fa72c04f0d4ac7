"""Errors from outside the run, explained: a full disk, another process that ended."""

import errno
import os
import re
import shutil
from pathlib import Path

from dew.errors import DewError, EngineError, Problem

FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""What the system, or a library that writes weights, reports."""
ALMOST_NOTHING = 1 << 20
DISCONNECTED = re.compile(r"gloo|NCCL|ProcessGroup|TCPStore|[Cc]onnection (closed|reset|refused)|Broken pipe")


def disk_full(error: BaseException, folder: Path | str) -> EngineError | None:
    """The error of a run whose disk is full; None if `error` has another cause.

    torch reports only that writing failed, so the free space on the disk counts too.
    """
    free = shutil.disk_usage(folder).free if Path(folder).is_dir() else ALMOST_NOTHING
    full = any(text in str(error) for text in FULL)
    if not full and (free >= ALMOST_NOTHING or not isinstance(error, OSError | RuntimeError)):
        return None
    what, why = f"{folder}: the disk is full, and the run stopped.", "Earlier checkpoints are complete."
    remedy = f"Free some space, then run: dew resume {folder}. save_total_limit and records_every limit its size."
    return EngineError(Problem(what, why, remedy))


def process_lost(error: BaseException, rank: int, processes: int) -> EngineError | None:
    """The error of a process whose connection to another one broke; None if `error` has another cause.

    The launcher (torchrun, accelerate launch) stops the remaining processes and names the one that failed first.
    """
    if processes == 1 or not isinstance(error, RuntimeError) or not DISCONNECTED.search(str(error)):
        return None
    what = f"Process {rank} of {processes} lost the connection to another process, which failed or was killed."
    why = "Signal 9 often means that the machine ran out of memory."
    remedy = "See the output of the process that the launcher names, then run dew resume."
    return EngineError(Problem(what, why, remedy))


def explain(error: BaseException, folder: str, rank: int, processes: int) -> EngineError | None:
    """An error that says what to do about `error`; None if it already does, or if its cause is not known."""
    if isinstance(error, DewError):
        return None
    return disk_full(error, folder) or process_lost(error, rank, processes)
