"""What dew relies on in TRL: names. tests/trl/test_compat.py checks these, keys and return values."""

import sys
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

HEAD_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""What that function returns, and the fields of the forward pass in which TRL puts it, one number per token."""


def check_not_unsloth() -> None:
    """Fail if Unsloth is imported: its trainer has a `compute_loss` of its own, which never calls dew's."""
    if "unsloth" in sys.modules:
        why = "It replaces TRL's GRPOTrainer.compute_loss, so that dew's loss would silently not run."
        remedy = (
            "Leave it out: load the model with transformers and pass peft_config=LoraConfig(...) for LoRA (in a "
            "recipe use_peft: true, with load_in_4bit: true for QLoRA); use_vllm=True samples fast."
        )
        raise EngineError(Problem("Unsloth is imported in this process.", why, remedy))


def check_generated(values: Sequence[Any]) -> None:
    """Fail if `_generate` changed, as it did in several TRL releases: columns would be mixed up without an error."""
    if len(values) != GENERATED:
        what = f"TRL {version('trl')} returns {len(values)} values from _generate; dew knows {GENERATED}."
        raise EngineError(Problem(what, remedy=f"Run: pip install 'trl=={SUPPORTED['trl'][2]}'."))
