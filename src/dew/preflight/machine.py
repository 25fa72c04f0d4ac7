"""The machine and the installation: memory, disk, GPUs, versions, and `dew doctor`. Imports no TRL."""

import os
import platform
import shutil
from pathlib import Path
from typing import Any

from packaging.version import Version

from dew.engines.compat import SUPPORTED, installed, supported, tried
from dew.files import existing, try_writing
from dew.memory import free_memory
from dew.preflight import Check, failed, graded, guarded, ok, warning

GB = 1e9
PACKAGES = (
    "torch", "transformers", "trl", "accelerate", "peft", "datasets", "math-verify", "triton", "vllm", "verl", "ray",
    "tensordict", "TransferQueue",
)  # fmt: skip
"""The packages to show."""
TRAINING_NEEDS = {
    "trl": ("transformers", "trl", "accelerate", "datasets"),
    "verl": ("verl", "ray", "TransferQueue"),
}


def size(nbytes: float) -> str:
    """1.5e9 -> 1.5 GB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes / 1e3:.3g} kB"


def gpus() -> list[dict[str, Any]]:
    import torch

    found = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(i)
        capability = ".".join(map(str, torch.cuda.get_device_capability(i)))
        found.append({"name": torch.cuda.get_device_name(i), "free": free, "total": total, "capability": capability})
    return found


def free_disk(path: Path) -> int:
    return shutil.disk_usage(existing(path)).free


def check_folder(folder: Path) -> Check:
    """Whether a run's folder can be created and written to."""
    parent = existing(folder)
    try:
        try_writing(parent)
    except OSError as error:
        says = f"output_dir={str(folder)!r}: cannot write to {parent} ({error.strerror})."
        return failed("folder", says, "Choose another output_dir, or fix the permissions.")
    if folder.is_dir() and any(path.name != ".lock" for path in folder.iterdir()):
        says = f"output_dir={str(folder)!r} is not empty, so `dew train` will not use it."
        return warning("folder", says, f"Resume (dew resume {folder}), choose another output_dir, or add --overwrite.")
    return ok("folder", f"output_dir={str(folder)!r} is writable.")


def versions() -> list[dict[str, str | None]]:
    """A row per package: the installed version, and the releases that dew supports, where it depends on them."""
    return [
        {"package": name, "installed": installed(name), "supported": SUPPORTED[name][0] if name in SUPPORTED else None}
        for name in PACKAGES
    ]


def check_versions(engine: str | None = None) -> Check:
    """Whether an engine's packages are installed, in supported releases; by default, of the engine installed here."""
    engine = engine or ("verl" if installed("verl") else "trl")
    found = {name: installed(name) for name in TRAINING_NEEDS[engine]}
    present = {name: number for name, number in found.items() if number is not None}
    releases = {name: number for name, number in present.items() if name in SUPPORTED}
    facts: dict[str, Any] = {"engine": engine, "installed": found}
    install = f"pip install {' '.join(f'{name}=={SUPPORTED[name][2]}' for name in releases)}"
    if broken := [f"{name} {number}" for name, number in releases.items() if not supported(name, number)]:
        return failed("versions", f"Not supported: {', '.join(broken)}.", install, **facts)
    if missing := [name for name in found if name not in present]:
        says = f"To train on {engine}, install: {', '.join(missing)}."
        return warning("versions", says, f"pip install 'dew-rl[{engine}]'.", **facts)
    newer = [name for name, number in releases.items() if Version(number) > Version(SUPPORTED[name][2])]
    shown = ", ".join(f"{name} {number}" for name, number in releases.items())
    says = f"{shown}; tried with {', '.join(map(tried, releases))}."
    return graded("versions", says, install, warn=bool(newer), **facts)


def doctor() -> list[Check]:
    """Fails only if something is broken or not supported."""
    checks = (check_torch, check_versions, check_gpu, check_triton, check_memory, check_disk)
    return [result for check in checks for result in guarded(check.__name__.removeprefix("check_"), check)]


def check_torch() -> Check:
    """Several processes with several threads each are many times slower than with one thread each."""
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    given, n, cores = os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads(), os.cpu_count()
    says = f"torch {torch.__version__} ({built}), Python {platform.python_version()} on {platform.platform()}; "
    says += f"OMP_NUM_THREADS={given or 'not set'}: {n} thread{'s' * (n != 1)} per process, {cores} cores."
    remedy = "export OMP_NUM_THREADS=1 if several processes share the cores."
    warn = given is None and n > 1 and not torch.cuda.is_available()
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    return graded("torch", says, remedy, warn=warn, OMP_NUM_THREADS=given, threads=n, cores=cores, **facts)


def check_gpu() -> Check:
    if found := gpus():
        shown = "; ".join(f"{gpu['name']}, {size(gpu['free'])} of {size(gpu['total'])} free" for gpu in found)
        return ok("gpu", f"{shown}.", gpus=found)
    if Path("/proc/driver/nvidia/version").exists():
        says = f"An NVIDIA driver is installed, but torch {installed('torch')} finds no GPU."
        return warning("gpu", says, "Install a CUDA build of torch, and run nvidia-smi.", gpus=[])
    return ok("gpu", "None. The tiny recipes run on a CPU; larger models need a GPU.", gpus=[])


def check_triton() -> Check:
    """On a GPU, compile and run a kernel and compare it with the reference implementation."""
    found = installed("triton")
    if found is None:
        return ok("triton", "Not installed: torch computes the head in chunks instead.", version=None)
    if not gpus():
        return ok("triton", f"triton {found} is installed; its kernels need a GPU.", version=found)
    error = _kernel_error()
    if error > 1e-2:
        says = f"triton {found}: the kernel's result differs by {error:.2g} from the reference."
        return failed("triton", says, "Use impl='chunked', and report this output as a bug.", version=found)
    return ok("triton", f"triton {found} compiles and runs; largest error {error:.1g}.", version=found)


def _kernel_error() -> float:
    import torch

    from dew.kernels import linear_logprob_entropy

    torch.manual_seed(0)
    hidden = torch.randn(64, 64, device="cuda").bfloat16()
    weight = torch.randn(512, 64, device="cuda").bfloat16() / 8
    targets = torch.arange(64, device="cuda")
    ours = linear_logprob_entropy(hidden, weight, targets, impl="triton")
    plain = linear_logprob_entropy(hidden, weight, targets, impl="reference")
    return max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))


def check_memory() -> Check:
    free = free_memory()
    remedy = "Close other programs: training the tiny model takes about 1 GB."
    return graded("memory", f"{size(free)} of memory free.", remedy, warn=free < 1.5 * GB, free=free)


def check_disk() -> Check:
    free = free_disk(Path.cwd())
    says = f"{size(free)} free in {Path.cwd()}."
    return graded("disk", says, "Free some space, or use another disk.", warn=free < GB, free=free)
