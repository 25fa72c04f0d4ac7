"""The losses in the trainer: TRL's own where TRL has the same, and the batch's however it is cut."""

from functools import partial

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

import trl_tiny as tiny
from dew.engines.trl import DewConfig, DewTrainer
from dew.engines.trl.loss import loss_part
from trl_tiny import outcome


def length(completions, **_):
    return [len(text) / 10 for text in completions]


def sometimes_silent(completions, **_):
    return [None if len(text) == 2 else float("a" in text or "b" in text) for text in completions]


TRL_TWINS = {
    "grpo": {"loss_type": "grpo", "epsilon": 0.2},
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon": 0.2, "epsilon_high": 0.2, "scale_rewards": "none"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.01},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
}
OUR_SETTINGS = {
    "dapo": {"dynamic_sampling": False},
    "cispo": {"dynamic_sampling": False, "clip_high": 0.01},  # TRL's epsilon_high is the bound itself
    "sapo": {"tau_pos": 2.0, "tau_neg": 3.0},
}
BATCH = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
SHARED = {**BATCH, "max_completion_length": 6, **tiny.ON_A_CPU}
SHARED["num_iterations"] = 2  # so that TRL keeps the old log-probabilities
SOME_TRUNCATED = partial(tiny.scripted, seed=2)
VARIANTS = {
    "plain": ({}, [outcome]),
    "truncated answers masked": ({"mask_truncated_completions": True}, [outcome]),
    "answers without a reward": ({}, [sometimes_silent]),
    "two rewards": ({"reward_weights": [1.0, 0.5]}, [outcome, length]),
    "two optimizer steps per generation": ({"steps_per_generation": 4}, [outcome]),
    "KL term": ({"beta": 0.5, "use_bias_correction_kl": False}, [outcome]),
}


def twins(folder, rewards, settings, ours, theirs):
    """The same run by dew and by TRL."""
    tiny.model().save_pretrained(folder / "policy")
    tiny.tokenizer().save_pretrained(folder / "policy")
    others = {"train_dataset": tiny.prompts(), "processing_class": tiny.tokenizer(), "rollout_func": SOME_TRUNCATED}
    start, both = str(folder / "policy"), {"model_init_kwargs": {"dtype": "float32"}, **SHARED, **settings}
    if ours["algorithm"] != "trl":
        ours = {**ours, "outcome_reward": rewards[0].__name__}
    return (
        DewTrainer(start, rewards, DewConfig(str(folder / "ours"), **ours, **both), **others),
        GRPOTrainer(start, list(rewards), GRPOConfig(str(folder / "theirs"), **theirs, **both), **others),
    )


def same_update(ours, theirs, distance):
    """The micro-batches' losses, and the gradient that they sum to, once the policy has moved from the sampling one."""
    found = []
    for trainer in (ours, theirs):
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 2
        batch = tiny.generation(trainer)
        tiny.move(trainer.model, distance)
        losses = []
        for part in split_tensor_dict(batch, trainer.args.steps_per_generation)[:2]:  # one optimizer step
            loss = trainer._compute_loss(trainer.model, part)
            loss.backward()
            losses.append(loss.item())
        found.append((torch.tensor(losses), tiny.gradient(trainer.model)))
    assert found[1][1].abs().max() > 1e-3, "a batch without gradient proves nothing"
    (loss, gradient), (expected_loss, expected_gradient) = found
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


@tiny.runs_trls_loss
@pytest.mark.parametrize(
    ("algorithm", "variant"),
    [
        pytest.param(a, v, marks=[] if v == "plain" or a in ("grpo", "dapo") else pytest.mark.slow)
        for a in TRL_TWINS
        for v in VARIANTS
        if a not in ("cispo", "sapo") or v in ("plain", "two rewards")
    ],
)
def test_the_loss_and_its_gradient_are_those_of_trl(algorithm, variant, tmp_path):
    settings, rewards = VARIANTS[variant]
    ours, theirs = {"algorithm": algorithm, "algorithm_kwargs": OUR_SETTINGS.get(algorithm, {})}, TRL_TWINS[algorithm]
    same_update(*twins(tmp_path, rewards, settings, ours, theirs), 1e-3 if algorithm == "gspo" else 0.03)


AS_IN_TRL = {
    "TRL's defaults": {},
    "KL with TRL's correction, two-sided clip": {"beta": 0.5, "delta": 1.5, "epsilon": 0.1, "epsilon_high": 0.3},
    "GSPO with TRL's clipping": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "rewards scaled by the batch": {"loss_type": "dr_grpo", "scale_rewards": "batch"},
    "a loss that only TRL has": {"loss_type": "vespo"},
    "80/20 rule and entropy bonus": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    "each reward normalised": {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [2.0, 0.5]},
}


@tiny.runs_trls_loss
@pytest.mark.parametrize("name", AS_IN_TRL)
def test_the_algorithm_trl_is_the_users_trl_run(name, tmp_path):
    """Every setting of GRPOConfig, as it is; several rewards need no outcome_reward."""
    given = AS_IN_TRL[name]
    same_update(*twins(tmp_path, [outcome, length], {}, {"algorithm": "trl", **given}, given), 0.03)


def gradient_of(folder, algorithm, per_device, accumulation):
    batch = {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": accumulation}
    kwargs = {"dynamic_sampling": False} if algorithm == "dapo" else {}
    trainer = tiny.ready(folder, algorithm=algorithm, algorithm_kwargs=kwargs, num_generations=16, **batch)
    trainer.current_gradient_accumulation_steps = accumulation
    for micro in range(accumulation):
        trainer._step = micro
        part = trainer._prepare_inputs(tiny.rows(trainer))
        trainer._compute_loss(trainer.model, part).backward()
    return tiny.gradient(trainer.model)


@pytest.mark.parametrize("algorithm", ["dapo", "grpo", "grpo_s", "dr_grpo"])
def test_a_generation_in_several_optimizer_steps_has_the_algorithms_loss(algorithm, tmp_path):
    """As on verl (tests/verl/test_core.py): each step takes its share of the generation's tokens, or of its answers, of
    which truncated and masked ones count; so the mean of the steps is `Algorithm.loss` of the generation."""
    trainer = tiny.ready(
        tmp_path, algorithm=algorithm, algorithm_kwargs={"dynamic_sampling": False}, per_device_train_batch_size=4,
        steps_per_generation=4, mask_truncated_completions=True, others={"rollout_func": SOME_TRUNCATED},
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    batch = tiny.generation(trainer)
    masked = ~batch["completion_mask"].bool().any(1)
    assert masked.any() and not masked.all()
    tiny.move(trainer.model, 0.03)
    with torch.no_grad():
        logp, entropy, _ = trainer._forward(trainer.model, batch)
        expected, _ = trainer.algorithm.loss(logp, loss_part(batch, logp, entropy), batch["advantages"])
        steps = [trainer._compute_loss(trainer.model, part) for part in split_tensor_dict(batch, 4)]
    torch.testing.assert_close(torch.stack(steps).mean(), expected, rtol=1e-4, atol=1e-6)
    assert expected.abs() > 1e-3


@pytest.mark.parametrize(
    "algorithm",
    ["gtpo", "grpo_s", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dew", "dapo", "forking_tokens"))],
)
def test_one_by_thirty_two_is_thirty_two_by_one(algorithm, tmp_path):
    whole = gradient_of(tmp_path / "whole", algorithm, 32, 1)
    assert whole.norm() > 0.1
    torch.testing.assert_close(gradient_of(tmp_path / "single", algorithm, 1, 32), whole, rtol=1e-4, atol=1e-5)
