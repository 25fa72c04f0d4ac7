"""pool="outcome", spread, the algorithm named dew, and tokens whose credit has the wrong sign."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dew import Rollouts, get_algorithm
from dew.algorithms.credit import give_credit
from dew.credit import group_relative, grpo_advantages, wrong_sign
from dew.engines import credit as by_row
from dew.engines.credit import Credit, Rows
from dew.engines.recorder import credit_metrics, group_records
from groups import batches, rollouts


def signs(batch, x):
    return batch.to_rows(x).sign()


# ---- dew: DAPO's advantage times the column weight of correct answers ---------------------------------------
def test_dew_by_hand():
    """At the first token two correct answers with entropies 1 and 3, 0.5 and 1.5 times their mean, and two wrong ones
    with inverses 10 and 1/3, 60/31 and 2/31 times theirs; half of each is its weight. One of each at the second."""
    batch = rollouts(([0] * 4, [1, 1, 0, 0], [[1.0, 3.0], [3.0], [0.1, 2.0], [3.0]]))
    A = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    first = [0.75, 1.25, -(0.5 + 30 / 31), -(0.5 + 1 / 31)]
    expected = A * torch.tensor([[first[0], 1], [first[1], 0], [first[2], -1], [first[3], 0]], dtype=torch.float64)
    torch.testing.assert_close(batch.to_rows(get_algorithm("dew").advantages(batch)), expected)


@given(batch=batches(), name=st.sampled_from(["dew", "gtpo", "grpo_s"]), spread=st.sampled_from(["both", "wrong"]))
def test_without_weighting_it_is_dapo(batch, name, spread):
    batch = rollouts(batch)
    rule = get_algorithm(name, pool="outcome", spread=spread).control()
    dapo = get_algorithm("dapo").advantages(batch)
    torch.testing.assert_close(rule.advantages(batch), dapo.expand(rule.advantages(batch).shape), atol=1e-9, rtol=1e-9)


def test_the_control_keeps_the_normalisation():
    gtpo = get_algorithm("gtpo", pool="joint", alpha2=0.4)
    assert gtpo.control() == get_algorithm("gtpo", pool="joint", alpha1=1.4, alpha2=0.0)
    assert get_algorithm("dapo").control() is None


@given(
    batch=batches(),
    rewards=st.lists(st.sampled_from([-1.0, 0.0, 0.2, 0.5, 0.7, 3.0]), min_size=24, max_size=24),
    name=st.sampled_from(["dew", "gtpo", "grpo_s"]),
    spread=st.sampled_from(["both", "correct", "wrong"]),
    scope=st.sampled_from(["group", "batch"]),
)
def test_graded_rewards_train_and_no_sign_flips(batch, rewards, name, spread, scope):
    ids, _, entropies = batch
    rewards = rewards[: len(ids)]
    batch = rollouts((ids, rewards, entropies))
    rule = get_algorithm(name, pool="outcome", spread=spread, scope=scope)
    credit = give_credit(rule, batch)
    A = credit.advantages
    assert not credit.flipped.any()
    expected = signs(batch, group_relative(batch.reward, batch.present)).unsqueeze(-1)
    live = batch.to_rows(batch.mask)
    positive_weight = name != "dew"  # α₁ = 0: a token whose entropy is next to 0 gets next to nothing
    if positive_weight:
        assert (signs(batch, A)[live] == expected.expand(live.shape)[live]).all()
    differ = torch.tensor([len({r for r, i in zip(rewards, ids, strict=True) if i == own}) > 1 for own in ids])
    assert (batch.to_rows(rule.signal(batch)[:, None].expand_as(batch.reward)) == differ).all()


def test_answers_at_the_mean_are_in_no_comparison():
    """Rewards 0, 0.5 and 1: the middle one has no advantage, and its entropy changes nobody else's."""
    first = rollouts(([0] * 3, [0.0, 0.5, 1.0], [[1.0], [0.01], [2.0]]))
    second = rollouts(([0] * 3, [0.0, 0.5, 1.0], [[1.0], [4.0], [2.0]]))
    rule = get_algorithm("gtpo", pool="outcome")
    torch.testing.assert_close(rule.advantages(first), rule.advantages(second))
    assert rule.advantages(first)[0, 1, 0] == 0


@pytest.mark.parametrize(("pool", "counts"), [("outcome", False), ("group", True)])
def test_whether_a_group_of_one_outcome_counts_in_the_batch(pool, counts):
    """scope="batch": it gets no advantage; the paper's pool compares with its answers, the outcome pool does not."""
    rule = get_algorithm("gtpo", pool=pool, scope="batch")
    first, second = (rollouts(([0, 0, 1, 1], [1, 0, 1, 1], [[1.0], [2.0], [other], [other]])) for other in (0.01, 4.0))
    one, two = rule.advantages(first), rule.advantages(second)
    assert not one[1].any() and torch.allclose(one[0], two[0]) != counts


@pytest.mark.parametrize("reward", [0.0, 0.3, 1.0, 100.3, -7e5])
def test_equal_rewards_are_no_signal_in_any_magnitude(reward):
    batch = rollouts(([0] * 7, [reward] * 7, [[1.0, 2.0]] * 7))
    batch = Rollouts(mask=batch.mask, reward=batch.reward.float(), entropy=batch.entropy)
    rule = get_algorithm("dew")
    assert not rule.advantages(batch).any() and not rule.signal(batch).any()


def test_other_rewards_count_in_the_outcome_pool():
    """All wrong, one well-formed: the paper's pools are silent, the outcome pool rewards the form."""
    batch = rollouts(([0] * 2, [0, 0], [[1.0], [2.0]]), extra=[0.1, 0.0])
    assert not get_algorithm("gtpo").advantages(batch).any()
    credit = give_credit(get_algorithm("dew"), batch)
    assert credit.advantages[0, 0, 0] > 0 > credit.advantages[0, 1, 0] and not credit.flipped.any()


SOFT = {"overlong": "soft", "max_tokens": 4, "overlong_buffer": 4}


@pytest.mark.parametrize("name", ["dapo", "dew", "gtpo"])
@pytest.mark.parametrize(
    ("outcomes", "lengths", "settings", "kept"),
    [
        ([1, 1, 1, 1], [1, 1, 1, 1], {}, False),  # the format reward differs
        ([0, 1, 1, 1], [1, 1, 1, 1], {}, True),
        ([1, 1, 1, 1], [1, 2, 3, 4], SOFT, False),  # the penalties differ
        ([0, 1, 1, 1], [1, 2, 3, 4], SOFT, True),
        ([0, 0, 1, 1], [0, 0, 1, 1], {}, False),  # both wrong answers are truncated and masked
        ([0, 0, 1, 1], [0, 1, 1, 1], {}, True),
    ],
)
def test_dynamic_sampling_reads_the_outcome_alone(name, outcomes, lengths, settings, kept):
    batch = rollouts(([0] * 4, outcomes, [[1.0] * n for n in lengths]), extra=[0.1, 0.1, 0.1, 0.0])
    assert get_algorithm(name, **settings).signal(batch).tolist() == [kept]


@given(batch=batches(), side=st.sampled_from(["correct", "wrong"]), name=st.sampled_from(["gtpo", "grpo_s"]))
def test_spread_leaves_the_other_side_even(batch, side, name):
    batch = rollouts(batch)
    shaped, both = (get_algorithm(name, spread=s).rewards(batch) for s in (side, "both"))
    on_side = batch.mask & (batch.correct() == (side == "correct")).unsqueeze(-1)
    torch.testing.assert_close(shaped[on_side], both[on_side])
    other = batch.mask & ~on_side
    torch.testing.assert_close(shaped[other].abs(), torch.full_like(shaped[other], 1.1))


# ---- signs ---------------------------------------------------------------------------------------------------
def test_wrong_sign_by_hand():
    advantages = torch.tensor([[1.0, -1.0], [0.0, -1.0], [2.0, -2.0]])
    rewards = torch.tensor([1.0, 0.5, 0.0])  # the middle answer is at the mean: it has no sign
    assert wrong_sign(advantages, rewards).tolist() == [[False, True], [False, False], [True, False]]


# ---- settings ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("setting", [{"average": "geometric"}, {"compare": "row"}, {"compare": "matrix"}])
def test_weights_without_a_bound_warn(setting):
    assert "entropy_clip" in get_algorithm("gtpo", **setting).warnings()[0]
    assert get_algorithm("gtpo", **setting, entropy_clip=(0.01, 5.0)).warnings() == []
    assert get_algorithm("gtpo").warnings() == get_algorithm("dew").warnings() == []


@pytest.mark.parametrize(
    "rule", [*(("dew", compare) for compare in ("row", "matrix", "turn")), ("gtpo", "turn")], ids=str
)
def test_a_certain_token_does_not_take_the_blame_of_a_long_answer(rule):
    """1e-6 nats among 4,095 tokens at 0.3, with the floor at 0.01: 100 / ((100 + 4,095 / 0.3) / 4,096) = 29.8."""
    name, compare = rule
    algorithm = get_algorithm(name, compare=compare, alpha1=0.0, alpha2=1.0)
    batch = rollouts(([0, 0], [1, 0], [[1.0], [1e-6] + [0.3] * 4095]))
    blame = algorithm.rewards(batch)[0, 1]
    assert blame.min().item() == pytest.approx(-29.79, abs=0.01) and algorithm.warnings() == []
    assert (blame.min() / blame.sum()).item() == pytest.approx(0.0073, abs=0.0001)
    assert get_algorithm(name).entropy_clip is None, "the paper's column is as it was"
    assert get_algorithm(name, compare=compare, entropy_clip=(0.0, 5.0)).entropy_clip == (0.0, 5.0)
    blames = [get_algorithm("dew", compare="row", entropy_clip=x).rewards(batch)[0, 1] for x in (None, (0.0, 5.0))]
    assert [(x.min() / x.sum()).item() for x in blames] == pytest.approx([0.0038, 0.4934], abs=1e-4)  # docs/papers.md


def test_the_largest_weight_and_the_share_of_flipped_tokens_are_metrics():
    """Weights 1, 1 and 4, 0 apart: 4 over their mean, 2. Three of eight tokens count as flipped."""
    advantages = torch.tensor([[1.0, 1.0, 1.0, 0.0], [-1.0, -1.0, 0.0, -4.0]])
    yes, mask = torch.ones(2, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool)
    rows = Rows(group=torch.zeros(2).long(), mask=mask, outcome=torch.tensor([1.0, 0.0]), extra=torch.zeros(2))
    credit = Credit(correct=rows.outcome > 0, signal=yes, extra=rows.extra, advantages=advantages, scored=yes,
                    flipped=advantages == 1)  # fmt: skip
    found = credit_metrics(rows, credit)
    assert (found["credit/max_weight"], found["credit/flipped_share"], found["credit/alone_share"]) == (2, 3 / 8, 1)


def test_how_many_tokens_have_no_other_answer_to_be_compared_with():
    """Correct answers of 4, 2 and, in another group, 1 tokens; a wrong one of 3; the last group has no signal."""
    ids, correct, n = torch.tensor([7, 7, 3, 7, 1]), torch.tensor([1, 1, 1, 0, 1]).bool(), [4, 2, 1, 3, 4]
    mask, signal = torch.arange(4) < torch.tensor(n)[:, None], ids != 1
    rows = Rows(group=ids, mask=mask, outcome=correct.float(), extra=torch.zeros(5))
    credit = Credit(correct=correct, signal=signal, extra=rows.extra, advantages=mask.float(), scored=signal | True)
    assert credit_metrics(rows, credit)["credit/alone_share"] == pytest.approx((2 + 1 + 3) / 10)


def test_an_answer_whose_reward_is_not_finite_is_excluded_from_its_group_and_its_record():
    outcome, extra = torch.zeros(2, 67)
    outcome[:2], extra[2], ids = torch.tensor([1, torch.inf]), torch.nan, torch.ones(67, 1, dtype=torch.long)
    rows = Rows(group=ids[:, 0], mask=ids.bool(), outcome=outcome, extra=extra)
    credit = by_row.give_credit(get_algorithm("dapo"), rows)
    assert (~credit.scored).nonzero()[:, 0].tolist() == [1, 2] and not credit.advantages[1:3].any()
    texts, names = dict.fromkeys(("gold", "extracted", "verdict"), [None] * 67), ("prompt", "completion")
    columns = {**vars(rows), **texts, "filler": ~rows.mask[:, 0], "prompt_mask": ids, "truncated": ids,
               "total_length": ids, **{f"{name}_ids": ids for name in names}}  # fmt: skip
    [record] = group_records(1, get_algorithm("dapo"), columns, credit, SimpleNamespace(decode=str), 1)
    expected = grpo_advantages(torch.eye(65)[:1]).T
    for found in (torch.tensor([x.grpo for x in record.answers]), credit.advantages[credit.scored]):
        torch.testing.assert_close(found, expected)


def test_who_needs_a_threshold():
    needs = {name: get_algorithm(name).uses_threshold for name in ("gtpo", "grpo_s", "dapo", "grpo", "dew")}
    assert needs == {"gtpo": True, "grpo_s": True, "dapo": True, "grpo": False, "dew": False}
