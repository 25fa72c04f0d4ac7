"""Areas under curves, paired differences over seeds and problems, and their verdicts."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.compare import compare_runs, read_result
from dew.compare.comparison import Result
from dew.compare.sampling import Sampled, Sampling
from dew.compare.scores import ScoredProblem, Scores
from dew.compare.statistics import area, paired_interval
from dew.errors import ConfigError
from dew.report.results import by_problem
from dew.rewards import Verdict
from dew.run.folder import RunFolder


def runs(algorithm: str, areas: list[float], passed: list[list[float]] | None = None) -> list[Result]:
    """One result per seed: its area, and pass@1 of each problem."""
    found = []
    for seed, height in enumerate(areas):
        problems = {"area": {"": height}}
        if passed is not None:
            problems["pass@1"] = {str(i): x for i, x in enumerate(passed[seed])}
        found.append(Result(algorithm, seed, groups=10, problems=problems))
    return found


# Golden


def test_areas_by_hand():
    assert area([1, 2, 3], [0.0, 1.0, 0.0]) == 0.5  # two triangles of 1/2 over a width of 2
    assert area([0, 1, 4], [0.2, 0.4, 0.4]) == pytest.approx((0.3 * 1 + 0.4 * 3) / 4)
    assert area([7], [0.25]) == 0.25


def test_difference_is_paired_by_seed_and_problem():
    # Seeds differ by up to 0.4, the algorithms by 0.01 for every seed: pairing sees only the latter.
    base = [0.1, 0.4, 0.2, 0.3, 0.5]
    result = compare_runs(runs("dapo", base) + runs("gtpo", [x + 0.01 for x in base]), "dapo")
    (d,) = result.differences
    assert (d.algorithm, d.baseline, d.score, d.seeds) == ("gtpo", "dapo", "area", (0, 1, 2, 3, 4))
    assert [d.difference.value, d.difference.low, d.difference.high] == pytest.approx([0.01] * 3)
    assert not d.within_noise and d.verdict == "gtpo ahead"


def test_problems_are_matched_by_name():
    a = Result("a", 0, 1, {"area": {"": 0.0}, "pass@1": {"x": 1.0, "y": 0.0}})
    b = Result("b", 0, 1, {"area": {"": 0.0}, "pass@1": {"y": 0.0, "x": 1.0}})
    assert [d.by_seed for d in compare_runs([a, b], "a").differences] == [(0.0,), (0.0,)]


def test_read_result_from_a_run_folder(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1, "accuracy": 0.2, "groups/sampled": 16})
    folder.append_metrics({"step": 2, "loss": 1.0})  # a mini-batch without sampling
    folder.append_metrics({"step": 3, "accuracy": 0.4, "groups/sampled": 32})
    verdicts = [[Verdict("correct", "1"), Verdict("wrong", "2")], [Verdict("wrong", "2"), Verdict("wrong", "3")]]
    problems = [ScoredProblem(f"{i}?", "1", [Sampled("a", 1, False)] * 2, v) for i, v in enumerate(verdicts)]
    Scores("sums", "by hand", Sampling(k=2), problems, 1.0).write(tmp_path / "answers-after.json")
    result = read_result(tmp_path, "gtpo", 3)
    assert (result["area"], result["pass@1"], result["pass@2"], result.groups) == pytest.approx((0.3, 0.25, 0.5, 48))
    assert json.loads(json.dumps(compare_runs([result], "gtpo").to_json()))["runs"][0]["seed"] == 3


def test_the_report_pairs_no_runs_that_were_scored_by_different_rewards(tmp_path):
    problem = ScoredProblem("1?", "1", [Sampled("1", 1, False)], [Verdict("correct", "1")])
    scores, folders = Scores("sums", "by hand", Sampling(k=1), [problem], 1.0), {}
    for name, judge in (("a", "math"), ("b", "math"), ("c", "mine.score > 0.5")):
        folders[name] = (SimpleNamespace(folder=tmp_path / name), "after")
        (tmp_path / name).mkdir()
        replace(scores, scored_by=judge).write(tmp_path / name / "answers-after.json")
    assert by_problem(folders["a"], folders["b"], "pass@1").value == 0
    assert by_problem(folders["a"], folders["c"], "pass@1") is None


# Oracle


def test_width_for_seeds_alone_is_that_of_students_t():
    from scipy.stats import t

    D = np.random.default_rng(1).normal(size=(12, 1))
    interval = paired_interval(D)
    half = t.ppf(0.975, 11) * D.std(ddof=1) / np.sqrt(12)
    assert (interval.high - interval.low) / 2 == pytest.approx(half, rel=0.15)


def test_interval_coverage():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(100):
        interval = paired_interval(rng.normal(size=(5, 1)))
        hits += interval.low <= 0 <= interval.high
    assert hits / 100 > 0.88  # of 1,500 such draws it covers 0.93, and a plain percentile interval 0.85


def test_few_problems_widen_the_interval_even_if_all_seeds_agree():
    one_seed = np.random.default_rng(3).normal(size=(1, 20))
    D = np.repeat(one_seed, 6, axis=0)
    interval = paired_interval(D)
    assert interval.high - interval.low > 2 * 1.96 * one_seed.std() / np.sqrt(20)


# Properties

heights = st.lists(st.floats(0, 1), min_size=2, max_size=7)


@given(heights, st.floats(0.1, 10), st.floats(-5, 5))
def test_area_does_not_depend_on_the_unit_of_steps(values, unit, start):
    steps = list(range(len(values)))
    moved = [start + unit * step for step in steps]
    assert area(moved, values) == pytest.approx(area(steps, values), abs=1e-9)
    assert min(values) - 1e-9 <= area(steps, values) <= max(values) + 1e-9


@settings(max_examples=20, deadline=None)
@given(heights, heights)
def test_swapping_the_algorithms_flips_the_sign(a, b):
    n = min(len(a), len(b))
    D = np.subtract(a[:n], b[:n])[:, None]
    forth, back = paired_interval(D), paired_interval(-D)
    assert forth.value == pytest.approx(-back.value)
    assert forth.low == pytest.approx(-back.high, abs=0.02 + 0.1 * np.ptp(D))


# Edges


@pytest.mark.parametrize("seeds", [1, 2, 4])
def test_too_few_seeds(seeds):
    base = [0.1] * seeds
    (d,) = compare_runs(runs("a", base) + runs("b", [0.9] * seeds), "a").differences
    assert d.within_noise and "too few seeds" in d.verdict


def test_difference_of_changing_sign_is_noise():
    (d,) = compare_runs(runs("a", [0.2] * 5) + runs("b", [0.3, 0.1, 0.25, 0.18, 0.2]), "a").differences
    assert d.verdict == "within noise"


def test_incomparable_inputs():
    a = runs("a", [0.1], [[1.0, 0.0]])
    b = [Result("b", 0, 1, {"area": {"": 0.1}, "pass@1": {"other": 1.0}})]
    with pytest.raises(ConfigError, match="different problems"):
        compare_runs(a + b, "a")
    with pytest.raises(ConfigError, match="no seed in common"):
        compare_runs([*runs("a", [0.1]), Result("b", 5, 1, {"area": {"": 0.1}})], "a")


def test_run_without_accuracy(tmp_path):
    with pytest.raises(ConfigError, match="no accuracy"):
        read_result(tmp_path, "gtpo", 0)
