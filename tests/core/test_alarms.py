"""Every alarm fires on its condition, and none on a healthy run."""

import math

import pytest

from dew.run.alarms import FIRST, NEWEST, RULES, Alarms, History

HEALTHY = {
    "accuracy": 0.4,
    "groups/mixed_share": 0.6,
    "length/truncated_share": 0.05,
    "entropy": 0.5,
    "credit/top1_share": 0.02,
    "credit/tokens": 200.0,
    "credit/max_weight": 4.0,
    "credit/flipped_share": 0.0,
    "eval/pass@1": 0.4,
    "eval/pass@16": 0.9,
    "ratio/abs_log": 0.01,
    "sampler/kl": 0.001,
    "clip/low": 0.01,
    "clip/high": 0.02,
    "kl/approx": 0.002,
    "verifier/failed_share": 0.0,
    "grad_norm": 0.3,
    "loss": 0.001,
    "groups/short": 0.0,
    "steps/skipped": 0.0,
}

# name -> (number of bad steps, their metrics); the alarm must fire at the last of them and not before
BAD = {
    "never_correct": (10, {"accuracy": 0.0}),
    "no_signal": (10, {"groups/mixed_share": 0.05}),
    "wrong_sign": (1, {"credit/flipped_share": 0.02}),
    "truncated": (1, {"length/truncated_share": 0.31}),
    "entropy_collapse": (5, {"entropy": 0.09}),
    "entropy_explosion": (5, {"entropy": 1.6}),
    "one_token_takes_all": (1, {"credit/top1_share": 0.25}),
    "large_weight": (1, {"credit/max_weight": 21.0}),
    "sampler_mismatch": (1, {"sampler/kl": 0.06}),
    "off_policy": (1, {"ratio/abs_log": 0.11}),
    "pass_falls": (1, {"eval/pass@1": 0.5, "eval/pass@16": 0.75}),
    "clipped": (1, {"clip/low": 0.2, "clip/high": 0.2}),
    "never_clips": (20, {"clip/low": 0.0, "clip/high": 0.0}),
    "verifier_fails": (1, {"verifier/failed_share": 0.02}),
    "no_gradient": (5, {"grad_norm": 0.0}),
    "not_finite": (1, {"loss": math.nan}),
    "skipped": (1, {"steps/skipped": 1.0}),
    "batch_not_full": (1, {"groups/short": 2.0}),
}


def fired(alarms, step, **changed):
    return [alarm["alarm"] for alarm in alarms.update(step, {**HEALTHY, **changed})]


def test_every_rule_is_tested():
    assert set(BAD) == {rule.name for rule in RULES}


def test_healthy_run_has_no_alarms():
    alarms = Alarms()
    assert [fired(alarms, step) for step in range(100)] == [[]] * 100


@pytest.mark.parametrize("name", BAD)
def test_alarm_fires_once_when_its_condition_starts_and_again_when_it_returns(name):
    steps, bad = BAD[name]
    alarms = Alarms()
    for step in range(30):
        fired(alarms, step)
    seen = [alarms.update(30 + i, {**HEALTHY, **bad}) for i in range(steps)]
    (alarm,) = (alarm for step in seen for alarm in step)
    assert set(alarm) == {"step", "alarm", "message", "remedy", "value", "threshold"}
    assert (alarm["alarm"], alarm["step"]) == (name, 29 + steps)
    assert alarm["message"].endswith(".") and "{" not in alarm["message"] and alarm["remedy"].endswith(".")
    assert fired(alarms, 60, **bad) == [], "the condition still holds"
    for step in range(61, 91):
        assert fired(alarms, step) == []
    seen = [fired(alarms, 100 + i, **bad) for i in range(steps)]
    assert name in [alarm for step in seen for alarm in step]


def test_pass_falls_on_one_of_several_evaluation_sets():
    alarms = Alarms()
    assert fired(alarms, 1, **{"eval/a_pass@8": 0.9, "eval/b_pass@1": 0.4, "eval/b_pass@8": 0.8}) == []
    assert fired(alarms, 2, **{"eval/a_pass@8": 0.9, "eval/b_pass@1": 0.4, "eval/b_pass@8": 0.6}) == ["pass_falls"]


def test_equal_shares_of_short_answers_are_no_alarm():
    """Four tokens with a quarter each: more than a fifth, and perfectly even."""
    assert fired(Alarms(), 1, **{"credit/top1_share": 0.25, "credit/tokens": 4.0}) == []


def test_entropy_is_compared_with_its_first_steps():
    """A model that starts at 0.05 nats has not collapsed at 0.02."""
    alarms = Alarms()
    assert [fired(alarms, step, entropy=0.05 if step < 20 else 0.02) for step in range(60)] == [[]] * 60


def test_history_of_a_long_run_keeps_the_first_and_newest_values():
    history = History()
    for step in range(5000):
        history.add(step, {"entropy": float(step)})
    series = history.series("entropy")
    assert series[:FIRST] == list(range(FIRST)) and series[-NEWEST:] == list(range(5000 - NEWEST, 5000))
    assert len(series) <= FIRST + 2 * NEWEST


def test_steps_in_parts_and_missing_metrics():
    alarms = Alarms()
    for step in range(1, 6):
        assert alarms.update(step, {"accuracy": 0.5}) == []
        seen = alarms.update(step, {"grad_norm": 0.0})
    assert [alarm["alarm"] for alarm in seen] == ["no_gradient"]


def test_resumed_run_does_not_repeat_alarms():
    alarms = Alarms()
    written = [{"step": step, "grad_norm": 0.0} for step in range(1, 9)]
    alarms.restore(written, until=6)
    assert alarms.update(7, {"grad_norm": 0.0}) == []
    fresh = Alarms()
    fresh.restore(written, until=3)
    assert fresh.update(4, {"grad_norm": 0.0}) == []
    assert [alarm["alarm"] for alarm in fresh.update(5, {"grad_norm": 0.0})] == ["no_gradient"]
