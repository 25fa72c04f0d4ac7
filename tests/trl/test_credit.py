"""Credit in the trainer: computed once, on whole groups, from the sampling policy's entropy."""

import functools

import pytest
import torch

import trl_tiny as tiny
from dew import GTPO, Rollouts, get_algorithm
from dew.engines.credit import Rows, give_credit
from dew.engines.recorder import credit_metrics
from trl_tiny import outcome


def scripted(folder, rewards=outcome, **settings):
    others = settings.pop("others", {"rollout_func": tiny.scripted})
    trainer = tiny.trainer(folder, rewards, others=others, **{"records_every": 0, **settings})
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def entropy_by_hand(trainer, batch):
    """−Σ p log p of the plain logits at the sampling temperature, dropout off."""
    model = trainer.model.eval()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, batch["prompt_ids"].size(1) - 1 : -1]
    model.train()
    logp = (logits / trainer.temperature).log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


# oracle


@pytest.mark.parametrize("algorithm", ["dew", "gtpo", "grpo_s"])
@pytest.mark.parametrize("iterations", [1, 2], ids=["our pass", "TRL's pass"])
def test_advantages_are_the_algorithms_on_whole_groups(algorithm, iterations, tmp_path):
    trainer = scripted(
        tmp_path,
        algorithm=algorithm,
        num_iterations=iterations,
        temperature=0.7,
        policy=tiny.model(attention_dropout=0.5),
    )
    batch = trainer._generate_and_score_completions(tiny.rows(trainer))
    mask = batch["completion_mask"].bool()
    texts = trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    rollouts = Rollouts.from_rows(
        [0] * 4 + [1] * 4,
        mask=mask,
        reward=torch.tensor(outcome(texts)),
        entropy=entropy_by_hand(trainer, batch),
    )
    expected = rollouts.to_rows(get_algorithm(algorithm).advantages(rollouts))
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(batch["advantages"], expected, rtol=1e-3, atol=1e-4)


# the scoring pass


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
    trainer = scripted(tmp_path, algorithm=algorithm, per_device_train_batch_size=8, **settings)
    seen = []
    head = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: seen.append(1) or head(*a, **k)
    batch = trainer._generate_and_score_completions(tiny.rows(trainer))
    assert len(seen) == passes
    assert ("old_per_token_logps" in batch) == ("num_iterations" in settings or "steps_per_generation" in settings)


def test_the_ratio_is_exactly_one_when_the_sampling_policy_trains(tmp_path):
    trainer = scripted(tmp_path, policy=tiny.model(attention_dropout=0.5))
    trainer._compute_loss(trainer.model, trainer._generate_and_score_completions(tiny.rows(trainer)))
    stats, _ = trainer._statistics.read(trainer.accelerator)
    assert stats["ratio/mean"] == stats["ratio/max"] == 1.0
    assert stats["ratio/abs_log"] == 0.0


def test_dropout_is_back_on_after_scoring(tmp_path):
    trainer = scripted(tmp_path, policy=tiny.model(attention_dropout=0.5))
    trainer._generate_and_score_completions(tiny.rows(trainer))
    assert all(module.training for module in trainer.model.modules())


# what does not train


def test_tool_output_gets_no_credit_and_is_not_compared(tmp_path):
    def with_tools(prompts, trainer):
        output = tiny.scripted(prompts, trainer)
        output["env_mask"] = [[i % 2 for i in range(len(ids))] for ids in output["completion_ids"]]
        return output

    trainer = scripted(tmp_path, others={"rollout_func": with_tools})
    batch = trainer._generate_and_score_completions(tiny.rows(trainer))
    mask = batch["completion_mask"].bool() & batch["tool_mask"].bool()
    assert (batch["advantages"][~mask] == 0).all()
    assert batch["advantages"][mask].abs().max() > 0.1
    rollouts = Rollouts.from_rows(
        [0] * 4 + [1] * 4,
        mask=mask,
        reward=torch.tensor(
            outcome(trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True))
        ),
        entropy=entropy_by_hand(trainer, batch),
    )
    torch.testing.assert_close(batch["advantages"], rollouts.to_rows(GTPO().advantages(rollouts)), rtol=1e-3, atol=1e-4)


def test_an_answer_without_a_reward_is_excluded_from_its_group(tmp_path):
    def none_for_the_third(completions, **_):
        return [None if i == 2 else value for i, value in enumerate(outcome(completions))]

    trainer = scripted(tmp_path / "a", none_for_the_third)
    batch = trainer._generate_and_score_completions(tiny.rows(trainer))
    assert (batch["advantages"][2] == 0).all()
    keep = [0, 1, 3, 4, 5, 6, 7]
    mask = batch["completion_mask"].bool()[keep]
    texts = trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    rollouts = Rollouts.from_rows(
        [0] * 3 + [1] * 4,
        mask=mask,
        reward=torch.tensor(outcome(texts))[keep],
        entropy=entropy_by_hand(trainer, batch)[keep],
    )
    expected = rollouts.to_rows(GTPO().advantages(rollouts))
    torch.testing.assert_close(batch["advantages"][keep], expected, rtol=1e-3, atol=1e-4)
    assert batch["verdict"].tolist()[2] == -1


@pytest.mark.parametrize("algorithm", ["gtpo", "grpo_s", "grpo", "dr_grpo"])
def test_groups_in_which_all_answers_are_truncated_train_nothing(algorithm, tmp_path):
    endless = functools.partial(tiny.scripted, longest=1)  # one token and no end: every answer is truncated
    trainer = scripted(tmp_path, algorithm=algorithm, mask_truncated_completions=True, others={"rollout_func": endless})
    batch = trainer._generate_and_score_completions(tiny.rows(trainer))
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    assert loss.item() == 0.0
    assert all((p.grad == 0).all() for p in trainer.model.parameters() if p.grad is not None)


# which reward decides


def test_only_the_outcome_reward_decides_correctness(tmp_path):
    def format_always_high(completions, **_):
        return [10.0] * len(completions)

    alone = scripted(tmp_path / "a")._generate_and_score_completions
    plain = alone(tiny.rows(alone.__self__))
    trainer = scripted(tmp_path / "b", [format_always_high, outcome], outcome_reward="outcome")
    batch = trainer._generate_and_score_completions(tiny.rows(trainer))
    assert batch["verdict"].tolist() == plain["verdict"].tolist()
    assert 0 < batch["verdict"].float().mean() < 1


def graded(completions, **_):
    return [0.01 * (len(set(text)) % 5) for text in completions]


@pytest.mark.parametrize(("rule", "trains"), [({}, False), ({"pool": "outcome"}, True)], ids=["paper", "outcome"])
def test_graded_rewards_train_with_the_outcome_pool_and_warn_without(rule, trains, tmp_path, caplog):
    trainer = scripted(tmp_path, graded, algorithm="gtpo", algorithm_kwargs=rule)
    with caplog.at_level("WARNING", logger="dew"):
        batches = [trainer._generate_and_score_completions(tiny.rows(trainer)) for _ in range(2)]
    assert bool(batches[0]["advantages"].any()) == trains
    warned = [r.getMessage() for r in caplog.records if "different values" in r.getMessage()]
    assert len(warned) == (0 if trains else 1), "once, in the first generation"
    if not trains:
        assert "all at or below the threshold of 0.5" in warned[0] and 'pool="outcome"' in warned[0]
        assert [alarm["alarm"] for alarm in trainer._recorder.folder.alarms()] == ["graded_reward"]


def test_evaluation_computes_credit_too(tmp_path):
    data = tiny.prompts(4)
    trainer = tiny.trainer(
        tmp_path, others={"eval_dataset": data}, per_device_eval_batch_size=4, num_generations_eval=2, max_steps=1
    )
    trainer.train()
    numbers = trainer.evaluate()
    assert {"eval_accuracy", "eval_entropy", "eval_reward", "eval_loss"} <= set(numbers)


def test_every_evaluation_set_has_metrics_of_its_own(tmp_path):
    sets = {"few": tiny.prompts(2), "many": tiny.prompts(4)}
    trainer = tiny.trainer(
        tmp_path, others={"eval_dataset": sets}, per_device_eval_batch_size=4, num_generations_eval=2
    )
    numbers = trainer.evaluate()
    for name in ("reward", "accuracy", "pass@2", "loss", "samples_per_second"):
        assert {f"eval_few_{name}", f"eval_many_{name}"} <= set(numbers) and f"eval_{name}" not in numbers
    recorded = set().union(*trainer._recorder.folder.metrics())
    assert {"eval/few_pass@2", "eval/many_pass@2"} <= recorded and "eval/pass@2" not in recorded


# groups in any order


def test_rows_of_a_group_need_not_be_contiguous():
    torch.manual_seed(0)
    mask = torch.rand(12, 5) > 0.2
    mask[:, 0] = True
    rows = Rows(
        group=torch.arange(12) // 4,
        mask=mask,
        outcome=(torch.rand(12) > 0.5).float(),
        extra=torch.zeros(12),
        entropy=torch.rand(12, 5) + 0.1,
    )
    order = torch.randperm(12)
    shuffled = Rows(**{name: value[order] for name, value in vars(rows).items() if value is not None})
    torch.testing.assert_close(
        give_credit(GTPO(), shuffled).advantages, give_credit(GTPO(), rows).advantages[order], rtol=1e-5, atol=1e-6
    )


# records


@pytest.mark.parametrize(("pool", "flips"), [("group", True), ("outcome", False)])
def test_flipped_tokens_are_counted(pool, flips):
    """One correct answer of 16: under the paper's pool most wrong tokens are rewarded."""
    torch.manual_seed(0)
    none = torch.zeros(16, dtype=torch.long)
    rows = Rows(
        group=none,
        mask=torch.rand(16, 30) < 0.9,
        outcome=(torch.arange(16) == 0).float(),
        extra=torch.zeros(16),
        entropy=torch.rand(16, 30).pow(4),
    )
    credit = give_credit(GTPO(pool=pool), rows)
    by_hand = (credit.advantages * (2 * rows.outcome - 1)[:, None] < 0) & rows.mask
    assert (by_hand == credit.flipped).all()
    share = credit_metrics(rows, credit)["credit/flipped_share"]
    assert share == pytest.approx(float(by_hand.sum() / rows.mask.sum())) and (share > 0.5) == flips


def test_shaping_is_repeated_only_for_records():
    rows = Rows(
        group=torch.zeros(4, dtype=torch.long),
        mask=torch.ones(4, 3, dtype=torch.bool),
        outcome=torch.tensor([1.0, 0.0, 1.0, 0.0]),
        extra=torch.zeros(4),
        entropy=torch.rand(4, 3) + 0.1,
    )
    plain, recorded = (give_credit(GTPO(), rows, for_records=flag) for flag in (False, True))
    assert torch.equal(plain.advantages, recorded.advantages) and plain.advantages.abs().max() > 0.1
    assert plain.shaped is None and recorded.shaped.shape == (4, 3)


def test_a_batch_without_a_record_is_shaped_once(tmp_path, monkeypatch):
    calls = []
    inner = GTPO._shaped
    monkeypatch.setattr(GTPO, "_shaped", lambda self, rollouts: calls.append(1) or inner(self, rollouts))
    trainer = scripted(tmp_path, records_every=0)
    trainer._generate_and_score_completions(tiny.rows(trainer))
    assert len(calls) == 1
