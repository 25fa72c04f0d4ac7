"""Every alarm fires on its condition, and none on a healthy run."""

import math
import random
import re

import pytest

from dew.algorithms import get_algorithm
from dew.run.alarms import FIRST, NEWEST, RULES, Alarms, History

HEALTHY = {
    "reward": 0.4, "accuracy": 0.4, "groups/mixed_share": 0.6, "length/truncated_share": 0.05, "entropy": 0.5,
    "credit/top1_share": 0.02, "credit/tokens": 200.0, "credit/max_weight": 4.0, "credit/flipped_share": 0.0,
    "eval/pass@1": 0.4, "eval/pass@16": 0.9, "ratio/abs_log": 0.01, "sampler/kl": 0.001, "clip/low": 0.01,
    "clip/high": 0.02, "kl/approx": 0.002, "verifier/failed_share": 0.0, "grad_norm": 0.3, "loss": 0.001,
    "groups/short": 0.0, "steps/skipped": 0.0, "steps/credit_not_finite": 0.0, "unscored_share": 0.2,
}  # fmt: skip

# name -> (number of bad steps, their metrics); the alarm must fire at the last of them and not before
BAD = {
    "unscored": (1, {"unscored_share": 0.6}),
    "never_correct": (10, {"accuracy": 0.0}),
    "no_signal": (10, {"groups/mixed_share": 0.05}),
    "wrong_sign": (1, {"credit/flipped_share": 0.02}),
    "reward_falls": (6, {"reward": 0.0}),
    "truncated": (1, {"length/truncated_share": 0.31}),
    "empty_answers": (1, {"length/mean": 1.2}),
    "entropy_collapse": (5, {"entropy": 0.09}),
    "entropy_explosion": (5, {"entropy": 1.6}),
    "one_token_takes_all": (1, {"credit/top1_share": 0.25}),
    "sampler_mismatch": (1, {"sampler/kl": 0.06}),
    "off_policy": (1, {"ratio/abs_log": 0.11}),
    "pass_falls": (1, {"eval/pass@1": 0.5, "eval/pass@16": 0.75}),
    "clipped": (1, {"clip/low": 0.2, "clip/high": 0.2}),
    "never_clips": (20, {"clip/low": 0.0, "clip/high": 0.0}),
    "verifier_fails": (1, {"verifier/failed_share": 0.02}),
    "no_gradient": (5, {"grad_norm": 0.0}),
    "not_finite": (1, {"loss": math.nan}),
    "skipped": (1, {"steps/skipped": 1.0}),
    "credit_not_finite": (1, {"steps/skipped": 1.0, "steps/credit_not_finite": 1.0}),
    "batch_not_full": (1, {"groups/short": 2.0}),
}


def fired(alarms, step, **changed):
    return [alarm["alarm"] for alarm in alarms.update(step, {**HEALTHY, **changed})]


def test_every_rule_is_tested():
    assert set(BAD) == {rule.name for rule in RULES}


def test_healthy_run_has_no_alarms():
    alarms = Alarms()
    assert [fired(alarms, step) for step in range(100)] == [[]] * 100


def sick(name, *settings, **others):
    """The alarm of a run that is healthy for 30 steps, and the alarms."""
    (steps, bad), alarms = BAD[name], Alarms(*settings)
    for step in range(30):
        fired(alarms, step)
    seen = [alarm for i in range(steps) for alarm in alarms.update(30 + i, {**HEALTHY, **bad, **others})]
    return seen[0] if seen else None, alarms


@pytest.mark.parametrize("name", BAD)
def test_alarm_fires_once_and_counts_the_steps_of_its_condition(name):
    steps, bad = BAD[name]
    alarm, alarms = sick(name)
    assert set(alarm) == {"step", "alarm", "message", "remedy", "value", "threshold"}
    assert (alarm["alarm"], alarm["step"]) == (name, 29 + steps)
    assert alarm["message"].endswith(".") and "{" not in alarm["message"] + alarm["remedy"]
    assert fired(alarms, 60, **bad) == fired(alarms, 60, **bad) == [], "it still holds, in both parts of the step"
    assert [fired(alarms, step) for step in range(61, 91)] == [[]] * 30
    held = alarms.steps[name]
    assert not any(fired(alarms, 100 + i, **bad) for i in range(steps + 4))
    assert alarms.steps[name] > held >= 2
    explained = name in ("never_correct", "no_signal", "no_gradient", "batch_not_full")
    for cause in ({"unscored_share": 0.6}, {"length/truncated_share": 0.95}, {"length/mean": 1.0}):
        assert (name in sick(name, **{**cause, **bad})[1].steps) != explained, cause


ADVISED = {  # alarm, algorithm -> what its remedy says, and what it does not
    ("wrong_sign", "gtpo"): ("`algorithm: gtpo(pool=outcome)`", "dew"),
    ("never_correct", "grpo_s(beta2=0.2)"): ("`algorithm: grpo_s(beta2=0.2,pool=outcome)`", "threshold"),
    ("never_correct", "dapo"): ("`algorithm: dapo(dynamic_sampling=False)`", "pool"),
    ("no_signal", "gtpo"): ("answers. To replace such groups, write `algorithm: gtpo(dynamic_sampling=True)`", "pool"),
    ("no_signal", "dapo"): ("num_generations.", "dynamic_sampling"),
    ("no_signal", "grpo"): ("num_generations.", "threshold"),
    ("no_gradient", "gtpo(threshold=0.2)"): ("the threshold (0.2) is between", "pool"),
    ("unscored", "gtpo"): ("set outcome_reward", "algorithm"),
    ("unscored", "trl"): ("Return a number", "outcome_reward"),
    ("one_token_takes_all", "gtpo(compare=row)"): ("entropy_clip=(0.01,5.0)", "pool"),
    ("one_token_takes_all", "gtpo(entropy_clip=(0.01,5.0))"): ("alpha2=0.05", "Bound"),
    ("truncated", "dew(max_tokens=64)"): ("`algorithm: dew(overlong=soft,overlong_buffer=16)`", "pool"),
    ("truncated", "dew(max_tokens=64,overlong=soft,overlong_buffer=8)"): ("Raise max_completion_length", "algorithm"),
    ("truncated", "trl(max_tokens=64)"): ("Raise max_completion_length", "algorithm"),
    ("batch_not_full", "dew"): ("`algorithm: dew(max_rounds=8)`", "threshold"),
    ("batch_not_full", "dapo(threshold=0.2)"): ("the threshold (0.2) is between", "pool"),
    ("never_clips", "grpo_s"): ("`algorithm: grpo_s(clip_low=0.01,clip_high=0.014)`", "pool"),
}


@pytest.mark.parametrize(("name", "text"), ADVISED)
def test_remedies_fit_the_algorithm_and_can_be_pasted(name, text):
    said, unsaid = ADVISED[name, text]
    remedy = sick(name, get_algorithm(text))[0]["remedy"]
    assert said in remedy and unsaid not in remedy
    for pasted in re.findall("`algorithm: (.*?)`", remedy):
        assert get_algorithm(pasted) != get_algorithm(text)


def test_correctness_matters_only_to_some_algorithms():
    assert sick("never_correct", None, get_algorithm("grpo").uses_threshold)[0] is None
    assert sick("never_correct", None, get_algorithm("gtpo").uses_threshold)[0]["alarm"] == "never_correct"
    assert set(sick("never_correct", reward=0.0)[1].steps) == {"reward_falls"}, "which explains it"


def test_counts_are_in_steps_where_a_generation_has_several():
    alarms = Alarms()
    seen = [alarm for step in range(1, 61, 4) for alarm in alarms.update(step, {"accuracy": 0.0})]
    assert [(alarm["step"], alarm["message"][:37]) for alarm in seen] == [(37, "No answer was correct for 37 steps: t")]


def test_a_reward_that_falls_names_the_checkpoint_before():
    """Measured: the tiny model with learning_rate 6e-4, a value for every fourth step (docs/log.md)."""
    alarms = Alarms(checkpoints=lambda: [1, 8])
    rewards = [0.148, 0.042, 0.031, 0.043]
    (alarm,) = (x for i, r in enumerate(rewards) for x in alarms.update(1 + 4 * i, {"reward": r}))
    assert (alarm["step"], alarm["message"]) == (13, "The reward fell from 0.15 to 0.039 since step 1.")
    assert alarm["remedy"] == "Lower learning_rate, and go back to checkpoint-1."


def test_a_noisy_reward_does_not_fall():
    """The second one is mostly 0: in a fifth of the steps, one answer of 64 is correct. The last begin with
    one such step, and differ by 0.08."""
    dice = random.Random(0)
    noise = [[dice.gauss(0.5, 0.1) for _ in range(300)], [(dice.random() < 0.2) / 64 for _ in range(300)]]
    for rewards in (*noise, [2 / 64, *[0] * 7, 1 / 64, *[0] * 9, 1 / 64, 0, 0, 0], [0.8, 0.36, 0.28, 0.36]):
        alarms = Alarms()
        assert not any(alarms.update(step, {"reward": reward}) for step, reward in enumerate(rewards))


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


def test_resumed_run_does_not_repeat_alarms_and_steps_come_in_parts():
    alarms = Alarms()
    written = [{"step": step, **part} for step in range(1, 9) for part in ({"accuracy": 0.5}, {"grad_norm": 0.0})]
    alarms.restore(written, until=6)
    assert alarms.update(7, {"grad_norm": 0.0}) == []
    fresh = Alarms()
    fresh.restore(written, until=3)
    assert fresh.update(4, {"grad_norm": 0.0}) == []
    assert [alarm["alarm"] for alarm in fresh.update(5, {"grad_norm": 0.0})] == ["no_gradient"]
