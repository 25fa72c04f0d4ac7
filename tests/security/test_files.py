"""Runs, models and data from other people: a table of files, the command that reads them, and its one error."""

import gzip
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from attacks import FAMILIES
from dew.engines.lab import load_study
from dew.engines.trl import DewConfig, DewTrainer
from dew.engines.trl.checkpoints import find_problem, write_manifest
from dew.engines.trl.launch import build_trainer, parse
from dew.errors import ConfigError, RecordError
from dew.files import stay_inside, write_atomically
from dew.report import build
from dew.run import models
from dew.run.config import make_run
from dew.run.folder import RunFolder
from dew.run.records import AnswerRecord, GroupRecord

TINY = Path(__file__).parents[2] / "src/dew/tasks/data/tiny"
SMALL = {"model_name_or_path": "tiny", "task": "countdown", "num_generations": 4, "per_device_train_batch_size": 8,
         "use_cpu": True, "bf16": False, "problems": 16}  # fmt: skip
NESTED = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
PIPE, SECRET, ZERO = "a pipe", Path("../secret"), Path("/dev/zero")
EVAL, TRAIN, REPORT = (
    ("eval", "model", "--task", "countdown", "-n", "1", "-k", "1"),
    ("train", "r.yaml"),
    ("report", "run", "--out", "r.html"),
)


TRY_LOADING = models._try_loading


class InThisProcess:
    """As the process that tries a model, but without its limits and the seconds that it takes to start."""

    def __init__(self, *_, **__):
        self.kill = lambda: None

    def ask(self, request, limit):
        return models.load(json.loads(request)["folder"])


class Evil:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return open, ("canary", "w")


class Case(NamedTuple):
    place: str
    content: Any
    """Text, bytes, a pipe, a link, keys to change in a file of JSON, or an object to pickle."""
    words: tuple[str, ...]
    message: str
    code: int = 1


def bomb(megabytes: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([*(packer.compress(b" " * (1 << 20)) for _ in range(megabytes)), packer.flush()])


CODE = {f"AutoModel{kind}": "evil.X" for kind in ("", "ForCausalLM")} | {"AutoConfig": "evil.X"}
RECORD = {"prompt": "p", "answers": [{"tokens": ["a"], "reward": 1.0, "entropy": [1.0]}] * 2}
LINKED = ("config.yaml", "run.json", "metrics.jsonl", "records/step-00000002.jsonl.gz", "checkpoints")
READ = ("run.json", "metrics.jsonl", "alarms.jsonl", "scores.json", "records/step-00000003.jsonl.gz")
LIMITS = (HANGS, LARGE, WIDE, DEEP) = ("did not answer within|GiB of memory", "GiB of memory", "parameters", "nested")
slow = pytest.mark.slow
CASES = [
    # links, pipes and devices
    Case("x.jsonl", PIPE, ("train", "r.yaml", "--guide", "x.jsonl"), "not a regular file"),
    *(Case(f"run/{name}", SECRET, words, "leads out of the run's folder") for name in LINKED
      for words in (REPORT, ("explain", "run"), ("resume", "run"))),
    Case("run/model/notes.txt", SECRET, ("export", "run", "out"), "leads out of the run's folder"),
    Case("theirs/verl.yaml", SECRET, ("resume", "theirs"), "leads out"),
    *(Case(f"run/{name}", PIPE, REPORT, "pipe", 0) for name in READ),  # the rest is shown
    Case("theirs/trainer_state.json", PIPE, ("report", "theirs"), "pipe"),
    *(Case(f"x.{kind}", what, words, "not a regular file") for what in (PIPE, ZERO) for kind, words in
      (("yaml", ("train", "x.yaml")), ("jsonl", ("eval", "tiny", "--task", "x.jsonl", "--reward", "math")))),
    Case("model/tokenizer.json", PIPE, EVAL, "pipe or a device"),
    # files that unpack to much
    Case("run/records/step-00000001.jsonl.gz", bomb(20), ("explain", "run"), "once decompressed"),
    Case("run/records/step-00000001.jsonl.gz", gzip.compress(b"[" * 5_000_000), ("explain", "run"), "decompressed"),
    Case("x.jsonl.gz", bomb(3), ("eval", "tiny", "--task", "x.jsonl.gz", "--reward", "math"), "one row per line"),
    # damaged
    Case("run/run.json", NESTED, ("explain", "run/run.json"), "not a token record"),
    Case("run/grid.json", NESTED, REPORT, "not the JSON that dew writes"),
    Case("run/run.json", {"command": ["touch", "evil"], "cwd": "."}, ("resume", "run"), "not the output_dir"),
    Case("r.yaml", {**SMALL, "task": "a\0b"}, TRAIN, r"\\0 is not allowed"),
    Case("model/config.json", (TINY / "config.json").read_bytes()[:100], TRAIN, "cannot be loaded"),
    Case("model/model.safetensors", (TINY / "model.safetensors").read_bytes()[:100], TRAIN, "cannot be loaded"),
    Case("model/config.json", NESTED, EVAL, DEEP),
    # code and pickles
    Case("run/records/step-00000001.jsonl.gz", json.dumps({**RECORD, "algorithm": "evil.py:X"}), ("explain", "run"),
         "evil.py:X", 0),  # shown as recorded, without the code
    Case("model/config.json", {"auto_map": CODE, "model_type": "evil"}, EVAL, "cannot be loaded"),
    Case("model/config.json", {"auto_map": CODE, "model_type": "evil"}, TRAIN, "cannot be loaded|custom code|evil"),
    Case("model/tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.X", "evil.X"]}, "tokenizer_class": "X"},
         EVAL, "cannot be loaded"),
    *(Case("model/pytorch_model.bin", Evil(), words, "loaded|holds no|no file named") for words in (EVAL, TRAIN)),
    *(Case("r.yaml", {**SMALL, "verifier": "math", "task": None, "dataset_name": name}, TRAIN, "cannot be loaded")
      for name in (".", "evil.py")),
    # models that hang their loader or fill the memory
    pytest.param(*Case("model/tokenizer_config.json", {"chat_template": 2 * "{% for a in range(99999) %}"
                       + 2 * "{% endfor %}"}, EVAL, HANGS), marks=slow),
    pytest.param(*Case("model/tokenizer_config.json", {"chat_template": "{{ 'a' * 10000000000 }}"}, TRAIN, LARGE),
                 marks=slow),
    Case("model/config.json", {"intermediate_size": 10**9}, ("preflight", "r.yaml", "--answers", "0"), WIDE),
    pytest.param(*Case("model/config.json", {"num_hidden_layers": 10**6}, EVAL, HANGS), marks=slow),
    pytest.param(*Case("model/tokenizer.json", {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}] * 6}}, EVAL, HANGS), marks=slow),
    pytest.param(*Case("model/adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": str(TINY), "r": 4,
        "task_type": "CAUSAL_LM", "target_modules": r"(((\w|\.)+)+)+!"}, EVAL, HANGS), marks=slow),
]  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with somebody's run, model, config and Python file in it, and a secret beside it."""
    (tmp_path / "here").mkdir()
    (tmp_path / "secret").write_text("a secret of mine\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "SECONDS", 4.0)
    monkeypatch.setattr(models, "_try_loading", TRY_LOADING)
    monkeypatch.setattr(models, "MEMORY", 2 * 2**30)
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers asks; a run has nobody to ask
    run = RunFolder("run")
    run.write_run({"name": "stranger"})
    run.append_metrics({"step": 1, "reward": 0.5})
    answers = [AnswerRecord(["a"], c, float(c), entropy=[0.5], advantage=[1.0]) for c in (True, False)]
    run.write_records(1, [GroupRecord(1, 0, "p", answers)])
    for folder in ("run/model", "model"):
        shutil.copytree(TINY, folder)
    Path("evil.py").write_text("open('canary', 'w')\n")
    shutil.copy("evil.py", "model/evil.py")
    Path("r.yaml").write_text(json.dumps({**SMALL, "model_name_or_path": "./model", "output_dir": "out"}))
    return Path()


def put(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    old = json.loads(path.read_text()) if isinstance(content, dict) and path.is_file() else {}
    path.unlink(missing_ok=True)
    if content is PIPE:
        os.mkfifo(path)
    elif isinstance(content, Path):
        path.symlink_to(content.resolve())
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, Evil):
        torch.save({"weights": content}, path)
        (path.parent / "model.safetensors").unlink()
    else:
        path.write_text(json.dumps({**old, **content}) if isinstance(content, dict) else content)


@pytest.mark.parametrize(("place", "content", "words", "message", "code"), CASES, ids=range(len(CASES)))
def test_a_file_of_somebody_else_gets_one_error(here, dew, monkeypatch, place, content, words, message, code):
    monkeypatch.setattr("dew.run.records.MAX_FILE", 1 << 24)
    monkeypatch.setattr("dew.tasks.rows.MAX_BYTES", 1 << 20)
    if message not in LIMITS:
        monkeypatch.setattr(models, "_try_loading", lambda _: None)
    if message in (WIDE, DEEP):
        monkeypatch.setattr(models, "Process", InThisProcess)
    put(Path(place), content)
    found, out, err = dew(*words)
    said = " ".join((out + err).split())
    assert found == code and re.search(message, said), said
    assert not re.search(r"Traceback|(?:Recursion|Memory|Key|Type)Error", said) and "secret of mine" not in said
    assert all(c.isprintable() or c == "\n" for c in out + err)
    assert not Path("canary").exists() and not Path("model/canary").exists()
    assert Path("../secret").read_text() == "a secret of mine\n"


def test_the_canary_sings_where_pickles_are_loaded(here):
    put(Path("model/pytorch_model.bin"), Evil())
    torch.load("model/pytorch_model.bin", weights_only=False)
    assert Path("canary").exists()


def test_an_ordinary_model_passes_and_is_not_tried_again(here, monkeypatch):
    monkeypatch.setattr(models, "Process", InThisProcess)
    models.check_model("model", "model")
    monkeypatch.setattr(models, "Process", None)
    models.check_model("model", "model")
    put(Path("model/config.json"), {"hidden_act": "relu"})
    with pytest.raises(TypeError):  # changed: tried again
        models.check_model("model", "model")


def test_the_revision_that_is_loaded_is_the_one_that_is_tried(here, monkeypatch):
    asked = []

    def download(name, revision=None, **_):
        asked.append((name, revision))
        raise OSError

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    run = make_run({**SMALL, "model_name_or_path": "me/mine", "model_revision": "v2"}, source="r.yaml")
    for begin in (
        lambda: build_trainer(parse(run)),
        lambda: DewTrainer("me/mine", [len], DewConfig("out", use_cpu=True, model_init_kwargs={"revision": "v2"})),
    ):
        asked.clear()
        with pytest.raises((ConfigError, OSError)):
            begin()
        assert asked and set(asked) == {("me/mine", "v2")}


@pytest.mark.parametrize("name", ["dew_manifest.json", "trainer_state.json"])
def test_a_checkpoint_with_nested_json_is_damaged(here, name):
    Path("trainer_state.json").write_text("{}")
    write_manifest(here)
    assert find_problem(here) is None
    put(Path(name), NESTED)
    assert "cannot be read" in find_problem(here) or "has changed" in find_problem(here)
    if name == "trainer_state.json":
        write_manifest(here)
        assert "incomplete" in find_problem(here)


@pytest.mark.parametrize("facts", [{"seed": "x"}, {"learning_rate": 1e999}, {"arm": "\x1b[2J"}, {"warm_start": 1}])
def test_a_damaged_run_of_a_study_is_an_error_before_training(here, facts):
    put(Path("study/grid.json"), json.dumps({"settings": {}, "arms": ["dapo"], "sources": {}}))
    run = {"arm": "dapo", "seed": 0, "learning_rate": 1e-4, "warm_start": {"digest": "x"}}
    put(Path("study/dapo/run.json"), json.dumps(run))
    RunFolder("study/dapo").append_metrics({"step": 1, "accuracy": 0.5})
    assert len(load_study("study")) == 1
    put(Path("study/dapo/run.json"), facts)
    with pytest.raises(RecordError, match=r"study/dapo"):
        load_study("study")


def test_the_names_of_weights_reach_the_terminal_as_text(here, monkeypatch, dew):
    save_file({"\x1b[2J\x1b]0;owned\x07": torch.zeros(1)}, "model/model.safetensors", {"format": "pt"})
    monkeypatch.setattr(models, "_try_loading", lambda _: None)
    logging.getLogger("transformers").addHandler(handler := logging.StreamHandler(said := io.StringIO()))
    dew(*EVAL)
    logging.getLogger("transformers").removeHandler(handler)
    assert "[2J" in said.getvalue() and "\x1b[2J" not in said.getvalue() and "\x1b]0" not in said.getvalue()


def test_links_inside_a_run_are_fine(here):
    run = Path("run")
    (run / "latest").symlink_to((run / "model").absolute())
    Path("elsewhere").symlink_to(run)
    stay_inside(run)
    stay_inside(Path("elsewhere"))
    (run / "itself").symlink_to("itself")
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


@pytest.mark.parametrize("name", FAMILIES["paths"])
def test_names_with_paths_in_them_stay_names(here, name):
    """Names in run.json, records and tasks are shown; none becomes a path that is written."""
    before = set(here.rglob("*"))
    RunFolder("run").write_run({"name": name, "model": name})
    build([Path("run")])
    assert set(here.rglob("*")) - before == {Path("run/report.html"), Path("run/report.json")}


@pytest.mark.slow
def test_pickles_in_a_checkpoint_are_not_run(here):
    """Every file of a checkpoint that torch reads, one after the other, replaced by a pickle that makes a file."""
    settings = {**SMALL, "output_dir": "saved", "problems": 64, "max_completion_length": 16}
    settings |= {"max_steps": 3, "save_steps": 2, "gradient_checkpointing": False}
    Path("r.yaml").write_text(json.dumps(settings))

    def call(*words):
        return subprocess.run([sys.executable, "-m", "dew", *words], capture_output=True, text=True, check=False)

    assert call("train", "r.yaml").returncode == 0
    shutil.rmtree("saved/model")
    shutil.rmtree("saved/checkpoint-3", ignore_errors=True)
    RunFolder("saved").write_run({"status": "running"})
    files = [p for p in Path("saved/checkpoint-2").iterdir() if p.suffix in (".pt", ".pth", ".bin")]
    assert {"optimizer.pt", "scheduler.pt", "training_args.bin", "dew_state_0.pt"} <= {p.name for p in files}
    for path in files:
        shutil.copytree("saved", "again")
        torch.save({"x": Evil()}, Path("again/checkpoint-2") / path.name)
        call("resume", "again")
        assert not Path("canary").exists(), path.name
        shutil.rmtree("again")
