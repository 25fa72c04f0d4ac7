"""dew: Dynamic Entropy Weighting, token-level credit for reinforcement learning of language models."""

from dew.algorithms import (
    DAPO,
    GRPO,
    GRPOS,
    GSPO,
    GTPO,
    Algorithm,
    DrGRPO,
    EntropyAdvantage,
    ForkingTokens,
    get_algorithm,
    list_algorithms,
    register_algorithm,
)
from dew.errors import DewError
from dew.rollouts import Rollouts

__version__ = "0.1.0"

__all__ = [
    "DAPO",
    "GRPO",
    "GRPOS",
    "GSPO",
    "GTPO",
    "Algorithm",
    "DewError",
    "DrGRPO",
    "EntropyAdvantage",
    "ForkingTokens",
    "Rollouts",
    "get_algorithm",
    "list_algorithms",
    "register_algorithm",
]
