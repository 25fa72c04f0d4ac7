"""reasoning-gym's data sets as tasks: splits, verdicts, and scorers that would run an answer as code."""

from importlib.util import find_spec

import pytest

from dew.errors import ConfigError
from dew.preflight.trl import Data, check_golds
from dew.rewards import verifier
from dew.rewards.games import OWN, REFUSED
from dew.tasks import task

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs the extra gym")
NO_GOLD = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")


def test_splits_are_fixed_and_do_not_overlap():
    source = task("reasoning_gym:coin_flip")  # small: by seeds alone the splits would share problems
    train, held_out = source.rows(300), source.rows(20, split="held_out")
    assert len(held_out) == 20 and not {row["problem"] for row in train} & {row["problem"] for row in held_out}
    assert source.rows(20) == train[:20] and source.rows(20, seed=1) != train[:20]
    assert len(task("reasoning_gym:coin_flip", size=10).rows(300)) == 10
    assert train[0]["prompt"][0]["content"].endswith("<answer> and </answer>.")
    assert task("reasoning_gym:coin_flip", template="plain").rows(1)[0]["prompt"] == train[0]["problem"]


def test_only_a_score_of_one_is_correct_and_the_score_can_be_the_reward():
    right = verifier("reasoning_gym:leg_counting")
    (row,) = task("reasoning_gym:leg_counting").rows(1)
    gold = row["answer"]
    texts = [f"<think>7</think>It is\n<answer> {gold} </answer>", rf"\boxed{{{gold}}}", gold, f"{gold}0", ""]
    statuses = [v.status for v in right.verdicts(texts, [row] * 5)]
    assert statuses == ["correct", "correct", "correct", "wrong", "unparsable"]
    (jumble,) = task("reasoning_gym:letter_jumble", graded=True).rows(1)
    texts = [jumble["answer"], " ".join([*jumble["answer"].split()[:-1], "zzz"])]
    whole, part = verifier("reasoning_gym:letter_jumble").verdicts(texts, [jumble] * 2)
    assert whole.correct and whole.reward == 1 and not part.correct and 0 < part.reward < 1


@pytest.mark.parametrize("name", [*OWN, "knights_knaves", "prime_factorization", "group_anagrams", "word_ladder"])
def test_gold_answers_verify_and_others_do_not(name):
    settings = {"min_numbers": 3, "max_numbers": 3} if name == "countdown" else {}
    rows = task(f"reasoning_gym:{name}", **settings).rows(2)
    check = verifier(f"reasoning_gym:{name}")
    assert [v.status for v in check.verdicts([row["answer"] for row in rows], rows)] == ["correct"] * len(rows)
    assert [v.correct for v in check.verdicts(["zzz nonsense"] * len(rows), rows)] == [False] * len(rows)


@pytest.mark.parametrize("name", OWN)
def test_no_answer_is_run_as_code(name, tmp_path):
    target = tmp_path / "touched"
    code = f"__import__('pathlib').Path({str(target)!r}).touch()"
    (row,) = task(f"reasoning_gym:{name}").rows(1)
    for text in (code, f"[{code}]", f"['a', {code}]"):
        assert not verifier(f"reasoning_gym:{name}").verdicts([text], [row])[0].correct
    assert not target.exists()


def test_scorers_that_run_code_without_a_replacement_are_refused():
    for name in REFUSED:
        with pytest.raises(ConfigError, match="as code"):
            verifier(f"reasoning_gym:{name}")


@pytest.mark.parametrize("name", NO_GOLD)
def test_preflight_knows_the_data_sets_without_gold_answers(name):
    name = f"reasoning_gym:{name}"
    found = check_golds(Data(task(name).rows(1), [verifier(name)]), 0, 0.5)
    assert found.status == "skipped" and "any solution" in found.says


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="leg_counting"):
        task("reasoning_gym:leg_countin")
    with pytest.raises(ConfigError, match="max_animals"):
        task("reasoning_gym:leg_counting", animals=3)
