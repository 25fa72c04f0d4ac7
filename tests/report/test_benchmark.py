"""The benchmark of credit rules: which runs follow from which, verdicts on planted differences, archives, the page."""

import argparse
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import benchmark as script
import benchmark_simulation as simulation
import benchmark_stages as stages
import numpy as np
import pytest
import torch

from dew.algorithms import DAPO, get_algorithm
from dew.compare.grid import Cell, open_grid
from dew.engines.lab import markdown
from dew.engines.lab.arms import parse_arms
from dew.engines.lab.study import write_run
from dew.errors import ConfigError
from dew.report import benchmark as b
from dew.report import read_content
from dew.rollouts import Rollouts

ROOT = Path(__file__).parents[2]
RELATIVE = "dew(entropy_clip=(0.01,100.0),compare=relative)"
ARMS = ("dapo", "grpo", "gtpo", "grpo_s", "dew", "kl_cov", "sapo", "maxrl", "qae", "gspo")
GAINS = {
    # stage 3: dew beats DAPO and its placebo, gtpo DAPO alone; grpo is level, grpo_s worse
    "dew": 0.05, "dew(placebo=True)": 0.01, "gtpo": 0.05, "gtpo(placebo=True)": 0.05, "grpo": 0.001, "grpo_s": -0.05,
    "kl_cov": 0.02, "sapo": 0.004, "maxrl": 0.03, "qae": -0.02,
    RELATIVE: 0.02, f"{RELATIVE[:-1]},placebo=True)": -0.01, "fipo": 0.03, "stare": -0.01,
}  # fmt: skip
OTHERS = {"entropy": 0.3, "length/mean": 250.0, "credit/flipped_share": 0.0, "length/truncated_share": 0.1, "kl": 0.01}


@pytest.fixture
def small(monkeypatch):
    """Fewer rules and seeds."""
    monkeypatch.setattr(b, "ARMS", ARMS)
    monkeypatch.setattr(b, "CANDIDATES", (RELATIVE, "fipo", "stare"))
    seeds = {"start": dict.fromkeys(["A", "A-train", "C-train"], 1), "stage1": {"A-train": 3, "C-train": 3}}
    seeds |= {"replication": {"A": 5}, "stage2": {"A": 5}, "screen": {"A-train": 5}, "stage3": {"A": 14, "C": 8}}
    monkeypatch.setattr(b, "STAGES", {name: replace(b.STAGES[name], seeds=of) for name, of in seeds.items()})


def plant(work, stage, task, score, only=()):
    """Runs of all that is missing, with `score(arm, rate)` and noise as pass@1."""
    runs = b.read(work / "no data", work)
    todo = [x for x in stages.missing(stage, task, runs) if x[0] in only or not only]
    cells = [Cell(arm, seed, "gsm8k", rate) for arm, rate, seed in todo]
    settings = {"eval_problems": 3, "eval_k": 4, "model": "m"}
    open_grid(work / f"{stage}-{task}", cells, settings, say=lambda _: None)
    times = {"started": "2026-11-17T10:00:00+00:00", "finished": "2026-11-17T10:03:00+00:00"}
    facts = {"settings": settings, "warm_start": {"digest": "d", "model": "m"}, "machine": {"gpu": "H200"}, **times}
    for cell in cells:
        noise = Random(f"{cell.seed}").gauss(0, 0.02) + Random(f"{cell.arm}{cell.seed}").gauss(0, 0.004)
        value = score(cell.arm, cell.learning_rate) + noise
        line = {"step": 1, "accuracy": value, "eval/pass@1": value, "eval/pass@4": 2 * value, **OTHERS}
        write_run(work / f"{stage}-{task}", cell, facts, [line], solved=[[1, 2, 0]])
    return b.read(work / "no data", work)


def by_rate(arm, rate):
    """The best rate is 4e-5, of dew the highest and beyond; gspo is below the start, which is 0.2, everywhere."""
    best = {"dew": 1.6e-4, "gspo": None}.get(arm, 4e-5)
    return 0.1 if best is None else 0.5 - 1000 * abs(rate - best)


def gain(arm, rate):
    return 0.3 + GAINS.get(arm, 0)


def test_stages_follow_from_one_another_and_verdicts_from_what_was_planted(small, tmp_path):
    assert [b.look("stage3", "A", n) for n in (11, 13, 14)] == [(14, None), (12, 0.005), (14, pytest.approx(0.045))]
    assert [b.look("stage2", "A", n)[1] for n in (4, 5)] == [None, 0.05]
    with pytest.raises(ConfigError, match="start on A-train lacks 1 runs"):
        stages.points("stage2", "A", {})
    plant(tmp_path, "start", "A-train", lambda *_: 0.2)
    assert read_content([tmp_path / "start-A-train"])["headline"].startswith("m on gsm8k, 1 step")
    runs = plant(tmp_path, "stage1", "A-train", by_rate)
    thirds = {(arm, 1.6e-4 if arm == "dew" else 2e-5, seed) for arm in ARMS for seed in range(3)}
    assert set(stages.missing("stage1", "A-train", runs)) == thirds  # on the side of the better of two
    runs = plant(tmp_path, "stage1", "A-train", by_rate)
    rates = {arm: 4e-5 for arm in ARMS if arm != "gspo"} | {"dew": 1.6e-4}
    assert stages.chosen_rates(runs) == rates
    points = dict(stages.points("stage2", "A", runs))
    assert points == rates | {stages.RANDOM: 4e-5}
    parsed = parse_arms(stages.texts(points.items()), [], controls=False)
    assert [(arm.label, arm.learning_rate) for arm in parsed] == list(points.items())
    runs = plant(tmp_path, "stage2", "A", gain)
    assert {row.verdict for row in b.stage_rows("stage2", "A", runs)} == {"", "open", "level", "loss"}  # no win yet
    assert stages.points("stage1", "C-train", runs) == [("dapo", rate) for rate in stages.WIDE_RATES]
    with pytest.raises(ConfigError, match="not screened yet: dapo, dew"):
        stages.finalists(runs)
    for _ in range(2):  # the candidates, then the placebo of the best that has one
        runs = plant(tmp_path, "screen", "A-train", lambda arm, rate: gain(arm, rate) + 100 * rate * (arm == "fipo"))
    placebo = b.companions(RELATIVE)[1]
    assert {r.arm for r in runs["screen-A-train"]} == {"dapo", *b.CANDIDATES, placebo}
    assert stages.screened(runs) == {"fipo": 8e-5, RELATIVE: pytest.approx(6e-5, abs=2.1e-5)}
    assert stages.finalists(runs)[:5] == ["dapo", "grpo", "dew", "gtpo", "grpo_s"]
    assert stages.finalists(runs)[5:] == ["maxrl", "kl_cov", "sapo", "fipo", RELATIVE]
    points = dict(stages.points("stage3", "A", runs))
    assert points.keys() - set(stages.finalists(runs)) == {*b.companions("dew"), *b.companions("gtpo")}
    assert points["dew(placebo=True)"] == 1.6e-4 and points["fipo"] == 8e-5
    plant(tmp_path, "start", "C-train", lambda *_: 0.2)
    for _ in range(4):  # DAPO's rates on C, one beyond the highest, then three for the others, one beyond dew's best
        with pytest.raises(ConfigError, match="C-train lacks"):
            stages.points("stage3", "C", runs)
        runs = plant(
            tmp_path, "stage1", "C-train", lambda arm, rate: 0.5 - 99 * abs(rate - 1.28e-3 / (1 + 3 * (arm == "dew")))
        )
    rates = {arm: 1.28e-3 for arm in stages.finalists(runs)} | {"dew": 3.2e-4, stages.RANDOM: 1.28e-3}
    assert dict(stages.points("stage3", "C", runs)) == rates
    runs = plant(tmp_path, "stage3", "A", gain)
    assert {arm for arm, _, _ in stages.missing("stage3", "A", runs)} == {placebo}  # it is better than DAPO
    assert next(row for row in b.stage_rows("stage3", "A", runs) if row.arm == RELATIVE).verdict == "open"
    runs = plant(tmp_path, "stage3", "A", gain)
    rows = {row.arm: row for row in b.stage_rows("stage3", "A", runs)}
    words = {arm: row.verdict for arm, row in rows.items() if row.verdict}
    assert words == {
        "dew": "win", "gtpo": "open", "grpo": "level", "grpo_s": "loss", "maxrl": "win",
        "kl_cov": "open", "fipo": "open",  # they weight tokens in their losses and have no placebo
        RELATIVE: "win",
        "sapo": "win",  # its interval is within ±0.01 too, but a win comes first
    }  # fmt: skip
    assert rows["dew"].than_baseline["pass@1"].value == pytest.approx(0.05, abs=0.005)
    assert rows["dew"].than_placebo.value == pytest.approx(0.04, abs=0.005)
    unpaired = [r for r in runs["stage3-A"] if not (r.arm == "dew(placebo=True)" and r.seed > 205)]
    assert {row.arm: row.verdict for row in b.stage_rows("stage3", "A", {"stage3-A": unpaired})}["dew"] == "open"
    thirteen = {"stage3-A": [r for r in runs["stage3-A"] if r.seed < 213]}  # the analysis of twelve, until the next
    looked = {row.arm: row for row in b.stage_rows("stage3", "A", thirteen)}
    assert {len(row.runs) for row in looked.values()} == {12} and looked["dew"].verdict == "win"
    # the page has all of it, of stage 3 nothing before its first analysis or without one of its arms
    plant(tmp_path, "start", "A", lambda *_: 0.2)
    runs = plant(tmp_path, "replication", "A", lambda *_: 0.3)
    early = {**runs, "stage3-A": [r for r in runs["stage3-A"] if r.seed < 206]}
    without = {**runs, "stage3-A": [r for r in runs["stage3-A"] if r.arm != "gtpo"]}
    for few, about in ((without, ""), (early, "A (GSM8K) has 6 of 14 seeds; C")):
        text, images = script.page(few)
        assert "No rule measured here is known" in text and about in text and "| win |" not in text and len(images) == 1
    assert not stages.better("A", early)
    unplaced = {**runs, "stage3-A": [r for r in runs["stage3-A"] if r.arm != placebo]}
    assert re.search(rf"not known to be better than a placebo: .*{re.escape(RELATIVE)}", script.page(unplaced)[0])
    text, images = script.page(runs)
    assert re.search(r"\| dew \| 1\.6e-4 \| 14 \| 0\.3\d\d \| \+0\.0.* \| win \|", text)
    assert re.search(r"\| stage3, A: GSM8K, m \| \d+ \| 0 \| 3 \|\n", text) and "seeds for a power of 80%" in text
    assert "found -0.001 [-0.010, +0.008], which agrees" in text
    assert re.search(r"\| fipo \| \+0\.0.*\n(.*\n)*\| stare \| -0\.0", text)  # the screening
    assert re.search(r"\n\| dew \|\s+(\| 0\.\d{3} ){2}\| \*\*0\.\d{3}\*\* \|\n", text)  # the best of three rates
    assert "Best at the lowest or highest rate tried: dapo and dew." in text
    result = text.split("\n\n")[1]
    assert re.match(r"\*\*Rules that win .*: dew.* on GSM8K\.\*\* In stage 2, ", result)
    assert "is not finished. On " in result
    assert re.search(r"1 loses \(grpo_s\) and \d stay open\. .*a placebo: gtpo.* on GSM8K\.$", result)
    assert set(images) == {"benchmark-stage2.svg", "benchmark-stage3.svg"}
    assert len(ElementTree.fromstring(images["benchmark-stage3.svg"]).findall(".//{*}g")) == len(rows) - 1


def test_in_a_simulated_stage_3_a_win_needs_more_than_the_placebo():
    gains = {"dew": 0.05, "gtpo": 0.05, "gtpo(placebo=True)": 0.05}
    assert simulation.wins(simulation.study(np.random.default_rng(0), gains)) == {"dew"}


def test_every_rule_that_weights_tokens_needs_a_placebo_to_win():
    rules = tuple(arm for arm in (*b.ARMS, *b.CANDIDATES) if arm not in b.REMOVED)
    assert tuple(x.label for x in parse_arms(rules, [1e-5], controls=False)) == rules  # runs are found by these names
    assert b.companions("stare")[1]  # it weights tokens where the entropy is low
    weighting = {arm for arm in b.ARMS if b.companions(arm)[1]} | b.IN_THE_LOSS.keys()
    rules = {arm: get_algorithm(arm) for arm in b.ARMS}
    in_the_loss = {arm for arm, x in rules.items() if x.penalises or x.needs_entropy == "current"} | {"fipo"}
    assert in_the_loss == b.IN_THE_LOSS.keys()
    assert weighting == {"gtpo", "dew", "forking_tokens", "clip_cov", "steer", "otb", *b.IN_THE_LOSS}


def test_a_score_that_is_not_finite_in_a_run_has_no_mean():
    scores = ({"area": 0.5, "entropy": 0.5, "length": 9, "flipped": 0}, {"area": 0.5, "length": 9, "pass@1": 1})
    runs = [b.Result("dapo", seed, of, "t", 1e-5) for seed, of in enumerate(scores)]
    table = b.table(b.compare(runs, {}), ["rule", "length", "entropy"])
    assert "| dapo | 9 |" in table and "| 0.500 |  |  | 9.000 |" in markdown(runs)


def test_a_learning_rate_counts_once_it_has_all_seeds():
    runs = [b.Result(arm, seed, {"pass@1": 0.5}, "t", 2e-5) for arm, seed in (("dapo", 0), ("dapo", 1), ("dew", 0))]
    assert b.rate_means(runs, 2) == {"dapo": {2e-5: 0.5}}


def test_earlier_runs_at_other_rates_are_left_out(monkeypatch):
    found = [b.Result("dapo", 0, {}, "gsm8k", rate) for rate in (2e-5, 4e-5)]
    monkeypatch.setattr(b, "study", lambda *_, **__: found)
    assert b.train("stage2", "A", ["dapo@4e-05"], Path()) == found[1:]


def test_runs_are_archived_once_and_read_again(small, tmp_path):
    work, data = tmp_path / "work", tmp_path / "data"
    runs = plant(work, "replication", "A", gain, only=["dapo"])
    big = work / "replication-A" / "gsm8k" / "dapo-lr4e-05-seed300" / "adapter"
    big.mkdir()
    (big / "adapter_model.safetensors").write_bytes(b"0" * 9999)
    assert [path.name for path in script.pack(work, data)] == ["001.jsonl.gz"] and not script.pack(work, data)
    runs = plant(work, "replication", "A", gain)
    assert [path.name for path in script.pack(work, data)] == ["002.jsonl.gz"]
    again = b.read(data, tmp_path / "other")
    assert len({str([(r.arm, r.seed, r.scores) for r in of["replication-A"]]) for of in (again, runs)}) == 1
    assert not stages.missing("replication", "A", again) and not list((tmp_path / "other").rglob("adapter*"))


def test_random_rewards_do_not_see_the_rewards():
    random = torch.Generator().manual_seed(0)
    mask, logp = torch.ones(400, 8, 5, dtype=torch.bool), -torch.rand(400, 8, 5, generator=random)
    found = []
    for reward in (torch.zeros(400, 8), torch.rand(400, 8, generator=random).round()):
        rollouts = Rollouts(mask=mask, reward=reward, logp=logp)
        rule = get_algorithm(f"{stages.OWN}:RandomRewards")
        found.append((rule.advantages(rollouts), rule.signal(rollouts)))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    coins = rule._tossed(rollouts).reward
    assert 0.47 < coins.mean() < 0.53 and torch.equal(found[0][0], DAPO().advantages(replace(rollouts, reward=coins)))


def test_a_stage_runs_in_pieces_on_the_bundled_model(tmp_path, monkeypatch, capsys):
    quick = {"group_size": 4, "prompts": 4, "generations": 2, "eval_problems": 4, "eval_k": 4, "max_new_tokens": 6}
    monkeypatch.setattr(b, "SETTINGS", {**b.SETTINGS, **quick, "optimizer_steps": 1, "rank": 4})
    monkeypatch.setitem(b.TASKS, "A", b.Task("countdown", "tiny", "countdown"))
    monkeypatch.setattr("dew.engines.lab.text.MOST", 100)
    monkeypatch.setitem(b.STAGES, "replication", b.Stage(300, {"A": 1}))
    options = {"stage": "replication", "tasks": [], "data": tmp_path / "data", "work": tmp_path / "work", "model": None}
    options |= {"runs_at_once": 2, "rules": None}
    script.run(argparse.Namespace(**options, limit_seconds=0.0))
    assert not options["data"].exists()
    train, calls = b.train, []
    monkeypatch.setattr(b, "train", lambda *args, **how: (calls.append(args[2]), train(*args, **how)))
    every = ["dapo@4e-05", "dew@4e-05", "dew(placebo=True)@4e-05"]
    for rules in (None, ["dew"]):
        script.run(argparse.Namespace(**options | {"rules": rules}, limit_seconds=600.0))
    assert calls == [every]  # the second call had nothing to do
    script.status(options["data"])
    assert "replication-A: 3 runs, 0 missing" in capsys.readouterr().out


def test_the_page_in_the_repository_is_that_of_the_committed_runs(tmp_path):
    text, images = script.page(b.read(b.COMMITTED, tmp_path))
    assert (ROOT / "docs" / "benchmark-results.md").read_text() == text, "run scripts/benchmark.py page"
    for name, image in images.items():
        assert (ROOT / "docs" / "images" / name).read_text() == image, "run scripts/benchmark.py page"


def test_a_rule_of_your_own_joins_the_table(dew, tmp_path, monkeypatch, small):
    """The rate is chosen as in stage 1, runs are those of stage 2, and its row is added to the committed ones."""
    planted = [("start", "A-train", gain), *[("stage1", "A-train", by_rate)] * 2, ("stage2", "A", gain)]
    for stage, task, score in planted:
        plant(tmp_path / "planted", stage, task, score)
    script.pack(tmp_path / "planted", tmp_path / "data")
    monkeypatch.setattr(b, "COMMITTED", tmp_path / "data")
    calls = []

    def train(stage, task, arms, output, **how):
        """8e-5 is better than 4e-5 for the rule, and 1.6e-4 than 8e-5."""
        calls.append((stage, task, arms, how.get("controls")))
        points = [(name.rsplit(":")[-1].lower(), float(x)) for name, x in (arm.split("@") for arm in arms)]
        seeds = [(arm, rate, seed) for arm, rate in points for seed in range(how.get("seeds", 5))]
        seeds += [("mine(a=1)", *seed[1:]) for seed in seeds if seed[0] == "mine"] * bool(how.get("controls"))
        scored = [(x, seed, dict.fromkeys(b.SCORES, 5e3 * rate + seed), "gsm8k", rate) for x, rate, seed in seeds]
        return [b.Result(*run, control="mine(a=1)" if run[0] == "mine" else None) for run in scored]

    monkeypatch.setattr(b, "train", train)
    (tmp_path / "rules.py").write_text("from dew.algorithms import DAPO\n\nclass Mine(DAPO):\n    name = 'mine'\n")
    rule = f"{tmp_path / 'rules.py'}:Mine"
    code, said, error = dew("lab", "--benchmark", rule, "--out", tmp_path / "out")
    assert code == 0, error
    first = [f"{rule}@4e-05", f"{rule}@8e-05"]  # DAPO's rate is known on this model
    assert calls == [
        ("stage1", "A-train", first, None),
        ("stage1", "A-train", [*first, f"{rule}@0.00016"], None),
        ("stage2", "A", ["dapo@4e-05", f"{rule}@0.00016"], True),
    ]
    text = (tmp_path / "out" / "benchmark.md").read_text()
    assert re.search(r"\| grpo_s .*\n(.*\n)*\| mine \(yours\) \| 1\.6e-4 \| 5 \|", text) and "4-bit" in text
    assert "| mine, control (yours) |" in text and "mine is ahead of dapo" in text
    assert ("There is no GPU" in said) != torch.cuda.is_available()
    rates = ("--learning-rate", 2e-5, "--learning-rate", 8e-5)
    code, said, error = dew("lab", "--benchmark", rule, "--quick", *rates, "--out", tmp_path / "trial")
    assert code == 0 and "Only your rows" in said and "grpo" not in said, error
    assert calls[3][2] == ["dapo@2e-05", "dapo@8e-05", f"{rule}@2e-05", f"{rule}@8e-05"] and len(calls) == 5
    _, said, _ = dew("lab", "--benchmark", rule, "--model", "other", *rates[:2], "--out", tmp_path / "other")
    assert calls[5][2] == ["dapo@2e-05", f"{rule}@2e-05"] and "Only your rows" in said
    for given, expected in (((rule, "--seeds", "3"), "its own task"), ((rule, f"{rule}@1e-4"), "given twice")):
        code, _, error = dew("lab", "--benchmark", *given)
        assert code != 0 and expected in error
