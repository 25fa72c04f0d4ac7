"""Preference pairs from verified answers: a correct and a wrong answer to the same problem."""

import random

from dew.compare.scores import Scores, as_completion
from dew.tasks import Row


def preference_pairs(scores: Scores, *, per_problem: int = 1, seed: int = 0) -> list[Row]:
    """Rows with `prompt`, `chosen` and `rejected`, at most `per_problem` per problem, drawn at random.

    Problems whose answers are all correct or all wrong give none. Truncated answers are left out, because a trainer
    would append an end token that the model did not write; answers whose check timed out, because they may be correct.
    """
    rng, rows = random.Random(seed), []
    for problem in scores.problems:
        sides: dict[bool, list[str]] = {True: [], False: []}
        for answer, verdict in zip(problem.answers, problem.verdicts, strict=True):
            if not answer.truncated and verdict.status != "timeout":
                sides[verdict.correct].append(answer.text)
        pairs = min(per_problem, *map(len, sides.values()))
        drawn = zip(rng.sample(sides[True], pairs), rng.sample(sides[False], pairs), strict=True)
        for pair in drawn:
            chosen, rejected = (as_completion(problem.prompt, text) for text in pair)
            rows.append({"prompt": problem.prompt, "chosen": chosen, "rejected": rejected})
    return rows
