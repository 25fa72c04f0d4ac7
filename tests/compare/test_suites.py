"""The paper's suite: data sets, settings, and the table of published results."""

from dew.compare import Sampling
from dew.compare.sampling import Sampled
from dew.compare.scores import ScoredProblem, Scores
from dew.compare.suites import PAPER
from dew.rewards import Verdict


def scores(task, k, correct):
    """Two problems with k answers each; `correct` answers to the first are correct, none to the second."""
    answers = [Sampled("x", 1, False)] * k
    verdicts = [Verdict("correct" if i < correct else "wrong", str(i)) for i in range(k)]
    wrong = [Verdict("wrong", "0")] * k
    problems = [ScoredProblem("a", "1", answers, verdicts), ScoredProblem("b", "1", answers, wrong)]
    return Scores(task, "m", Sampling(k=k), problems, 1.0)


def test_table_has_published_and_own_scores():
    heading, *published, own = PAPER.table("mine", {task: scores(task, 32, 16) for task in PAPER.tasks})
    assert heading[1] == "aime24 mean@32" and len(published) == 10
    gtpo = dict((row[0], row[1:]) for row in published)["7B GTPO"]
    assert gtpo == ["34.23", "48.03", "64.89", "16.67", "25.51", "26.67", "80.16"]
    assert own[0] == "mine" and own[1].startswith("25.00 [")  # half of one problem's answers, none of the other's
    assert own[3].startswith("50.00 [")  # pass@32: one of two problems


def test_missing_scores_are_marked():
    *_, own = PAPER.table("mine", {task: scores(task, 4, 2) for task in PAPER.tasks})
    assert own[1] == "not sampled" and own[2].startswith("50.00 [")  # pass@4 of 4 answers, two right
