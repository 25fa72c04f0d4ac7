"""Results of runs, paired differences over seeds and problems, verdicts, and grids of runs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dew.compare import Result, compare_runs, corrected, paired, read_result, verdicts
from dew.compare.grid import Cell, open_grid, read_grid
from dew.compare.sampling import Sampled, Sampling
from dew.compare.scores import ScoredProblem, Scores
from dew.compare.statistics import holm, mean_interval, t_test
from dew.compare.verdicts import difference_table, summary
from dew.errors import ConfigError, RecordError
from dew.rewards import Verdict
from dew.run.folder import RunFolder


def runs(arm, areas, **more):
    return [Result(arm, seed, {"area": x}, groups=480, **more) for seed, x in enumerate(areas)]


def difference(*by_pair, arm="gtpo", score="area", unit="seeds", task=""):
    values = dict(enumerate(by_pair))
    return paired(values, dict.fromkeys(values, 0.0), arm=arm, baseline="dapo", score=score, unit=unit, task=task)


# ── Statistics ────────────────────────────────────────────────────────────────────────────────────────────
def test_t_test_is_scipys():
    from scipy.stats import ttest_rel

    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(2, 12))
    truth = ttest_rel(a, b)
    interval, p = t_test(a - b)
    bounds = truth.confidence_interval()
    assert (interval.low, interval.high, p) == pytest.approx((bounds.low, bounds.high, truth.pvalue))


def test_unanimous_problems_have_a_wide_interval():
    # Five of five: a true share of 0.478 still gives that with probability 0.478⁵ = 0.025.
    all_right, none_right = mean_interval([1.0] * 5), mean_interval([0.0] * 5)
    assert all_right.low == pytest.approx(0.025 ** (1 / 5)) and all_right.high == 1.0
    assert none_right.high == pytest.approx(1 - 0.025 ** (1 / 5)) and none_right.low == 0.0


@given(st.integers(1, 60), st.floats(-3, 3), st.floats(3, 9))
def test_an_exact_interval_excludes_0_exactly_if_p_is_small(n, value, reach):
    interval, p = t_test([value] * n, (-reach, reach))
    assert (interval.low > 0 or interval.high < 0) == (p < 0.05) or p == pytest.approx(0.05)


def test_rewards_beyond_1_are_not_clipped():
    """Differences of 4 on each of two problems, of rewards up to 5: 1 − 0.025^(1/2) = 0.842 of them may be −5."""
    found = paired({0: 5.0, 1: 5.0}, {0: 1.0, 1: 1.0}, arm="a", baseline="b", score="reward", unit="problems")
    assert (found.low, found.high) == pytest.approx((4 - 0.8419 * 9, 4 + 0.8419 * 1), abs=1e-3)


# ── Differences ───────────────────────────────────────────────────────────────────────────────────────────
def test_a_difference_is_paired():
    """Seeds differ by up to 0.4, the arms by about 0.01 in every seed: pairing sees only the latter."""
    base = [0.1, 0.4, 0.2, 0.3, 0.5]
    other = [x + 0.01 + 0.001 * i for i, x in enumerate(base)]
    (d,) = compare_runs(runs("dapo", base) + runs("gtpo", other), "dapo")
    assert (d.arm, d.baseline, d.score, d.unit, d.pairs) == ("gtpo", "dapo", "area", "seeds", 5)
    assert d.value == pytest.approx(0.012) and d.verdict == "ahead" and not d.within_noise
    assert d.to_json()["verdict"] == "ahead" and d.to_json()["by_pair"] == d.by_pair
    (back,) = compare_runs(runs("dapo", base) + runs("gtpo", other), "gtpo")
    assert back.verdict == "behind" and (back.low, back.high) == pytest.approx((-d.high, -d.low))


def test_only_common_seeds_are_paired():
    assert paired({0: 1.0, 7: 2.0}, {0: 0.0, 1: 0.0}, arm="a", baseline="b", score="x").pairs == 1
    assert paired({0: 1.0}, {1: 0.0}, arm="a", baseline="b", score="x") is None
    with pytest.raises(ConfigError, match="no seed in common"):
        compare_runs([*runs("a", [0.1]), Result("b", 5, {"area": 0.1})], "a")


@pytest.mark.parametrize("seeds", [1, 2, 4])
def test_too_few_seeds(seeds):
    d = difference(*([0.8] * seeds))
    assert d.within_noise and d.verdict == f"too few seeds ({seeds} of at least 5)"


def test_holms_correction_is_over_the_arms_of_a_score():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # 3 · 0.01, then 2 · 0.03, then no less
    values = (0.01, 0.02, 0.03, 0.02, 0.01)
    every = [difference(*values, arm=arm, score=score) for arm in "ab" for score in ("area", "final")]
    assert [d.holm for d in corrected(every)] == pytest.approx([2 * d.p for d in every])
    assert corrected(every[:2]) == every[:2]


# ── Results of runs ───────────────────────────────────────────────────────────────────────────────────────
def write_run(folder, correct=(1, 0), **facts):
    """A run with two problems of two answers."""
    run = RunFolder(folder)
    run.write_run(facts)
    run.append_metrics({"step": 1, "accuracy": 0.2, "groups/sampled": 16})
    run.append_metrics({"step": 2, "loss": 1.0})  # a mini-batch without sampling
    run.append_metrics({"step": 3, "accuracy": 0.4, "groups/sampled": 32})
    verdicts = [[Verdict("correct" if i < n else "wrong", str(i)) for i in range(2)] for n in correct]
    problems = [ScoredProblem("?", str(i), [Sampled("a", 1, False)] * 2, v) for i, v in enumerate(verdicts)]
    scores = Scores("sums", "by hand", Sampling(k=2), problems, 1.0, scored_by="math")
    scores.write(folder / "answers-after.json")
    run.write_scores([{"when": "before", "scores": {"pass@1": {"value": 0}}}, {"when": "after", **scores.summary()}])
    return scores


def test_the_result_of_a_run_folder(tmp_path):
    write_run(tmp_path, algorithm={"name": "gtpo"}, seed=3, data="sums")
    result = read_result(tmp_path)
    assert (result.arm, result.seed, result.task, result.groups) == ("gtpo", 3, "sums", 48)
    assert result.scores["area"] == pytest.approx(0.3) and result.scores["pass@1"] == 0.25
    RunFolder(tmp_path).write_run({"arm": "gtpo(alpha2=0.5)", "learning_rate": 1e-4})
    assert read_result(tmp_path).arm == "gtpo(alpha2=0.5)" and read_result(tmp_path, arm="x").learning_rate == 1e-4
    with pytest.raises(ConfigError, match="no accuracy"):
        read_result(tmp_path / "nowhere")


def test_one_run_each_is_paired_by_problem(tmp_path):
    """The problems have the same prompt and different golds: +0.5 in one of two."""
    for name, correct in (("dapo", (1, 0)), ("gtpo", (2, 0))):
        write_run(tmp_path / name, correct, algorithm=name)
    results = [read_result(tmp_path / name) for name in ("dapo", "gtpo")]
    area, first, second = compare_runs(results, "dapo")
    assert (area.unit, area.verdict) == ("seeds", "too few seeds (1 of at least 5)")
    assert (first.unit, first.pairs, first.value, first.verdict) == ("problems", 2, 0.25, "within noise")
    assert verdicts([area, first, second]) == [
        "gtpo is within noise of dapo in pass@1 (±0.750) and pass@2 (±0.842), with one run each."
    ]
    assert "| gtpo − dapo | 1 | +0.000 | +0.250 [-1.000, +1.000] |" in summary(results, [area, first, second])
    other = replace(Scores.read(tmp_path / "gtpo" / "answers-after.json"), scored_by="mine.score > 0.5")
    other.write(tmp_path / "gtpo" / "answers-after.json")  # scored differently: not paired by problem
    assert {d.unit for d in compare_runs(results, "dapo")} == {"seeds"}


# ── Verdicts ──────────────────────────────────────────────────────────────────────────────────────────────
CLEAR = (0.030, 0.031, 0.032, 0.031, 0.032)
NOISE = (0.1, -0.1, 0.05, -0.06, 0.02)


def test_a_sentence_for_each_arm_that_differs_and_one_for_all_others():
    ahead = [difference(*CLEAR), difference(*NOISE, score="final"), difference(*(-x for x in CLEAR), score="pass@16")]
    others = [difference(*NOISE, arm=arm) for arm in ("grpo", "otb")]
    same = [difference(0.0, 0.0, arm="dr_grpo", score=score) for score in ("area", "entropy")]
    assert verdicts([*others, difference(0.1, arm="new"), *same, *ahead]) == [
        "gtpo is ahead of dapo in mean accuracy in training by 0.031 (95% interval 0.030 to 0.032); behind it in "
        "pass@16 by 0.031 (0.030 to 0.032); within noise in accuracy at the end of training.",
        "grpo and otb are within noise of dapo in mean accuracy in training (±0.101).",
        "Too few seeds to compare new with dapo: 1 of at least 5.",
        "Every run of dr_grpo is identical to that of dapo: its credit is the same or differs by a constant factor, "
        "which Adam cancels, or neither trained.",
    ]
    assert verdicts([]) == []


def test_runs_of_equal_accuracy_are_identical_only_if_their_entropy_is():
    zero = difference(*[0.0] * 5)
    assert "identical" in verdicts([zero, difference(*[0.0] * 5, score="entropy")])[0]
    for others in ([], [difference(*CLEAR, score="entropy")]):
        assert "within noise" in verdicts([zero, *others])[0]


def test_tasks_are_named_if_there_are_several_and_one_run_is_not_called_better():
    first, second = difference(*CLEAR, task="easy"), difference(*[0.5] * 40, task="hard", unit="problems")
    easy, hard = verdicts([first, second])
    assert easy.startswith("easy: gtpo is ahead") and hard.startswith("hard: gtpo is ahead")
    assert hard.endswith("This is one run each: another seed may reverse it.")
    assert not verdicts([first])[0].startswith("easy")


def test_the_tables_by_hand():
    results = runs("dapo", [0.2, 0.4]) + runs("gtpo", [0.3, 0.4])
    text = summary(results, compare_runs(results, "dapo"))
    assert "| dapo | 2 | 0.300 ± 0.141 | 480 |" in text  # √(0.1² + 0.1²) = 0.141
    # t = 12.706, the standard error 0.05
    assert "| gtpo − dapo | 2 | +0.050 [-0.585, +0.685] |" in text and "Too few seeds to compare gtpo" in text
    assert "| gtpo − dapo | 5 | **+0.031 [+0.030, +0.032]** |" in difference_table([difference(*CLEAR)])
    assert "difference" not in summary(results[:2], [])


# ── Grids ─────────────────────────────────────────────────────────────────────────────────────────────────
def finish(folder, cell):
    RunFolder(folder / cell.home).write_run(cell.facts())


def test_a_grid_returns_what_is_not_finished(tmp_path):
    cells = [Cell(arm, seed) for seed in (0, 1) for arm in ("dapo", "gtpo(alpha2=0.5)")]
    assert open_grid(tmp_path / "g", cells, {"max_steps": 5}) == cells
    assert [str(cell.home) for cell in cells[:2]] == ["dapo-seed0", "gtpo_alpha2_0.5-seed0"]
    finish(tmp_path / "g", cells[1])
    assert RunFolder(tmp_path / "g" / cells[1].home).run()["arm"] == "gtpo(alpha2=0.5)"
    left = open_grid(tmp_path / "g", cells, {"max_steps": 5}, finished=lambda run: "arm" in run.run())
    assert left == [cells[0], *cells[2:]] and read_grid(tmp_path / "g")["arms"] == ["dapo", "gtpo(alpha2=0.5)"]
    other = Cell("dapo", 0, task="countdown-4", learning_rate=3e-5, control="x")
    assert str(other.home) == "countdown-4/dapo-lr3e-05-seed0"
    paths = ("/a/b.jsonl", "a/b.jsonl", "../b.jsonl", "b.jsonl")
    files = [str(Cell("dapo", 0, task=path).home.parent) for path in paths]
    assert files == ["_a_b.jsonl", "a_b.jsonl", "_._b.jsonl", "b.jsonl"]  # not hidden, not outside of the grid
    assert other.facts() == {"arm": "dapo", "seed": 0, "control": "x", "data": "countdown-4", "learning_rate": 3e-5}
    open_grid(tmp_path / "g", [Cell("grpo", 0)], {"max_steps": 5})  # added to the baseline
    assert read_grid(tmp_path / "g")["arms"] == ["dapo", "gtpo(alpha2=0.5)", "grpo"]
    open_grid(tmp_path / "g", [Cell("grpo", 0), Cell("dapo", 0)], {"max_steps": 5})
    assert read_grid(tmp_path / "g")["arms"] == ["grpo", "dapo", "gtpo(alpha2=0.5)"]


def test_a_folder_holds_one_grid(tmp_path):
    cells = [Cell("gtpo", 0)]
    open_grid(tmp_path / "g", cells, {"max_step": 5})  # a typo: no run has started
    open_grid(tmp_path / "g", cells, {"max_steps": 5})
    finish(tmp_path / "g", cells[0])
    with pytest.raises(ConfigError, match=r"other settings \(max_steps 5 and 6\)"):
        open_grid(tmp_path / "g", cells, {"max_steps": 6})
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="not empty"):
        open_grid(tmp_path, cells, {})
    with pytest.raises(ConfigError, match="same folder"):
        open_grid(tmp_path / "new", [Cell("a(x=1)", 0), Cell("a(x,1)", 0)], {})
    (tmp_path / "g" / "grid.json").write_text("[]")
    with pytest.raises(RecordError, match=r"grid\.json"):
        open_grid(tmp_path / "g", cells, {})


def test_runs_of_a_rule_that_was_edited_are_set_aside(tmp_path, capsys):
    old, other = Cell("mine", 0, source="1"), Cell("mine2", 0, source="9")
    placebo = Cell("mine(placebo=True)", 0, source="1")
    for cell in (old, placebo, other):
        open_grid(tmp_path, [cell], {})
        finish(tmp_path, cell)
    open_grid(tmp_path, [replace(old, source="2")], {})
    assert "The code of mine has changed: its earlier runs (1) are now in" in capsys.readouterr().out
    assert [(tmp_path / cell.home).exists() for cell in (old, placebo, other)] == [False, False, True]
    assert RunFolder(tmp_path / ".replaced" / "1" / old.home).run()["source"] == "1"
    open_grid(tmp_path, [replace(old, source="2")], {})
    assert not capsys.readouterr().out
