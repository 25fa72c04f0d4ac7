"""Files from other people: configs read with --untrusted, runs, data sets and models."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from attacks import FAMILIES
from dew.cli.flags import load_run
from dew.engines.trl import launch
from dew.engines.trl.settings import parse
from dew.errors import ConfigError, DewError, RecordError
from dew.files import stay_inside, write_atomically
from dew.run.config import make_run, parse_yaml, read_run
from dew.run.folder import RunFolder
from dew.run.permission import OFF, RUNS_CODE, SENDS, check_permission, needs_approval
from dew.run.records import AnswerRecord, GroupRecord, read_records

ROOT = Path(__file__).parents[2]
TINY = ROOT / "src/dew/tasks/data/tiny"
SMALL = {"model_name_or_path": "tiny", "task": "countdown", "num_generations": 4, "per_device_train_batch_size": 8,
         "use_cpu": True, "bf16": False}  # fmt: skip


# ── configs ─────────────────────────────────────────────────────────────────────────────────────────────────

NEED_APPROVAL = {
    "algorithm": {"algorithm": "evil_rules.py:Rule"},
    "env": {"env": {"LD_PRELOAD": "/tmp/evil.so"}},
    "overwrite_output_dir": {"overwrite_output_dir": True},
    "trust_remote_code": {"trust_remote_code": True},
    "trust_remote_code ": {"trust_remote_code": "yes"},
    "model_init_kwargs.trust_remote_code": {"model_init_kwargs": {"trust_remote_code": True}},
    "model_init_kwargs.trust_remote_code ": {"model_init_kwargs": '{"trust_remote_code": true}'},
    "generation_kwargs.custom_generate": {"generation_kwargs": {"custom_generate": "evil/code"}},
    "model_init_kwargs.use_kernels": {"model_init_kwargs": {"use_kernels": True}},
    "attn_implementation": {"attn_implementation": "evil/kernel"},
    "model_init_kwargs.attn_implementation": {"model_init_kwargs": {"attn_implementation": "evil/kernel"}},
    "model_init_kwargs.use_safetensors": {"model_init_kwargs": {"use_safetensors": False}},
    "model_init_kwargs.weights_only": {"model_init_kwargs": {"weights_only": False}},
    "reward_funcs": {"reward_funcs": ["rewards.py:score"]},
    "reward_funcs ": {"reward_funcs": ["think_format", "os.system"]},
    "reward_funcs  ": {"reward_funcs": "os:system"},
    "push_to_hub": {"push_to_hub": True},
    "log_completions_hub_repo": {"log_completions_hub_repo": "evil/answers"},
    "trackio_space_id": {"trackio_space_id": "evil/space"},
    "report_to": {"report_to": ["tensorboard", "wandb"]},
    "report_to ": {"report_to": "all"},
    "deepspeed": {"deepspeed": {"tensorboard": {"output_path": "/"}}},
    "guide": {"guide": "http://evil.example/v1"},
    "vllm_server_base_url": {"vllm_server_base_url": "http://evil.example:8000"},
    "vllm_server_host": {"vllm_server_host": "evil.example"},
    "output_dir": {"output_dir": "/etc/dew"},
    "output_dir ": {"output_dir": "../../elsewhere"},
    "output_dir  ": {"output_dir": "runs/../../elsewhere"},
    "output_dir   ": {"output_dir": ".git/hooks"},
    "output_dir    ": {"output_dir": "."},
    "output_dir     ": {"output_dir": "~/x/../../../../etc"},
    "output_dir      ": {"output_dir": "~/runs"},
    "output_dir       ": {"output_dir": "~root/runs"},
}
HARMLESS = [
    {"trust_remote_code": False},
    {"trust_remote_code": "false"},
    {"model_init_kwargs": {"use_safetensors": True, "attn_implementation": "sdpa"}},
    {"reward_funcs": ["think_format", "boxed_format", "accuracy_reward"]},
    {"report_to": "none"},
    {"report_to": "tensorboard"},
    {"guide": "http://localhost:8000/v1"},
    {"guide": "answers.jsonl"},
    {"vllm_server_host": "0.0.0.0"},
    {"output_dir": "runs/mine"},
    {"push_to_hub": False, "log_completions_hub_repo": None},
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder, with a folder for recipes somewhere else."""
    for name in ("here", "recipes"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "recipes"


@pytest.mark.parametrize(("name", "settings"), NEED_APPROVAL.items())
def test_an_untrusted_file_needs_approval_on_the_command_line(here, name, settings):
    run = make_run({**SMALL, **settings}, source=str(here / "r.yaml"))
    with pytest.raises(ConfigError) as error:
        parse(run, untrusted=True)
    (problem,) = error.value.problems
    assert problem.what.startswith(f"{name.strip()}: ") and "command line" in problem.remedy
    check_permission(run, settings, untrusted=True)  # typed
    check_permission(run, (), untrusted=False)


TRL_FILE = """
model_name_or_path: tiny
dataset_name: somebody/problems
reward_funcs: [accuracy_reward, my_rewards.brevity, rewards/mine.py:score]
outcome_reward: accuracy_reward
reward_weights: [1.0, 0.1, 0.1]
report_to: wandb
push_to_hub: true
hub_model_id: me/my-model
output_dir: %s/elsewhere/run
trackio_space_id: me/space
learning_rate: 1e-6
num_generations: 4
per_device_train_batch_size: 8
use_cpu: true
bf16: false
log_completions: true
vllm_server_host: gpu-node-1
model_init_kwargs: {attn_implementation: sdpa}
"""


def test_an_ordinary_config_of_trl_is_trusted(here, tmp_path, dew):
    (here / "r.yaml").write_text(TRL_FILE % tmp_path)
    code, out, err = dew("train", here / "r.yaml", "--dry-run", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["report_to"] == "wandb" and found["push_to_hub"] is True
    assert found["reward_funcs"] == ["accuracy_reward", "my_rewards.brevity", "rewards/mine.py:score"]
    code, _, err = dew("train", here / "r.yaml", "--dry-run", "--untrusted")
    assert code == 1
    for name in ("reward_funcs", "report_to", "push_to_hub", "output_dir", "trackio_space_id", "vllm_server_host"):
        assert f"  {name}: " in err


def test_remote_code_and_pickles_are_off_unless_the_file_turns_them_on(here):
    run = make_run({**SMALL, "output_dir": "run"}, source=str(here / "r.yaml"))
    parsed = parse(run)
    assert parsed.args.trust_remote_code is False
    assert launch.build_trainer(parsed).args.model_init_kwargs["use_safetensors"] is True
    named = {"trust_remote_code": True, "model_init_kwargs": {"use_safetensors": False}}
    parsed = parse(make_run({**run.to_dict(), **named}, source=run.source))
    assert parsed.args.trust_remote_code is True and parsed.args.model_init_kwargs == {"use_safetensors": False}


@pytest.mark.parametrize(
    ("verl", "name"),
    [
        (
            {"actor_rollout_ref": {"model": {"trust_remote_code": True}}},
            "verl.actor_rollout_ref.model.trust_remote_code",
        ),
        ({"reward.custom_reward_function.path": "/tmp/x.py"}, "verl.reward.custom_reward_function.path"),
        ({"data": {"custom_cls": {"path": "pkg://x"}}}, "verl.data.custom_cls.path"),
        ({"actor_rollout_ref.model.external_lib": "x"}, "verl.actor_rollout_ref.model.external_lib"),
        ({"trainer": {"rollout_data_dir": "/etc"}}, "verl.trainer.rollout_data_dir"),
        ({"hydra.run.dir": "/etc"}, "verl.hydra.run.dir"),
        ({"trainer": {"logger": ["console", "wandb"]}}, "verl.trainer.logger"),
        ({"actor_rollout_ref.actor._target_": "os.system"}, "verl.actor_rollout_ref.actor._target_"),
    ],
)
def test_an_untrusted_file_for_verl_needs_approval_too(here, verl, name):
    (here / "r.yaml").write_text(json.dumps({**SMALL, "engine": "verl", "verl": verl}))
    run, typed = load_run(here / "r.yaml", [])
    with pytest.raises(ConfigError) as error:
        check_permission(run, typed, untrusted=True)
    assert error.value.problems[0].what.startswith(f"{name}: ")
    check_permission(run, typed, untrusted=False)
    run, typed = load_run(here / "r.yaml", [f"{name.removeprefix('verl.')}=~/x.py"])
    check_permission(run, typed, untrusted=True)
    harmless = {"actor_rollout_ref.model.path": "folder", "trainer.default_local_dir": "runs/x/checkpoints"}
    harmless["trainer.logger"] = ["console"]
    check_permission(make_run({**SMALL, "verl": harmless}, source=str(here / "r.yaml")), (), untrusted=True)


@pytest.mark.parametrize("settings", HARMLESS)
def test_what_needs_no_approval(here, settings):
    assert list(needs_approval(settings, here)) == []


def test_all_settings_that_need_approval_are_listed_at_once(here):
    keys = {"trust_remote_code": True, "push_to_hub": True, "reward_funcs": ["a.py:b"]}
    with pytest.raises(ConfigError) as error:
        parse(make_run({**SMALL, **keys}, source=str(here / "r.yaml")), untrusted=True)
    assert {problem.what.split(":")[0] for problem in error.value.problems} == set(keys)


@pytest.mark.parametrize("untrusted", [False, True])
def test_a_secret_is_refused_everywhere(here, dew, untrusted):
    with pytest.raises(ConfigError, match="HF_TOKEN") as error:
        parse(make_run({**SMALL, "hub_token": "hf_x"}), untrusted=untrusted)
    assert "hf_x" not in str(error.value)
    (here / "r.yaml").write_text(json.dumps({**SMALL, "output_dir": "run"}))
    words = ["train", here / "r.yaml", "--hub_token", "hf_x", *["--untrusted"] * untrusted]
    code, out, err = dew(*words)
    assert code == 1 and "HF_TOKEN" in err and "hf_x" not in out + err and not Path("run").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda p: p.stem)
def test_bundled_recipes_need_no_approval(path):
    check_permission(read_run(path), (), untrusted=True)


REVIEWED = {
    "output_dir", "hub_token", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision",
    "dataset_name", "model_name_or_path", "reward_model_name_or_path", "model_revision", "attn_implementation",
    "report_to", "guide", "guide_timeout", "guide_weight", "guide_completions", "guide_failed_weight", "reward_funcs",
    "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "use_liger_kernel",
    "liger_kernel_config", "resume_from_checkpoint", "restore_callback_states_from_checkpoint", "enable_jit_checkpoint",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "cache_implementation", "torch_compile",
    "torch_compile_backend", "torch_compile_mode", "model_init_kwargs", "generation_kwargs", "chat_template_kwargs",
    "vllm_model_impl", "use_cache", "torch_empty_cache_steps", "include_num_input_tokens_seen",
    "average_tokens_across_devices", "save_total_limit", "load_in_4bit", "load_in_8bit", "load_best_model_at_end",
    "fsdp_config", "accelerator_config", "parallelism_config", "transformers_continuous_batching_config",
    "dataset_config", "eval_use_gather_object", "lr_scheduler_kwargs", "algorithm_kwargs", "optim_args",
    "outcome_reward", "reward_timeout", "reward_memory", "reward_weights", "scale_rewards",
}  # fmt: skip
"""Settings whose names sound as if they might run, load, send or write something, and that were reviewed."""
SOUNDS = re.compile(
    r"remote|code|hub|token|url|host|server|space|bucket_id|repo|_dir|path|deepspeed|kernel|config|kwargs|args|backend|"
    r"checkpoint|compile|template|reward|guide|dataset_name|model|(?<!data)load|gather_object|impl|report_to|cache|script"
)


def test_new_settings_of_trl_are_reviewed():
    """A new version may bring a new way to run code or to send data: this test fails until somebody has reviewed it."""
    from trl import ModelConfig
    from trl.scripts.grpo import GRPOScriptArguments

    from dew.engines.trl import DewConfig

    names = {f.name for kind in (GRPOScriptArguments, DewConfig, ModelConfig) for f in fields(kind) if f.init}
    unknown = {n for n in names if SOUNDS.search(n)} - REVIEWED - set(RUNS_CODE) - set(SENDS)
    assert unknown <= {
        "max_completion_length", "disable_dropout", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps",
        "metric_for_best_model", "save_only_model", "vllm_max_model_length", "ddp_backend",
    }, unknown  # fmt: skip


def test_off_is_off_however_it_is_written():
    from transformers.hf_argparser import string_to_bool

    for word in ("yes", "true", "t", "y", "1", "on"):
        assert word not in OFF
        try:
            assert string_to_bool(word) is True
        except Exception:
            assert word == "on"  # which argparse refuses
    for word in ("no", "false", "f", "n", "0"):
        assert word in OFF and string_to_bool(word) is False


def test_every_command_refuses_an_untrusted_file_until_the_setting_is_typed(here, dew):
    (here / "mine.py").write_text("open('ran', 'w')\ndef score(completions, **_): return [0.0] * len(completions)\n")
    path = here / "r.yaml"
    path.write_text(json.dumps({**SMALL, "output_dir": "run", "reward_funcs": [f"{here}/mine.py:score"]}))
    code, _, err = dew("train", path, "--dry-run", "--untrusted")
    assert code == 1 and "runs code" in err
    code, out, _ = dew("preflight", path, "--answers", "0", "--json", "--untrusted")
    assert code == 1 and "runs code" in out
    code, _, err = dew("compare", path, "--untrusted")
    assert code == 1 and "runs code" in err
    (here / "run").mkdir()
    shutil.copy(path, here / "run" / "config.yaml")
    code, _, err = dew("resume", here / "run", "--untrusted")
    assert code == 1 and "runs code" in err
    assert not Path("ran").exists() and not list(Path().iterdir())
    words = ["train", path, "--dry-run", "--untrusted", "--reward_funcs", f"{here}/mine.py:score"]
    assert dew(*words)[0] == 0
    assert dew("train", path, "--dry-run")[0] == 0


MERGES = "b0: &b0 {k: 1}\n" + "".join(f"b{i + 1}: &b{i + 1} {{<<: [{', '.join([f'*b{i}'] * 20)}]}}\n" for i in range(7))
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    "text",
    [LAUGHS, MERGES, "a: &a [*a]", "a: &a {b: *a}", "a: &a {<<: *a}", "x: " + "[" * 1000, "a: 1\n" * 100_000,
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


# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "stranger")
    folder.write_run({"name": "stranger"})
    folder.append_metrics({"step": 1, "reward": 0.5})
    answers = [AnswerRecord(["a"], c, float(c), entropy=[0.5], advantage=[1.0]) for c in (True, False)]
    folder.write_records(1, [GroupRecord(1, 0, "p", answers)])
    (folder.path / "config.yaml").write_text("task: countdown\nmodel_name_or_path: tiny\n")
    shutil.copytree(TINY, folder.path / "model")
    (tmp_path / "secret").write_text("a secret of mine\n")
    return folder.path


LINKS = ["config.yaml", "run.json", "metrics.jsonl", "records/step-00000002.jsonl.gz", "model/notes.txt", "checkpoints"]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_that_leads_out_of_a_run_is_not_followed(run, tmp_path, dew, name):
    link = run / name
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / "secret")
    commands = [["report", run, "--out", tmp_path / "r.html"], ["explain", run], ["resume", run]]
    commands = [["export", run, tmp_path / "out"]] if name.startswith("model") else commands
    for words in commands:
        code, out, err = dew(*words)
        assert code == 1 and "leads out of the run's folder" in err.replace("\n", " ")
        assert "a secret of mine" not in out + err
    assert (tmp_path / "secret").read_text() == "a secret of mine\n"
    assert not (tmp_path / "r.html").exists() and not (tmp_path / "out").exists()


def test_links_inside_a_run_are_fine(run, tmp_path):
    (run / "latest").symlink_to(run / "model")
    (tmp_path / "elsewhere").symlink_to(run)
    stay_inside(run)
    stay_inside(tmp_path / "elsewhere")
    (run / "itself").symlink_to(run / "itself")
    with pytest.raises(RecordError, match="leads out"):
        stay_inside(run)


def test_writing_never_goes_through_a_link(tmp_path):
    """Neither the file's own name nor that of its temporary one, which can be guessed."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    target = tmp_path / "run.json"
    target.symlink_to(mine)
    (tmp_path / f".run.json.{os.getpid()}.tmp").symlink_to(mine)
    write_atomically(target, b"theirs")
    assert mine.read_text() == "mine" and target.read_text() == "theirs" and not target.is_symlink()


@pytest.mark.parametrize(
    "name", ["run.json", "metrics.jsonl", "alarms.jsonl", "scores.json", "records/step-00000003.jsonl.gz"]
)
def test_a_pipe_in_the_place_of_a_file_does_not_hang(run, tmp_path, dew, name):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    code, _, err = dew("report", run, "--out", tmp_path / "r.html")
    assert "pipe" in err and code == 0  # the rest of the run is shown, and what is missing is named


@pytest.mark.parametrize("name", ["trainer_state.json", "completions/completions_00001.parquet"])
def test_a_pipe_in_another_trainers_folder_does_not_hang(tmp_path, dew, name):
    path = tmp_path / "theirs" / name
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    _, out, err = dew("report", tmp_path / "theirs", "--out", tmp_path / "r.html")
    assert "pipe" in out + err


def test_a_verl_run_with_a_link_out_of_its_folder_is_not_resumed(tmp_path, dew):
    mine = tmp_path / "mine.yaml"
    mine.write_text("secret_of_mine: 1")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "verl.yaml").symlink_to(mine)
    code, out, err = dew("resume", tmp_path / "theirs")
    assert code == 1 and "leads out" in err and "secret" not in out + err


def bomb(megabytes: int, line: bytes = b" " * (1 << 20)) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([*(packer.compress(line) for _ in range(megabytes)), packer.flush()])


BOMBS = {
    "one line": bomb(20),
    "many lines": bomb(20, b" " * ((1 << 20) - 1) + b"\n"),
    "many lists": gzip.compress(b'{"answers":' + b"[" * 5_000_000),
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_a_small_file_that_unpacks_to_much_is_refused(tmp_path, monkeypatch, content):
    monkeypatch.setattr("dew.run.records.MAX_FILE", 1 << 24)
    monkeypatch.setattr("dew.run.records.MAX_LINE", 1 << 23)
    path = tmp_path / "step-00000001.jsonl.gz"
    path.write_bytes(content)
    assert len(content) < 300_000
    with pytest.raises(RecordError, match="once decompressed"):
        read_records(path)


def test_data_that_unpack_to_much_are_refused(tmp_path, monkeypatch):
    from dew.tasks import files, task

    monkeypatch.setattr(files, "MAX_LINE", 1 << 20)
    monkeypatch.setattr(files, "MAX_JSON", 1 << 20)
    for name, says in (("train.jsonl.gz", "one problem per line"), ("train.json.gz", "one row per line")):
        (tmp_path / name).write_bytes(bomb(3))
        with pytest.raises(ConfigError, match=says):
            task(str(tmp_path / name), template="plain").rows(1)


@pytest.mark.parametrize("name", FAMILIES["paths"])
def test_names_with_paths_in_them_stay_names(tmp_path, monkeypatch, name, run):
    """Names in run.json, records and tasks are shown; none becomes a path that is written."""
    from dew.report import build

    monkeypatch.chdir(tmp_path)
    before = {p for p in tmp_path.rglob("*")}
    RunFolder(run).write_run({"name": name, "model": name})
    build([run])
    made = {p for p in tmp_path.rglob("*")} - before
    assert made == {run / "report.html", run / "report.json"}


# ── models, checkpoints, data sets ──────────────────────────────────────────────────────────────────────────


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def model(tmp_path):
    """A copy of the tiny model whose weights are a pickle that makes a file."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "model.safetensors").unlink()
    torch.save({"weights": Evil(tmp_path / "canary")}, folder / "pytorch_model.bin")
    return folder


def test_the_canary_sings_where_pickles_are_loaded(tmp_path, model):
    torch.load(model / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "canary").exists()


def test_weights_that_are_pickles_are_not_loaded(tmp_path, model, dew):
    code, _, err = dew("eval", model, "-n", 1, "-k", 1)
    assert code == 1 and "cannot be loaded" in err
    shutil.copytree(model, tmp_path / "run" / "model")
    code, _, err = dew("export", tmp_path / "run", tmp_path / "out")
    assert code == 1
    run = make_run({**SMALL, "model_name_or_path": str(model), "output_dir": str(tmp_path / "o")})
    with pytest.raises(Exception, match=r"model\.safetensors"):
        launch.build_trainer(parse(run))
    assert not (tmp_path / "canary").exists()


def test_code_in_a_model_folder_is_not_run(tmp_path, dew, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    code = f"open({str(tmp_path / 'canary')!r}, 'w')\nfrom transformers import *\nclass X: pass\n"
    (folder / "evil.py").write_text(code)
    classes = {f"AutoModel{kind}": "evil.X" for kind in ("", "ForCausalLM")} | {"AutoConfig": "evil.X"}
    for name, extra in (("config.json", {"auto_map": classes, "model_type": "evil"}),
                        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.X", "evil.X"]}})):  # fmt: skip
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **extra}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers asks; a run has nobody to ask
    code, _, _ = dew("eval", folder, "-n", 1, "-k", 1)
    assert code == 1
    run = make_run({**SMALL, "model_name_or_path": str(folder), "output_dir": str(tmp_path / "o")})
    with pytest.raises(Exception, match=r"trust_remote_code|evil|custom code"):
        launch.build_trainer(parse(run))
    assert not (tmp_path / "canary").exists()


def test_a_data_set_that_is_a_script_is_not_run(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "data.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    for name in (str(folder), str(folder / "data.py")):
        with pytest.raises(ConfigError, match="cannot be loaded"):
            launch.data_of(parse(make_run({**SMALL, "task": None, "dataset_name": name})))
    assert not (tmp_path / "canary").exists()


@pytest.mark.slow
def test_pickles_in_a_checkpoint_are_not_run(tmp_path):
    """Every file of a checkpoint that torch reads, one after the other, replaced by a pickle that makes a file."""
    settings = {**SMALL, "output_dir": str(tmp_path / "run"), "problems": 64, "max_completion_length": 16}
    settings |= {"max_steps": 3, "save_steps": 2, "gradient_checkpointing": False}
    (tmp_path / "r.yaml").write_text(json.dumps(settings))

    def call(*words):
        command = [sys.executable, "-m", "dew.cli", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert call("train", tmp_path / "r.yaml").returncode == 0
    shutil.rmtree(tmp_path / "run/model")
    shutil.rmtree(tmp_path / "run/checkpoint-3", ignore_errors=True)
    RunFolder(tmp_path / "run").write_run({"status": "running"})
    files = [p for p in (tmp_path / "run/checkpoint-2").iterdir() if p.suffix in (".pt", ".pth", ".bin")]
    assert {"optimizer.pt", "scheduler.pt", "training_args.bin", "dew_state_0.pt"} <= {p.name for p in files}
    for path in files:
        shutil.copytree(tmp_path / "run", tmp_path / "again")
        torch.save({"x": Evil(tmp_path / "canary")}, tmp_path / "again/checkpoint-2" / path.name)
        call("resume", tmp_path / "again")
        assert not (tmp_path / "canary").exists(), path.name
        shutil.rmtree(tmp_path / "again")
