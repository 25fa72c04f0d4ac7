"""Config files from other people, read with --untrusted."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from dew.cli.flags import load_run
from dew.engines.trl import launch
from dew.engines.trl.launch import parse
from dew.errors import ConfigError, DewError
from dew.run.config import OWN_KEYS, make_run, parse_yaml, read_run
from dew.run.permission import ALLOWED, NAMES, check_permission

ROOT = Path(__file__).parents[2]
SMALL = {"model_name_or_path": "tiny", "task": "countdown", "num_generations": 4, "per_device_train_batch_size": 8,
         "use_cpu": True, "bf16": False}  # fmt: skip


# ── configs ─────────────────────────────────────────────────────────────────────────────────────────────────
REFUSED = [
    ("algorithm", "evil_rules.py:Rule"), ("env", {"LD_PRELOAD": "/tmp/evil.so"}), ("overwrite_output_dir", True),
    ("trust_remote_code", True), ("trust_remote_code", "yes"), ("attn_implementation", "evil/kernel"),
    ("model_init_kwargs", {"trust_remote_code": True}), ("model_init_kwargs", '{"use_safetensors": false}'),
    ("model_init_kwargs", {"offload_folder": "/etc", "key_mapping": {"(a+)+": "b"}}),
    ("generation_kwargs", {"custom_generate": "evil/code"}), ("reward_funcs", ["rewards.py:score"]),
    ("reward_funcs", ["think_format", "os.system"]), ("reward_funcs", "os:system"), ("push_to_hub", True),
    ("log_completions_hub_repo", "evil/answers"), ("trackio_space_id", "evil/space"), ("hub_model_id", "evil/model"),
    ("report_to", ["tensorboard", "wandb"]), ("report_to", "all"), ("deepspeed", {"tensorboard": {"output_path": "/"}}),
    ("deepspeed", "/dev/zero"), ("accelerator_config", "/dev/zero"), ("fsdp_config", "pipe.json"),
    ("lora_target_modules", "(a+)+$"), ("guide", "http://evil.example/v1"), ("vllm_server_host", "evil.example"),
    ("vllm_server_base_url", "http://evil.example:8000"), ("vllm_mode", "server"), ("dataset_name", "/etc"),
    ("task", "/etc/passwd"), ("task", "../secret.jsonl"), ("task_settings", {"keep": "../x"}),
    ("model_name_or_path", "~/models/x"), ("run_name", "${oc.env:HOME}"), ("learning_rate", "${oc.env:HOME}"),
    ("fsdp_config", "none"), ("accelerator_config", "no"), ("lora_target_modules", ["q_proj", "(a+)+$"]),  # file names
    ("lora_r", 10**12), ("learning_rate", math.inf), ("task", "link/x.jsonl"), ("model_name_or_path", "link/model"),
    *[("output_dir", path) for path in ("/etc/dew", "../x", "runs/../../x", ".git/hooks", ".", "~/x", "link/x")],
]  # fmt: skip
VERL_REFUSED = [
    {"actor_rollout_ref": {"model": {"trust_remote_code": True}}}, {"reward.custom_reward_function.path": "/tmp/x.py"},
    {"data": {"custom_cls": {"path": "x.pyc"}}}, {"data.custom_cls.path": "pkg://x"}, {"data.train_files": ["/etc/x"]},
    {"actor_rollout_ref.model.external_lib": "x"}, {"trainer": {"rollout_data_dir": "/etc"}}, {"hydra.run.dir": "x"},
    {"hydra.searchpath": ["file:///tmp"]}, {"trainer": {"logger": ["console", "wandb"]}},
    {"actor_rollout_ref.actor._target_": "os.system"}, {"trainer.default_local_dir": "${oc.env:HOME}"},
    {"+ray_kwargs.ray_init.runtime_env.env_vars": {"LD_PRELOAD": "x"}}, {"trainer.nnodes": "${oc.env:HOME}"},
    {"actor_rollout_ref.rollout.agent.agent_loop_config_path": "x.yaml"}, {"~trainer.logger": None},
    {"actor_rollout_ref.rollout.multi_turn.tool_config_path": "x.yaml"},
    {"data.train_files": [["x.pyc"]]}, {"reward.custom_reward_function.path": "x.pyc"}, {"+optim": "x"}, {"task": "x"},
    {"trainer.n_gpus_per_node": [1, "${oc.env:HOME}"]}, {"actor_rollout_ref.rollout.n": 10**12},
    {"actor_rollout_ref.rollout.load_format": "pt"}, {"actor_rollout_ref.model.override_config": {"x": "evil/kernel"}},
]  # fmt: skip
HARMLESS = {
    "trust_remote_code": False, "push_to_hub": False, "log_completions_hub_repo": None, "report_to": "none",
    "reward_funcs": ["think_format", "boxed_format", "accuracy_reward"], "attn_implementation": "sdpa",
    "output_dir": "runs/mine", "dataset_config": "main", "algorithm_kwargs": {"alpha2": 0.2, "entropy_clip": [0.1, 2]},
    "lora_target_modules": ["q_proj", "v_proj"], "model_name_or_path": "Qwen/Qwen2.5-0.5B", "task": "data/mine.jsonl",
    "verl": {"trainer": {"nnodes": 2}, "+data.max_prompt_length": 99},
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder, with a folder for recipes somewhere else."""
    for name in ("here", "recipes"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "recipes"


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_an_untrusted_file_needs_approval_on_the_command_line(here, name, value):
    Path("link").symlink_to(here)
    run = make_run({**SMALL, name: value, **({"task": None} if name == "dataset_name" else {})}, source="r.yaml")
    with pytest.raises(ConfigError) as error:
        check_permission(run, (), untrusted=True)
    (problem,) = error.value.problems
    assert problem.what.startswith(f"{name}: ") and "command line" in problem.remedy
    check_permission(run, [name], untrusted=True)  # typed
    check_permission(run, (), untrusted=False)


@pytest.mark.parametrize("verl", VERL_REFUSED, ids=str)
def test_an_untrusted_file_for_verl_needs_approval_too(here, verl):
    (here / "r.yaml").write_text(json.dumps({**SMALL, "engine": "verl", "verl": verl}))
    run, typed = load_run(here / "r.yaml", [])
    with pytest.raises(ConfigError) as error:
        check_permission(run, typed, untrusted=True)
    name = error.value.problems[0].what.split(": ")[0]
    assert len(error.value.problems) == 1 and name.startswith("verl.")
    can_be_typed = name.count(".") > 1 and "~" not in name
    run, typed = load_run(here / "r.yaml", [f"{name.removeprefix('verl.')}=~/x.py"] if can_be_typed else [])
    check_permission(run, typed or [name], untrusted=True)


def test_plain_training_settings_need_no_approval(here):
    check_permission(make_run({**SMALL, **HARMLESS}, source="r.yaml"), (), untrusted=True)
    for path in (ROOT / "recipes").rglob("*.yaml"):
        check_permission(read_run(path), (), untrusted=True)


def test_every_allowed_setting_exists_and_is_documented():
    from dew.engines.trl.launch import setting_fields

    assert NAMES.strip() in (ROOT / "docs/security.md").read_text()
    known = {field.name for field in setting_fields()} | set(OWN_KEYS)
    assert {name.partition("=")[0] for name in ALLOWED if "." not in name} <= known
    risky = re.compile("token$|remote|push|hub|url|host|path$|_dir$|kwargs$|config$")
    assert {name for name in ALLOWED if risky.search(name)} == {
        "algorithm_kwargs", "output_dir", "model_name_or_path", "dataset_config",
    }  # fmt: skip


TRL_FILE = {
    "dataset_name": "somebody/problems", "reward_funcs": ["accuracy_reward", "my_rewards.brevity", "x/mine.py:score"],
    "outcome_reward": "accuracy_reward", "report_to": "wandb", "push_to_hub": True, "learning_rate": 1e-6, "task": None,
    "model_init_kwargs": {"attn_implementation": "sdpa"},
}  # fmt: skip


def test_an_ordinary_config_of_trl_is_trusted(here, tmp_path, dew):
    (here / "r.yaml").write_text(json.dumps({**SMALL, **TRL_FILE, "output_dir": f"{tmp_path}/elsewhere/run"}))
    code, out, err = dew("train", here / "r.yaml", "--dry-run")
    assert code == 0 and "report_to: wandb" in out and "push_to_hub: true" in out, err
    code, _, err = dew("train", here / "r.yaml", "--dry-run", "--untrusted")
    assert code == 1
    for name in ("reward_funcs", "report_to", "push_to_hub", "output_dir", "model_init_kwargs"):
        assert f"  {name}: " in err  # all of them at once
    assert "learning_rate" not in err


def test_remote_code_and_pickles_are_off_unless_the_file_turns_them_on(here):
    run = make_run({**SMALL, "output_dir": "run"}, source=str(here / "r.yaml"))
    parsed = parse(run)
    assert parsed.args.trust_remote_code is False
    assert launch.build_trainer(parsed).args.model_init_kwargs["use_safetensors"] is True
    named = {"trust_remote_code": True, "model_init_kwargs": {"use_safetensors": False}}
    parsed = parse(make_run({**run.to_dict(), **named}, source=run.source))
    assert parsed.args.trust_remote_code is True and parsed.args.model_init_kwargs == {"use_safetensors": False}


@pytest.mark.parametrize("flags", [[], ["--untrusted"]])
def test_a_secret_is_refused_everywhere(here, dew, flags):
    (here / "r.yaml").write_text(json.dumps({**SMALL, "output_dir": "run"}))
    (here / "s.yaml").write_text(json.dumps({**SMALL, "hub_token": "hf_x"}))
    for words in (["train", here / "s.yaml"], ["train", here / "r.yaml", "--hub_token", "hf_x"]):
        code, out, err = dew(*words, *flags)
        assert code == 1 and "HF_TOKEN" in err and "hf_x" not in out + err and not Path("run").exists()


def test_every_command_refuses_an_untrusted_file_until_the_setting_is_typed(here, dew):
    (here / "mine.py").write_text("open('ran', 'w')\ndef score(completions, **_): return [0.0] * len(completions)\n")
    path, rewards = here / "r.yaml", f"{here}/mine.py:score"
    path.write_text(json.dumps({**SMALL, "output_dir": "run", "reward_funcs": [rewards]}))
    (here / "run").mkdir()
    shutil.copy(path, here / "run" / "config.yaml")
    for words in (["train", path, "--dry-run"], ["preflight", path, "--answers", "0"], ["compare", path],
                  ["resume", here / "run"]):  # fmt: skip
        code, out, err = dew(*words, "--untrusted")
        assert code == 1 and "needs your approval" in " ".join((out + err).split())
    assert not Path("ran").exists() and not list(Path().iterdir())
    assert dew("train", path, "--dry-run", "--untrusted", "--reward_funcs", rewards)[0] == 0
    assert dew("train", path, "--dry-run")[0] == 0


MERGES = "b0: &b0 {k: 1}\n" + "".join(f"b{i + 1}: &b{i + 1} {{<<: [{', '.join([f'*b{i}'] * 20)}]}}\n" for i in range(7))
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    "text",
    [LAUGHS, MERGES, "a: &a [*a]", "a: &a {b: *a}", "a: &a {<<: *a}", "x: " + "[" * 1000, "a: 1\n" * 4_000,
     "k" * 300_000 + ": 1", "a: " + "9" * 5000, "? {a: 1}\n: 2", "a: !!timestamp 2001-99-99", "a: !!int x",
     "a: !!float x", "a: !!binary '\x80'", "a: !!pairs x", "a: !!set {b, c}", "&a : *a",
     "a: 2001-12-14t21:59:43.10-05:99"],
    ids=range(18),
)  # fmt: skip
def test_yaml_that_expands_without_end_is_refused(text):
    try:
        value = parse_yaml(text)
    except DewError as error:
        assert len(str(error)) < 500
    else:
        assert len(repr(value)) < 1000
