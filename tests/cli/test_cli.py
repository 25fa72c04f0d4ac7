"""The command `dew` as its user types it. Commands that train are in test_train.py."""

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import typer

from dew.cli import console, runs
from dew.cli.app import app
from dew.compare.sampling import Sampled, Sampling
from dew.compare.scores import ScoredProblem as Problem
from dew.compare.scores import Scores
from dew.errors import Problem as Trouble
from dew.preflight.machine import PACKAGES
from dew.rewards import Verdict
from dew.run.config import read_run
from dew.run.folder import RunFolder
from dew.run.records import AnswerRecord, GroupRecord, write_records


def group(step=3, number=0):
    """Two answers of two tokens: ✓ H = 1, 3 and ✗ H = 1, 2."""
    answers = [
        AnswerRecord(tokens=["3+5", "=8"], correct=True, reward=1.0, entropy=[1.0, 3.0], advantage=[1.0, 0.5]),
        AnswerRecord(tokens=["3-\x1b[31m5", "=\u202e8"], correct=False, reward=0.0, entropy=[1.0, 2.0]),
    ]
    return GroupRecord(step=step, group=number, prompt="3,5>8:", gold="8", answers=answers)


# ---- help --------------------------------------------------------------------------------------
LIGHT = """
import contextlib, io, sys
import dew

TRAINERS = {"transformers", "trl", "datasets", "peft", "accelerate", "verl", "vllm"}
HEAVY = TRAINERS | {"torch", "triton", "numpy", "scipy"}

def imported(packages):
    return sorted(packages & set(sys.modules))

def run(*words, says, without):
    from dew.cli import main
    sys.argv = ["dew", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    print(code, says in out.getvalue(), imported(without))

print(imported(HEAVY))
run("--help", says="Train:", without=HEAVY)
run("train", "typo.yaml", says="→ ", without=HEAVY)
run("train", "good.yaml", "--learnin_rate", "1", says="→ ", without=HEAVY)
run("train", "engine.yaml", says="→ ", without=HEAVY)
run("doctor", says="supported", without=TRAINERS)
run("train", "paper/qwen2.5-7b", "--engine", "verl", "--dry-run", says="data.train_batch_size=128", without=TRAINERS)
"""


def test_heavy_packages_are_imported_when_they_are_needed(tmp_path):
    """No torch for help and for a typing error in a recipe; no trainer for `dew doctor` and for a dry run on verl."""
    for name, line in {"good": "", "typo": "learning_rat: 1e-6", "engine": "engine: openrlhf"}.items():
        (tmp_path / f"{name}.yaml").write_text(f"model_name_or_path: tiny\ntask: countdown\n{line}\n")
    done = subprocess.run([sys.executable, "-c", LIGHT], cwd=tmp_path, capture_output=True, text=True, check=True)
    first, *runs, doctor, dry_run = done.stdout.splitlines()
    assert first == "[]" and runs == ["0 True []", *["1 True []"] * 3] and dry_run == "0 True []"
    assert doctor in ("0 True []", "1 True []")  # by what is installed


def test_doctor_lists_every_package(dew):
    code, out, _ = dew("doctor", "--json")
    value = json.loads(out)
    assert code == (0 if value["ok"] else 1)
    assert [row["package"] for row in value["versions"]] == list(PACKAGES)
    assert {check["status"] for check in value["checks"]} <= {"ok", "warning", "failed"}


COMMANDS = [
    "demo", "recipes", "train", "resume", "preflight", "export", "eval", "compare", "lab", "report", "view",
    "explain", "doctor",
]  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(dew, name):
    code, out, _ = dew(name, "--help")
    assert code == 0 and "Usage: dew" in out and len(out.splitlines()) < 80


def test_without_arguments_it_shows_its_help_and_no_line_is_cut():
    done = subprocess.run([sys.executable, "-m", "dew"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr
    assert re.findall(r"^  (\w+)  .*[^.]\.$", done.stdout, flags=re.MULTILINE) == COMMANDS
    group = typer.main.get_command(app)
    assert set(group.commands) == set(COMMANDS), "every command is in a section of the help"


# ---- errors ------------------------------------------------------------------------------------
def test_ctrl_c_is_said(dew, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("dew.engines.lab.study", interrupted)
    code, _, err = dew("lab", "dapo")
    assert code == 130 and err == "interrupted\n"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["trian"], 2, "No such command"),
        (["eval"], 2, "Missing argument 'model'.\n→ See `dew eval --help`"),
        (["train"], 1, "dew train FILE.yaml"),
        (["train", "nowhere.yaml"], 1, "There is no config file or recipe 'nowhere.yaml'"),
        (["train", "tiny/cuntdown"], 1, "Did you mean 'tiny/countdown'"),
        (["train", "a_folder"], 1, "a_folder is a folder, not a config file"),
        (["train", "tiny/countdown", "--output_dir", "a_file"], 1, "a_file is a file, not a folder"),
        (["train", "tiny/countdown", "--output_dir", "."], 1, "Choose another folder.\n"),
        (["train", "tiny/countdown", "--alpha2", "1"], 1, "algorithm_kwargs: {alpha2"),
        (["train", "tiny/countdown", "--model_name_or_path", "nowhere"], 1, "model_name_or_path: 'nowhere' cannot be"),
        (["compare", "tiny/countdown", "--algorithms", "gtpo,gapo"], 1, "gapo"),
        (["compare", "tiny/countdown", "--learning_rate", "3e-5,"], 1, "learning_rate: invalid float value: '3e-5,'."),
        (["compare", "tiny/countdown", "--num_generations", "7"], 1, "not a whole number of groups of 7."),
        (["train", "a run"], 1, "To resume: dew resume 'a run';"),
        (["train", "tiny/countdown", "--output_dir", "a run"], 1, "Resume the run (dew resume 'a run'), choose"),
        (["compare", "a_run", "a_run"], 1, "to compare runs: dew report RUN RUN"),
        (["compare", "tiny/countdown", "dapo", "gtpo"], 1, "→ Write --algorithms dapo,gtpo."),
        (["resume", "nowhere"], 1, "nowhere: no such folder"),
        (["resume", "a_folder"], 1, "not the output_dir of a run"),
        (["train", "tiny/countdown", "--model_name_or_path"], 1, "Write --model_name_or_path NAME."),
        (["train", "tiny/countdown", "--reward_funcs", "acuracy_reward"], 1, "Did you mean 'accuracy_reward'?"),
        (["export", "nowhere", "there"], 1, "nowhere does not exist.\n→ Give the folder of a run with a model."),
        (["eval", "a_folder"], 1, "a_folder' is not a model folder. It has no config.json"),
        (["eval", "one.jsonl"], 1, "not a file of scores that `dew eval --keep` wrote.\n→ To evaluate a model"),
        (["eval", "one.json"], 1, "one.json: cannot be read (No such file or directory).\n→ Did you mean 'one.jsonl'?"),
        (["eval", "tiny", "--keep", "a_folder"], 1, "a_folder already exists"),
        (["eval", "tiny", "--reward", "maths"], 1, "Did you mean 'math'? Or name your own: module:function"),
        (["eval", "tiny", "--task", "empty.jsonl", "--reward", "math"], 1, "empty.jsonl: no rows."),
        (["eval", "tiny", "--task", "one.jsonl", "--reward", "math"], 1, "one: too few problems (1) to hold out"),
        (["eval", "tiny", "--options", "{gredy: true}"], 1, "Did you mean 'greedy'?"),
        (["eval", "tiny", "--options", "{top_p: high}"], 1, "every value must be a number"),
        (["eval", "tiny", "--options", "{threshold: .nan}"], 1, "every value must be a number"),
        (["eval", "tiny", "--settings", "{numbers: 3.5}"], 1, "countdown numbers=3.5 is not a whole number."),
        (["eval", "tiny", "--task", "sums", "--settings", "{numbers: 0}"], 1, "numbers=0, largest=99: give at least"),
        (["eval", "tiny", "--task", "sums", "-n", 1], 1, "`dew lab`: --settings '{task_settings: {template: plain}}'"),
        (["compare", "tiny/countdown", "--out", "a_run"], 1, "Choose another folder with --out.\n"),
        (["report"], 1, "dew report runs/NAME"),
        (["report", ".", "--records", "x.jsonl"], 1, "run folders or --records, not both"),
        (["train", "tiny/countdown", "stray"], 1, "'stray' is not understood"),
        (["train", "tiny/countdown", "trainer.nnodes=2"], 1, "--engine verl"),
        (["eval", "tiny", "--engine", "sglang"], 2, "is not one of 'transformers', 'vllm'"),
        (["eval", "tiny", "--settings", "numbers"], 1, "not a mapping"),
        (["explain", "nowhere.jsonl"], 1, "error: nowhere.jsonl: no such file.\n"),
        (["explain", "a_folder"], 1, "a_folder: not the folder of a run."),
    ],
)
def test_mistakes_get_one_clear_message(dew, words, code, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "a_run/config.yaml",
        "a run/run.json",
        "a run/metrics.jsonl",
        "a_folder/note.txt",
        "a_file",
        "empty.jsonl",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "one.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    got, out, err = dew(*words)
    assert got == code and says in err and "Traceback" not in err + out and "None" not in out
    assert len(err.splitlines()) <= console.MAX_ERROR_LINES + 1


def test_an_error_shows_each_problem_and_its_remedy(capsys):
    console.show_error([Trouble("a: 1 is bad.", "It is odd.", "Write 2."), Trouble("b is missing.")], "my.yaml")
    assert capsys.readouterr().err == "error: my.yaml:\n  a: 1 is bad. It is odd.\n  → Write 2.\n  b is missing.\n"


# ---- eval --------------------------------------------------------------------------------------
def test_kept_answers_are_compared_without_their_models(dew, tmp_path):
    """Two problems, two answers each: 2 of 4 correct against 1 of 4."""
    for name, correct in (("a", [2, 0]), ("b", [1, 0])):
        verdicts = [[Verdict("correct")] * n + [Verdict("wrong")] * (2 - n) for n in correct]
        problems = [Problem(f"{i}?", "1", [Sampled("x", 1, False)] * 2, found) for i, found in enumerate(verdicts)]
        Scores("sums", name, Sampling(k=2), problems, 1.0, scored_by="math").write(tmp_path / f"{name}.json")
    code, out, err = dew("eval", tmp_path / "a.json", "--vs", tmp_path / "b.json", "--json")
    found = json.loads(out)
    assert code == 0 and not err
    assert found["model"]["scores"]["mean@2"]["value"] == 0.5 and found["vs"]["scores"]["mean@2"]["value"] == 0.25
    assert found["differences"]["mean@2"]["value"] == -0.25
    _, out, _ = dew("eval", tmp_path / "a.json", "--vs", tmp_path / "b.json")
    assert "-0.250 [" in out and "b.json is within noise of" in out


# ---- recipes -----------------------------------------------------------------------------------
def test_recipes_are_listed_and_copied(dew, tmp_path):
    code, listed, _ = dew("recipes")
    assert code == 0 and "tiny/countdown" in listed
    code, _, _ = dew("recipes", "copy", "tiny/countdown", tmp_path)
    assert code == 0 and read_run(tmp_path / "countdown.yaml").task == "countdown"
    code, _, err = dew("recipes", "copy", "tiny/countdown", tmp_path)
    assert code == 1 and "already exists" in err


# ---- explain -----------------------------------------------------------------------------------
def test_explain_shows_a_group(dew, tmp_path):
    write_records(tmp_path, 3, [group()])
    code, out, _ = dew("explain", tmp_path)
    assert code == 0 and "✓ correct   advantage +0.500 to +1.000" in out and "✗ wrong" in out
    assert out.count("3+5=8") == 1
    write_records(tmp_path, 3, [replace(group(), answers=[AnswerRecord([f" {i}" for i in range(1000)], True, 1.0)])])
    words = dew("explain", tmp_path)[1].split()
    assert words[words.index("199") :][:5] == ["199", "…", "600", "tokens", "…"] and words[-201:-199] == ["…", "800"]
    assert "\x1b[31m" not in out and "\u202e" not in out  # what a model wrote reaches the terminal as plain text


def test_explain_shows_what_the_run_recorded(dew, tmp_path):
    """Its algorithm and advantages; the most telling group of all steps; tokens of the wrong sign."""
    dull, telling = group(), group(number=1)
    recorded = [replace(telling.answers[0], advantage=[0.9, 0.1]), replace(telling.answers[1], advantage=[-0.5, 0.25])]
    telling = replace(telling, answers=recorded, algorithm="gtpo")
    write_records(tmp_path / "mine", 3, [dull, telling])
    write_records(tmp_path / "mine", 5, [replace(dull, step=5)])
    code, out, _ = dew("explain", tmp_path / "mine", "--step", 5)
    assert code == 0 and "step 5, group 0" in out
    code, out, _ = dew("explain", tmp_path / "mine")
    assert code == 0 and "group 1" in out and "advantages of gtpo:" in out and "gtpo +0.100 to +0.900" in out
    assert "1 of the wrong sign" in out and "±0.900" in out
    assert "Choose one of: 0." in dew("explain", tmp_path / "mine", "--step", 5, "--group", 7)[2]
    RunFolder(tmp_path / "mine").write_run({"name": "mine"})
    code, _, err = dew("explain", tmp_path)
    assert code == 1 and f"Give a run that has some, e.g. dew explain {tmp_path / 'mine'}\n" in err


def test_explain_names_the_runs_of_a_lab_that_have_records(dew, tmp_path):
    for seed in (0, 1):
        RunFolder(tmp_path / "t" / f"dew-seed{seed}").write_run({"engine": "lab", "seed": seed})
    write_records(tmp_path / "t" / "dew-seed0", 1, [group()])
    for given in (tmp_path, tmp_path / "t" / "dew-seed1"):
        code, _, err = dew("explain", given)
        assert code == 1 and f"e.g. dew explain {tmp_path / 't' / 'dew-seed0'}\n" in err


def test_explain_says_how_a_run_of_trl_alone_gets_records(dew, tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text('{"log_history": [{"step": 1, "reward": 0.5}]}')
    assert "dew.watch(trainer)" in dew("explain", tmp_path)[2]
    RunFolder(tmp_path).write_run({"name": "mine"})
    assert "records_every" in dew("explain", tmp_path)[2]


def test_explain_ignores_advantages_that_are_null_in_the_records(dew, tmp_path):
    """Of a token that does not train, and of one that does."""
    null = float("nan")
    given = {"live": [False, True, True, True], "entropy": [null, 1.0, 2.0, null], "advantage": [null, 0.9, 0.1, null]}
    write_records(tmp_path, 1, [replace(group(), answers=[AnswerRecord(list("abcd"), True, 1.0, **given)])])
    code, out, _ = dew("explain", tmp_path)
    assert code == 0 and "±0.900" in out and "advantage +0.100 to +0.900" in out and "largest: 'b' +0.900" in out
    assert "entropy 1 to 2" in out and "nan" not in out


def test_explain_says_that_there_are_no_advantages(dew, tmp_path):
    bare = [replace(answer, advantage=None) for answer in group().answers]
    write_records(tmp_path, 1, [replace(group(), answers=bare)])
    code, out, _ = dew("explain", tmp_path)
    assert code == 0 and "no advantages of the run were recorded" in out and "full colour" not in out


# ---- a terminal ---------------------------------------------------------------------------------
PTY = """
import sys
from dew.cli.console import out, show_markdown
out.print("Words are never cut in two, and a path stays whole: /" + "long/" * 20)
show_markdown("gtpo is ahead.\\n\\n"
              "| difference | seeds | mean accuracy in training | accuracy at the end of training | p |\\n"
              "| --- | --- | --- | --- | --- |\\n"
              "| gtpo(placebo=True) - dapo(credit=maxrl) | 8 | **+0.020 [+0.016, +0.024]** | +0.001 [-0.1, +0.1] |  |")
"""


def test_a_terminal_wraps_at_words_and_fits_tables():
    main, child = os.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"} | {"COLUMNS": "80"}
    process = subprocess.Popen([sys.executable, "-c", PTY], stdout=child, stderr=child, env=environment)
    os.close(child)
    shown = b""
    with suppress(OSError):  # the end of a terminal
        while more := os.read(main, 65536):
            shown += more
    os.close(main)
    assert process.wait() == 0
    text = shown.decode()
    assert "·" not in text
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "").splitlines()
    assert "Words are never cut in two, and a path stays whole:" in [line.strip() for line in lines]
    assert "/" + "long/" * 20 in lines
    table = lines[lines.index("gtpo is ahead.") :]
    assert max(map(len, table)) <= 80 and any("mean accuracy in training" in x and "+0.024]" in x for x in table)
    assert table[2].strip() == "gtpo(placebo=True) - dapo(credit=maxrl)"  # on a line of its own, in one piece
    assert "p" not in [line.strip() for line in table]  # has no value


# ---- how a run is going -------------------------------------------------------------------------
def test_a_view_follows_a_run_as_it_grows(tmp_path):
    folder, view = RunFolder(tmp_path), runs.RunView(tmp_path)
    assert view.poll() == [] and view.seconds_left is None
    folder.write_run({"steps": 10})
    for step, known in ((1, {"entropy": 0.3}), (2, {})):
        metrics = {"time": 100.0 + 2 * step, "accuracy": 0.1 * step, "tokens_per_second": 5.0, "grad_norm": 0.0}
        folder.append_metrics({"step": step, **metrics, **known})
    assert len(view.poll()) == 2 and view.poll() == []
    assert view.step == 2 and view.seconds_left == pytest.approx(8 * 2)
    assert "step 2/10  accuracy 0.200  tokens/s 5  00:16 left" in view.line()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "rew')  # half a line: not yet
    assert view.poll() == []
    folder.clear(whole=False)
    folder.append_metrics({"step": 1, "accuracy": 0.7})  # resumed without a checkpoint: it starts again
    view.poll()
    assert "step 1/10  accuracy 0.700" in view.line()


def test_progress_is_plain_lines(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.write_run({"steps": 5})
    folder.append_metrics({"step": 2, "accuracy": 0.1})  # before the run was killed and resumed from step 1
    view = runs.RunView(tmp_path)
    view.label = "mine"
    with runs.followed([view], every=2):
        assert view.step == 2 and view.seconds_left is None
        folder.write_run({"steps": 6})  # resumed with a larger max_steps
        folder.append_metrics({"step": 2, "accuracy": 0.5})
        folder.append_alarm({"step": 2, "message": "Entropy fell.", "remedy": "Lower the rate."})
        while view.latest["accuracy"] < 0.5:
            time.sleep(0.01)
        folder.append_metrics({"step": 2, "seconds": 9.0})  # more about the same step
        folder.append_metrics({"step": 3, "accuracy": 0.6})
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["mine: step 2/6  accuracy 0.500", "⚠ mine step 2: Entropy fell. Lower the rate."]
