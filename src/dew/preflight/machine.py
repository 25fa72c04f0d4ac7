"""The machine: memory, disk, GPUs, and the folder that a run writes to."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from dew.preflight.check import Check, failed, ok, warning

GB = 1e9


def size(nbytes: float) -> str:
    """1.5e9 -> 1.5 GB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes / 1e3:.3g} kB"


def free_host_memory() -> int:
    """Bytes that a process can still allocate, within the container's limit if there is one."""
    import psutil

    available = int(psutil.virtual_memory().available)
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit, used = int((cgroup / "memory.max").read_text()), int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup, or its limit is "max"
        return available
    return min(available, limit - used)


def gpus() -> list[dict[str, Any]]:
    import torch

    found = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(i)
        capability = ".".join(map(str, torch.cuda.get_device_capability(i)))
        found.append({"name": torch.cuda.get_device_name(i), "free": free, "total": total, "capability": capability})
    return found


def free_device_memory(use_cpu: bool) -> tuple[str, int]:
    """(name, free bytes) of the device that a run would use."""
    for gpu in [] if use_cpu else gpus():
        return gpu["name"], gpu["free"]
    return "this machine", free_host_memory()


def existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def free_disk(path: Path) -> int:
    return shutil.disk_usage(existing(path)).free


def check_folder(folder: Path) -> Check:
    """Whether a run's folder can be created and written to."""
    parent = existing(folder)
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        says = f"output_dir={str(folder)!r}: cannot write to {parent} ({error.strerror})."
        return failed("folder", says, "Choose another output_dir, or fix the permissions.")
    if folder.is_dir() and any(folder.iterdir()):
        says = f"output_dir={str(folder)!r} is not empty; `dew train` would refuse to use it."
        return warning("folder", says, f"dew resume {folder}, another output_dir, or --overwrite.")
    return ok("folder", f"output_dir={str(folder)!r} is writable.")
