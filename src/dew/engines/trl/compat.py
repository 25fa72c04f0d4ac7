"""What dew relies on in TRL: versions, keys, return values. tests/trl/test_compat.py checks these and the methods."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dew.errors import EngineError, Problem

OLDEST, TOO_NEW = (1, 14), (2, 0)

BATCH_KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch")
"""Keys that `_generate_and_score_completions` always returns."""

IMAGE_KEYS = ("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
              "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids")  # fmt: skip
"""Further inputs of vision-language models, passed to the forward pass unchanged."""

GENERATED = ("prompt_ids", "completion_ids", "tool_mask", "completions", "logprobs", "extra_fields", "images",
             "tool_images")  # fmt: skip
"""The eight values that `_generate` returns, in this order."""

FUSED_HEAD = "_ChunkedLogProbFunction"
"""The name in `trl.trainer.utils` under which TRL's forward finds the autograd function of the fused head."""


def require_trl() -> None:
    """Fail at import, with a clear message, if TRL is missing or not supported."""
    try:
        found = version("trl")
    except PackageNotFoundError:
        raise EngineError(Problem("TRL is not installed.", remedy="Run: pip install 'dew-rl[trl]'.")) from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not OLDEST <= numbers < TOO_NEW:
        what = f"TRL {found} is installed; dew works with TRL >= 1.14 and < 2."
        why = "Earlier releases do not average the gradients of the fused head over processes."
        raise EngineError(Problem(what, why, "Run: pip install 'trl>=1.14,<2'."))


def check_batch(batch: dict[str, Any]) -> None:
    missing = [key for key in BATCH_KEYS if key not in batch]
    if missing:
        raise _incompatible(f"returned a batch without {', '.join(missing)}, which dew needs.")


def check_generated(values: Sequence[Any]) -> None:
    if len(values) != len(GENERATED):
        raise _incompatible(f"returns {len(values)} values from _generate, dew expects: {', '.join(GENERATED)}.")


def _incompatible(what: str) -> EngineError:
    return EngineError(Problem(f"TRL {version('trl')} {what}", remedy="Run: pip install 'trl==1.16.0'."))
