"""dew preflight: valid runs, invalid runs and the checks that must fail. One module, so that TRL is imported once."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

import dew.cli.preflight  # noqa: F401 adds the command
import trl_tiny
from dew.algorithms import GTPO, get_algorithm
from dew.cli.app import app
from dew.cli.flags import recipe_file
from dew.engines.trl.launch import parse
from dew.engines.trl.trainer import DewTrainer
from dew.errors import ConfigError, Problem
from dew.preflight import attempt, failed, guarded, machine, ok, passed, preflight, skipped, trl, warning
from dew.preflight.machine import Model
from dew.preflight.trl import Data, check_golds, correct_answers
from dew.rewards import verifier
from dew.run.config import make_run, read_run
from dew.tasks import TINY

REWARDS = '''
def never(completions, **_):
    """A format that no prompt asks for."""
    return [1.0 if "<<json>>" in text else 0.0 for text in completions]

def always(completions, **_):
    return [1.0 for _ in completions]

def thinks(completions, **_):
    return [float(text.startswith("<think>")) for text in completions]

def shaped(completions, **_):
    """Longer is a little better: no two answers earn the same."""
    return [0.45 + len(text) / 200 + sum(map(ord, text)) % 97 / 1e4 for text in completions]
'''


@pytest.fixture
def settings(tmp_path, monkeypatch):
    (tmp_path / "preflight_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    own = {"algorithm": None, "problems": 32, "output_dir": str(tmp_path / "run"), "max_completion_length": 40}
    return {**trl_tiny.COUNTDOWN, **own}


def look(settings, answers=0, flags=()):
    checks = preflight(make_run(settings), flags, answers=answers, say=lambda _: None)
    found = {check.name: check for check in checks}
    assert len(found) == len(checks), "every check has a name of its own"
    for check in checks:
        assert check.remedy or check.status in ("ok", "skipped"), f"{check.name} leaves the user without a remedy"
    return found


# ---- a valid run, and the same run with one thing wrong --------------------------
def test_a_good_run_passes_and_reports_what_the_first_step_will_see(settings, tmp_path, monkeypatch):
    sampled, inner = [], DewTrainer.sample
    monkeypatch.setattr(DewTrainer, "sample", lambda self, rows: sampled.append(len(rows)) or inner(self, rows))
    found = look(settings, answers=32)
    assert sampled == [16, 16], "no more at once than in training"
    assert "of 32 answers" in found["truncated"].says
    assert passed(list(found.values())), found
    assert "accepts all 32 gold answers" in found["gold"].says and "of 8 groups" in found["groups"].says
    mean, low, high = (float(x) for x in re.findall(r"0\.\d+", found["mean reward"].says))
    assert low < mean < high
    assert 0 < float(found["entropy"].says.split()[1]) < 3
    assert found["reward countdown"].says.startswith("On gold answers 1.00, on empty ones 0.00")
    assert found["filter"].status == "ok"
    assert not (tmp_path / "run").exists(), "preflight leaves nothing in the run's folder"


def test_truncated_answers_fail(settings):
    found = look({**settings, "max_completion_length": 4}, answers=16)["truncated"]
    assert found.status == "failed" and "(100%)" in found.says
    assert "max_completion_length=4" in found.says and "to 8" in found.remedy


@pytest.mark.parametrize(
    ("bad", "grade", "status"), [([7], 0, "warning"), ([7, 8, 9], 0, "failed"), ([7, 8, 9], 0.001, "warning")]
)
def test_exactly_the_bad_golds_are_found(bad, grade, status):
    """One in 200 is only worth a warning; so are more if the reward is graded."""

    def digits(completions, answer, **_):
        return [float(x == y and x.isdecimal()) or grade * len(x) for x, y in zip(completions, answer, strict=True)]

    rows = [{"prompt": f"{i}+1=", "answer": "eight" if i in bad else str(i + 1)} for i in range(200)]
    said = check_golds(Data(rows, [digits]), 0, 0.5)
    assert said.status == status
    assert f"{len(bad)} of 200 gold answers, e.g. row 7: 'eight'" in said.says


def test_a_gold_that_makes_the_verifier_raise_fails():
    rows = [{"prompt": "2,3>5:", "answer": "5", "numbers": [2, 3], "solution": "2+3=5"} for _ in range(9)]
    rows[4] = {**rows[4], "answer": "five"}
    [said] = guarded("gold", check_golds, Data(rows, [verifier("countdown")]), 0, 0.5)
    assert said.status == "failed" and "'five'" in said.says


def test_format_rewards_that_never_change_or_that_the_model_never_earns(settings):
    names = [f"preflight_rewards.{name}" for name in ("never", "always", "thinks")]
    found = look({**settings, "reward_funcs": names, "outcome_reward": "countdown"}, answers=8)
    for name, value in (("never", 0), ("always", 1)):
        assert found[f"reward {name}"].status == "failed" and f"always {value}" in found[f"reward {name}"].says
    assert found["reward thinks"].status == "warning" and "0 for every answer" in found["reward thinks"].says
    assert found["reward countdown"].status == "ok"


def test_a_filter_on_a_shaped_reward_fails(settings):
    shaped = {"reward_funcs": ["preflight_rewards.shaped"], "outcome_reward": "shaped", "algorithm": "dapo"}
    found = look({**settings, **shaped}, answers=16)["filter"]
    assert found.status == "failed" and "different values (0." in found.says
    assert all(word in found.remedy for word in ("outcome_reward", "threshold", "dapo(dynamic_sampling=False)"))

    def filtered(**changes):
        args = parse(make_run({**settings, **shaped, **changes})).args
        return trl.check_filter(args, "shaped", drawn([0.45, 0.5, 0.6, 0.7]))

    alone = filtered(algorithm="gtpo")
    assert alone.status == "warning", "without dynamic sampling nothing is filtered"
    chosen = filtered(algorithm_kwargs={"threshold": 0.6})
    assert chosen.status == "warning" and "Nothing to change if" in chosen.remedy
    assert filtered(algorithm="gtpo", algorithm_kwargs={"pool": "outcome"}).status == "ok"


def test_a_rule_of_the_user_is_tried(settings, tmp_path):
    head = "from dew.algorithms import DAPO\nclass Rule(DAPO):\n    name = 'mine'\n    def advantages(self, rollouts):"
    (tmp_path / "rule.py").write_text(f"{head} return rollouts.reward\n")
    found = look({**settings, "algorithm": f"{tmp_path}/rule.py:Rule"}, answers=4)["answers"]
    assert found.status == "failed" and "returned shape (1, 4); expected (P, G, T) = (1, 4, " in found.says


def test_a_model_that_does_not_fit_fails_and_is_not_loaded(settings, tmp_path):
    folder = tmp_path / "giant"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config.update(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128)
    config.update(num_key_value_heads=8, head_dim=128)
    (folder / "config.json").write_text(json.dumps(config))
    found = look({**settings, "model_name_or_path": str(folder)}, answers=8)
    assert found["memory"].status == "failed" and "TB at full length" in found["memory"].says
    assert "of it optimizer" in found["memory"].says and "use_peft" in found["memory"].remedy
    assert found["answers"].status == "skipped"


def test_a_missing_column_fails(settings, tmp_path):
    rows = [{"prompt": f"{i},2>3:", "answer": "3"} for i in range(24)]
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = look({**settings, "task": str(path), "verifier": "countdown", "problems": 8}, answers=8)
    assert found["columns"].status == "failed" and "'numbers'" in found["columns"].says
    assert found["the rest"].status == "skipped" and len([c for c in found.values() if c.status == "failed"]) == 1


def test_a_folder_that_cannot_be_written_and_a_full_disk_fail(settings, monkeypatch):
    monkeypatch.setattr("dew.preflight.machine.free_disk", lambda _: 1_000_000)
    found = look({**settings, "output_dir": "/proc/dew/run"})
    assert found["folder"].status == "failed" and "/proc" in found["folder"].says
    assert found["disk"].status == "failed" and "1 MB free" in found["disk"].says


@pytest.mark.parametrize(
    ("algorithm", "own", "empty", "says"),
    [("gtpo", [2.0] * 4, 1.0, "counts as correct"), ("dew", [2.0, 3.0] * 2, 1.0, ""),
     ("dew", [0.5] * 4, float("nan"), "NaN or infinity for 1 answers"), ("gtpo", [0.0] * 4, 0.0, "It is always 0."),
     ("dew", [0.5] * 4, 1.0, "above that")],
)  # fmt: skip
def test_the_outcome_reward_of_empty_answers(algorithm, own, empty, says):
    data = Data([{"prompt": "1"}], [lambda completions, **_: [empty]])
    found = trl.check_reward(0, 0, data, drawn(own), get_algorithm(algorithm))
    assert says in found.says and found.status == ("failed" if says else "ok")


def test_the_verifier_of_the_task_is_the_default_outcome_reward(settings):
    """As in training; see also tests/trl for several rewards without a verifier."""
    found = look({**settings, "reward_funcs": ["preflight_rewards.thinks"]})["outcome"]
    assert found.status == "ok" and found.says.startswith("countdown decides") and "thinks" in found.says
    unknown = look({**settings, "reward_funcs": ["preflight_rewards.thinks"], "outcome_reward": "think"})["outcome"]
    assert unknown.status == "failed" and "thinks" in unknown.remedy
    fewer = look({**settings, "reward_funcs": ["preflight_rewards.thinks"], "reward_weights": [0.5]})["outcome"]
    assert fewer.status == "failed" and "1 for 2 rewards, countdown, thinks." in fewer.says


def test_a_context_that_is_too_small_fails(settings):
    vllm = {"max_completion_length": 28, "use_vllm": True, "vllm_max_model_length": 32}
    for given, owner in (({"max_completion_length": 600}, "the model"), (vllm, "vLLM (vllm_max_model_length)")):
        found = look({**settings, **given})["context"]
        prompt, *_, context = map(int, re.findall(r"\d+", found.says))
        assert found.status == "failed" and f"{owner} has {context} positions" in found.says
        assert found.remedy == f"Set max_completion_length to at most {context - prompt}."


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"loging_steps": 1}, "settings"),
        ({"task": "countdwn"}, "settings"),
        ({"task": "missing.jsonl", "task_settings": {}, "verifier": "countdown"}, "data"),
        ({"reward_funcs": ["nowhere.reward"]}, "data"),
        ({"model_name_or_path": "/no/such/model"}, "model"),
    ],
)
def test_anything_that_cannot_be_loaded_is_one_failed_check(settings, change, name):
    assert look({**settings, **change})[name].status == "failed"


def test_every_invalid_setting_is_a_check_of_its_own(settings):
    run = make_run({**settings, "per_device_train_batch_size": 6, "algorithm": "gtpo", "top_entropy_quantile": 0.5})
    with pytest.raises(ConfigError) as raised:
        parse(run)
    *problems, last = preflight(run, answers=0, say=print)
    assert len([check for check in problems if check.status == "failed"]) == len(raised.value.problems) == 2
    assert (last.name, last.status) == ("the rest", "skipped")


# ---- the command --------------------------------------------------------------------------------
def test_command_exit_code_and_json(settings, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(settings))
    good = CliRunner().invoke(app, ["preflight", str(path), "--answers", "0", "--json"])
    assert good.exit_code == 0, good.output
    value = json.loads(good.stdout)
    assert value["ok"] and {"name", "status", "says", "remedy"} == set(value["checks"][0])
    bad = CliRunner().invoke(app, ["preflight", str(path), "--answers=0", "--num_generations", "5"])
    assert bad.exit_code == 1 and "✗ failed" in bad.stdout and "→" in bad.stdout


# ---- single checks -----------------------------------------------------------------------------
MODEL = Model(parameters=1000, trained=1000, layers=3, width=8, inner=20, context=64, weight_bytes=4)


def arguments(**changes):
    plain = {
        "max_completion_length": 6, "per_device_train_batch_size": 2, "gradient_checkpointing": False, "bf16": False,
        "fp16": False, "optim": "adamw_torch_fused", "use_vllm": False, "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3, "vllm_enable_sleep_mode": False, "build_algorithm": GTPO,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **changes})


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({}, "weights", 4 * 1000),
        ({}, "gradients", 4 * 1000),
        ({}, "optimizer", 2 * 4 * 1000),
        ({}, "activations", 2 * 10 * 4 * (13 * 8 + 4 * 20) * 3),  # 2 answers x (4 + 6) tokens
        ({"gradient_checkpointing": True}, "activations", 2 * 10 * 4 * (8 * 3 + 13 * 8 + 4 * 20)),
        ({"bf16": True}, "activations", 2 * 10 * 2 * (13 * 8 + 4 * 20) * 3),
        ({"bf16": True}, "weights", (4 + 2) * 1000),
        ({"build_algorithm": lambda: GTPO(kl_coef=0.1)}, "weights", 2 * 4 * 1000),
        ({"optim": "adamw_8bit"}, "optimizer", 2 * 1000),
        ({"use_vllm": True}, "vllm", 300),
        ({"use_vllm": True, "vllm_enable_sleep_mode": True}, "vllm", 0),
    ],
)
def test_memory_by_hand(changes, name, expected):
    args = arguments(**changes)
    assert machine.estimate(MODEL, args, 4, 1000.0, args.gradient_checkpointing)[name] == expected


@pytest.mark.parametrize(
    ("family", "dtype", "mixed"),
    [("Llama", "float32", False), ("Qwen3", "bfloat16", False), ("Qwen2", "float32", True)],
)
def test_activations_are_about_what_autograd_keeps(family, dtype, mixed):
    """The oracle: every tensor that a real layer saves for its backward pass, counted once by its storage."""
    D, inner, B, T, saved = 128, 352, 2, 32, {}
    sizes = {"vocab_size": 64, "hidden_size": D, "intermediate_size": inner, "head_dim": 32}

    def kept(layers):
        saved.clear()
        config = getattr(transformers, f"{family}Config")(
            num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, **sizes
        )
        model = getattr(transformers, f"{family}Model")(config).to(getattr(torch, dtype))
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.setdefault(x.data_ptr(), x), lambda x: x)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            model(input_ids=torch.zeros(B, T, dtype=torch.long), use_cache=False)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved.values()}
        return sum(size for at, size in storages.items() if at not in own)

    copies = 2 * (3 * D * D + 3 * D * inner) if mixed else 0  # of the weights, a term of their own
    measured = ((kept(3) - kept(1)) / 2 - copies) / (B * T)
    model = replace(MODEL, layers=1, width=D, inner=inner, weight_bytes=2 if dtype == "bfloat16" else 4)
    one_token = arguments(bf16=mixed, per_device_train_batch_size=1, max_completion_length=0)
    assert 0.7 < machine.estimate(model, one_token, 1, 0.0, False)["activations"] / measured < 1.2


def test_only_loras_adapters_are_trained(settings):
    full, lora = (machine.model_of(parse(make_run({**settings, "use_peft": x, "lora_r": 4}))) for x in (False, True))
    assert full.trained == full.parameters and 0 < lora.trained < 0.5 * full.trained


def test_memory_remedies_name_what_to_change():
    def checked(free, saves=False, compiled=False, device="a GPU", rows=2, size=10**9, vllm=False):
        args = arguments(deepspeed=None, fsdp=None, gradient_checkpointing=saves, torch_compile=compiled, use_vllm=vllm,
                         max_completion_length=800, per_device_train_batch_size=rows)  # fmt: skip
        return machine.check_memory({"weights": 100.0, "activations": 900.0}, args, 100, device, free, 7000.0, size)

    assert checked(900).status == "failed" and "Set gradient_checkpointing: true." in checked(900).remedy
    assert "max_completion_length to 565: that fits" in checked(900).remedy, "100 + 100 + 565 = 0.85 * 900"
    assert "Halve per_device" in checked(900, True).remedy and "Use a smaller" in checked(900, True, rows=1).remedy
    assert "max_completion_length" not in checked(200).remedy, "the prompt alone does not fit"
    assert checked(1050).status == "warning" and checked(2000).status == "ok"
    faster = ["gradient_checkpointing: false" in checked(free, True).says for free in (9999, 10001)]
    assert faster == [False, True] and "gradient_checkpointing" not in checked(10001).says
    assert "torch_compile: true" in checked(2000).says and "use_vllm: true" in checked(2000, size=7 * 10**9).says
    assert all("torch_compile" not in checked(2000, **x).says for x in ({"compiled": True}, {"device": machine.NO_GPU}))
    advised = [x for x in (10**9, 3 * 10**9) if "use_vllm: false" in checked(2000, size=x, vllm=True).says]
    assert advised == [10**9] and "use_vllm" not in checked(2000).says


def drawn(outcome, **changes):
    n, rewards = len(outcome), np.array(outcome, float)
    plain = {"outcome": rewards.reshape(-1, 4), "parts": rewards[:, None], "truncated": [False] * n, "lengths": [5] * n}
    plain |= {"signal": [0 < sum(x or 0 for x in outcome[i : i + 4]) < 4 for i in range(0, n, 4)], "entropy": 0.5}
    return trl.Answers(**{**plain, **changes})


def test_groups_without_signal_and_rewards_that_are_missing_or_all_the_same():
    few, many = drawn([0.0] * 16), drawn([0.0] * 32)
    assert trl.check_groups(few).status == "warning", "four groups prove nothing"
    assert trl.check_groups(many).status == "failed" and "solves sometimes" in trl.check_groups(many).remedy
    assert trl.check_groups(drawn([1.0, 0, 0, 0] + [0.0] * 28)).status == "ok"
    assert trl.check_mean(drawn([1.0, 0.0, 0.0, 0.0])).status == "ok"
    assert [check(drawn([None] * 8)).status for check in (trl.check_mean, trl.check_groups)] == ["failed", "skipped"]
    assert trl.check_mean(drawn([0.0] * 8)).status == "warning"
    assert trl.check_entropy(drawn([0.0] * 8, entropy=0.001)).status == "warning"


def test_correct_answers():
    assert correct_answers({"prompt": "?"}) == []
    assert correct_answers({"answer": "7", "solution": "3+4=7"})[0] == "3+4=7"
    assert "\\boxed{7}" in correct_answers({"answer": "7"})


def test_errors_become_checks():
    def broken():
        raise ConfigError([Problem("a is 3.", "It must be even.", "Write 4."), "no b"], source="my.yaml")

    first, second = guarded("x", broken)
    assert first == failed("x", "a is 3. It must be even.", "Write 4.")
    assert second.says == "no b" and second.remedy, "a problem without a remedy gets a general one"
    assert attempt("x", divmod, 7, 2) == ((3, 1), []) and attempt("x", broken) == (None, [first, second])
    assert "ZeroDivisionError" in guarded("x", divmod, 1, 0)[0].says
    assert passed([ok("a", ""), warning("b", "", ""), skipped("c", "")])
    assert not passed([ok("a", ""), failed("b", "", "")])


# ---- the plan of `dew train --dry-run` -----------------------------------------------------------
def planned(name, **changed):
    return machine.plan(parse(read_run(recipe_file(name), changed), dry=True))


def test_a_plan():
    found = planned("gsm8k/qwen2.5-0.5b-instruct", num_iterations=2, algorithm_kwargs='{"alpha2": 0.2}')
    assert found["algorithm"] == "gtpo(alpha2=0.2)"
    # 200 steps, two on every generation of 8 x 64 answers
    assert found["length"] == "200 optimizer steps on 100 generations: 51,200 answers of at most 512 tokens"


def test_the_length_is_not_invented():
    """4096 problems in three epochs are the maximum; a data set of the hub has as many rows as it has."""
    epochs = {"max_steps": -1, "num_train_epochs": 3}
    length = planned("tiny/countdown", **epochs)["length"]
    assert length.startswith("at most 3,072 optimizer steps on 768 generations")  # 4096 x 3 x 16 / 64 answers a step
    assert "length" not in planned(
        "tiny/countdown", **epochs, task=None, scores=None, dataset_name="some/data", verifier="math"
    )
