"""Groups of answers for tests: ragged lists, padded with NaN so that reading the padding fails loudly."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from dew import Rollouts

NAN = float("nan")
ONE_GROUP = ([0] * 4, [1.0, 1.0, 0.0, 0.0], [[1.0, 3.0], [3.0], [1.0, 2.0], [3.0]])
"""For `rollouts`: two correct and two wrong answers."""
GOLDEN, OUTCOME = (
    json.loads(Path(__file__).with_name(name).read_text()) for name in ("golden.json", "golden_outcome.json")
)
COMPARE = st.sampled_from(["column", "row", "matrix", "turn", "relative"])
AVERAGE = st.sampled_from(["arithmetic", "geometric"])
POOL = st.sampled_from(["group", "joint", "sign"])


def entries(golden):
    return pytest.mark.parametrize("entry", golden, ids=[f"{len(e['input']['reward'])} answers" for e in golden])


def pad(rows, fill=NAN, dtype=torch.float64):
    """Ragged rows -> (values, mask)."""
    T = max((len(row) for row in rows), default=0)
    values = torch.tensor([[float(x) for x in row] + [fill] * (T - len(row)) for row in rows], dtype=dtype)
    mask = torch.tensor([[True] * len(row) + [False] * (T - len(row)) for row in rows], dtype=torch.bool)
    return values, mask


@st.composite
def groups(draw, max_size=8, min_entropy=0.0, mixed=False):
    """One group: (correct, ragged entropies)."""
    G = draw(st.integers(2 if mixed else 1, max_size))
    entropies = st.floats(min_entropy, 5, width=32)
    rows = draw(st.lists(st.lists(entropies, min_size=1, max_size=5), min_size=G, max_size=G))
    correct = draw(st.lists(st.booleans(), min_size=G, max_size=G))
    if mixed:
        correct[0], correct[1] = True, False
    return correct, rows


def tensors(group):
    return torch.tensor(group[0]), *pad(group[1])


@st.composite
def batches(draw):
    """Rows of several groups of any size in any order: (group ids, rewards, ragged entropies)."""
    n = draw(st.integers(1, 24))
    ids = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n))
    rows = draw(st.lists(st.lists(st.floats(0, 5, width=32), min_size=1, max_size=5), min_size=n, max_size=n))
    return ids, rewards, rows


def rollouts(batch, extra=None):
    """Log-probabilities and Σπ² are made up from the entropies; NaN on the padding, as these are."""
    ids, rewards, rows = batch
    entropy, mask = pad(rows)
    reward, extra = (None if x is None else torch.tensor(x, dtype=torch.float64) for x in (rewards, extra))
    made_up = {"logp": -(entropy * 1.5 + 0.1), "sum_sq": (-entropy).exp()}
    return Rollouts.from_rows(ids, mask=mask, reward=reward, entropy=entropy, extra=extra, **made_up)
