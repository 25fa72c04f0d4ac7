"""Scores and their intervals, from hand-made verdicts."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dew.compare import Sampling, Scores, compare_scores, evaluate
from dew.compare.sampling import Sampled
from dew.compare.scores import ScoredProblem, judge_name
from dew.compare.statistics import maj_at_k, pass_at_k
from dew.errors import ConfigError
from dew.rewards import Verdict, load_reward, verifier

RIGHT, WRONG, NOTHING = Verdict("correct", "7"), Verdict("wrong", "8"), Verdict("unparsable", None)


def scores_of(groups: list[list[Verdict]]) -> Scores:
    problems = [
        ScoredProblem(f"{i}?", "7", [Sampled(str(v.extracted), 2, v is NOTHING) for v in group], group)
        for i, group in enumerate(groups)
    ]
    return Scores("sums", "by hand", Sampling(k=len(groups[0])), problems, seconds=0.5)


# ── Golden ────────────────────────────────────────────────────────────────────────────────────────────────
def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5  # 1 − C(3,2)/C(4,2) = 1 − 3/6
    assert pass_at_k(4, 2, 3) == 1.0  # three of four always include one of two
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)  # 1 − C(3,2)/C(5,2) = 1 − 3/10


def test_majority_by_hand():
    assert maj_at_k([RIGHT, RIGHT, WRONG]) == 1.0
    assert maj_at_k([RIGHT, WRONG, WRONG]) == 0.0
    assert maj_at_k([RIGHT, WRONG]) == 0.5  # a tie of two answers, one of them correct
    assert maj_at_k([RIGHT, NOTHING, NOTHING]) == 1.0  # unparsable answers do not vote
    assert maj_at_k([NOTHING]) == 0.0


def test_scores_by_hand():
    scores = scores_of([[RIGHT, RIGHT, WRONG, NOTHING], [WRONG, WRONG, WRONG, RIGHT]])
    assert scores["pass@1"].value == scores["mean@4"].value == (2 / 4 + 1 / 4) / 2
    assert scores["pass@2"].value == pytest.approx((5 / 6 + 1 / 2) / 2)  # 1 − C(2,2)/6, 1 − C(3,2)/6
    assert scores["pass@4"].value == 1.0
    assert scores["maj@4"].value == 0.5
    assert scores.statuses == {"correct": 3, "wrong": 4, "unparsable": 1}
    assert scores.truncated_share == 1 / 8
    assert scores.tokens_per_second == 8 * 2 / 0.5


# ── Properties ────────────────────────────────────────────────────────────────────────────────────────────────
def test_more_answers_to_the_same_problems_do_not_narrow_the_interval():
    problems = [[RIGHT] * 2, [WRONG] * 2] * 20
    few, many = scores_of(problems), scores_of([group * 8 for group in problems])
    assert few["pass@1"] == many["pass@1"]


def test_scores_round_trip_through_a_file(tmp_path):
    path, scores = tmp_path / "scores.json", scores_of([[RIGHT, NOTHING], [WRONG, RIGHT]])
    scores.write(path)
    assert Scores.read(path) == scores
    assert json.loads(path.read_text())["scores"]["pass@1"]["value"] == scores["pass@1"].value


# ── Edges ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_different_problems_are_not_compared():
    with pytest.raises(ConfigError, match="1 of sums and 2 of sums, 1 in common"):
        compare_scores(scores_of([[RIGHT], [WRONG]]), scores_of([[RIGHT]]))
    other_gold = replace(scores_of([[RIGHT]]).problems[0], gold="8")
    with pytest.raises(ConfigError, match="1 of other and 1 of sums, 0 in common"):
        compare_scores(scores_of([[RIGHT]]), replace(scores_of([[RIGHT]]), task="other", problems=[other_gold]))


def test_a_repeated_problem_is_paired_as_often_as_it_counts():
    one, other = (replace(s, problems=s.problems * 2) for s in (scores_of([[RIGHT]]), scores_of([[WRONG]])))
    other.problems[1] = one.problems[0]
    assert compare_scores(one, other)["pass@1"].value == one["pass@1"].value - other["pass@1"].value == 0.5


def test_answers_that_were_scored_differently_are_not_compared(tmp_path):
    old, kept = scores_of([[RIGHT], [WRONG]]), tmp_path / "kept.json"
    replace(old, scored_by="rewards.score > 0.5").write(kept)
    by_reward = Scores.read(kept)
    assert compare_scores(by_reward, by_reward)["pass@1"].equal
    for other in ("math", "rewards.score > 0.2"):
        with pytest.raises(ConfigError, match=f"same reward or verifier: {other} and rewards.score > 0.5"):
            compare_scores(by_reward, replace(old, scored_by=other))
    assert compare_scores(old, by_reward)  # an older file does not say what scored it


def test_what_scored_the_answers_has_the_same_name_in_every_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def score(completions, **_):\n    return [1.0 for _ in completions]\n")
    monkeypatch.chdir(tmp_path)
    paths = ("mine.py:score", f"{tmp_path}/mine.py:score", "mine:score", "mine.score")
    assert {judge_name(load_reward(path), 0.25) for path in paths} == {"mine.score > 0.25"}
    in_a_trainer = SimpleNamespace(__wrapped__=load_reward("mine.py:score"))
    assert judge_name(in_a_trainer, 0.5) == "mine.score > 0.5" and judge_name(len, 1) == "len > 1"
    assert judge_name(SimpleNamespace(__wrapped__=verifier("gsm8k")), 0.5) == "math"


def test_a_column_that_the_reward_needs_is_missed_before_sampling():
    def score(completions, gold, **_):
        return [1.0 for _ in completions]

    rows = [{"prompt": "1+1?", "golds": "2"}]
    with pytest.raises(ConfigError, match=r"score needs the column 'gold'; .* prompt, golds\. Did you mean"):
        evaluate(None, None, rows, score)
    with pytest.raises(ConfigError, match="countdown needs the column 'numbers'; the data has prompt, golds"):
        evaluate(None, None, rows, verifier("countdown"))
    with pytest.raises(ConfigError, match=r"needs the column 'prompt'; .* Did you mean 'prompts'"):
        evaluate(None, None, rows, lambda prompt, **_: [])


def test_all_invalid_settings_are_listed():
    with pytest.raises(ConfigError, match=r"(?s)k=0.*tokens=-1.*batch_size=0.*temperature=nan.*top_p=2.*seed=-1"):
        Sampling(k=0, temperature=math.nan, top_p=2, max_new_tokens=-1, batch_size=0, seed=-1)
    with pytest.raises(ConfigError, match=r"(?s)k=True is not a whole.*greedy=1 is not true.*seed=0.5 is not a whole"):
        Sampling(k=True, greedy=1, seed=0.5)  # type: ignore[arg-type]
