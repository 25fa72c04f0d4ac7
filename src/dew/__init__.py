"""dew: Dynamic Entropy Weighting, token-level credit for reinforcement learning of language models.

get_algorithm("gtpo", alpha2=0.2).advantages(rollouts)     an algorithm by name; `list_algorithms` has the names
Rollouts.from_rows(group_ids, mask=..., reward=...)        whole groups from flat rows, and back with `to_rows`
dew.credit, dew.losses, dew.kernels                        functions of tensors
dew.watch(trainer)                                         a run folder, alarms and a report for TRL's GRPOTrainer
dew.engines.trl.DewTrainer                                 TRL's GRPOTrainer with any of these algorithms
"""

# ruff: noqa: F403, F405

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from dew.algorithms import *
    from dew.engines.trl.watch import watch
    from dew.errors import DewError
    from dew.rollouts import Rollouts

__all__ = [
    "DAPO", "DEW", "GRPO", "GRPOS", "GSPO", "GTPO", "Algorithm", "DewError", "DrGRPO", "EntropyAdvantage",
    "ForkingTokens", "Rollouts", "get_algorithm", "list_algorithms", "register_algorithm", "watch",
]  # fmt: skip

_MODULES = {"DewError": "dew.errors", "Rollouts": "dew.rollouts", "watch": "dew.engines.trl.watch"}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `dew --help` does not import torch."""
    if name not in __all__:
        raise AttributeError(f"module 'dew' has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "dew.algorithms")), name)
