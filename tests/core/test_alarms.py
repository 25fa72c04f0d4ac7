"""Each alarm, provoked; and silence on a healthy run."""

import math

import pytest

from dew.alarms import FIRST, NEWEST, RULES, Alarms, History

HEALTHY = {
    "accuracy": 0.4,
    "groups/mixed_share": 0.6,
    "length/truncated_share": 0.05,
    "entropy": 0.5,
    "credit/top1_share": 0.02,
    "credit/tokens": 200.0,
    "ratio/abs_log": 0.01,
    "clip/low": 0.01,
    "clip/high": 0.02,
    "verifier/failed_share": 0.0,
    "grad_norm": 0.3,
    "loss": 0.001,
    "groups/short": 0.0,
    "steps/skipped": 0.0,
}

# name -> (steps that are sick, what is sick about them); the alarm must ring at the last of them and not before
PROVOKED = {
    "never_correct": (10, {"accuracy": 0.0}),
    "no_signal": (10, {"groups/mixed_share": 0.05}),
    "truncated": (1, {"length/truncated_share": 0.31}),
    "entropy_collapse": (5, {"entropy": 0.09}),
    "entropy_explosion": (5, {"entropy": 1.6}),
    "one_token_takes_all": (1, {"credit/top1_share": 0.25}),
    "off_policy": (1, {"ratio/abs_log": 0.11}),
    "clipped": (1, {"clip/low": 0.2, "clip/high": 0.2}),
    "verifier_fails": (1, {"verifier/failed_share": 0.02}),
    "no_gradient": (5, {"grad_norm": 0.0}),
    "not_finite": (1, {"loss": math.nan}),
    "skipped": (1, {"steps/skipped": 1.0}),
    "batch_not_full": (1, {"groups/short": 2.0}),
}


def rung(alarms, step, **changed):
    return [alarm["alarm"] for alarm in alarms.update(step, {**HEALTHY, **changed})]


def test_every_rule_is_provoked_here():
    assert set(PROVOKED) == {rule.name for rule in RULES}


def test_a_healthy_run_is_silent():
    alarms = Alarms()
    assert [rung(alarms, step) for step in range(100)] == [[]] * 100


@pytest.mark.parametrize("name", PROVOKED)
def test_it_rings_once_when_its_condition_begins_and_again_when_it_returns(name):
    steps, sick = PROVOKED[name]
    alarms = Alarms()
    for step in range(30):
        rung(alarms, step)
    told = [rung(alarms, 30 + i, **sick) for i in range(steps)]
    assert name not in [alarm for step in told[:-1] for alarm in step]
    assert told[-1] == [name]
    assert rung(alarms, 60, **sick) == [], "it goes on: nothing new to say"
    for step in range(61, 91):
        assert rung(alarms, step) == []
    told = [rung(alarms, 100 + i, **sick) for i in range(steps)]
    assert name in [alarm for step in told for alarm in step]


@pytest.mark.parametrize("name", PROVOKED)
def test_it_says_one_sentence_and_one_remedy(name):
    steps, sick = PROVOKED[name]
    alarms = Alarms()
    for step in range(30):
        alarms.update(step, HEALTHY)
    told = [alarm for i in range(steps) for alarm in alarms.update(30 + i, {**HEALTHY, **sick})]
    (alarm,) = told
    assert set(alarm) == {"step", "alarm", "message", "remedy", "value", "threshold"}
    assert alarm["step"] == 29 + steps
    assert alarm["message"].endswith(".") and "{" not in alarm["message"]
    assert alarm["remedy"].endswith(".")


def test_short_answers_do_not_ring_for_an_equal_share():
    """Four tokens with a quarter each: more than a fifth, and perfectly even."""
    assert rung(Alarms(), 1, **{"credit/top1_share": 0.25, "credit/tokens": 4.0}) == []


def test_entropy_is_compared_with_its_own_beginning():
    """A model that starts at 0.05 nats has not collapsed at 0.02."""
    alarms = Alarms()
    assert [rung(alarms, step, entropy=0.05 if step < 20 else 0.02) for step in range(60)] == [[]] * 60


def test_a_long_run_is_remembered_by_its_beginning_and_its_end():
    history = History()
    for step in range(5000):
        history.add(step, {"entropy": float(step)})
    series = history.series("entropy")
    assert series[:FIRST] == list(range(FIRST)) and series[-NEWEST:] == list(range(5000 - NEWEST, 5000))
    assert len(series) <= FIRST + 2 * NEWEST


def test_a_step_may_come_in_parts_and_metrics_may_be_missing():
    alarms = Alarms()
    for step in range(1, 6):
        assert alarms.update(step, {"accuracy": 0.5}) == []
        told = alarms.update(step, {"grad_norm": 0.0})
    assert [alarm["alarm"] for alarm in told] == ["no_gradient"]


def test_a_resumed_run_remembers_without_ringing_again():
    alarms = Alarms()
    written = [{"step": step, "grad_norm": 0.0} for step in range(1, 9)]
    alarms.restore(written, until=6)
    assert alarms.update(7, {"grad_norm": 0.0}) == []
    fresh = Alarms()
    fresh.restore(written, until=3)
    assert fresh.update(4, {"grad_norm": 0.0}) == []
    assert [alarm["alarm"] for alarm in fresh.update(5, {"grad_norm": 0.0})] == ["no_gradient"]
