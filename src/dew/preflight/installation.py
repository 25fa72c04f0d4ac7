"""The machine and the installation: what is there, whether it was tested together, whether it works."""

import os
import platform
import sys
from importlib import import_module
from pathlib import Path

from dew.preflight import versions
from dew.preflight.check import Check, failed, guarded, ok, warning
from dew.preflight.machine import GB, free_disk, free_host_memory, gpus, size

PYTHON = ((3, 11), (3, 14))
NEEDED = ("numpy", "scipy", "jaxtyping", "rich", "typer", "jinja2", "yaml")


def doctor() -> list[Check]:
    """Only what dew cannot do without can fail here; the rest is told or advised."""
    looks = {
        "python": check_python,
        "packages": check_packages,
        "torch": check_torch,
        "threads": check_threads,
        "versions": versions.check,
        "gpu": check_gpu,
        "triton": check_triton,
        "memory": check_memory,
        "disk": check_disk,
    }
    return [check for name, look in looks.items() for check in guarded(name, lambda look=look: [look()])]  # type: ignore[misc]


def check_python() -> Check:
    low, high = (".".join(map(str, bound)) for bound in PYTHON)
    says = f"Python {platform.python_version()} on {platform.platform()}."
    if PYTHON[0] <= sys.version_info[:2] < PYTHON[1]:
        return ok("python", says, version=platform.python_version())
    return failed("python", says, f"dew runs on Python {low} to below {high}.", version=platform.python_version())


def check_packages() -> Check:
    missing = []
    for name in NEEDED:
        try:
            import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        return failed("packages", f"Cannot be imported: {', '.join(missing)}.", "pip install dew-rl", missing=missing)
    return ok("packages", "All that dew needs besides torch can be imported.")


def check_torch() -> Check:
    import torch

    total = float(torch.ones(8, 8).matmul(torch.ones(8, 8)).sum())
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    says = f"torch {torch.__version__} ({built}), {_threads()} on {os.cpu_count()} cores."
    facts = {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    if total != 512:
        return failed("torch", f"{says} It multiplies wrongly.", "Install torch again.", **facts)
    return ok("torch", says, **facts)


def check_threads() -> Check:
    """Several processes with several threads each are many times slower than with one each."""
    import torch

    given, threads = os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()
    facts = {"OMP_NUM_THREADS": given, "threads": threads, "cores": os.cpu_count()}
    if given is None and threads > 1 and not torch.cuda.is_available():
        says = f"OMP_NUM_THREADS is not set, so each process takes {_threads()}."
        return warning("threads", says, "export OMP_NUM_THREADS=1 where several processes share the cores.", **facts)
    return ok("threads", f"OMP_NUM_THREADS={given or 'not set'}: {_threads()} for each process.", **facts)


def _threads() -> str:
    import torch

    n = torch.get_num_threads()
    return f"{n} thread{'s' * (n != 1)}"


def check_gpu() -> Check:
    import torch

    found = gpus()
    if found:
        shown = "; ".join(f"{gpu['name']}, {size(gpu['free'])} of {size(gpu['total'])} free" for gpu in found)
        return ok("gpu", f"{shown}.", gpus=found)
    if Path("/proc/driver/nvidia/version").exists():
        says = f"There is an NVIDIA driver, but torch {torch.__version__} sees no GPU."
        return warning("gpu", says, "Install a CUDA build of torch, and see nvidia-smi.", gpus=[])
    return ok("gpu", "None: the tiny recipes run on the CPU, larger models want a GPU.", gpus=[])


def check_triton() -> Check:
    """On a GPU a kernel is compiled, run and held against the plain line that it replaces."""
    found = versions.installed("triton")
    if found is None:
        return ok("triton", "Not installed: the head is computed in chunks by torch instead.", version=None)
    import torch

    if not torch.cuda.is_available():
        import_module("triton")
        return ok("triton", f"triton {found} can be imported; its kernels need a GPU.", version=found)
    error = _kernel_error()
    if error > 1e-2:
        says = f"triton {found} runs, but its head differs by {error:.2g} from the plain one."
        return failed("triton", says, "Report it with this output; write impl='chunked' meanwhile.", version=found)
    return ok("triton", f"triton {found} compiles and runs: the head differs by {error:.1g}.", version=found)


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
    if free < 1.5 * GB:
        says = f"{size(free)} of memory are free; training the tiny model takes about 1 GB."
        return warning("memory", says, "Close what else is running.", free=free)
    return ok("memory", f"{size(free)} of memory are free.", free=free)


def check_disk() -> Check:
    here = Path.cwd()
    free = free_disk(here)
    if free < GB:
        return warning("disk", f"{size(free)} are free in {here}.", "Make room, or name another output_dir.", free=free)
    return ok("disk", f"{size(free)} are free in {here}.", free=free)
