"""Settings that cannot work are rejected at the start, all at once, with what to write instead."""

import dataclasses
from contextlib import nullcontext

import pytest
from datasets import Dataset
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
    assert {name: value for name, value in theirs.to_dict().items() if ours.to_dict()[name] != value}.keys() <= own


def test_bf16_is_off_where_no_gpu_has_it_unless_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("dew.engines.trl.config.is_torch_bf16_gpu_available", lambda: False)
    assert DewConfig(str(tmp_path)).bf16 is False
    assert DewConfig(str(tmp_path), bf16=True, use_cpu=True).bf16 is True
    monkeypatch.setattr("dew.engines.trl.config.is_torch_bf16_gpu_available", lambda: True)
    assert DewConfig(str(tmp_path), use_cpu=True).bf16 is True


def test_an_object_and_a_json_string_are_equivalent(tmp_path):
    by_object = tiny.config(tmp_path, algorithm=GTPO(alpha2=0.2))
    by_string = tiny.config(tmp_path, algorithm="gtpo", algorithm_kwargs='{"alpha2": 0.2}')
    assert (by_object.build_algorithm(), by_object.algorithm) == (by_string.build_algorithm(), "gtpo")
    both = tiny.config(tmp_path, algorithm=GTPO(alpha1=2.0), algorithm_kwargs={"alpha2": 0.2}).build_algorithm()
    assert (both.alpha1, both.alpha2) == (2.0, 0.2)


def test_command_line_and_yaml(tmp_path):
    words = ["--output_dir", str(tmp_path), "--algorithm", "gtpo", "--algorithm_kwargs", '{"alpha2": 0.2}', "--bf16=no"]
    (tmp_path / "c").write_text(f"output_dir: {tmp_path}\nalgorithm: gtpo\nalgorithm_kwargs: {{alpha2: 0.2}}\nbf16: no")
    for given in (words, ["--config", str(tmp_path / "c")]):
        (config,) = TrlParser([DewConfig]).parse_args_and_config(given)
        assert config.build_algorithm().alpha2 == 0.2


CHOSEN = {
    "nothing": ({}, "dew"),
    "TRL's defaults": ({"loss_type": "dapo", "scale_rewards": True, "use_bias_correction_kl": True}, "dew"),
    "another loss": ({"loss_type": "grpo", "beta": 0.04}, "trl"),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_trls_settings_choose_the_algorithm_where_none_is_named(name, tmp_path, caplog):
    settings, expected = CHOSEN[name]
    assert tiny.config(tmp_path, algorithm=None, **settings).algorithm == expected
    assert ("Training with the algorithm trl" in caplog.text) == (expected != "dew")


def test_trls_clipping_and_kl_mean_what_they_mean_in_trl(tmp_path, caplog, monkeypatch):
    for rank in "10":  # of two processes, one logs
        monkeypatch.setenv("RANK", rank)
        algorithm = tiny.config(tmp_path, epsilon=0.1, beta=0.04).build_algorithm()
    assert caplog.text.count("unless use_bias_correction_kl=False") == 1
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef) == (0.1, 0.1, 0.04)
    config = tiny.config(tmp_path, epsilon_high=0.4)
    assert (config.epsilon, config.epsilon_high) == (0.2, 0.4)
    assert dataclasses.replace(config, generation_batch_size=None).build_algorithm() == config.build_algorithm()
    own = tiny.config(tmp_path, algorithm="trl(kl_coef=0.3)", delta=4.0, epsilon=0.1)
    assert (own.epsilon, own.epsilon_high, own.beta, own.use_bias_correction_kl) == (0.1, 0.1, 0.3, True)
    assert (own.loss_type, own.build_algorithm().clip_high) == ("dapo", 0.1)
    gate = tiny.config(tmp_path, algorithm="trl", loss_type="sapo", sapo_temperature_neg=2.0)
    assert (gate.sapo_temperature_pos, gate.sapo_temperature_neg) == (1.0, 2.0)


def test_trls_settings_of_other_losses_mean_what_they_mean_in_trl(tmp_path):
    """CISPO: TRL's epsilon_high bounds the ratio itself, dew's clip_high the distance from 1; TRL reads no epsilon."""
    config = tiny.config(tmp_path, algorithm="cispo", loss_type="cispo", epsilon=0.2, epsilon_high=3.0)
    assert (config.build_algorithm().clip_low, config.build_algorithm().clip_high) == (1.0, 2.0)
    assert tiny.config(tmp_path, algorithm="trl(clip_high=4.0)", loss_type="cispo").epsilon_high == 5.0
    assert dataclasses.replace(config, generation_batch_size=None).build_algorithm() == config.build_algorithm()
    gate = tiny.config(tmp_path, algorithm="sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=3.0)
    assert (gate.build_algorithm().tau_pos, gate.build_algorithm().tau_neg) == (2.0, 3.0)


def test_a_length_penalty_that_masked_answers_escape_is_warned_about(tmp_path):
    soft = {"algorithm_kwargs": {"overlong": "soft", "overlong_buffer": 2}}
    assert not tiny.config(tmp_path, **soft).warnings()
    found = tiny.config(tmp_path, **soft, mask_truncated_completions=True).warnings()
    assert [problem.remedy for problem in found] == ["Use one of the two."]


# ── what is rejected ──────────────────────────────────────────────────────────────────────────────────────
REJECTED = {
    "unknown algorithm": ({"algorithm": "gtop"}, r"Did you mean 'gtpo'\?"),
    "bad setting": ({"algorithm_kwargs": {"alpha2": -0.1}}, "rewarded for being sure"),
    "broken JSON": ({"algorithm_kwargs": "{alpha2"}, "not a mapping in YAML or JSON"),
    "generation": ({"generation_batch_size": 20}, "20 is not a multiple of 8, .* Nearest that fit: 16 or 24"),
    "group of one": ({"num_generations": 1}, "at least 2"),
    "nothing": ({"per_device_train_batch_size": 0, "generation_batch_size": 8}, "size=0. Give a number >= 1"),
    "two clippings": ({"epsilon": 0.1, "algorithm_kwargs": {"clip_low": 0.3}}, "epsilon=0.1, but algorithm_kwargs has"),
    "other loss": ({"algorithm": "gtpo", "loss_type": "bnpo"}, "gtpo trains with 'dapo'.*algorithm='trl'"),
    "TRL's KL": ({"algorithm": "grpo", "beta": 0.1, "use_bias_correction_kl": True}, "grpo trains with False"),
    "dew's KL": ({"algorithm": "grpo(kl_coef=0.1)", "use_bias_correction_kl": True}, "grpo trains with False"),
    "scaling": ({"algorithm": "gtpo", "scale_rewards": False}, "gtpo trains with 'group'"),
    "dynamic sampling in TRL's own": ({"algorithm": "trl", "algorithm_kwargs": {"dynamic_sampling": True}}, "not part"),
    "a guide in TRL's own": ({"algorithm": "trl", "guide": "x.jsonl"}, "guide with algorithm='trl'"),
    "greedy sampling": ({"temperature": 0.0}, "temperature=0.0. Give a number > 0"),
    "text": ({"learning_rate": "1e-5"}, "learning_rate='1e-5'. Give a number >= 0"),
    "several answers at once": ({"generation_kwargs": {"n": 2}}, "n': 2}: each prompt already has num_generations"),
    "another temperature": ({"generation_kwargs": {"temperature": 0.7}}, "computed at the setting `temperature`"),
    "a stop string without vLLM": ({"generation_kwargs": '{"stop_strings": ["a"]}'}, "only with use_vllm=True"),
    "soft overlong without a buffer": ({"algorithm_kwargs": {"overlong": "soft"}}, "overlong_buffer"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(name, tmp_path):
    settings, advice = REJECTED[name]
    with pytest.raises(ConfigError, match=advice):
        tiny.config(tmp_path, **settings)


def test_every_problem_is_listed_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        tiny.config(tmp_path, algorithm="gtpo", num_generations=3, temperature=0, num_iterations=0, delta=1.0)
    assert [bool(problem.remedy) for problem in caught.value.problems] == [True] * 4


def test_the_nearest_settings_fit(tmp_path, monkeypatch):
    """6 per device x 2 processes x 3 micro-batches = 36 answers are no groups of 16; 8 or 18 would fit."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    sizes = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3, "num_generations": 16}
    factors = "6 per device x 2 processes x 3 micro-batches = 36 answers at once: not a whole number of groups of 16"
    with pytest.raises(ConfigError, match=factors) as error:
        tiny.config(tmp_path, **sizes)
    assert error.value.problems[0].remedy == "Nearest that fit: per_device_train_batch_size=8; num_generations=18."
    sizes |= {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 20, "eval_strategy": "steps"}
    with pytest.raises(ConfigError, match=r"eval_batch_size=20 x 2 processes: .* groups of 16.*that fit: 16 or 24. Or"):
        tiny.config(tmp_path, **sizes, eval_steps=1)


# ── data, rewards and models ──────────────────────────────────────────────────────────────────────────────
def rows(prompt="1+1=", *others):
    return Dataset.from_list([{"prompt": text, "answer": "1"} for text in (prompt, *others) * 16])


MESSAGES = rows([{"role": "user", "content": "1+1="}])
TWO = [tiny.has_a, tiny.outcome]
WRONG = {  # what the error says -> reward, data, settings
    r"needs the column 'solution', but .* has prompt, answer. Rename": (lambda completions, solution: [], rows()),
    r"'prompt'.*Did you mean 'prompts'\?": (tiny.has_a, rows().rename_column("prompt", "prompts")),
    "rename the column": (tiny.has_a, rows().rename_column("answer", "completions")),
    "tokenizer has no chat template. Write prompts as text, or set tok": (tiny.has_a, MESSAGES),
    "A prompt is 3, neither text nor": (tiny.has_a, rows(3)),
    "A prompt is None, neither text nor": (tiny.has_a, rows("1+1=", None)),
    "A prompt is 4, neither": (tiny.has_a, rows(), {"others": {"eval_dataset": {"a": rows(), "b": rows(4)}}}),
    "is None, neither text nor": (tiny.has_a, rows("1+1=", None).to_iterable_dataset()),
    "streamed": (tiny.has_a, rows().to_iterable_dataset(), {"algorithm": "dapo"}),
    "reward_funcs: 'no/such-model' cannot": ("no/such-model", rows()),
    "model: 'no/such-model' cannot": (tiny.has_a, rows(), {"policy": "no/such-model"}),
    "outcome_reward='has_a'": (TWO, rows()),
    r"Did you mean 'has_a'\?": (TWO, rows(), {"outcome_reward": "hasa"}),
    r"reward_weights=\[1.0, 0.5\]": (TWO, rows(), {"outcome_reward": "has_a", "reward_weights": [2.0, 1.0]}),
    "has_a': 2 reward functions have this name": ([tiny.has_a, *TWO], rows(), {"outcome_reward": "has_a"}),
    "no reward function": ([], rows()),
}


@pytest.mark.parametrize("says", WRONG)
def test_what_cannot_work_is_explained(says, tmp_path):
    reward, data, settings = (*WRONG[says], {})[:3]
    with pytest.raises(ConfigError, match=says):
        trainer = tiny.trainer(tmp_path, reward, data, **settings)
        if not hasattr(data, "__len__"):
            trainer.train()


def test_settings_of_loss_and_batches_are_not_lost_if_they_are_set_on_the_finished_config(tmp_path):
    loss = ("grpo", {"epsilon": 0.1, "beta": 0.1}), ("dew", {"algorithm": "trl"}), ("trl", {"beta": 0.1})
    changes = *loss, ("dew", {"per_device_train_batch_size": 4}), ("dew", {"num_generations": 2})
    for algorithm, late in changes:
        config = tiny.config(tmp_path, algorithm=algorithm)
        config.learning_rate = 1e-4
        assert not config.late_problems()
        vars(config).update(late)
        with pytest.raises(ConfigError) as error:
            DewTrainer(tiny.model(), tiny.has_a, config, rows(), processing_class=tiny.tokenizer())
        assert [problem.what for problem in error.value.problems] == [f"args.{x} was set to {late[x]!r}." for x in late]


def test_plain_grpo_config_and_a_tokenizer_without_an_end_are_rejected(tmp_path):
    args = GRPOConfig(str(tmp_path), per_device_train_batch_size=8, bf16=False, use_cpu=True)
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = None
    for config, says in ((args, "DewConfig"), (tiny.config(tmp_path), "neither an end-of-sequence token nor")):
        with pytest.raises(ConfigError, match=says):
            DewTrainer(tiny.model(), tiny.has_a, config, rows(), processing_class=tokenizer)


ROLLOUTS = {  # what the error says -> what is returned in addition to eight answers of two tokens
    "returned tool_mask, .* Return it as env_mask": {"tool_mask": [[1, 0]] * 8},
    "env_mask does not have one number per token": {"env_mask": [[1, 0]] * 7 + [[1]]},
    "7 non-empty answers for 8 prompts": {"completion_ids": [[3, 1]] * 7 + [[]]},
    None: {"answer": ["1"] * 8, "masked": ["a"] * 8, "mask_rate": 0.5, "prompt_mask": [[1] * 4] * 8},
}


@pytest.mark.parametrize("says", ROLLOUTS)
def test_a_rollout_function_may_take_messages_and_bring_gold_answers_but_no_mask_of_another_name(says, tmp_path):
    def rollout(*_):
        return {"prompt_ids": [[3, 4]] * 8, "completion_ids": [[3, 1]] * 8, "logprobs": None} | ROLLOUTS[says]

    data, others = MESSAGES.remove_columns("answer"), {"rollout_func": rollout}
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        tiny.generation(tiny.trainer(tmp_path, verifier("math"), data, others=others))


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
