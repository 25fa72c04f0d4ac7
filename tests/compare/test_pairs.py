"""Preference pairs from verified answers."""

from dew.compare import Sampling, Scores, preference_pairs
from dew.compare.sampling import Sampled
from dew.compare.scores import ScoredProblem
from dew.rewards import Verdict


def scores(*problems, prompt="p{}"):
    """Each problem as a string: + correct, - wrong, t timed out, and C, W cut off at the maximum length."""
    kinds = {"+": ("correct", False), "-": ("wrong", False), "t": ("timeout", False),
             "C": ("correct", True), "W": ("wrong", True)}  # fmt: skip
    rows = []
    for i, answers in enumerate(problems):
        made = [
            (Sampled(f"{i}{kind}{j}", 3, kinds[kind][1]), Verdict(kinds[kind][0])) for j, kind in enumerate(answers)
        ]
        shown = prompt.format(i) if isinstance(prompt, str) else prompt
        rows.append(ScoredProblem(shown, None, [a for a, _ in made], [v for _, v in made]))
    return Scores("game", "model", Sampling(k=len(problems[0])), rows, 1.0)


def test_a_correct_answer_against_a_wrong_one_of_the_same_problem():
    found = preference_pairs(scores("+--", "---", "+++", "-+-"))
    assert [row["prompt"] for row in found] == ["p0", "p3"]
    assert all("+" in row["chosen"] and "-" in row["rejected"] for row in found)
    assert all(row["chosen"][0] == row["rejected"][0] == row["prompt"][1] for row in found)


def test_answers_that_were_cut_off_or_timed_out_are_left_out():
    assert preference_pairs(scores("C--", "+WW", "+tt")) == []


def test_no_answer_is_used_twice():
    found = preference_pairs(scores("++---"), per_problem=5)
    assert len(found) == 2 and len({row["chosen"] for row in found} | {row["rejected"] for row in found}) == 4


def test_the_seed_decides_which():
    many = scores(*["++++----"] * 20)
    assert preference_pairs(many, seed=1) == preference_pairs(many, seed=1) != preference_pairs(many, seed=2)


def test_chat_prompts_get_chat_answers():
    (row,) = preference_pairs(scores("+-", prompt=[{"role": "user", "content": "1+1?"}]))
    assert row["chosen"] == [{"role": "assistant", "content": "0+0"}]
