"""What dew relies on in TRL: versions and names. tests/trl/test_compat.py checks these, keys and return values."""

from importlib.metadata import PackageNotFoundError, version

from dew.errors import EngineError, Problem

OLDEST, TOO_NEW = (1, 14), (2, 0)

IMAGE_KEYS = ("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
              "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids")  # fmt: skip
"""Further inputs of vision-language models, passed to the forward pass unchanged."""

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
