"""dew.watch: a plain GRPOTrainer trains exactly as before, and its folder has what dew's tools read."""

import logging
import sys

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

import dew
import trl_tiny as tiny
from dew import report
from dew.errors import ConfigError
from dew.run.folder import RunFolder

pytestmark = tiny.runs_trls_loss


def long(completions, **_):
    return [len(text) / 6 for text in completions]


def plain(folder, rewards=tiny.outcome, **settings):
    batch = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "max_steps": 3}
    args = {**batch, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", **tiny.ON_A_CPU, **settings}
    model = tiny.model(attention_dropout=0.3)
    args = GRPOConfig(str(folder), **args)
    return GRPOTrainer(model, rewards, args, tiny.prompts(), tiny.prompts(4), tiny.tokenizer())


def trains_as_alone(folder, kind=GRPOTrainer, **settings):
    weights, logs, times = [], [], ("time", "seconds", "runtime", "per_second")
    for name in ("alone", "watched"):
        trainer = plain(folder / name, **settings)
        trainer.__class__ = kind
        if name == "watched":
            dew.watch(trainer, records_every=1)
        trainer.train()
        weights.append(tiny.weights(trainer.model))
        logs += [[{k: v for k, v in x.items() if not any(t in k for t in times)} for x in trainer.state.log_history]]
    assert torch.equal(*weights) and not torch.equal(weights[0], tiny.weights(tiny.model()))
    assert logs[0] == logs[1]
    return logs[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2, "num_iterations": 2, "beta": 0.0, "epsilon": 0.01},
        {"loss_type": "grpo", "scale_rewards": "batch", "eval_strategy": "steps", "eval_steps": 1},
    ],
)
def test_weights_and_logs_are_those_of_the_trainer_alone(tmp_path, settings):
    trains_as_alone(tmp_path, **settings)


class PerToken(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        return batch | {"advantages": batch["advantages"][:, None].expand(batch["completion_ids"].shape).clone()}

    def _compute_loss(self, model, inputs):  # does not ask for entropies
        ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
        logp, *_ = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))
        return -(logp * inputs["advantages"]).mean()


class Reordered(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        return {k: v.flip(0) if v.ndim else v for k, v in super()._generate_and_score_completions(inputs).items()}

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) + 1


@pytest.mark.parametrize("kind", [PerToken, Reordered])
def test_subclasses_train_as_before_and_their_own_loss_is_recorded(tmp_path, kind, caplog):
    losses, run = [x["loss"] for x in trains_as_alone(tmp_path, kind) if "loss" in x], RunFolder(tmp_path / "watched")
    assert [x["loss"] for x in run.metrics()] == pytest.approx(losses)
    scored = kind is PerToken  # the others' answers are no longer in the order of TRL's rewards
    assert all(("accuracy" in line) == scored for line in run.metrics()) and any(run.records()) == scored
    assert ("Reordered changes the answers" in caplog.text) != scored


def test_a_reward_that_decides_correctness_unasked_is_named(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    says = "correct if its reward long is above 0.5"
    trainer = plain(tmp_path / "two", [long, tiny.outcome], max_steps=1)
    dew.watch(trainer, outcome_reward="long").train()
    dew.watch(plain(tmp_path / "one", long, max_steps=1)).train()
    assert says not in caplog.text
    dew.watch(trainer).train()
    assert says in caplog.text


def test_alarms_do_not_break_the_progress_bar(tmp_path, monkeypatch, capsys):
    for name, value in {"propagate": False, "handlers": [], "level": logging.INFO}.items():
        monkeypatch.setattr(logging.getLogger("dew"), name, value)
    dew.watch(plain(tmp_path, lambda completions, **_: [0.0] * len(completions), max_steps=5)).train()
    assert "\ndew: step 5: The gradient was exactly 0" in capsys.readouterr().err.replace("\r", "\n")


def test_two_processes(tmp_path):
    """A group spans both: the metrics are those of all answers, and the weights those of the trainer alone."""

    def train(rank):
        alone = plain(tmp_path / "alone", per_device_train_batch_size=2)
        alone.train()
        trainer = dew.watch(plain(tmp_path / "watched", per_device_train_batch_size=2), records_every=1)
        trainer.train()
        assert torch.equal(tiny.weights(alone.model), tiny.weights(trainer.model))

    assert tiny.in_children(train, 2) == [0, 0]
    run = RunFolder(tmp_path / "watched")
    for line, group in zip(run.metrics(), run.records(), strict=True):
        assert len(group.answers) == 4
        assert line["accuracy"] == sum(answer.correct for answer in group.answers) / 4


def test_the_folder_has_metrics_records_and_a_report(tmp_path):
    trainer = plain(tmp_path, [long, tiny.outcome])
    assert dew.watch(trainer) is dew.watch(trainer, outcome_reward="outcome", records_every=1) is trainer
    trainer.train()
    run = RunFolder(tmp_path)
    facts = {"status": "done", "learning_rate": 1e-2, "rewards": "long, outcome"}
    assert facts.items() <= run.run().items() and run.run()["algorithm"]["name"] == "trl"
    assert run.run()["batches"]["num_generations"] == 4  # each alone: a report has those that differ in names of arms
    lines, groups = run.metrics(), list(run.records())
    assert [line["step"] for line in lines] == [1, 2, 3] and {group.step for group in groups} == {1, 2, 3}
    for line in lines:
        of_step = [answer for group in groups if group.step == line["step"] for answer in group.answers]
        assert line["accuracy"] == pytest.approx(sum(answer.correct for answer in of_step) / len(of_step))
        entropies = [h for answer in of_step for h in answer.entropy]
        assert line["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=0.2)  # that has dropout
        assert line["grad_norm"] > 0 and line["length/mean"] > 0 and "seconds/generation" in line
    rewards = [answer.rewards for group in groups for answer in group.answers]
    assert all(set(x) == {"long", "outcome"} for x in rewards)
    for group in groups:  # the advantages of TRL's loss: of the sum of both rewards, within the group
        total = torch.tensor([sum(answer.rewards.values()) for answer in group.answers])
        expected = (total - total.mean()) / (total.std() + 1e-4)
        found = torch.tensor([answer.advantage[0] for answer in group.answers])
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert "<html" in report.build([tmp_path]).read_text()


def test_alarms_fire_and_a_stopped_run_says_so(tmp_path):
    rewards = [lambda completions, value=value, **_: [value] * len(completions) for value in (None, 0.0)]
    trainer = dew.watch(plain(tmp_path, rewards, max_steps=12))  # TRL learns from any reward
    trainer.train()
    assert [line["reward"] for line in RunFolder(tmp_path).metrics()] == [0.0] * 12
    found = {alarm["alarm"] for alarm in RunFolder(tmp_path).alarms()}
    assert {"no_signal", "no_gradient"} <= found and "unscored" not in found

    def broken(completions, **_):
        raise RuntimeError("no")

    trainer = dew.watch(plain(tmp_path / "broken", broken))
    with pytest.raises(RuntimeError, match="no"):
        trainer.train()
    run = RunFolder(tmp_path / "broken").run()
    assert run["status"] == "failed" and "RuntimeError at test_watch.py, line" in run["error"]


def test_an_infinite_gradient_is_an_alarm(tmp_path):
    trainer = dew.watch(plain(tmp_path, max_steps=1, max_grad_norm=1.0))
    trainer.model.lm_head.weight.register_hook(lambda grad: grad * float("inf"))
    trainer.train()
    assert "not_finite" in {alarm["alarm"] for alarm in RunFolder(tmp_path).alarms()}


def test_a_second_run_in_the_same_folder_keeps_the_log_of_the_first(tmp_path):
    first = dew.watch(plain(tmp_path, max_steps=3))
    first.evaluate()  # before training: part of its run
    first.train()
    dew.watch(plain(tmp_path, max_steps=1)).train()
    assert [line["step"] for line in RunFolder(tmp_path).metrics()] == [1]
    assert [line["step"] for line in RunFolder(tmp_path / ".replaced" / "1").metrics()] == [0, 1, 2, 3]


def test_a_resumed_run_continues_its_log(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 2}
    dew.watch(plain(tmp_path, max_steps=2, **saves)).train()
    dew.watch(plain(tmp_path, max_steps=4, **saves)).train(resume_from_checkpoint=True)
    assert [line["step"] for line in RunFolder(tmp_path).metrics()] == [1, 2, 3, 4]


def test_a_trainer_with_its_own_loss_as_in_unsloth(tmp_path, monkeypatch):
    class Unsloth(GRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            return (model(input_ids=ids).logits.mean((1, 2)) * inputs["advantages"]).sum()

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            raise AssertionError("its scores have another layout")

    monkeypatch.setitem(sys.modules, "unsloth", object())
    trains_as_alone(tmp_path, Unsloth)
    run = RunFolder(tmp_path / "watched")
    assert all(line["accuracy"] >= 0 and line["grad_norm"] > 0 for line in run.metrics())
    assert not any(answer.entropy for group in run.records() for answer in group.answers)


def test_mistakes_are_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="not a GRPOTrainer") as error:
        dew.watch(tiny.model())
    assert "unsloth" not in str(error.value)
    args = tiny.trainer(tmp_path, algorithm="gtpo").args
    with pytest.raises(ConfigError, match="A GRPOTrainer ignores algorithm='gtpo'"):
        GRPOTrainer(tiny.model(), tiny.has_a, args, tiny.prompts(), processing_class=tiny.tokenizer())
    with monkeypatch.context() as imported, pytest.raises(ConfigError, match="Import unsloth before dew"):
        imported.setitem(sys.modules, "unsloth", object())
        dew.watch(tiny.model())
    for wrong, says in ({"outcome_reward": tiny.outcome}, "functions: outc"), ({"records_every": "20"}, "'20'.*Give"):
        with pytest.raises(ConfigError, match=says):
            dew.watch(plain(tmp_path), **wrong)
    assert dew.watch(trainer := tiny.trainer(tmp_path)) is trainer and type(trainer).__name__ == "DewTrainer"
