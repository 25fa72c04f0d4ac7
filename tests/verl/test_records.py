"""A verl run's folder and reward function, without verl."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dew.engines.verl.config import RunSettings
from dew.engines.verl.data import compute_score
from dew.engines.verl.estimators import batch_context, estimator, record_rows
from dew.engines.verl.recorder import Recorder, batch_numbers, record_columns, step_numbers
from dew.run.folder import RunFolder
from dew.run.records import read_records
from verl_rows import context

H = torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 3.0], [1.0, 1.0, 0.0], [2.0, 0.0, 0.0], [5.0, 0.0, 0.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
ACC = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0])
UIDS = np.array(["a", "a", "b", "b", "pad"], dtype=object)
KEYS = ["a_0_0", "a_1_0", "b_0_0", "b_1_0", "pad_0_0"]
REWARDS = torch.zeros(5, 3)
REWARDS[0, 1] = 1.0


class Letters:
    def decode(self, ids):
        return "".join("·abcdefgh"[i] for i in ids)


def credited(name="gtpo", recorded=False):
    with batch_context(context(name, H, keys=KEYS, acc=ACC, score=ACC, recorded=recorded)) as c:
        advantages, _ = estimator(name)(token_level_rewards=REWARDS, response_mask=MASK, index=UIDS)
    return c.credited[0], advantages


def data():
    return {
        "prompts": torch.tensor([[1, 2]] * 5),
        "prompt_mask": torch.tensor([[True, True]] * 5),
        "responses": torch.tensor([[3, 4, 0], [3, 5, 6], [7, 7, 0], [8, 0, 0], [0, 0, 0]]),
        "old_log_probs": -H,
        "gold": ["42"] * 5,
        "reward_extra_info": [{"acc": 1.0, "verdict": "correct", "extracted": "42"}] * 4 + [{}],
    }


TRUNCATED = torch.tensor([False, True, False, False, False])


def test_the_numbers_of_a_batch():
    found, _ = credited()
    numbers = batch_numbers(found, TRUNCATED, 0.5)
    assert numbers["accuracy"] == 0.25 and numbers["groups/kept"] == 2 and numbers["groups/mixed"] == 1
    assert numbers["length/mean"] == 2.0 and numbers["length/truncated_share"] == 0.25
    assert numbers["entropy"] == pytest.approx((1 + 2 + 2 + 1 + 3 + 1 + 1 + 2) / 8)
    assert numbers["entropy/correct"] == 1.5
    assert numbers["credit/mean_correct"] > 0 > numbers["credit/mean_wrong"]


def test_dropped_groups_count_in_the_accuracy():
    """4 answers in 2 kept groups, 1 right; 3 groups dropped: one all right, two all wrong. (1 + 2) / (4 + 6)."""
    found, _ = credited()
    parts = [(4, batch_numbers(found, TRUNCATED, 0.5))]
    metrics = {
        "training/filter_groups/evicted_samples": 3,
        "_dapo_filtered_reward_counts": {0.3: 1, 0.0: 2},  # with a threshold of 0.2
        "actor/grad_norm": 0.5,
        "actor/dew/clip/high": 0.1,
        "val-core/countdown/acc/mean@1": 0.3,
    }
    numbers = step_numbers(parts, metrics, {"gen": 4.0, "adv": 0.5}, 0.2)
    assert numbers["accuracy"] == pytest.approx(0.3)
    assert (numbers["groups/sampled"], numbers["groups/dropped"], numbers["groups/mixed_share"]) == (5, 3, 0.2)
    assert (numbers["grad_norm"], numbers["clip/high"], numbers["eval/countdown/acc/mean@1"]) == (0.5, 0.1, 0.3)
    assert (numbers["seconds/credit"], numbers["tokens_per_second"]) == (0.5, 2.0)


def test_the_batches_of_a_step_are_weighted_by_their_answers():
    parts = [
        (1, {"reward": 1.0, "length/max": 3.0, "tokens": 3.0}),
        (3, {"reward": 0.0, "length/max": 9.0, "tokens": 9.0}),
    ]
    numbers = step_numbers(parts, {}, {"gen": 1.0}, 0.5)
    assert (numbers["reward"], numbers["length/max"], numbers["tokens_per_second"]) == (0.25, 9.0, 12.0)


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_a_record_holds_what_was_trained_on(name, tmp_path):
    found, advantages = credited(name, recorded=True)
    settings = RunSettings(folder=str(tmp_path), records_every=2)
    recorder = Recorder(settings, context(name, H).algorithm)
    assert recorder.due(1)
    recorder.record(1, found, record_columns(found, data(), TRUNCATED), Letters())
    assert not recorder.due(1) and recorder.due(2) and not recorder.due(3)
    a, b = read_records(tmp_path / "records" / "step-00000001.jsonl.gz")
    assert (a.prompt, a.gold, a.algorithm) == ("ab", "42", name)
    first, second = a.answers
    assert ("".join(first.tokens), "".join(second.tokens)) == ("cd", "cef")
    assert (first.correct, second.correct, second.truncated, first.verdict) == (True, False, True, "correct")
    assert first.shaped is not None and credited(name)[0].credit.shaped is None
    torch.testing.assert_close(torch.tensor(second.advantage), advantages[1], rtol=1e-4, atol=1e-6)
    assert len(b.answers) == 2 and not any(map(any, (answer.advantage for answer in b.answers)))


def test_verls_own_estimator_is_recorded_as_it_is():
    advantages = torch.ones(5, 3) * MASK
    found = record_rows(context("gtpo", H, keys=KEYS, acc=ACC, score=ACC), REWARDS, MASK.bool(), UIDS, advantages)
    assert torch.equal(found.credit.advantages, advantages)
    assert found.credit.correct.tolist() == [True, False, False, False, False]
    assert found.credit.shaped[0].tolist() == [1.0, 1.0, 0.0]
    assert batch_numbers(found, TRUNCATED, 0.5)["credit/mean_correct"] == 1.0


def test_a_step_becomes_a_line_of_the_folder(tmp_path):
    found, _ = credited()
    recorder = Recorder(RunSettings(folder=str(tmp_path)), context("gtpo", H).algorithm)
    RunFolder(tmp_path).append_metrics({"step": 9})  # of a run without a checkpoint: this one starts again
    recorder.start({"data": {"train_batch_size": 4}, "actor_rollout_ref": {"rollout": {"n": 2}}}, steps=7, done=0)
    recorder.add(1, found, TRUNCATED)
    recorder.step_end(1, {"actor/loss": 0.1}, {"gen": 1.0})
    recorder.end("done")
    run = RunFolder(tmp_path)
    assert (run.run()["engine"], run.run()["status"], run.run()["algorithm"]["name"]) == ("verl", "done", "gtpo")
    assert run.run()["steps"] == 7
    [line] = run.metrics()
    assert (line["step"], line["loss"], line["accuracy"], line["unscored_share"]) == (1, 0.1, 0.25, 0.5)


def test_a_graded_reward_is_an_alarm_of_the_step_that_saw_it(tmp_path):
    found, _ = credited()
    graded = replace(found, rows=replace(found.rows, outcome=torch.linspace(0, 1, len(found.rows.outcome))))
    recorder = Recorder(RunSettings(folder=str(tmp_path)), context("gtpo", H).algorithm)
    recorder.add(2, replace(found, rows=replace(found.rows, outcome=torch.tensor([1.0, 1, 1, 1, 0]))), TRUNCATED)
    recorder.add(3, graded, TRUNCATED)
    recorder.write(4, {"length/truncated_share": 0.5})
    graded, cut = RunFolder(tmp_path).alarms()
    assert (graded["step"], graded["alarm"]) == (3, "graded_reward") and "data.max_response_length" in cut["remedy"]


# ── rewards ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_verifier_as_verls_reward_function():
    extra = {"index": 0, "numbers": np.array([3, 5, 7, 10])}
    right = compute_score("countdown", "10*5=50;50-7=43;43+3=46", "46", extra)
    assert right == {"score": 1.0, "acc": 1.0, "verdict": "correct", "extracted": right["extracted"]}
    wrong = compute_score("countdown", "10*5=50", "46", extra)
    assert (wrong["score"], wrong["acc"]) == (0.0, 0.0) and wrong.keys() == right.keys()
