"""The losses in the trainer: TRL's own where TRL has the same, and the batch's however it is cut."""

import copy

import pytest
import torch

import trl_tiny as tiny
from dew.engines.trl import DewConfig, DewTrainer
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
SHARED = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_iterations": 2,  # so that TRL keeps the old log-probabilities
    "num_generations": 4,
    "max_completion_length": 6,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
}
VARIANTS = {
    "plain": ({}, [outcome]),
    "truncated answers masked": ({"mask_truncated_completions": True}, [outcome]),
    "answers without a reward": ({}, [sometimes_silent]),
    "two rewards": ({"reward_weights": [1.0, 0.5]}, [outcome, length]),
    "two optimizer steps per generation": ({"steps_per_generation": 4}, [outcome]),
}


def twins(algorithm, folder, settings, rewards, kl=0.0):
    from trl import GRPOConfig, GRPOTrainer

    policy = tiny.model()
    policy.save_pretrained(folder / "policy")
    tiny.tokenizer().save_pretrained(folder / "policy")
    others = {"train_dataset": tiny.prompts(), "processing_class": tiny.tokenizer(), "rollout_func": tiny.scripted}
    start = str(folder / "policy")
    kwargs = OUR_SETTINGS.get(algorithm, {})
    ours = DewTrainer(
        start,
        rewards,
        DewConfig(
            str(folder / "ours"),
            algorithm=algorithm,
            algorithm_kwargs={**kwargs, "kl_coef": kl},
            outcome_reward=rewards[0].__name__,
            model_init_kwargs={"dtype": "float32"},
            **SHARED,
            **settings,
        ),
        **others,
    )
    theirs = GRPOTrainer(
        start,
        list(rewards),
        GRPOConfig(
            str(folder / "theirs"),
            beta=kl,
            use_bias_correction_kl=False,
            model_init_kwargs={"dtype": "float32"},
            **TRL_TWINS[algorithm],
            **SHARED,
            **settings,
        ),
        **others,
    )
    return ours, theirs


def losses_and_gradient(trainer, moved):
    """The micro-batches' losses, and the gradient that they sum to, once the policy has moved from the sampling one."""
    from trl.trainer.utils import split_tensor_dict

    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    batch = trainer._generate_and_score_completions(tiny.rows(trainer))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(moved * torch.randn_like(parameter))
    losses = []
    for part in split_tensor_dict(batch, trainer.args.steps_per_generation)[:2]:  # one optimizer step
        loss = trainer._compute_loss(trainer.model, part)
        loss.backward()
        losses.append(loss.item())
    return torch.tensor(losses), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def by_default(algorithm, variant):
    """Every loss and every variant: the others combine them."""
    return variant == "plain" or algorithm in ("grpo", "dapo")


@tiny.runs_trls_loss
@pytest.mark.parametrize(
    ("algorithm", "variant"),
    [
        pytest.param(a, v, marks=[] if by_default(a, v) else pytest.mark.slow)
        for a in TRL_TWINS
        for v in VARIANTS
        if a not in ("cispo", "sapo") or v in ("plain", "two rewards")
    ],
)
def test_the_loss_and_its_gradient_are_those_of_trl(algorithm, variant, tmp_path):
    settings, rewards = VARIANTS[variant]
    ours, theirs = twins(algorithm, tmp_path, settings, rewards)
    moved = 1e-3 if algorithm == "gspo" else 0.03
    loss, gradient = losses_and_gradient(ours, moved)
    expected_loss, expected_gradient = losses_and_gradient(theirs, moved)
    assert expected_gradient.abs().max() > 1e-3, "a batch without gradient proves nothing"
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


@tiny.runs_trls_loss
def test_the_kl_term_is_that_of_trl(tmp_path):
    ours, theirs = twins("grpo", tmp_path, {}, [outcome], kl=0.5)
    loss, gradient = losses_and_gradient(ours, 0.03)
    expected_loss, expected_gradient = losses_and_gradient(theirs, 0.03)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


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
    from trl import GRPOConfig, GRPOTrainer

    tiny.model().save_pretrained(tmp_path / "policy")
    tiny.tokenizer().save_pretrained(tmp_path / "policy")
    others = {"train_dataset": tiny.prompts(), "processing_class": tiny.tokenizer(), "rollout_func": tiny.scripted}
    settings = {"model_init_kwargs": {"dtype": "float32"}, **SHARED, **AS_IN_TRL[name]}
    start, rewards = str(tmp_path / "policy"), [outcome, length]
    ours = DewTrainer(start, rewards, DewConfig(str(tmp_path / "a"), algorithm="trl", **settings), **others)
    theirs = GRPOTrainer(start, list(rewards), GRPOConfig(str(tmp_path / "b"), **settings), **others)
    loss, gradient = losses_and_gradient(ours, 0.03)
    expected_loss, expected_gradient = losses_and_gradient(theirs, 0.03)
    assert expected_gradient.abs().max() > 1e-3, "a batch without gradient proves nothing"
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


def gradient_of(folder, algorithm, per_device, accumulation):
    trainer = tiny.trainer(
        folder,
        outcome,
        policy=copy.deepcopy(POLICY),
        others={"rollout_func": tiny.scripted},
        algorithm=algorithm,
        algorithm_kwargs={"dynamic_sampling": False} if algorithm == "dapo" else {},
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        num_generations=16,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = accumulation
    for micro in range(accumulation):
        trainer._step = micro
        part = trainer._prepare_inputs(tiny.rows(trainer))
        trainer._compute_loss(trainer.model, part).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


POLICY = tiny.model()


@pytest.mark.parametrize(
    "algorithm",
    ["gtpo", "grpo_s", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dew", "dapo", "forking_tokens"))],
)
def test_one_by_sixty_four_is_sixty_four_by_one(algorithm, tmp_path):
    whole = gradient_of(tmp_path / "whole", algorithm, 64, 1)
    assert whole.norm() > 0.1
    torch.testing.assert_close(gradient_of(tmp_path / "single", algorithm, 1, 64), whole, rtol=1e-4, atol=1e-5)


def test_grpo_s_trains_with_the_arithmetic_ratio_when_it_is_off_policy(tmp_path):
    """ŵᵢ = meanₜ wᵢₜ, worked out from the log-probabilities before and after the policy has moved."""
    trainer = tiny.trainer(
        tmp_path, outcome, others={"rollout_func": tiny.scripted}, algorithm="grpo_s", num_iterations=2
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions(tiny.rows(trainer))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        logp, _, _ = trainer._forward(trainer.model, batch)
    loss = trainer._compute_loss(trainer.model, batch).item()
    expected = []
    for i, mask in enumerate(batch["completion_mask"].bool()):
        w = (logp[i] - batch["old_per_token_logps"][i])[mask].exp().mean().item()
        A = batch["advantages"][i, 0].item()
        expected.append(-min(w * A, min(max(w, 0.8), 1.28) * A))
    assert loss == pytest.approx(sum(expected) / len(expected), rel=1e-4, abs=1e-6)


def test_the_samplers_correction_multiplies_the_surrogate(tmp_path):
    """vLLM's importance-sampling ratio: with 2 on every token the loss and its gradient double."""
    trainer = tiny.trainer(tmp_path, outcome, others={"rollout_func": tiny.scripted}, num_iterations=2)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions(tiny.rows(trainer))
    plain = gradient_on(trainer, batch)
    assert plain.norm() > 0.1
    for width in (1, batch["completion_ids"].size(1)):
        ratio = torch.full((len(batch["completion_ids"]), width), 2.0)
        doubled = gradient_on(trainer, {**batch, "importance_sampling_ratio": ratio})
        torch.testing.assert_close(doubled, 2 * plain, rtol=1e-4, atol=1e-6)


def gradient_on(trainer, batch):
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, batch).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
