"""What dew relies on in TRL: versions and names. tests/trl/test_compat.py checks these, keys and return values."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dew.errors import EngineError, Problem

OLDEST, TOO_NEW = (1, 14), (2, 0)

IMAGE_KEYS = ("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
              "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids")  # fmt: skip
"""Further inputs of vision-language models, passed to the forward pass unchanged."""

GENERATED = 8
"""Values that `_generate` returns; dew reads the completions and the tool mask by position."""

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


def check_generated(values: Sequence[Any]) -> None:
    """Fail if `_generate` changed, as it did in several TRL releases: columns would be mixed up without an error."""
    if len(values) != GENERATED:
        what = f"TRL {version('trl')} returns {len(values)} values from _generate; dew knows {GENERATED}."
        raise EngineError(Problem(what, remedy="Run: pip install 'trl==1.16.0', which dew is tested with."))
