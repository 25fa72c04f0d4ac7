"""What this machine has: memory, disk, a GPU."""

import os
import shutil
from pathlib import Path
from typing import Any

GB = 1e9


def size(nbytes: float) -> str:
    """1.5e9 -> 1.5 GB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes / 1e3:.3g} kB"


def free_host_memory() -> int:
    """Bytes that a process could still take: of the machine, and of the container around it if there is one."""
    free = [found for found in (_meminfo("MemAvailable"), _cgroup_free()) if found is not None]
    return min(free) if free else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _cgroup_free() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None


def free_device_memory(use_cpu: bool) -> tuple[str, int]:
    """(the device in words, free bytes) of the device that a run would take."""
    import torch

    if torch.cuda.is_available() and not use_cpu:
        return torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
    return "this machine", free_host_memory()


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def free_disk(path: Path) -> int:
    return shutil.disk_usage(existing(path)).free


def gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [
        {
            "name": torch.cuda.get_device_name(i),
            "free": torch.cuda.mem_get_info(i)[0],
            "total": torch.cuda.mem_get_info(i)[1],
            "capability": ".".join(map(str, torch.cuda.get_device_capability(i))),
        }
        for i in range(torch.cuda.device_count())
    ]
