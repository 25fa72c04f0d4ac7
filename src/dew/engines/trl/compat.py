"""What dew relies on in TRL: names. tests/trl/test_compat.py checks these, keys and return values."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from dew.engines.compat import SUPPORTED
from dew.errors import EngineError, Problem

IMAGE_KEYS = ("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
              "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids")  # fmt: skip
"""Further inputs of vision-language models, passed to the forward pass unchanged."""

GENERATED = 8
"""Values that `_generate` returns; dew reads the completions and the tool mask by position."""

FUSED_HEAD = "_ChunkedLogProbFunction"
"""The name in `trl.trainer.utils` under which TRL's forward finds the autograd function of the fused head."""


def check_generated(values: Sequence[Any]) -> None:
    """Fail if `_generate` changed, as it did in several TRL releases: columns would be mixed up without an error."""
    if len(values) != GENERATED:
        what = f"TRL {version('trl')} returns {len(values)} values from _generate; dew knows {GENERATED}."
        raise EngineError(Problem(what, remedy=f"Run: pip install 'trl=={SUPPORTED['trl'][1]}'."))
