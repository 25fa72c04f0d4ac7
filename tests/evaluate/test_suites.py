"""The paper's suite: its sets, its settings, and a table beside the published one."""

import pytest

from dew.errors import ConfigError
from dew.evaluate import Sampling
from dew.evaluate.sampling import Sampled
from dew.evaluate.scores import Problem, Scores
from dew.evaluate.suites import PAPER, suite
from dew.rewards import Verdict


def scores(task, k, correct):
    """Two problems with k answers each, of which `correct` are right in the first and none in the second."""
    answers = [Sampled("x", 1, False)] * k
    verdicts = [Verdict("correct" if i < correct else "wrong", str(i)) for i in range(k)]
    wrong = [Verdict("wrong", "0")] * k
    problems = [Problem("a", "1", answers, verdicts), Problem("b", "1", answers, wrong)]
    return Scores(task, "m", Sampling(k=k), problems, 1.0)


def test_the_table_stands_beside_the_papers():
    heading, *published, own = PAPER.table("mine", {task: scores(task, 32, 16) for task in PAPER.tasks})
    assert heading[1] == "aime24 mean@32" and len(published) == 10
    gtpo = dict((row[0], row[1:]) for row in published)["7B GTPO"]
    assert gtpo == ["34.23", "48.03", "64.89", "16.67", "25.51", "26.67", "80.16"]
    assert own[0] == "mine" and own[1].startswith("25.00 [")  # half of one problem's answers, none of the other's
    assert own[3].startswith("50.00 [")  # pass@32: one of two problems


def test_scores_that_were_not_sampled_are_said_to_be_missing():
    *_, own = PAPER.table("mine", {task: scores(task, 4, 2) for task in PAPER.tasks})
    assert own[1] == "not sampled" and own[2].startswith("50.00 [")  # pass@4 of 4 answers, two right


def test_unknown_suites_are_named():
    assert suite("paper").sampling["k"] == 32
    with pytest.raises(ConfigError, match="There are: paper"):
        suite("papers")
