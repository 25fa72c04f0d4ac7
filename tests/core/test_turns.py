"""compare="turn": a token is compared with the same turn, the k-th of each answer with the same outcome."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from dew.credit import gtpo_rewards
from dew.ops import turn_numbers
from groups import AVERAGE

TOOL = float("nan")


def laid_out(answers, gap=lambda i, k: 1, value=TOOL):
    """Answers as lists of turns -> (values, mask), with `gap` tokens of tool output before each further turn."""
    rows = []
    for i, turns in enumerate(answers):
        row = []
        for k, turn in enumerate(turns):
            row += ([(value, False)] * gap(i, k) if k else []) + [(x, True) for x in turn]
        rows.append(row)
    T = max(map(len, rows))
    rows = [row + [(value, False)] * (T - len(row)) for row in rows]
    values = torch.tensor([[x for x, _ in row] for row in rows], dtype=torch.float64)
    return values, torch.tensor([[live for _, live in row] for row in rows])


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-9, atol=1e-9)


# ---- golden: worked by hand ---------------------------------------------------------------------
#            turn 1            turn 2
#   ✓ A      H = 1, 3          H = 2            ✓ turn 1: mean(1, 3, 2) = 2      ✓ turn 2: mean(2, 6) = 4
#   ✓ B      H = 2             H = 6
#   ✗ C      H = 1, ½          H = ¼            ✗ turn 1: mean(1, 2, ½) = 7/6    ✗ turn 2: ¼ alone
#   ✗ D      H = 2             (stopped)
CORRECT = torch.tensor([True, True, False, False])
ANSWERS = [[[1, 3], [2]], [[2], [6]], [[1, 0.5], [0.25]], [[2]]]
REWARDS = [
    [[1 + 0.1 * 1 / 2, 1 + 0.1 * 3 / 2], [1 + 0.1 * 2 / 4]],
    [[1 + 0.1 * 2 / 2], [1 + 0.1 * 6 / 4]],
    [[-1 - 0.1 * 6 / 7, -1 - 0.1 * 12 / 7], [-1.1]],
    [[-1 - 0.1 * 3 / 7]],
]


def test_golden():
    entropy, mask = laid_out(ANSWERS)
    close(gtpo_rewards(CORRECT, entropy, mask, compare="turn"), laid_out(REWARDS, value=0.0)[0])


def test_turn_numbers():
    mask = torch.tensor([[1, 1, 0, 0, 1, 0, 1, 1], [0, 1, 1, 0, 1, 1, 0, 0], [1, 0, 1, 0, 1, 0, 1, 0]]).bool()
    numbers = turn_numbers(mask)
    assert [row[m].tolist() for row, m in zip(numbers, mask, strict=True)] == [
        [0, 0, 1, 2, 2],
        [0, 0, 1, 1],  # the conversation may begin with what the policy did not write
        [0, 1, 2, 3],
    ]


# ---- oracle and properties ----------------------------------------------------------------------
TURN = st.lists(st.floats(0, 5, width=32), min_size=1, max_size=3)


@st.composite
def conversations(draw):
    G = draw(st.integers(1, 6))
    answers = draw(st.lists(st.lists(TURN, min_size=1, max_size=4), min_size=G, max_size=G))
    return draw(st.lists(st.booleans(), min_size=G, max_size=G)), answers


@given(conversations(), AVERAGE, st.floats(0, 2), st.floats(0, 2))
def test_rewards_match_the_loops(group, average, alpha1, alpha2):
    correct, answers = group
    settings = {"average": average, "alpha1": alpha1, "alpha2": alpha2}
    entropy, mask = laid_out(answers)
    expected = laid_out(oracles.gtpo_turn_rewards(correct, answers, **settings), value=0.0)[0]
    close(gtpo_rewards(torch.tensor(correct), entropy, mask, compare="turn", **settings), expected)


@given(conversations(), AVERAGE, st.integers(1, 4), st.floats(0, 9))
def test_tool_output_does_not_matter(group, average, length, value):
    """Neither its length, which shifts later turns, nor what is stored there."""
    correct, answers = torch.tensor(group[0]), group[1]
    short, mask = laid_out(answers)
    long, wide = laid_out(answers, gap=lambda i, k: 1 + (i + k) % length, value=value)
    rewards = [
        gtpo_rewards(correct, H, m, compare="turn", average=average)[m] for H, m in ((short, mask), (long, wide))
    ]
    torch.testing.assert_close(*rewards)
    assert not gtpo_rewards(correct, long, wide, compare="turn")[~wide].any()
