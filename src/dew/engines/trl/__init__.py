"""Training on TRL: `DewTrainer` is `GRPOTrainer` with any of dew's algorithms, or one of your own."""

from dew.engines.compat import require

require("trl")
require("transformers")

from dew.engines.trl.config import DewConfig  # noqa: E402
from dew.engines.trl.trainer import DewTrainer  # noqa: E402

__all__ = ["DewConfig", "DewTrainer"]
