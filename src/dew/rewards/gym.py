"""Verifiers of reasoning-gym's data sets: `verifier("reasoning_gym:leg_counting")`. A score of 1 is correct.

Several of its scorers run text of the model as code (`eval`, or sympy's `parse_expr`, which uses it). Those are
replaced here, or refused.
"""

import ast
from collections.abc import Callable
from functools import cache
from typing import Any

from dew.errors import ConfigError, Problem
from dew.rewards.extract import MAX_LENGTH, after_thinking, last_boxed
from dew.rewards.games import check_equation
from dew.rewards.verifiers import Verdict, Verifier

Entry = dict[str, Any]


def _same(answer: str, entry: Entry) -> float:
    return float(answer == entry["answer"].strip())


def _listed(answer: str, entry: Entry) -> float:
    return float(answer in {text.strip() for text in entry["metadata"]["valid_answers"]})


def _equation(answer: str, entry: Entry) -> float:
    facts = entry["metadata"]
    target = facts.get("target", 24)
    return float(check_equation(f"<answer>{answer}</answer>", numbers=facts["numbers"], answer=target).correct)


OWN: dict[str, Callable[[str, Entry], float]] = {
    **dict.fromkeys(("string_insertion", "spiral_matrix", "binary_matrix"), _same),
    "n_queens": _listed,
    **dict.fromkeys(("countdown", "puzzle24"), _equation),
    "game_of_life_halting": _same,  # theirs accepts any text where the answer is "True" or "False"
}
"""Scorers of dew instead of reasoning-gym's."""
REFUSED = ("polynomial_multiplication", "simple_integration", "intermediate_integration")


@cache
def gym_verifier(name: str) -> Verifier:
    """`name` is `reasoning_gym:` and a data set."""
    dataset = name.partition(":")[2]
    if dataset in REFUSED:
        what = f"The scorer of {name} runs text of the model as code (sympy's parse_expr), and dew has none of its own."
        raise ConfigError(Problem(what, remedy="Choose another data set, or write your own reward function."))
    score = OWN.get(dataset)

    def check(text: str, *, entry: str) -> Verdict:
        facts = ast.literal_eval(entry)
        answer = final_answer(text)
        if not answer or len(answer) > MAX_LENGTH:
            return Verdict("unparsable", value=0.0)
        value = (score or _theirs(dataset))(answer, facts)
        return Verdict("correct" if value >= 1 else "wrong", answer, float(value) if facts["graded"] else None)

    return Verifier(name, ("entry",), check)


def final_answer(text: str) -> str:
    """What is in the last <answer>, else in the last box; else the whole text after the thinking."""
    text = after_thinking(text)
    if "<answer>" in text:
        return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    return (last_boxed(text) or text).strip()


@cache
def _theirs(dataset: str) -> Callable[[str, Entry], float]:
    import reasoning_gym

    score = reasoning_gym.create_dataset(dataset, seed=0, size=1).score_answer

    def scored(answer: str, entry: Entry) -> float:
        try:
            return float(score(answer, entry))
        except Exception:  # several do not expect an answer in another form
            return 0.0

    return scored
