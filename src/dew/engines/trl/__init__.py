"""Training on TRL: `DewTrainer` is `GRPOTrainer` with GTPO or any other algorithm of dew or of your own.

    from dew.engines.trl import DewConfig, DewTrainer

    args = DewConfig(output_dir="runs/first", algorithm="gtpo")
    DewTrainer("Qwen/Qwen3-0.6B", reward_funcs=accuracy, args=args, train_dataset=data).train()

`dew.engines.compat` has the supported releases. `compat.py` lists what dew relies on in TRL; a test checks each item.
"""

from dew.engines.compat import require

require("trl")
require("transformers")

from dew.engines.trl.config import DewConfig  # noqa: E402
from dew.engines.trl.trainer import DewTrainer  # noqa: E402

__all__ = ["DewConfig", "DewTrainer"]
