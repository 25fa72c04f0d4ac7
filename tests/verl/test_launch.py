"""`dew train --engine verl`: a recipe in verl's keys, the data that verl reads, the command, and a run's output."""

import json
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dew.cli import train
from dew.engines import compat
from dew.engines.verl import data, launch
from dew.engines.verl.launch import OWN_REWARD, PLAIN_TEMPLATE, hydra_text, hydra_words, prepare
from dew.errors import ConfigError, EngineError
from dew.preflight import preflight
from dew.preflight.verl import check_gpus
from dew.run.config import OWN_KEYS, flat, make_run, merged, read_run, to_yaml
from dew.run.folder import RunFolder
from dew.run.settings import ALGORITHM_NAMES, CHOOSE_ALGORITHM, SETTINGS, Batches, misspelled

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SMALL = {
    "engine": "verl", "model_name_or_path": "tiny", "task": "countdown", "problems": 64, "max_steps": 2,
    "num_generations": 4, "per_device_train_batch_size": 16, "max_completion_length": 32,
    "lr_scheduler_type": "constant",
}  # fmt: skip


def small(**changes):
    return make_run({**SMALL, **changes}, source="x.yaml")


# ---- golden ------------------------------------------------------------------------------------
def test_the_papers_setup():
    """Batch 128 prompts x 16 answers, one optimizer step each; 2,048 + 4,096 tokens; lr 1e-6; 210 steps."""
    found = prepare(read_run(ROOT / "recipes/paper/qwen2.5-7b.yaml"))
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "use_kl_loss": False, "calculate_entropy": False}
    expected = {
        "data": {"train_batch_size": 128, "max_prompt_length": 2048, "max_response_length": 4096, "seed": 0},
        ACTOR: {"ppo_mini_batch_size": 128, "optim.lr": 1e-6, "loss_agg_mode": "token-mean", **clips},
        ROLLOUT: {"n": 16, "temperature": 1.0, "top_p": 1.0},
        "algorithm": {"adv_estimator": "gtpo", "filter_groups.enable": False},
        "algorithm.rollout_correction": {"rollout_is_threshold": "1e-09_3.0"},  # TRL's default
        "trainer": {"total_training_steps": 210, "save_freq": 30, "n_gpus_per_node": 8, "nnodes": 1},
        "trainer.v1": {"trainer_mode": "dew_sync"},
    }
    expected = flat(expected)
    assert {key: found[key] for key in expected} == expected
    assert found.batches == Batches(sampled=2048, trained=2048, answers=16, processes=8)


def test_optimizer_steps_become_steps():
    """64 per device x 4 micro-batches = 256 completions = 16 prompts x 16; 4 optimizer steps of 4 prompts each.
    240 optimizer steps are 240/4 = 60 steps, a checkpoint every 80 is one every 20."""
    path = ROOT / "recipes/tiny/countdown.yaml"
    found = prepare(read_run(path))
    assert (found["data.train_batch_size"], found[f"{ACTOR}.ppo_mini_batch_size"]) == (16, 4)
    assert (found["trainer.total_training_steps"], found["trainer.save_freq"]) == (60, 20)
    twice = prepare(read_run(path, {"num_iterations": 2}))  # each answer trained on twice: half the steps
    assert twice["trainer.total_training_steps"] == 30 and twice[f"{ACTOR}.ppo_epochs"] == 2
    own = prepare(read_run(path, {"max_steps": None, "verl": {"trainer.total_training_steps": 500}}))
    assert own["trainer.total_epochs"] == 500, "verl would stop after TRL's three epochs"
    odd = prepare(read_run(path, {"max_steps": 241}))
    assert "the learning rate is constant" in prepare(small(lr_scheduler_type=None)).notes[-1]
    assert odd["trainer.total_training_steps"] == 61 and "241 optimizer steps become 61" in odd.notes[-1]


ALGORITHMS = {  # estimator, loss, aggregation, filter, clip
    "dew": ("dew", "dew", "token-mean", True, (0.2, 0.28)),
    "gtpo": ("gtpo", "dew", "token-mean", False, (0.2, 0.28)),
    "grpo_s": ("grpo_s", "dew", "seq-mean-token-mean", False, (0.2, 0.28)),
    "grpo": ("grpo", "vanilla", "seq-mean-token-mean", False, (0.2, 0.2)),
    "dapo": ("dapo", "dew", "token-mean", True, (0.2, 0.28)),
    "dr_grpo": ("dr_grpo", "dew", "seq-mean-token-sum-norm", False, (0.2, 0.2)),
    "gspo": ("gspo", "dew", "seq-mean-token-mean", False, (3e-4, 4e-4)),
    "entropy_advantage": ("entropy_advantage", "dew", "token-mean", True, (0.2, 0.28)),
    "cispo": ("cispo", "dew", "token-mean", True, (1.0, 4.0)),
    "dppo": ("dppo", "dew", "seq-mean-token-sum-norm", False, (0.15, 0.15)),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_its_estimator_loss_and_filter(name):
    found = prepare(small(algorithm=name))
    estimator, loss, aggregation, filtered, clip = ALGORITHMS[name]
    assert found["algorithm.adv_estimator"] == estimator
    assert found[f"{ACTOR}.policy_loss.loss_mode"] == loss
    assert found[f"{ACTOR}.loss_agg_mode"] == aggregation
    assert found["algorithm.filter_groups.enable"] is filtered and found["algorithm.filter_groups.metric"] == "acc"
    assert (found[f"{ACTOR}.clip_ratio_low"], found[f"{ACTOR}.clip_ratio_high"]) == clip
    assert (found[f"{ACTOR}.clip_ratio_c"] is not None) == (loss == "vanilla")  # no dual clip: dew's losses have none
    assert found[f"{ACTOR}.calculate_entropy"] is (name == "entropy_advantage")  # in the update


def test_settings_of_the_algorithm():
    found = prepare(small(algorithm="gtpo", algorithm_kwargs={"alpha2": 0.2, "clip_high": 0.3, "kl_coef": 0.01}))
    dew_settings = {k: v for k, v in found.overrides.items() if k.startswith("+algorithm.dew.")}
    assert dew_settings == {"+algorithm.dew.alpha2": 0.2}  # what verl has keys for goes there
    assert found[f"{ACTOR}.clip_ratio_high"] == 0.3
    assert found[f"{ACTOR}.use_kl_loss"] is True and found[f"{ACTOR}.kl_loss_coef"] == 0.01
    assert prepare(small(algorithm_kwargs='{"alpha2": 0.2}'))["algorithm.dew.alpha2"] == 0.2  # JSON, as TRL's flags
    trls = prepare(small(algorithm="gtpo", epsilon=0.1, epsilon_high=0.4, beta=0.05, loss_type="dapo"))
    keys = ("clip_ratio_low", "clip_ratio_high", "kl_loss_coef")
    assert [trls[f"{ACTOR}.{key}"] for key in keys] == [0.1, 0.4, 0.05]
    assert trls.notes == ["not used on verl: loss_type"]
    assert prepare(small(epsilon=0.1))[f"{ACTOR}.clip_ratio_high"] == 0.1  # as in TRL
    assert prepare(small(algorithm_kwargs={"overlong": "group"}))["algorithm.dew.overlong"] == "group"
    longer = prepare(small(algorithm="dr_grpo", verl={"data.max_response_length": 99}))
    assert longer[f"{ACTOR}.loss_scale_factor"] == 99


def test_scores_become_verls_validation():
    found = prepare(small(scores={"problems": 4, "k": 2}, save_total_limit=1))
    assert found["trainer.val_before_train"] is True and found["trainer.test_freq"] == 2
    assert found[f"{ROLLOUT}.val_kwargs.n"] == 2 and found["trainer.max_actor_ckpt_to_keep"] == 1
    assert prepare(small(scores={"k": 2}, eval_steps=1))["trainer.test_freq"] == 1


def test_lora_recipes_have_the_same_adapters_on_both_engines():
    lora = [read_run(path) for path in RECIPES if path.stem.endswith("-lora")]
    assert len(lora) == 4
    for run in lora:
        found, model = prepare(run), "actor_rollout_ref.model"
        assert found[f"{model}.lora_rank"] == run.settings["lora_r"] == 64
        assert found[f"{model}.lora_alpha"] == run.settings["lora_alpha"] == 128
        assert found[f"{model}.target_modules"] == run.settings["lora_target_modules"] == "all-linear"
        assert "lora" not in " ".join(found.notes)


def test_float32_recipes_are_float32_on_verl():
    in_float32 = [run for run in map(read_run, RECIPES) if run.settings.get("bf16") is False]
    assert len(in_float32) == 3
    for run in in_float32:
        assert prepare(run)[f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"] == "fp32"


# ---- settings ----------------------------------------------------------------------------------
def test_shared_settings_are_trls_and_no_other_setting_is_taken_for_a_typing_error():
    pytest.importorskip("trl")
    from dew.engines.trl.launch import setting_fields

    known = {field.name: field.default for field in setting_fields()}
    assert {*SETTINGS, *ALGORITHM_NAMES, *CHOOSE_ALGORITHM} <= set(known)
    assert misspelled({*known, *OWN_KEYS}) == []
    differ = {name for name, x in SETTINGS.items() if x.default is not None and x.default != known[name]}
    assert differ <= {"eval_steps", "num_generations", "warmup_steps", "output_dir"}  # None, or dew's own


def test_the_new_name_of_gradient_checkpointing():
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        found = prepare(small(**{name: False}))
        assert found["actor_rollout_ref.model.enable_gradient_checkpointing"] is False and not found.notes


def test_settings_that_verl_does_not_use_are_listed_once():
    own = {"algorithm": "dapo", "algorithm_kwargs": {"oversample": 3}}
    own |= {"use_vllm": True, "mask_truncated_completions": True}
    unused, masked = prepare(small(logging_steps=5, scores={"max_new_tokens": 9}, **own)).notes
    assert unused == "not used on verl: logging_steps, use_vllm, scores.max_new_tokens, algorithm_kwargs.oversample"
    assert "also trains on truncated answers" in masked


def test_the_learning_rate_is_constant_after_the_warmup():
    found = prepare(small(lr_scheduler_type="constant_with_warmup", warmup_steps=3))
    assert found[f"{ACTOR}.optim.lr_warmup_steps"] == 3  # and verl's own scheduler is constant
    share = prepare(small(warmup_steps=0.1))
    assert share[f"{ACTOR}.optim.lr_warmup_steps_ratio"] == 0.1 and not share[f"{ACTOR}.optim.lr_warmup_steps"]
    key = f"{ACTOR}.optim.lr_scheduler_type"
    assert prepare(small(lr_scheduler_type="cosine", verl={key: "cosine"}))[key] == "cosine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "kl_cov"}, "kl_cov works only on TRL. Choose another algorithm, or verl's own version"),
        ({"temperature": 0.0}, "Give a number > 0"),
        ({"trainer.nnodes": 2}, "trainer.nnodes is a key of verl, not a setting. Write trainer.nnodes=VALUE"),
        ({"algorithm": "dapo", "verl": {"algorithm.adv_estimator": "gtpo"}}, "Write `algorithm: gtpo` instead"),
        ({"algorithm": "dapo", "verl": {"algorithm.adv_estimator": "rloo"}}, "Write `algorithm: grpo` to use verl's"),
        ({"learning_rate": "fast", "verl": {"data.val_files": 0}}, "expected int or float.*\n.*val_files: dew"),
        ({"num_generations": 1}, "at least 2"),
        ({"num_generations": 5}, "not a whole number of groups of 5"),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, "steps_per_generation=2: on verl an optimizer"),
        ({"loss_type": "dr_grpo"}, "no algorithm is named. Name it"),
        ({"max_grad_norm": 0}, "max_grad_norm=0 is not translated"),  # no clipping
        ({"min_p": 0.1}, "min_p=0.1 is not translated to verl. Remove it, or train on TRL."),
        ({"warmup_ratio": 0.1}, "warmup_ratio is not a setting. Write warmup_steps"),
        ({"vllm_importance_sampling_correction": False}, "Write verl: {algorithm.rollout_correction.rollout_is: ...}"),
        ({"task": "missing.jsonl", "task_settings": {"prompt": "prompt"}}, "missing.jsonl"),
        ({"max_steps": None, "num_train_epochs": 1.5}, "num_train_epochs=1.5"),
        ({"reward_funcs": ["mine.py:f"]}, "reward_funcs"),
        ({"algorithm_kwargs": "x"}, "algorithm_kwargs"),
        ({"algorithm": "grpo", "algorithm_kwargs": {"overlong": "group"}}, "verl's own grpo has no such setting"),
        ({"task": None, "model_name_or_path": None}, "model_name_or_path is missing.*\n.*task is missing"),
        ({"verl": {"trainer": {"n_gpus_per_node": "all"}}}, "n_gpus_per_node='all'"),
        ({"alpha2": 0.2}, "alpha2 is a setting of the algorithm. Write algorithm_kwargs: {alpha2: ...}."),
        ({"verl": {f"{ACTOR}.ppo_max_token_len_per_gpu": 100}}, "must fit in one micro-batch"),
        ({"verl": {f"{ROLLOUT}.tensor_model_parallel_size": 2}}, "1 GPUs are not divisible by"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        prepare(small(**change))


# ---- batches -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prompts", "mini", "answers", "gpus", "verl", "message"),
    [
        (128, 128, 16, 64, {}, None),
        (128, 32, 16, 8, {}, None),
        (100, 32, 16, 1, {}, "data.train_batch_size=96 or 128"),
        (3, 3, 5, 2, {}, "data.train_batch_size=4"),  # 15 rows to 2 GPUs
        (6, 3, 5, 2, {}, "ppo_mini_batch_size=4"),
        (3, 3, 5, 2, {launch.SEQUENCE_GPUS: 2}, None),  # 2 GPUs share each row
        (8, 8, 2, 4, {launch.SAMPLER_GPUS: 3}, "tensor_model_parallel_size=3"),
    ],
)
def test_uneven_batches_are_refused_with_the_nearest_even_ones(prompts, mini, answers, gpus, verl, message):
    keys = {launch.PROMPTS: prompts, launch.MINI_BATCH: mini, f"{ROLLOUT}.n": answers, launch.GPUS_PER_NODE: gpus}
    run = small(verl={**keys, **verl})
    if message is None:
        assert prepare(run).batches == Batches(prompts * answers, mini * answers, answers, processes=gpus)
    else:
        with pytest.raises(ConfigError, match=message):
            prepare(run)


# ---- hydra -------------------------------------------------------------------------------------
def test_verls_own_keys_win():
    assert flat({"a": {"b": 1, "c.d": 2}, "e": {}}) == {"a.b": 1, "a.c.d": 2, "e": {}}
    assert merged({"a.b": 1, "+c": 2}, {"+a.b": 3, "c": 4}) == {"+a.b": 3, "c": 4}
    found = prepare(small(verl={"data": {"max_prompt_length": 99}, f"+{ROLLOUT}.engine_kwargs.vllm.x": 1}))
    assert found["data.max_prompt_length"] == 99
    assert f"+{ROLLOUT}.engine_kwargs.vllm.x=1" in hydra_words(found)
    for key in ("trainer.nnodes", "+trainer.nnodes", "++trainer.nnodes"):
        found = prepare(small(verl={key: 2}))
        assert found.batches.processes == found["trainer.nnodes"] == 2 and f"{key}=2" in hydra_words(found)


def test_values_in_hydras_grammar():
    for value, text in (
        (None, "null"),
        (True, "true"),
        (1e-6, "1e-06"),
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("true", '"true"'),
        ("run²", '"run²"'),  # hydra's bare words are ASCII
        ("1e-09_3.0", '"1e-09_3.0"'),
        ('say "x"', r'"say \"x\""'),
        (["a", 1], "[a,1]"),
        ({"eps": 0.1}, "{eps:0.1}"),
    ):
        assert hydra_text(value) == text


@pytest.mark.skipif(find_spec("hydra") is None, reason="hydra comes with verl: make test-verl")
@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=20), lambda x: st.lists(x, max_size=3))
)
def test_what_is_written_is_what_hydra_reads(value):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if "$" in str(value) or any(ord(c) < 32 for c in str(value)):  # hydra's own syntax; no setting has it
        return
    assert OverridesParser.create().parse_override(f"key={hydra_text(value)}").value() == value


# ---- recipes -----------------------------------------------------------------------------------
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_recipe_works_with_every_algorithm(path):
    algorithms = ["gtpo", "grpo_s", "dapo", "grpo"]
    runs = [prepare(read_run(path, {"algorithm": algorithm})) for algorithm in algorithms]
    assert [run.algorithm.name for run in runs] == algorithms
    launch.check_with_verl(runs[RECIPES.index(path) % 4])  # where verl is installed, it knows every key


def test_arguments_of_the_chat_template_are_a_key_that_verl_knows():
    found = prepare(small(chat_template_kwargs={"enable_thinking": False}, max_grad_norm=1.0))
    assert found["data.apply_chat_template_kwargs"] == {"enable_thinking": False}
    launch.check_with_verl(found)


def test_a_dry_run_prints_the_command_and_writes_nothing(dew, tmp_path):
    dry_run = ["train", "paper/qwen2.5-7b", "--engine", "verl", "--dry-run"]
    code, shown, errors = dew(*dry_run, "--output_dir", tmp_path / "run")
    assert code == 0, errors
    lines = [line for line in shown.splitlines() if not line.startswith("#")]
    words = shlex.split("\n".join(lines))
    assert words[:3] == ["python", "-m", "dew.engines.verl.main"] and "data.train_batch_size=128" in words
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed: make test-verl")
def test_verl_names_an_unknown_key():
    with pytest.raises(ConfigError, match=r"Could not override 'trainer\.nnode'.*needs a leading \+"):
        launch.check_with_verl(prepare(small(verl={"trainer.nnode": 2})))
    assert launch.check_with_verl(prepare(small(verl={"+algorithm.dew.alpha2": 0.3}))).alpha2 == 0.3  # as trained


@pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed: make test-verl")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verl": {"trainer.v1.trainer_mode": "sync"}}, "trainer_mode=sync drops"),
        ({"verl": {"+algorithm.dew.alpha3": 1}}, "no setting 'alpha3'"),
        ({"algorithm": "grpo", "verl": {"algorithm.adv_estimator": "rlooo"}}, "adv_estimator=rlooo is not known"),
    ],
)
def test_what_a_run_refuses_is_found_before_it_starts(change, message, dew, tmp_path):
    run = small(**change)
    with pytest.raises(EngineError, match=message):
        launch.check_with_verl(prepare(run))
    (tmp_path / "run.yaml").write_text(to_yaml(run))
    code, _, errors = dew("train", tmp_path / "run.yaml", "--output_dir", tmp_path / "run")
    assert code == 1 and message in errors and not (tmp_path / "run").exists()


# ---- preflight ---------------------------------------------------------------------------------
def checks(**changes):
    return {check.name: check for check in preflight(small(**changes))}


def test_preflight_checks_what_it_can_and_skips_the_rest(tmp_path):
    pytest.importorskip("transformers")
    found = checks(output_dir=str(tmp_path / "run"))
    assert {name for name, check in found.items() if check.status == "failed"} == set()
    assert "64 training problems" in found["data"].says and "accepts 0 of 64 empty" in found["verifier"].says
    assert found["answers"].status == "skipped" and not (tmp_path / "run").exists()


def test_data_that_verl_cannot_read_fail(tmp_path):
    pytest.importorskip("transformers")
    rows = [{"prompt": f"{i}+1=", "answer": "one" if i == 5 else i} for i in range(64)]
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = checks(task=str(tmp_path / "mixed.jsonl"), verifier="math", output_dir=str(tmp_path / "run"))["data"]
    assert found.status == "failed" and "Parquet" in found.says and "one type" in found.remedy


def test_preflight_lists_every_invalid_setting():
    wrong = small(lr_scheduler_type="linear", learning_rate="fast", num_generations=5)
    with pytest.raises(ConfigError, match=r"x\.yaml on verl:"):
        prepare(wrong)
    found = preflight(wrong)
    failed = [check for check in found if check.name == "settings" and check.status == "failed"]
    assert len(failed) == 3 and all(check.remedy for check in failed) and found[-1].status == "skipped"


def test_preflight_counts_gpus():
    wanted = prepare(small(verl={"trainer.n_gpus_per_node": 8}))
    assert check_gpus(wanted, [{}] * 8).status == "ok"
    few, many = (check_gpus(wanted, [{}] * n) for n in (4, 16))  # many: the others would be idle
    assert (
        few.status == many.status == "warning"
        and "this machine has 4" in few.says
        and "n_gpus_per_node=4" in few.remedy
    )


# ---- data --------------------------------------------------------------------------------------
class Tokenizer:
    """A token per character, <s> in front; chat messages in angle brackets."""

    chat_template = "yes"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [0] * add_special_tokens + [1 + ord(c) for c in text]}

    def decode(self, ids):
        return "".join("<s>" if i == 0 else chr(i - 1) for i in ids)

    def apply_chat_template(self, messages, **_):
        return "".join(f"<{m['content']}>" for m in messages)


def test_rows_as_verl_reads_them():
    run = small()
    found = data.prepare_data(prepare(run), Tokenizer())
    row = found.train[0]
    assert len(found.train) == 64 and len(found.validation) == data.UNUSED_VALIDATION
    assert row["prompt"][0]["content"].startswith("<s>") and row["data_source"] == "countdown"
    assert row["reward_model"]["ground_truth"] == row["extra_info"]["answer"]
    assert row["extra_info"]["numbers"] and row["extra_info"]["index"] == 0


def test_prompts_are_messages_and_templates_are_not_added_twice(tmp_path):
    rows = [{"problem": f"What is {i}+1?", "answer": str(i + 1)} for i in range(24)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {"task": str(tmp_path / "p.jsonl"), "verifier": "math", "problems": 8, "num_generations": 16}
    chat = small(**task, task_settings={"problem": "problem", "template": "chat"})
    assert prepare(chat)["actor_rollout_ref.model.custom_chat_template"] is None
    plain = small(**task, task_settings={"problem": "problem", "template": "qwen-boxed"})
    assert prepare(plain)["actor_rollout_ref.model.custom_chat_template"] is not None
    for prompt, own in (([{"role": "user", "content": "1+1?"}], None), ("1+1?", PLAIN_TEMPLATE)):
        (tmp_path / "q.jsonl").write_text(json.dumps({"question": prompt, "answer": "2"}))
        ready = small(**{**task, "task": str(tmp_path / "q.jsonl")}, task_settings={"prompt": "question"})
        assert prepare(ready)["actor_rollout_ref.model.custom_chat_template"] == own
    bare = {name: value for name, value in task.items() if name != "verifier"}
    with pytest.raises(ConfigError, match="p has no verifier"):
        data.prepare_data(prepare(small(**bare)), Tokenizer())
    own = small(**bare, verl={OWN_REWARD: "rewards.py"})
    assert data.prepare_data(prepare(own), Tokenizer()).train[0]["data_source"] == "p"
    pytest.importorskip("math_verify")
    message = data.prepare_data(prepare(chat), Tokenizer()).train[0]["prompt"][0]
    assert message["role"] == "user" and not message["content"].startswith("<s>")  # the model's own template adds it


def test_messages_in_parts_are_refused_not_written_as_python_text():
    row = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}], "answer": "2"}
    with pytest.raises(ConfigError, match="not text"):
        data.verl_row(row, 0, "train", "math", [])


def test_long_prompts_are_left_out_and_too_few_rows_are_refused(caplog):
    run = small(verl={"data.max_prompt_length": 13})
    found = data.prepare_data(prepare(run), Tokenizer())
    assert 0 < found.too_long == 64 - len(found.train) and "Left out" in caplog.text
    with pytest.raises(ConfigError, match="fewer than the 4 prompts of a generation"):
        data.prepare_data(prepare(small(problems=2)), Tokenizer())


def test_validation_problems_are_held_out():
    run = small(scores={"problems": 5, "k": 2})
    found = data.prepare_data(prepare(run), Tokenizer())
    train = {row["prompt"][0]["content"] for row in found.train}
    assert len(found.validation) == 5 and not train & {row["prompt"][0]["content"] for row in found.validation}


# ---- a run -------------------------------------------------------------------------------------
FAKE_DRIVER = """
import json, os, sys
words = dict(word.split("=", 1) for word in sys.argv[1:])
folder = words["+algorithm.dew_run.folder"]
assert os.path.isfile(words["data.train_files"])
if os.path.exists("fail"):
    print("\\x1b[36m(Runner pid=1)\\x1b[0m CUDA out of memory"); sys.exit(1)
run = json.load(open(f"{folder}/run.json"))
json.dump({**run, "steps": int(words["trainer.total_training_steps"])}, open(f"{folder}/run.json", "w"))
with open(f"{folder}/metrics.jsonl", "a") as file:
    file.write(json.dumps({"step": 1, "accuracy": 0.5, "resume": words["trainer.resume_mode"]}) + "\\n")
os.makedirs(f"{folder}/checkpoints", exist_ok=True)
open(f"{folder}/checkpoints/latest_checkpointed_iteration.txt", "w").write("1")
"""


@pytest.fixture
def fake_run(tmp_path, monkeypatch, capsys):
    """Everything except verl: a driver that writes the files of a run."""
    from dew.cli.console import out

    (tmp_path / "driver.py").write_text(FAKE_DRIVER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "MAIN", ("driver.py",))
    monkeypatch.setattr(compat, "require", lambda package: None)
    monkeypatch.setattr(launch, "check_with_verl", lambda _: True)
    monkeypatch.setattr(data, "load_tokenizer", lambda _: Tokenizer())
    monkeypatch.setattr(out, "_file", None)

    def run(**changes):
        keys = {**SMALL, "output_dir": str(tmp_path / "run"), **changes}
        train.train_on_verl(make_run(keys), {}, dry=False, overwrite=False, untrusted=False)
        return RunFolder(tmp_path / "run")

    return run


def test_a_run_leaves_its_data_command_and_configuration(fake_run, capsys):
    folder = fake_run()
    assert folder.run()["status"] == "done" and folder.metrics()[0]["resume"] == "disable"
    output = capsys.readouterr().out
    assert "64" in output and "accuracy 0.500" in output
    assert "verl.model_merger" in output and "global_step_1/actor" in output
    again = read_run(folder.path / "verl.yaml")
    assert again.engine == "verl"
    assert prepare(again).overrides == prepare(make_run({**SMALL, **again.settings})).overrides
    assert "driver.py" in (folder.path / "train.sh").read_text()
    with pytest.raises(ConfigError, match="already holds a run"):
        fake_run()


def test_trl_beside_verl_is_one_clear_error_before_anything_starts(fake_run, tmp_path, monkeypatch):
    """verl 0.9.1 imports a class that TRL removed before 1.15, in its workers, minutes after the start."""
    there = {"verl": "0.9.1", "trl": "1.16.0"}
    monkeypatch.setattr(compat, "version", lambda name: there[name])
    with pytest.raises(EngineError, match="environment without TRL"):
        fake_run()
    assert not (tmp_path / "run").exists()
    first, *_ = preflight(small())
    assert (first.name, first.status) == ("versions", "failed") and "TRL 1.16.0" in first.says
    there["trl"] = "1.14.0"
    assert fake_run().run()["status"] == "done"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_failed_run_shows_the_end_of_its_log_and_resumes_from_a_checkpoint(fake_run, tmp_path, capsys, elsewhere):
    (tmp_path / "fail").touch()
    checkpoints = tmp_path / ("elsewhere" if elsewhere else "run/checkpoints")
    changes = {"verl": {"trainer.default_local_dir": str(checkpoints)}} if elsewhere else {}
    with pytest.raises(EngineError, match=r"exit code 1[\s\S]*\n\(Runner pid=1\) CUDA out of memory"):
        fake_run(**changes)
    folder = RunFolder(tmp_path / "run")
    assert folder.run()["status"] == "failed"
    with pytest.raises(EngineError, match="no checkpoint yet"):
        train.resume(folder.path)
    (tmp_path / "fail").unlink()
    checkpoints.mkdir()
    (checkpoints / train.VERLS_LATEST).write_text("1")
    train.resume(folder.path)
    assert folder.run()["status"] == "done" and folder.metrics()[0]["resume"] == "auto"
    assert "CUDA out of memory" in (tmp_path / "run.log").read_text()
    train.resume(folder.path)
    assert "is finished" in capsys.readouterr().out


def test_a_finished_run_is_extended_by_a_larger_max_steps(fake_run, capsys):
    folder = fake_run()
    config = folder.path / train.VERL_CONFIG
    config.write_text(config.read_text().replace("max_steps: 2", "max_steps: 3"))
    train.resume(folder.path)
    assert folder.metrics()[-1]["resume"] == "auto"
    train.resume(folder.path)
    assert "is finished" in capsys.readouterr().out


def test_without_a_merged_model_the_command_that_merges_it_is_shown(fake_run, dew):
    folder = fake_run()
    for words in (["export", folder.path, folder.path.parent / "to"], ["eval", folder.path, "--task", "countdown"]):
        code, _, errors = dew(*words)
        assert code == 1 and "verl.model_merger" in errors and "global_step_1/actor" in errors
        if (saved := folder.path / "checkpoints").is_dir():  # for `dew eval`: outside the run folder, as verl's default
            elsewhere = saved.rename(folder.path.parent / "elsewhere")
            (folder.path / "config.yaml").write_text(f"trainer: {{default_local_dir: {elsewhere}}}")


def test_a_run_started_with_verl_itself_says_how_to_resume(dew, tmp_path):
    (tmp_path / "config.yaml").write_text("actor_rollout_ref: {model: {path: tiny}}\ntrainer: {nnodes: 1}\n")
    code, _, errors = dew("resume", tmp_path)
    assert code == 1 and "trainer.resume_mode=auto" in errors


def test_without_verl_the_error_says_what_to_install(dew, tmp_path):
    if find_spec("verl"):
        pytest.skip("verl is installed")
    (tmp_path / "x.yaml").write_text(to_yaml(small(output_dir=str(tmp_path / "run"))))
    code, _, errors = dew("train", tmp_path / "x.yaml")
    assert code == 1 and "dew-rl[verl]" in errors and not (tmp_path / "run").exists()


def test_another_release_of_verl_is_one_error(tmp_path):
    (tmp_path / "verl-0.8.5.dist-info").mkdir()
    (tmp_path / "verl-0.8.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.8.5\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    line = [sys.executable, "-m", "dew.engines.verl.main"]
    ended = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 1 and ended.stderr.startswith("dew: verl 0.8.5 is installed")
    assert "verl==0.9.1" in ended.stderr and "Traceback" not in ended.stderr
