"""Runs with the answers of an evaluation."""

from pathlib import Path

from dew.compare import Sampling, Scores
from dew.compare.sampling import Sampled
from dew.compare.scores import ScoredProblem
from dew.rewards import Verdict
from dew.run.folder import RunFolder
from make_run import make_run


def write_answers(folder: Path, verdicts: list[bool], scored_by: str = "math") -> None:
    """The same verdicts on the answers to each of 40 problems."""
    judged = [Verdict("correct" if right else "wrong", "1") for right in verdicts]
    problems = [ScoredProblem(f"{i}?", "1", [Sampled("1", 1, False)] * len(judged), judged) for i in range(40)]
    scores = Scores("sums", "by hand", Sampling(k=len(judged)), problems, 1.0, scored_by=scored_by)
    scores.write(folder / "answers-after.json")
    RunFolder(folder).write_scores([{"when": "after", **scores.summary()}])


def make_scored_runs(folder: Path) -> Path:
    """One run each of grpo and dapo, paired by problem: dapo has both answers right, grpo one of them."""
    for name, verdicts in (("dapo", [True, True]), ("grpo", [True, False])):
        run = make_run(folder / f"{name}-seed0", steps=5, groups=1, size=2, algorithm=name)
        write_answers(run, verdicts)
        RunFolder(run).write_run({"arm": name})
    (folder / "grid.json").write_text('{"settings": {}, "arms": ["grpo", "dapo"], "sources": {}}')
    return folder
