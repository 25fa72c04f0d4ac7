"""Rows as verl passes them to an estimator, for tests: uids, keys, padding rows, in any order."""

import numpy as np
import torch

from dew.algorithms import get_algorithm
from dew.engines.verl.estimators import BatchContext
from groups import GOLDEN, entries, pad

every_entry = entries(GOLDEN)


def rows(entry, dtype=torch.float64):
    """An entry of golden.json as (rewards, mask, uids, entropy). The reward is at an answer's last token."""
    entropy, mask = pad(entry["input"]["entropy"], fill=0.0, dtype=dtype)
    rewards = torch.zeros_like(entropy)
    rewards[torch.arange(len(mask)), mask.sum(-1) - 1] = torch.tensor(entry["input"]["reward"], dtype=dtype)
    uids = np.array([f"uid-{g}" for g in entry["input"]["group"]], dtype=object)
    return rewards, mask.long(), uids, entropy


def context(name, entropy, settings=None, **more):
    """Log-probabilities are made up from the entropies."""
    made_up = {} if entropy is None else {"logp": -1.5 * entropy}
    return BatchContext(algorithm=get_algorithm(name, **(settings or {})), entropy=entropy, **{**made_up, **more})


def with_padding(rewards, mask, uids, entropy, n=3):
    """verl's padding rows: their own uid, no live token, reward 0, arbitrary entropy."""
    T = mask.shape[1]
    return (
        torch.cat([rewards, rewards.new_zeros(n, T)]),
        torch.cat([mask, mask.new_zeros(n, T)]),
        np.concatenate([uids, np.array(["pad0"] * n, dtype=object)]),
        torch.cat([entropy, torch.full((n, T), 9.0, dtype=entropy.dtype)]),
    )
