"""What a run writes: metrics with fixed names, alarms, token records, facts; and TRL's table of completions."""

from statistics import fmean

import pandas
import pytest
import torch
from transformers import TrainerCallback

import trl_tiny as tiny
from dew import GRPO, GTPO, Rollouts
from dew.engines.recorder import due
from dew.errors import ConfigError
from dew.rewards import Verdict, Verifier
from dew.run.folder import RunFolder

EVERY_STEP = {
    "reward", "accuracy", "reward/has_a", "groups/sampled", "groups/kept", "groups/dropped", "groups/refilled",
    "groups/rounds", "groups/mixed_share", "clip/low", "clip/high", "ratio/mean", "ratio/max", "kl/approx",
    "length/mean", "length/max", "length/truncated_share", "seconds/generation", "seconds/scoring", "seconds/credit",
    "seconds/update", "tokens_per_second", "loss", "grad_norm", "learning_rate", "steps/skipped",
    "steps/credit_not_finite",
}  # fmt: skip
WITH_SIGNAL = {
    "credit/mean_correct", "credit/std_correct", "credit/mean_wrong", "credit/std_wrong", "credit/top20_share",
    "credit/top1_share", "credit/max_weight", "entropy", "entropy/floor_share", "entropy/correct", "entropy/wrong",
    "length/correct", "length/wrong",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    settings = {"max_steps": 5, "records_every": 2, "records_groups": 1, "log_completions": True, "logging_steps": 2}
    trainer = tiny.trainer(folder, num_generations=8, **settings)
    trainer.train()
    return trainer, RunFolder(folder)


def test_every_step_has_every_metric(run):
    lines = run[1].metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert {line["step"] for line in lines if "learning_rate" in line} == {2, 4}, "what transformers logs"
    times = {"seconds/generation", "seconds/scoring", "seconds/credit", "seconds/update"}
    assert (EVERY_STEP - times) <= set(run[0].state.log_history[0]), "trackers get the same names"
    for line in lines:
        assert EVERY_STEP - {"learning_rate"} <= set(line)
        assert 0 <= line["accuracy"] <= 1 and line["accuracy"] == line["reward"] == line["reward/has_a"]
        assert 1 <= line["length/mean"] <= line["length/max"] <= 6
        if line["groups/mixed_share"] > 0:
            assert set(line) >= WITH_SIGNAL and 0 < line["entropy"] < 4
            assert line["credit/mean_correct"] > 0 > line["credit/mean_wrong"]
            assert 0 < line["credit/top20_share"] < 1 and 0 < line["credit/top1_share"] <= 1
            tokens = line["length/mean"]
            mean = (line["entropy/correct"] * line["accuracy"] * line["length/correct"]
                    + line["entropy/wrong"] * (1 - line["accuracy"]) * line["length/wrong"]) / tokens  # fmt: skip
            assert line["entropy"] == pytest.approx(mean, rel=1e-4)


def test_facts_of_the_run(run):
    facts = run[1].run()
    assert (facts["status"], facts["engine"], facts["steps"]) == ("done", "trl", 5)
    assert facts["algorithm"]["name"] == "gtpo" and facts["algorithm"]["settings"]["alpha2"] == 0.1
    assert {"num_generations": 8, "processes": 1}.items() <= facts["batches"].items()
    assert {"dew", "torch", "transformers", "trl"} <= set(facts["versions"])
    assert facts["started"] <= facts["finished"]


# ── token records ─────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("every", "per_generation", "steps"),
    [(0, 1, []), (1, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9]), (3, 1, [1, 3, 6, 9]), (3, 2, [1, 3, 5, 9]), (3, 4, [1, 5, 9])],
)
def test_due(every, per_generation, steps):
    """Generations start at steps 1, 1 + n, 1 + 2n, ...; one is recorded if a multiple of `every` falls in it."""
    assert [s for s in range(1, 10, per_generation) if due(s, every, per_generation)] == steps


def test_a_record_has_what_was_trained_on(run):
    assert [path.name for path in run[1].record_files()] == [f"step-{n:08d}.jsonl.gz" for n in (1, 2, 4)]
    for group in run[1].records():
        assert group.algorithm == "gtpo" and group.settings["alpha1"] == 1.0
        assert len(group.answers) == 8
        assert group.prompt.endswith("=") and group.gold == str(int(group.prompt[0]) + 10 * int(group.prompt[2]))
        rollouts = _rollouts(group)
        for algorithm, name in ((GTPO(), "advantage"), (GRPO(), "grpo")):
            expected = rollouts.to_rows(algorithm.advantages(rollouts))
            for answer, row in zip(group.answers, expected.tolist(), strict=True):
                assert getattr(answer, name) == pytest.approx(row[: len(answer.tokens)], abs=2e-3)
        shaped = rollouts.to_rows(GTPO().rewards(rollouts))
        for answer, row in zip(group.answers, shaped.tolist(), strict=True):
            assert answer.shaped == pytest.approx(row[: len(answer.tokens)], abs=2e-3)
            assert answer.correct == ("a" in _plain(answer))
            assert all(value <= 0 for value in answer.logp)


def _plain(answer):
    return "".join(token for token in answer.tokens if not token.startswith("<"))


def _rollouts(group):
    width = max(len(answer.tokens) for answer in group.answers)
    entropy, mask = torch.zeros(len(group.answers), width), torch.zeros(len(group.answers), width, dtype=torch.bool)
    for i, answer in enumerate(group.answers):
        entropy[i, : len(answer.tokens)] = torch.tensor(answer.entropy)
        mask[i, : len(answer.tokens)] = True
    reward = torch.tensor([answer.reward for answer in group.answers])
    return Rollouts.from_rows([0] * len(reward), mask=mask, reward=reward, entropy=entropy)


def test_algorithms_without_entropy_are_recorded_too(tmp_path):
    tiny.trainer(tmp_path, algorithm="grpo", max_steps=1).train()
    (first, *_) = RunFolder(tmp_path).records()
    assert first.answers[0].entropy is not None and first.answers[0].advantage == first.answers[0].grpo


def test_verdicts_of_a_verifier_are_recorded(tmp_path):
    def check(text, answer):
        found = text[:1]
        status = "unparsable" if not found else "timeout" if found.isdigit() else "correct" if found < "f" else "wrong"
        return Verdict(status, found or None)

    more = {"oversample": 4, "max_rounds": 1}  # than TRL's table would hold
    letters = Verifier("letters", ("answer",), check)
    tiny.trainer(tmp_path, letters, max_steps=1, algorithm="dapo", algorithm_kwargs=more).train()
    line = RunFolder(tmp_path).metrics()[0]
    assert 0 < line["verifier/failed_share"] < 1 and "verifier/unparsable_share" in line
    for group in RunFolder(tmp_path).records():
        for answer in group.answers:
            assert answer.extracted == (_plain(answer)[:1] or None)
            assert answer.verdict == check(_plain(answer), None).status
            assert answer.correct == (answer.verdict == "correct")
    with pytest.raises(ConfigError, match="'letters' needs the column 'gold'"):
        tiny.trainer(tmp_path, Verifier("letters", ("gold",), check))


# ── TRL's table ───────────────────────────────────────────────────────────────────────────────────────────
def test_the_completions_table_shows_our_advantages(run):
    _, folder = run
    table = pandas.read_parquet(folder.path / "completions" / "completions_00004.parquet")
    assert len(table) == 8
    group = next(g for g in folder.records() if g.step == 4)
    by_text = {_plain(answer): answer for answer in group.answers}
    for row in table.itertuples():
        answer = by_text[row.completion]
        assert row.advantage == pytest.approx(sum(answer.advantage) / len(answer.advantage), abs=1e-3)


def test_callbacks_and_user_metrics_work(tmp_path):
    seen = []

    class Spy(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            seen.append(logs)

    def logs_metrics(completions, log_metric, log_extra, **_):
        log_metric("verifier/failed_share", 0.5)
        log_metric("reward_margin", 0.25)
        log_extra("length", [len(text) for text in completions])
        return tiny.has_a(completions)

    tiny.trainer(tmp_path, logs_metrics, others={"callbacks": [Spy()]}, algorithm="dapo").train()
    assert seen[0]["verifier/failed_share"] == 0.5
    line = RunFolder(tmp_path).metrics()[0]
    assert (line["verifier/failed_share"], line["reward_margin"]) == (0.5, 0.25)
    assert not {"reward_std", "frac_reward_zero_std", "rewards/logs_metrics/mean"} & set(line), "said by dew's own"
    assert "verifier_fails" in {alarm["alarm"] for alarm in RunFolder(tmp_path).alarms()}


def test_trackers_get_means_over_all_steps_since_the_last_log(tmp_path):
    trainer = tiny.trainer(tmp_path, max_steps=4, logging_steps=4, num_generations=8)
    trainer.train()
    lines = RunFolder(tmp_path).metrics()
    for name in ("reward", "accuracy", "entropy", "loss"):
        mean = fmean(line[name] for line in lines if name in line)
        assert trainer.state.log_history[0][name] == pytest.approx(mean, rel=1e-3, abs=1e-6), name


def test_the_log_history_of_transformers_is_bounded(tmp_path, monkeypatch):
    """It is kept in memory and in every checkpoint; metrics.jsonl has every step."""
    monkeypatch.setattr("dew.engines.trl.trainer.LOGS_KEPT", 3)
    trainer = tiny.trainer(tmp_path, max_steps=6, logging_steps=1)
    trainer.train()
    assert len(trainer.state.log_history) == 3
    assert [line["step"] for line in RunFolder(tmp_path).metrics()] == [1, 2, 3, 4, 5, 6]
