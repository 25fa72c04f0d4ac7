"""Settings that cannot work are rejected at the start, all at once, with what to write instead."""

import dataclasses

import pytest
from trl import GRPOConfig, TrlParser

import trl_tiny as tiny
from dew import GTPO
from dew.engines.trl import DewConfig, DewTrainer
from dew.errors import ConfigError, RewardError
from dew.rewards import verifier
from dew.run.folder import RunFolder


# ── what an algorithm sets ────────────────────────────────────────────────────────────────────────────────
def test_the_algorithm_sets_what_it_defines(tmp_path):
    config = tiny.config(tmp_path, algorithm="gtpo")
    assert (config.epsilon, config.epsilon_high, config.beta) == (0.2, 0.28, 0.0)
    assert (config.loss_type, config.scale_rewards, config.importance_sampling_level) == ("dapo", "group", "token")
    gspo = tiny.config(tmp_path, algorithm="gspo")
    assert (gspo.epsilon, gspo.epsilon_high, gspo.importance_sampling_level) == (3e-4, 4e-4, "sequence")
    dr_grpo = tiny.config(tmp_path, algorithm="dr_grpo")
    assert (dr_grpo.loss_type, dr_grpo.scale_rewards) == ("dr_grpo", "none")
    assert dr_grpo.build_algorithm().max_tokens == 6


def test_everything_else_is_trls_default(tmp_path):
    ours, theirs = DewConfig(str(tmp_path), bf16=False), GRPOConfig(str(tmp_path), bf16=False)
    own = {"epsilon_high", "use_bias_correction_kl", "logging_dir", "run_name"}
    for name, value in theirs.to_dict().items():
        if name not in own:
            assert ours.to_dict()[name] == value, name


def test_bf16_is_off_where_no_gpu_has_it_unless_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("dew.engines.trl.config.is_torch_bf16_gpu_available", lambda: False)
    assert DewConfig(str(tmp_path)).bf16 is False
    assert DewConfig(str(tmp_path), bf16=True, use_cpu=True).bf16 is True
    monkeypatch.setattr("dew.engines.trl.config.is_torch_bf16_gpu_available", lambda: True)
    assert DewConfig(str(tmp_path), use_cpu=True).bf16 is True


def test_an_object_and_a_json_string_are_equivalent(tmp_path):
    by_object = tiny.config(tmp_path, algorithm=GTPO(alpha2=0.2))
    by_string = tiny.config(tmp_path, algorithm="gtpo", algorithm_kwargs='{"alpha2": 0.2}')
    assert by_object.build_algorithm() == by_string.build_algorithm()
    assert by_object.algorithm == "gtpo"
    both = tiny.config(tmp_path, algorithm=GTPO(alpha1=2.0), algorithm_kwargs={"alpha2": 0.2}).build_algorithm()
    assert (both.alpha1, both.alpha2) == (2.0, 0.2)


def test_command_line_and_yaml(tmp_path):
    words = ["--output_dir", str(tmp_path), "--algorithm", "gtpo", "--algorithm_kwargs", '{"alpha2": 0.2}', "--bf16=no"]
    (tmp_path / "c.yaml").write_text(
        f"output_dir: {tmp_path}\nalgorithm: gtpo\nalgorithm_kwargs:\n  alpha2: 0.2\nbf16: false\n"
    )
    for given in (words, ["--config", str(tmp_path / "c.yaml")]):
        (config,) = TrlParser([DewConfig]).parse_args_and_config(given)
        assert config.build_algorithm().alpha2 == 0.2


CHOSEN = {
    "nothing": ({}, "dew"),
    "TRL's defaults": ({"loss_type": "dapo", "scale_rewards": True, "use_bias_correction_kl": True}, "dew"),
    "another loss": ({"loss_type": "grpo", "beta": 0.04}, "trl"),
    "two-sided clip": ({"delta": 4.0}, "trl"),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_trls_settings_choose_the_algorithm_where_none_is_named(name, tmp_path, caplog):
    settings, expected = CHOSEN[name]
    config = tiny.config(tmp_path, algorithm=None, **settings)
    assert config.algorithm == expected
    assert ("Training with the algorithm trl" in caplog.text) == (expected != "dew")


def test_trls_clipping_and_kl_mean_what_they_mean_in_trl(tmp_path, caplog):
    algorithm = tiny.config(tmp_path, epsilon=0.1, beta=0.04).build_algorithm()
    assert "unless use_bias_correction_kl=False" in caplog.text
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef) == (0.1, 0.1, 0.04)
    config = tiny.config(tmp_path, epsilon_high=0.4)
    assert (config.epsilon, config.epsilon_high) == (0.2, 0.4)
    again = dataclasses.replace(config, generation_batch_size=None)
    assert again.build_algorithm() == config.build_algorithm()
    own = tiny.config(tmp_path, algorithm="trl", delta=4.0, epsilon=0.1)
    assert (own.epsilon, own.epsilon_high, own.loss_type, own.use_bias_correction_kl) == (0.1, None, "dapo", True)
    assert own.build_algorithm().clip_high == 0.1
    gate = tiny.config(tmp_path, algorithm="trl", loss_type="sapo", sapo_temperature_neg=2.0)
    assert (gate.sapo_temperature_pos, gate.sapo_temperature_neg) == (1.0, 2.0)


def test_trls_settings_of_other_losses_mean_what_they_mean_in_trl(tmp_path):
    """CISPO: TRL's epsilon_high bounds the ratio itself, dew's clip_high the distance from 1; TRL reads no epsilon."""
    config = tiny.config(tmp_path, algorithm="cispo", loss_type="cispo", epsilon=0.2, epsilon_high=3.0)
    assert (config.build_algorithm().clip_low, config.build_algorithm().clip_high) == (1.0, 2.0)
    again = dataclasses.replace(config, generation_batch_size=None)
    assert again.build_algorithm() == config.build_algorithm()
    gate = tiny.config(tmp_path, algorithm="sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=3.0)
    assert (gate.build_algorithm().tau_pos, gate.build_algorithm().tau_neg) == (2.0, 3.0)


# ── what is rejected ──────────────────────────────────────────────────────────────────────────────────────
REJECTED = {
    "unknown algorithm": ({"algorithm": "gtop"}, r"Did you mean 'gtpo'\?"),
    "bad setting": ({"algorithm_kwargs": {"alpha2": -0.1}}, "rewarded for being sure"),
    "broken JSON": ({"algorithm_kwargs": "{alpha2"}, "not a mapping in YAML or JSON"),
    "JSON that is a list": ({"algorithm_kwargs": "[0.2]"}, "not a mapping"),
    "a list": ({"algorithm_kwargs": [0.2]}, "not a mapping"),
    "group of one": ({"num_generations": 1}, "at least 2"),
    "two clippings": ({"epsilon": 0.1, "algorithm_kwargs": {"clip_low": 0.3}}, "epsilon=0.1, but algorithm_kwargs has"),
    "other loss": ({"algorithm": "gtpo", "loss_type": "bnpo"}, "gtpo trains with 'dapo'.*algorithm='trl'"),
    "other ratio": ({"algorithm": "grpo", "importance_sampling_level": "sequence"}, "grpo trains with 'token'"),
    "TRL's KL": ({"algorithm": "grpo", "beta": 0.1, "use_bias_correction_kl": True}, "grpo trains with False"),
    "dew's KL": ({"algorithm": "grpo(kl_coef=0.1)", "use_bias_correction_kl": True}, "grpo trains with False"),
    "scaling": ({"algorithm": "gtpo", "scale_rewards": False}, "gtpo trains with 'group'"),
    "80/20 rule": ({"algorithm": "gtpo", "top_entropy_quantile": 0.2}, "quantile=0.2, but gtpo trains with 1.0"),
    "two-sided clip": ({"algorithm": "gtpo", "delta": 4.0}, "delta=4.0"),
    "objectives": ({"algorithm": "gtpo", "multi_objective_aggregation": "normalize_then_sum"}, "aggregation="),
    "dynamic sampling in TRL's own": ({"algorithm": "trl", "algorithm_kwargs": {"dynamic_sampling": True}}, "not part"),
    "a guide in TRL's own": ({"algorithm": "trl", "guide": "x.jsonl"}, "guide with algorithm='trl'"),
    "greedy sampling": ({"temperature": 0.0}, "temperature=0.0. Give a number > 0"),
    "no time for rewards": ({"reward_timeout": 0}, "reward_timeout=0. Give a number > 0"),
    "records": ({"records_groups": 0}, "records_groups=0"),
    "soft overlong without a buffer": ({"algorithm_kwargs": {"overlong": "soft"}}, "overlong_buffer"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(name, tmp_path):
    settings, advice = REJECTED[name]
    with pytest.raises(ConfigError, match=advice):
        tiny.config(tmp_path, **settings)


def test_every_problem_is_listed_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        tiny.config(tmp_path, algorithm="gtpo", num_generations=3, temperature=0, entropy_coef=0.1, delta=1.0)
    assert len(caught.value.problems) == 4
    assert all(problem.remedy for problem in caught.value.problems)


def test_the_nearest_settings_fit(tmp_path, monkeypatch):
    """6 per device x 2 processes x 3 micro-batches = 36 answers are no groups of 16; 8 or 18 would fit."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    sizes = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3, "num_generations": 16}
    factors = "6 per device x 2 processes x 3 micro-batches = 36 answers at once: not a whole number of groups of 16"
    with pytest.raises(ConfigError, match=factors) as error:
        tiny.config(tmp_path, **sizes)
    nearest = "per_device_train_batch_size=8; num_generations=18"
    assert error.value.problems[0].remedy == f"Nearest that fit: {nearest}."


def test_plain_grpo_config_is_rejected(tmp_path):
    args = GRPOConfig(str(tmp_path), per_device_train_batch_size=8, bf16=False, use_cpu=True)
    with pytest.raises(ConfigError, match="DewConfig"):
        DewTrainer(tiny.model(), tiny.has_a, args, tiny.prompts(), processing_class=tiny.tokenizer())


# ── data and rewards ──────────────────────────────────────────────────────────────────────────────────────
def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"needs the column 'solution', but .* has prompt, answer. Rename one to"):
        tiny.trainer(tmp_path, lambda completions, solution, **_: [1.0] * len(completions))
    with pytest.raises(ConfigError, match=r"the trainer needs the column 'prompt'.*Did you mean 'prompts'\?"):
        tiny.trainer(tmp_path, data=tiny.prompts().rename_column("prompt", "prompts"))
    with pytest.raises(ConfigError, match="rename the column"):
        tiny.trainer(tmp_path, data=tiny.prompts().rename_column("answer", "completions"))


def test_chat_messages_need_a_chat_template(tmp_path):
    data = tiny.prompts().map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    with pytest.raises(ConfigError, match="tokenizer has no chat template"):
        tiny.trainer(tmp_path, data=data)
    tiny.trainer(tmp_path, data=data, others={"rollout_func": tiny.scripted})


def test_a_rollout_function_may_bring_the_gold_answers(tmp_path):
    """Then the data set needs no column for them, and the trainer is built without looking at it."""

    def rollout(prompts, trainer):
        return {**tiny.scripted(prompts, trainer), "answer": ["1"] * len(prompts)}

    data = tiny.prompts().remove_columns("answer")
    tiny.trainer(tmp_path, verifier("math"), data, others={"rollout_func": rollout})


def test_several_rewards_need_an_outcome_reward(tmp_path):
    def length(completions, **_):
        return [0.0] * len(completions)

    with pytest.raises(ConfigError, match="outcome_reward='has_a'"):
        tiny.trainer(tmp_path, [tiny.has_a, length])
    with pytest.raises(ConfigError, match=r"Did you mean 'has_a'\?"):
        tiny.trainer(tmp_path, [tiny.has_a, length], outcome_reward="hasa")
    with pytest.raises(ConfigError, match=r"reward_weights=\[1.0, 0.5\]"):
        tiny.trainer(tmp_path, [tiny.has_a, length], outcome_reward="has_a", reward_weights=[2.0, 1.0])
    with pytest.raises(ConfigError, match="no reward function"):
        tiny.trainer(tmp_path, [])


async def raises_later(completions, **_):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("reward", "advice"),
    [(raises_later, "raises_later failed: ZeroDivisionError"), (lambda completions: [], r"failed: .* Add \*\*kwargs")],
)
def test_a_reward_that_fails_raises_one_clear_error(reward, advice, tmp_path):
    with pytest.raises(RewardError, match=advice):
        tiny.trainer(tmp_path, reward).train()
    assert RunFolder(tmp_path).run()["status"] == "failed"


def test_dynamic_sampling_rejects_a_streamed_data_set(tmp_path):
    with pytest.raises(ConfigError, match="streamed"):
        tiny.trainer(tmp_path, data=tiny.prompts().to_iterable_dataset(), algorithm="dapo")
