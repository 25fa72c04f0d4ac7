"""What ends a run from outside, told as advice: a full disk."""

import errno
import os
import shutil
from pathlib import Path

from dew.errors import EngineError

FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""What the system, or a library that writes weights, says."""
NEXT_TO_NOTHING = 1 << 20


def disk_full(error: BaseException, folder: Path | str) -> EngineError | None:
    """The error of a run whose disk is full; None if that is not what `error` is about.

    torch says only that writing failed, so what is left on the disk is asked too.
    """
    free = shutil.disk_usage(folder).free if Path(folder).is_dir() else NEXT_TO_NOTHING
    writing = any(text in str(error) for text in FULL)
    if not writing and (free >= NEXT_TO_NOTHING or not isinstance(error, OSError | RuntimeError)):
        return None
    return EngineError(
        f"{folder}: the disk is full, and the run stopped. Earlier checkpoints are whole: free some space, then go "
        f"on with dew resume {folder}; save_total_limit and records_every say how much a run keeps."
    )
