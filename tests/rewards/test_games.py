"""Verifiers of the arithmetic games: exact, and text is never run as code."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dew.errors import ConfigError, RewardError
from dew.rewards import Verdict, verifier
from dew.rewards.games import parse_steps

countdown, equation = map(verifier, ("countdown", "countdown-tinyzero"))


def check(text: str, numbers: list[int], target: int) -> Verdict:
    return countdown.check(text, numbers=numbers, answer=str(target))


# ── Golden ────────────────────────────────────────────────────────────────────────────────────────────────
def test_countdown_accepts_every_way_to_the_target():
    # 2, 3, 5 -> 16:  3+5=8, 8*2=16.   Also 5+3, and the product the other way round.
    for text in ("3+5=8;8*2=16", "5+3=8;2*8=16", " 3+5=8;8*2=16\n"):
        assert check(text, [2, 3, 5], 16) == Verdict("correct", text.strip())
    assert check("2-5=-3;-3+9=6", [2, 5, 9], 6).correct  # −3 + 9 = 6
    assert check("2-5=-3;9--3=12", [2, 5, 9], 12).correct  # 9 − (−3) = 12
    assert check("4-4=0;0+7=7", [4, 4, 7], 7).correct


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("3+5=7;7*2=16", "steps that do not hold"), ("3+5=8;8+2=10", "wrong target"), ("3+5=8", "a number left over"),
        ("3+5=8;8*2=16;16*1=16", "a number that was not given"), ("3+5=8;8+8=16", "a result used twice"),
        ("3+5=8;3*5=15", "numbers used twice"), ("8*2=16", "the result of a step that was never made"),
        ("8*2=16;3+5=8", "steps in the wrong order"),
    ],
)  # fmt: skip
def test_countdown_rejects(text: str, why: str):
    assert check(text, [2, 3, 5], 16).status == "wrong", why


def test_countdown_requires_every_number():
    assert check("3*5=15", [2, 3, 5], 15).status == "wrong" and check("3*5=15", [3, 5], 15).correct


@pytest.mark.parametrize(
    "text",
    ["", ";", "16", "3+5", "3+5=", "3+5=8;", "3+5=8;8*2", "3 + 5 = 8;8*2=16", "3+5=08;8*2=16", "3/5=0",
     "+3+5=8", "3+5=8,8*2=16", "3+5=8;8**2=64", "(3+5)*2=16", "__import__('os')",
     "３+5=8;8*2=16", "9" * 5000 + "+1=2"],
)  # fmt: skip
def test_countdown_cannot_parse(text: str):
    assert check(text, [2, 3, 5], 16) == Verdict("unparsable", None)


def test_gold_columns_may_be_numbers_or_text():
    """A file with ready-made prompts keeps the types of its columns."""
    for numbers, answer in (([2, 3, 5], 16), (["2", "3", "5"], "16"), ([2.0, 3.0, 5.0], 16.0)):
        assert countdown.check("3+5=8;8*2=16", numbers=numbers, answer=answer).correct
        assert equation.check("<answer>(3+5)*2</answer>", numbers=numbers, answer=answer).correct
    with pytest.raises(RewardError, match="cannot check an answer against numbers='2,3,5'"):
        countdown.verdicts(["3+5=8;8*2=16"], [{"numbers": "2,3,5", "answer": "16"}])


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("<think>hm</think><answer>44 + 19 + 35</answer>", "correct"),  # 63 + 35 = 98
        ("<answer>(35 + 44) + 19 = 98</answer>", "correct"),
        ("<answer>44 + 19 - -35</answer>", "correct"),  # 63 - (-35) = 98
        ("<answer>44 + 54</answer>", "wrong"),  # 98, with a number that was not given
        ("<answer>44 + 19 + 35 + 0</answer>", "wrong"),
        ("<answer>44 * 19 - 35</answer>", "wrong"),
        *((text, "unparsable") for text in
          ("<answer>__import__('os')</answer>", "<answer>44 / (19 - 19)</answer>", "<answer>44 + </answer>",
           "<answer>(44 + 19 + 35</answer>", "<answer>2**99999999</answer>", "I give up")),
    ],
)  # fmt: skip
def test_tinyzero_countdown(text: str, status: str):
    assert equation.check(text, numbers=[44, 19, 35], answer="98").status == status


def test_the_last_number_is_the_sum():
    texts = "47 + 85 = 132.", "The sum of 47 and 85 is 0,132", "132, because 47 + 85", "one hundred"
    statuses = [verifier("sums").check(text, answer="132").status for text in texts]
    assert statuses == ["correct", "correct", "wrong", "unparsable"]  # the last number of the third is 85


@pytest.mark.parametrize(
    ("text", "answer", "status"),
    [("It is 132.0.", "132", "correct"), ("It is 13.2", "2", "wrong"), ("It is 0.", "0", "correct"),
     ("It is 1000", "1", "wrong"), ("It is 10.50", "10.5", "correct"), ("It is 0.50", ".5", "correct"),
     ("It is 1,132", "1,132", "correct"), ("It is 132", 132.0, "correct"), ("It is " + "9" * 5000, "9", "wrong")],
)  # fmt: skip
def test_sums_compare_numbers(text: str, answer: object, status: str):
    assert verifier("sums").check(text, answer=answer).status == status


def test_division_is_exact():
    for text in ("(1 / 3) * 6", r"\(\left(1 \div 3\right) \cdot 6\)", r"$\frac{1}{3} \times 6 = 2$", "1÷3·6."):
        assert equation.check(f"<answer>{text}</answer>", numbers=[1, 3, 6], answer="2").correct


# ── Oracle ────────────────────────────────────────────────────────────────────────────────────────────────
def reaches(numbers: list[int], target: int) -> set[str]:
    """Every solution, by exhaustion: take any two numbers, put any result back."""
    found = set()

    def search(pool: list[int], steps: list[str]) -> None:
        if len(pool) == 1 and pool[0] == target:
            found.add(";".join(steps))
        for i in range(len(pool)):
            for j in range(len(pool)):
                if i != j:
                    a, b = pool[i], pool[j]
                    rest = [x for at, x in enumerate(pool) if at not in (i, j)]
                    for sign, value in (("+", a + b), ("-", a - b), ("*", a * b)):
                        search([*rest, value], [*steps, f"{a}{sign}{b}={value}"])

    search(numbers, [])
    return found


@given(st.lists(st.integers(1, 9), min_size=3, max_size=3), st.integers(-20, 60))
def test_exactly_the_solutions_found_by_exhaustion_are_correct(numbers: list[int], target: int):
    everything = {text for goal in (target, target + 1) for text in reaches(numbers, goal)}
    assert {text for text in everything if check(text, numbers, target).correct} == reaches(numbers, target)


# ── Properties ────────────────────────────────────────────────────────────────────────────────────────────
@given(st.lists(st.tuples(st.integers(-99, 99), st.sampled_from("+-*"), st.integers(-99, 99), st.integers(0, 999))))
def test_steps_survive_a_round_trip(steps: list[tuple[int, str, int, int]]):
    text = ";".join(f"{left}{op}{right}={result}" for left, op, right, result in steps)
    assert parse_steps(text) == (steps or None)


# ── Edges ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_invalid_columns_and_names():
    with pytest.raises(RewardError, match="no column 'numbers'; it has answer, target"):
        countdown(["1+2=3"], target=[3], answer=["3"])
    with pytest.raises(RewardError, match="2 answers for 1 rows"):
        countdown.verdicts(["1+2=3", "1+2=3"], [{"answer": "3"}])
    with pytest.raises(ConfigError, match="Did you mean 'countdown'"):
        verifier("cuntdown")
