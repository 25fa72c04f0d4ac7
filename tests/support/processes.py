"""Whether processes are still there."""

import time
from pathlib import Path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def gone(*pids: int, patience: float = 90.0) -> bool:
    """A killed process disappears a moment later."""
    end = time.monotonic() + patience
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(alive, pids))
