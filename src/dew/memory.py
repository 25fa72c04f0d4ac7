"""Free host memory, within the limits of the container, job or service that the process runs in."""

from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def free_memory() -> int:
    """Bytes that this process can still allocate."""
    return max(0, min([psutil.virtual_memory().available, *_left_in_groups()]))


def _left_in_groups() -> Iterator[int]:
    """Limit − usage of each control group of this process that has a limit. Cached files do not count as used."""
    lines = MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.exists() else []
    for controllers, group in (line.split(":", 2)[1:] for line in lines):
        if controllers not in ("", "memory"):
            continue
        limit, used, cached = V1 if controllers else V2
        inner = GROUPS / controllers / group.lstrip("/")  # often absent in a container, whose own group is the root
        for folder in (inner, *inner.parents):
            try:
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield int((folder / limit).read_text()) - int((folder / used).read_text()) + int(stat.get(cached, 0))
            except (OSError, ValueError):  # no such group, or its limit is "max"
                continue
