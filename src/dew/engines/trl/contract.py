"""What dew leans on in TRL: versions, keys and arities. A release that moves one of them fails here, by name."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dew.errors import EngineError

OLDEST, TOO_NEW = (1, 14), (2, 0)

BATCH_KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch")
"""What `_generate_and_score_completions` always returns."""

OPTIONAL_KEYS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "tool_mask",
                 "importance_sampling_ratio")  # fmt: skip
"""What it returns when there is such a thing. Every one has a row per completion."""

IMAGE_KEYS = ("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
              "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids")  # fmt: skip
"""What models with images need besides the tokens; handed on to the forward pass as it came."""

GENERATED = ("prompt_ids", "completion_ids", "tool_mask", "completions", "logprobs", "extra_fields", "images",
             "tool_images")  # fmt: skip
"""The eight values that `_generate` returns, in this order."""

OVERRIDDEN = ("_generate", "_calculate_rewards", "_get_per_token_logps_and_entropies",
              "_generate_and_score_completions", "_compute_loss", "training_step", "log", "_save_checkpoint",
              "_load_optimizer_and_scheduler", "_get_train_sampler", "_get_grad_norm")  # fmt: skip
"""The methods that `DewTrainer` wraps: each calls TRL's own and works on what it returns."""


def require_trl() -> None:
    """One sentence instead of an ImportError from deep inside, or of a failure an hour later."""
    try:
        found = version("trl")
    except PackageNotFoundError:
        raise EngineError("TRL is not installed. Install dew with it: pip install 'dew-rl[trl]'.") from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not OLDEST <= numbers < TOO_NEW:
        raise EngineError(
            f"TRL {found} is installed; dew works with TRL >= 1.14 and < 2: earlier ones do not average the "
            "gradients of the fused head over processes. pip install 'trl>=1.14,<2'."
        )


def require_keys(batch: dict[str, Any]) -> None:
    missing = [key for key in BATCH_KEYS if key not in batch]
    if missing:
        raise EngineError(
            f"TRL {version('trl')} returned a batch without {', '.join(missing)}, which dew needs. "
            "Install a release that dew is tested with: pip install 'trl==1.16.0'."
        )


def require_generated(values: Sequence[Any]) -> None:
    if len(values) != len(GENERATED):
        raise EngineError(
            f"TRL {version('trl')} returns {len(values)} values from _generate, dew knows {len(GENERATED)}: "
            f"{', '.join(GENERATED)}. Install a release that dew is tested with: pip install 'trl==1.16.0'."
        )
