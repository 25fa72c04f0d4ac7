"""Credit in the trainer: computed once, on whole groups, from the sampling policy's entropy."""

import functools

import pytest
import torch

import trl_tiny as tiny
from dew import GTPO, Rollouts, get_algorithm
from dew.engines.trl import DewTrainer
from trl_tiny import generation, outcome, ready


def expected_advantages(trainer, batch, mask, algorithm=None, keep=None):
    """From the plain logits: −Σ p log p at the sampling temperature, dropout off."""
    model, keep = trainer.model.eval(), list(range(len(mask))) if keep is None else keep
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention).logits[:, batch["prompt_ids"].size(1) - 1 : -1]
    model.train()
    logp = (logits / trainer.temperature).log_softmax(-1)
    rollouts = Rollouts.from_rows(
        [i // 4 for i in keep],
        mask=mask[keep],
        reward=torch.tensor(outcome(tiny.texts(trainer, batch)))[keep],
        entropy=-(logp.exp() * logp).sum(-1)[keep],
    )
    found = rollouts.to_rows((algorithm or GTPO()).advantages(rollouts))
    assert found.abs().max() > 0.1
    return found


close = functools.partial(torch.testing.assert_close, rtol=1e-3, atol=1e-4)


# ── oracle ────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("algorithm", ["dew", "gtpo", "grpo_s"])
@pytest.mark.parametrize("iterations", [1, 2], ids=["our pass", "TRL's pass"])
def test_advantages_are_the_algorithms_on_whole_groups(algorithm, iterations, tmp_path):
    policy = tiny.model(attention_dropout=0.5)
    trainer = ready(tmp_path, algorithm=algorithm, num_iterations=iterations, temperature=0.7, policy=policy)
    batch = generation(trainer)
    assert all(module.training for module in trainer.model.modules()), "dropout is back on after scoring"
    expected = expected_advantages(trainer, batch, batch["completion_mask"].bool(), get_algorithm(algorithm))
    close(batch["advantages"], expected)


# ── the scoring pass ──────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("algorithm", "settings", "passes"),
    [
        ("gtpo", {}, 1),
        ("gtpo", {"num_iterations": 2}, 1),
        ("grpo_s", {"steps_per_generation": 2}, 1),
        ("grpo", {}, 0),
        ("grpo", {"num_iterations": 2}, 1),
        ("grpo", {"records_every": 1}, 1),
    ],
)
def test_tokens_are_scored_at_most_once(algorithm, settings, passes, tmp_path):
    trainer = ready(tmp_path, algorithm=algorithm, per_device_train_batch_size=8, **settings)
    seen = []
    head = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: seen.append(1) or head(*a, **k)
    batch = generation(trainer)
    assert len(seen) == passes
    assert ("old_per_token_logps" in batch) == ("num_iterations" in settings or "steps_per_generation" in settings)


# ── what does not train ───────────────────────────────────────────────────────────────────────────────────
def test_an_answer_without_a_reward_is_excluded_from_its_group(tmp_path):
    def none_for_the_seventh(completions, **_):
        return [None if i == 6 else value for i, value in enumerate(outcome(completions))]

    trainer = ready(tmp_path, none_for_the_seventh)
    batch = generation(trainer)
    assert (batch["advantages"][6] == 0).all() and batch["verdict"].tolist()[6] == -1
    assert trainer._metrics["train"]["groups/mixed_share"] == [0.5]
    keep = [0, 1, 2, 3, 4, 5, 7]
    expected = expected_advantages(trainer, batch, batch["completion_mask"].bool(), keep=keep)
    close(batch["advantages"][keep], expected)


# ── which reward decides ──────────────────────────────────────────────────────────────────────────────────
def test_rewards_that_a_subclass_changes_are_trained_on(tmp_path, monkeypatch):
    class Opposite(DewTrainer):
        def _calculate_rewards(self, *args, **kwargs):
            return 1 - super()._calculate_rewards(*args, **kwargs)

    advantages = [generation(ready(tmp_path / "plain", algorithm="grpo"))["advantages"]]
    monkeypatch.setattr("dew.engines.trl.DewTrainer", Opposite)
    changed = ready(tmp_path / "changed", algorithm="grpo")
    advantages += [generation(changed)["advantages"]]
    assert advantages[0].any() and torch.equal(advantages[1], -advantages[0])


def test_graded_rewards_on_both_sides_of_the_threshold_are_one_warning(tmp_path, caplog):
    calls = iter([0, 1, 1])  # the first generation has one reward only
    rewards = lambda completions, **_: [k * (len(set(x)) % 5) / 4 for k in [next(calls)] for x in completions]  # noqa: E731
    trainer = ready(tmp_path, rewards, algorithm="gtpo")
    assert [bool(generation(trainer)["advantages"].any()) for _ in range(3)] == [False, True, True]
    assert caplog.text.count("different values") == 1
    assert [(x["alarm"], x["step"]) for x in trainer._recorder.folder.alarms()] == [("graded_reward", 1)]


def test_every_evaluation_set_has_metrics_of_its_own(tmp_path):
    sets = {"few": tiny.prompts(2), "many": tiny.prompts(4)}
    sizes = {"per_device_eval_batch_size": 4, "num_generations_eval": 2}
    trainer = tiny.trainer(tmp_path, others={"eval_dataset": sets}, **sizes)
    numbers = trainer.evaluate()
    for name in ("reward", "accuracy", "entropy", "pass@2", "loss", "samples_per_second"):
        assert {f"eval_few_{name}", f"eval_many_{name}"} <= set(numbers) and f"eval_{name}" not in numbers
    recorded = set().union(*trainer._recorder.folder.metrics())
    assert {"eval/few_pass@2", "eval/many_pass@2"} <= recorded and "eval/pass@2" not in recorded
