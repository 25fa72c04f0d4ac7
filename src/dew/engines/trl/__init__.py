"""Training on TRL: change one import and one word, and GRPOTrainer trains with GTPO or any of its peers.

    from dew.engines.trl import DewConfig, DewTrainer

    args = DewConfig(output_dir="runs/first", algorithm="gtpo")
    DewTrainer("Qwen/Qwen3-0.6B", reward_funcs=accuracy, args=args, train_dataset=data).train()

For TRL >= 1.14, < 2. What of TRL is leaned on stands in `contract.py`, and a test holds it there.
"""

from dew.engines.trl.contract import require_trl

require_trl()

from dew.engines.trl.config import DewConfig  # noqa: E402
from dew.engines.trl.trainer import DewTrainer  # noqa: E402

__all__ = ["DewConfig", "DewTrainer"]
