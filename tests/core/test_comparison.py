"""What a token is compared with (`compare`), by which value (`value`), and how far a weight may go."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dew import DewError, Rollouts, get_algorithm
from dew.credit import grpo_s_rewards, gtpo_rewards
from dew.engines.credit import Rows, give_credit
from dew.ops import masked_mean
from groups import groups, pad

BY_TOKENS = ["step", "step_mean", "context"]
COMPARE = st.sampled_from(["column", "row", "matrix", "turn", "relative", *BY_TOKENS])
VALUE = st.sampled_from(["entropy", "rank", "divergence", "contrast"])
DOT = 9


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-9, atol=1e-9)


def weights(correct, entropy, tokens, batched=False, **settings):
    """|r̃| with α₁ = 0 and α₂ = 1: the weights themselves, as ragged lists."""
    ids, mask = pad(tokens, fill=-7)
    H = pad(entropy)[0]
    settings = {"alpha1": 0.0, "alpha2": 1.0, "step_ends": (DOT,), **settings}
    given = [x[None] if batched else x for x in (torch.tensor(correct), H, mask, ids.long())]
    r = gtpo_rewards(*given[:3], tokens=given[3], **settings).view(mask.shape)
    assert not r[~mask].any()
    return [row[live].abs().tolist() for row, live in zip(r, mask, strict=True)]


# ---- golden: worked by hand ---------------------------------------------------------------------
#   ✓ A   1 2 . 3        H = 1 2 3 4        steps (1 2 .) (3)
#   ✓ B   1 . 3 2        H = 2 4 6 8              (1 .) (3 2)
#   ✗ C   1 2 3          H = 1 ½ ¼                (1 2 3)
CORRECT = [True, True, False]
TOKENS = [[1, 2, DOT, 3], [1, DOT, 3, 2], [1, 2, 3]]
ENTROPY = [[1, 2, 3, 4], [2, 4, 6, 8], [1, 1 / 2, 1 / 4]]
GOLDEN = {
    # tenths 0 2 5 7 in A and B, 0 3 6 in C, where each is alone
    "relative": [[2 / 3, 2 / 3, 2 / 3, 2 / 3], [4 / 3, 4 / 3, 4 / 3, 4 / 3], [1, 1, 1]],
    # first of step 1: 1, 2; second: 2, 4; third: 3 alone; first of step 2: 4, 6; second: 8 alone
    "step": [[2 / 3, 2 / 3, 1, 4 / 5], [4 / 3, 4 / 3, 6 / 5, 1], [1, 1, 1]],
    # means of the steps: A 2 and 4, B 3 and 7; over the tokens of step 1 (3·2 + 2·3)/5, of step 2 (4 + 2·7)/3;
    # C: 1/H̄ is the same for its only step
    "step_mean": [[5 / 6, 5 / 6, 5 / 6, 4 / 6], [5 / 4, 5 / 4, 7 / 6, 7 / 6], [1, 1, 1]],
    # ✓ start: 1, 2; after (start, 1): 2, 4; after a dot (1 . | 2 .) one token is shared: 4, 6; the rest: 3, 8
    # ✗ no two tokens follow the same ones: 1, 2, 4 among themselves
    "context": [[2 / 3, 2 / 3, 6 / 11, 4 / 5], [4 / 3, 4 / 3, 6 / 5, 16 / 11], [3 / 7, 6 / 7, 12 / 7]],
}


@pytest.mark.parametrize("compare", GOLDEN)
def test_golden(compare):
    for batched in (False, True):
        found = weights(CORRECT, ENTROPY, TOKENS, batched, compare=compare)
        for row, expected in zip(found, GOLDEN[compare], strict=True):
            assert row == pytest.approx(expected)


def test_golden_tenths():
    # tenths of 7 tokens: 0 1 2 4 5 7 8, of 4 tokens: 0 2 5 7; H = 1 and 3 where both have one, else a token is alone
    long, short = weights([True, True], [[1] * 7, [3] * 4], [[1] * 7, [1] * 4], compare="relative")
    assert pytest.approx([0.5, 1, 0.5, 1, 0.5, 0.5, 1]) == long and short == pytest.approx([1.5] * 4)


def test_golden_rank():
    # ✓ column 1: 1 < 2 -> ranks 1, 2 over 3/2;  matrix: 1 2 2 3 4 4 6 8 -> 1, 2½, 4, 5½ | 2½, 5½, 7, 8 over 4½
    assert weights(CORRECT, ENTROPY, TOKENS, value="rank")[0] == pytest.approx([2 / 3] * 4)
    A, B, C = weights(CORRECT, ENTROPY, TOKENS, compare="matrix", value="rank")
    assert pytest.approx([1 / 4.5, 2.5 / 4.5, 4 / 4.5, 5.5 / 4.5]) == A
    assert pytest.approx([2.5 / 4.5, 5.5 / 4.5, 7 / 4.5, 8 / 4.5]) == B
    assert pytest.approx([1 / 2, 2 / 2, 3 / 2]) == C  # the surest token of a wrong answer has the largest
    assert weights(CORRECT, ENTROPY, TOKENS, compare="row", value="rank")[1] == pytest.approx([0.4, 0.8, 1.2, 1.6])


def test_golden_divergence():
    # A leaves C at its third token, B leaves it at its second: ✓ 5 of 8 tokens, ✗ 1 of 3 (C shares 1 2 with A)
    A, B, C = weights(CORRECT, ENTROPY, TOKENS, compare="matrix", value="divergence")
    assert pytest.approx([0, 0, 8 / 5, 8 / 5], abs=1e-5) == A
    assert pytest.approx([0, 8 / 5, 8 / 5, 8 / 5], abs=1e-5) == B
    assert pytest.approx([0, 0, 3], abs=1e-5) == C


def test_golden_contrast():
    # pairs of ✓: start-1 in both and in C: 1 − 1 = 0;  1-2: ½ − 1 < 0;  2-. and 1-.: ½;  .-3: 1;  3-2: ½
    # pairs of ✗: start-1: 0;  1-2: 1 − ½ = ½;  2-3: 1            means: ✓ (½ + 1 + ½ + 1 + ½)/8 = 7/16, ✗ ½
    A, B, C = weights(CORRECT, ENTROPY, TOKENS, compare="matrix", value="contrast")
    assert pytest.approx([0, 0, 8 / 7, 16 / 7], abs=1e-4) == A
    assert pytest.approx([0, 8 / 7, 16 / 7, 8 / 7], abs=1e-4) == B
    assert pytest.approx([0, 1, 2], abs=1e-4) == C


def test_an_answer_counts_once_however_often_it_repeats_a_pair():
    # start-1, 1-1 in every repetition, and start-2 are in one of two correct answers each, and in no wrong one: ½
    found = weights([True, True, False], [[1] * 4, [1], [1]], [[1] * 4, [2], [3]], compare="matrix", value="contrast")
    assert found == [[1] * 4, [1], [1]]


def test_a_context_does_not_reach_over_tool_output():
    # the second 5 follows tool output in A: it starts a turn, like the first tokens of all answers
    H = torch.tensor([[1.0, 9, 2], [3, 5, 9]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    tokens = torch.tensor([[5, 8, 5], [5, 5, 8]])
    r = gtpo_rewards(torch.tensor([True, True]), H, mask, compare="context", tokens=tokens, alpha1=0.0, alpha2=1.0)
    close(r, [[1 / 2, 0, 2 / 2], [3 / 2, 1, 0]])  # starts: 1, 2, 3; the 5 after a 5 is alone
    r = gtpo_rewards(torch.tensor([True, False]), H, mask, compare="matrix", value="divergence", tokens=tokens)
    torch.testing.assert_close(r, torch.tensor([[1, 0, 1.2], [-1, -1.2, 0]]).double(), rtol=0, atol=1e-6)


# ---- oracle: sets of tokens by key, as loops -----------------------------------------------------
def keys_of(correct, tokens, compare):
    """What a token must have in common with those that it is compared with, by (answer, position)."""
    found = {}
    for i, row in enumerate(tokens):
        step, start = 0, 0
        for t, token in enumerate(row):
            places = {"column": t, "row": i, "matrix": 0, "turn": 0, "relative": 10 * t // len(row)}
            places |= {"step": (step, t - start), "step_mean": step}
            one = tuple(row[max(0, t - 1) : t])
            found[i, t] = places.get(compare, (one, tuple(row[max(0, t - 2) : max(0, t - 1)])))
            if token == DOT:
                step, start = step + 1, t + 1
    if compare == "context":

        def sharing(of):
            return {
                x: [y for y in found if correct[y[0]] == correct[x[0]] and of(found[y]) == of(found[x])] for x in found
            }

        two, one = sharing(lambda key: key), sharing(lambda key: key[0])
        found = {x: key if len(two[x]) > 1 else key[:1] if len(one[x]) > 1 else () for x, key in found.items()}
    return found


@st.composite
def written(draw, **settings):
    """(correct, entropies, token ids), ragged."""
    correct, entropy = draw(groups(min_entropy=2**-10, **settings))
    return correct, entropy, [[draw(st.sampled_from([1, 2, DOT])) for _ in row] for row in entropy]


@given(written(), COMPARE, st.sampled_from(["entropy", "rank"]))
def test_weights_match_the_loops(group, compare, value):
    correct, entropy, tokens = group
    keys = keys_of(correct, tokens, compare)
    x = {(i, t): h if correct[i] else 1 / h for i, row in enumerate(entropy) for t, h in enumerate(row)}
    if compare == "step_mean":
        for i, t in list(x):
            mine = [entropy[i][s] for s in range(len(entropy[i])) if keys[i, s] == keys[i, t]]
            x[i, t] = (sum(mine) / len(mine)) ** (1 if correct[i] else -1)
    found = weights(correct, entropy, tokens, compare=compare, value=value)
    for (i, t), key in keys.items():
        peers = [x[k] for k in keys if keys[k] == key and correct[k[0]] == correct[i]]
        mine = x[i, t]
        if value == "rank":
            below = sum(p < mine * (1 - 1e-9) for p in peers)
            same = sum(abs(p - mine) <= 1e-9 * mine for p in peers)
            if any(0 < abs(p - mine) <= 1e-9 * mine for p in peers):
                continue  # equal but for rounding
            mine, peers = below + (same + 1) / 2, [(len(peers) + 1) / 2]
        assert found[i][t] == pytest.approx(mine / (sum(peers) / len(peers)), rel=1e-6)


# ---- properties ---------------------------------------------------------------------------------
@given(written(), COMPARE, VALUE)
def test_credit_is_conserved_on_each_side(group, compare, value):
    """Every comparison splits the tokens of a side into sets, and the weights of each set have mean 1."""
    found = weights(*group, compare=compare, value=value)
    for side in (True, False):
        rows = [row for row, correct in zip(found, group[0], strict=True) if correct == side]
        assert sum(map(sum, rows)) == pytest.approx(sum(map(len, rows)), rel=1e-6)


@given(written(), COMPARE, VALUE, st.randoms())
def test_neither_order_nor_padding_nor_the_names_of_tokens_matter(group, compare, value, random):
    correct, entropy, tokens = group
    order = list(range(len(correct)))
    random.shuffle(order)
    found = weights(correct, entropy, tokens, compare=compare, value=value)
    renamed = [[{1: 70_000, 2: 3, DOT: DOT}[x] for x in tokens[i]] for i in order]
    shuffled = weights([correct[i] for i in order], [entropy[i] for i in order], renamed, compare=compare, value=value)
    for i, row in zip(order, shuffled, strict=True):
        assert row == pytest.approx(found[i], rel=1e-6)


@given(written(), written(), COMPARE, VALUE)
def test_groups_do_not_mix(one, two, compare, value):
    batch = [row for group in (one, two) for row in zip(*group, strict=True)]
    correct, entropy, tokens = zip(*batch, strict=True)
    ids, mask = pad(tokens, fill=0)
    rollouts = Rollouts.from_rows(
        [0] * len(one[0]) + [1] * len(two[0]), mask=mask, reward=torch.tensor(correct).float(),
        entropy=pad(entropy, fill=0.0)[0], tokens=ids.long(),
    )  # fmt: skip
    rule = get_algorithm("gtpo", compare=compare, value=value, alpha1=0.0, alpha2=1.0, step_ends=(DOT,),
                         entropy_clip=(1e-6, 100))  # fmt: skip
    together = rollouts.to_rows(rule.rewards(rollouts)).abs()
    alone = [*weights(*one, compare=compare, value=value), *weights(*two, compare=compare, value=value)]
    for row, live, expected in zip(together, mask, alone, strict=True):
        assert row[live].tolist() == pytest.approx(expected, rel=1e-5)


def test_the_mean_of_a_label_without_values_is_0():
    found = masked_mean(torch.tensor([3.0, 5.0, 7.0]), torch.tensor([True, True, False]), torch.tensor([0, 0, 1]))
    assert found.tolist() == [4, 4, 0]


# ---- bounds of a weight -------------------------------------------------------------------------
def test_golden_bounds():
    # column 1 of ✓: weights 2/3 and 4/3 of two values; C is alone
    assert [row[0] for row in weights(CORRECT, ENTROPY, TOKENS, cap=1.25)] == pytest.approx([2 / 3, 1.25, 1])
    # answers: Ĥ = 2½ and 5 -> 2/3 and 4/3
    H, mask = pad(ENTROPY)
    r = grpo_s_rewards(torch.tensor(CORRECT), H, mask, beta1=0.0, beta2=1.0, cap=1.1)
    close(r, [2 / 3, 1.1, -1])


@given(written(), COMPARE, VALUE)
def test_bounds_keep_the_side_of_1(group, compare, value):
    plain = weights(*group, compare=compare, value=value)
    shrunk = weights(*group, compare=compare, value=value, cap=1.5)
    for row, other in zip(plain, shrunk, strict=True):
        for w, v in zip(row, other, strict=True):
            assert (v - 1) * (w - 1) >= -1e-9 and abs(v - 1) <= abs(w - 1) + 1e-9 and v <= 1.5


# ---- in algorithms ------------------------------------------------------------------------------
def test_algorithms_ask_for_tokens_only_where_they_read_them():
    asks = {
        "column": False, "row": False, "matrix": False, "turn": False, "relative": False,
        "step": True, "step_mean": True, "context": True,
    }  # fmt: skip
    for compare, needed in asks.items():
        rule = get_algorithm("dew", compare=compare, step_ends=(DOT,))
        assert rule.needs_tokens is needed and ("tokens" in rule.signals) is needed
        assert rule.entropy_clip == (None if compare == "column" else (0.01, 100.0))
        floored = compare not in ("column", "row", "matrix")
        assert (get_algorithm("gtpo", compare=compare, step_ends=(DOT,)).entropy_clip is not None) is floored
        assert not get_algorithm("gtpo", compare=compare, step_ends=(DOT,), value="rank").warnings()
    assert get_algorithm("gtpo", value="contrast").needs_tokens and not get_algorithm("gtpo", value="rank").needs_tokens
    assert not get_algorithm("dapo").needs_tokens


@pytest.mark.parametrize("name", ["gtpo", "dew"])
def test_tokens_of_rows_reach_the_credit(name):
    """Rows in any order, as engines have them."""
    ids, mask = pad(TOKENS, fill=0)
    H = pad(ENTROPY, fill=0.0)[0]
    rule = get_algorithm(name, compare="context")
    rows = {"mask": mask, "outcome": torch.tensor(CORRECT).float(), "extra": torch.zeros(3), "entropy": H,
            "tokens": ids.long(), "group": torch.zeros(3).long()}  # fmt: skip
    order = torch.tensor([2, 0, 1])
    credit = give_credit(rule, Rows(**{x: value[order] for x, value in rows.items()})).advantages
    rollouts = Rollouts(mask=mask[None], reward=rows["outcome"][None], entropy=H[None], tokens=ids.long()[None])
    torch.testing.assert_close(credit, rule.advantages(rollouts)[0][order].float())
    with pytest.raises(DewError, match="needs the token ids"):
        rule.advantages(Rollouts(mask=mask[None], reward=rows["outcome"][None], entropy=H[None]))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"compare": "step"}, "needs step_ends"),
        ({"compare": "step_mean"}, "needs step_ends"),
        ({"compare": "step", "step_ends": 198}, "ids of tokens"),
        ({"compare": "step", "step_ends": ("\n",)}, "ids of tokens"),
        ({"value": "divergence", "scope": "batch"}, "same problem"),
        ({"value": "size"}, "entropy, rank, divergence, contrast"),
        ({"cap": 0.5}, "at least 1"),
    ],
)
def test_invalid_settings(settings, says):
    with pytest.raises(DewError, match=says) as error:
        get_algorithm("gtpo", **settings)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"compare": "context"}, "tokens="),
        ({"value": "contrast"}, "tokens="),
        ({"value": "size"}, "entropy, rank"),
        ({"cap": 0.5}, "cap=0.5"),
        ({"tokens": torch.ones(1, 2)}, "tokens has shape"),
    ],
)
def test_invalid_input(settings, says):
    H, mask = pad(ENTROPY)
    with pytest.raises(DewError, match=says):
        gtpo_rewards(torch.tensor(CORRECT), H, mask, **settings)
