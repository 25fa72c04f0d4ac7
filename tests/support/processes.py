"""Whether processes are still there, and whether they compute."""

import os
import time
from pathlib import Path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_busy(pid: int, seconds: float = 0.1, patience: float = 90.0) -> None:
    """Wait until a process has computed for so long, from now on."""

    def computed() -> float:
        user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    start, end = computed(), time.monotonic() + patience
    while computed() < start + seconds:
        assert time.monotonic() < end, "it does not compute"
        time.sleep(0.01)


def gone(*pids: int, patience: float = 90.0) -> bool:
    """A killed process disappears a moment later."""
    end = time.monotonic() + patience
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(alive, pids))
