"""Files from other people: configs read with --untrusted, runs, data sets and models."""

import gzip
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

from attacks import FAMILIES
from dew.cli.flags import load_run
from dew.engines.trl import launch
from dew.engines.trl.launch import parse
from dew.errors import ConfigError, DewError, RecordError
from dew.files import stay_inside, write_atomically
from dew.report import serve
from dew.run.config import OWN_KEYS, make_run, parse_yaml, read_run
from dew.run.folder import RunFolder
from dew.run.permission import ALLOWED, check_permission
from dew.run.records import AnswerRecord, GroupRecord, read_records
from dew.tasks import task

ROOT = Path(__file__).parents[2]
TINY = ROOT / "src/dew/tasks/data/tiny"
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


def test_every_allowed_setting_exists():
    from dew.engines.trl.launch import setting_fields

    known = {field.name for field in setting_fields()} | set(OWN_KEYS)
    assert {name.partition("=")[0] for name in ALLOWED if "." not in name} <= known
    risky = re.compile("token$|remote|push|hub|url|host|path$|_dir$|kwargs$|config$")
    assert {name for name in ALLOWED if risky.search(name)} == {
        "algorithm_kwargs", "output_dir", "model_name_or_path", "dataset_config",
    }  # fmt: skip


TRL_FILE = """
model_name_or_path: tiny
dataset_name: somebody/problems
reward_funcs: [accuracy_reward, my_rewards.brevity, rewards/mine.py:score]
outcome_reward: accuracy_reward
report_to: wandb
push_to_hub: true
output_dir: %s/elsewhere/run
learning_rate: 1e-6
num_generations: 4
per_device_train_batch_size: 8
use_cpu: true
bf16: false
model_init_kwargs: {attn_implementation: sdpa}
"""


def test_an_ordinary_config_of_trl_is_trusted(here, tmp_path, dew):
    (here / "r.yaml").write_text(TRL_FILE % tmp_path)
    code, out, err = dew("train", here / "r.yaml", "--dry-run", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["report_to"] == "wandb" and found["push_to_hub"] is True
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
    "bytes": bomb(20),
    "many lists": gzip.compress(b'{"answers":' + b"[" * 5_000_000),
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_a_small_file_that_unpacks_to_much_is_refused(tmp_path, monkeypatch, content):
    monkeypatch.setattr("dew.run.records.MAX_FILE", 1 << 24)
    path = tmp_path / "step-00000001.jsonl.gz"
    path.write_bytes(content)
    assert len(content) < 300_000
    with pytest.raises(RecordError, match="once decompressed"):
        read_records(path)


def test_data_that_unpack_to_much_are_refused(tmp_path, monkeypatch):
    from dew.tasks import files

    monkeypatch.setattr(files, "MAX_BYTES", 1 << 20)
    for name in ("train.jsonl.gz", "train.json.gz"):
        (tmp_path / name).write_bytes(bomb(3))
        with pytest.raises(ConfigError, match="one row per line"):
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


def test_a_pipe_and_a_device_are_refused_wherever_a_file_is_read(tmp_path):
    from dew.engines.trl.guide import RecordedGuide

    for suffix in ("yaml", "jsonl"):
        os.mkfifo(tmp_path / f"pipe.{suffix}")
        (tmp_path / f"zero.{suffix}").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        for read in (
            lambda path: read_run(f"{path}.yaml"),
            lambda path: task(f"{path}.jsonl").rows(4),
            lambda path: RecordedGuide(f"{path}.jsonl", None, 8),
        ):
            with pytest.raises(ConfigError, match="not a regular file"):
                read(tmp_path / name)


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


@pytest.mark.parametrize("damaged", ["config.json", "model.safetensors"])
def test_a_damaged_model_is_refused(damaged, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes()[: 100 if name == damaged else None])
    run = make_run({**SMALL, "model_name_or_path": str(tmp_path), "output_dir": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match="cannot be loaded"):
        launch.build_trainer(parse(run))


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


# ── the page's server ───────────────────────────────────────────────────────────────────────────────────────


def test_the_server_of_dew_view_outlives_idle_connections_and_checks_the_host(run, monkeypatch):
    monkeypatch.setattr(serve, "IDLE", 0.5)
    server, address = serve.make_server([run])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    idle = [socket.create_connection(server.server_address, timeout=20) for _ in range(200)]
    try:
        assert urlopen(f"{address}stamp", timeout=20).status == 200
        assert all(connection.recv(1) == b"" for connection in idle)  # closed by the server
        assert urlopen(Request(f"{address}stamp", headers={"Host": "localhost:99"})).status == 200  # a tunnel
        with pytest.raises(HTTPError):
            urlopen(Request(f"{address}stamp", headers={"Host": f"evil.example:{server.server_port}"}))
    finally:
        for connection in idle:
            connection.close()
        server.shutdown()
        server.server_close()
