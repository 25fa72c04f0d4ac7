"""`dew demo`, and training in child processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import typer

from dew.algorithms import get_algorithm
from dew.cli import demo
from dew.cli.flags import recipe_file
from dew.cli.runs import Child, run_all
from dew.errors import ConfigError, EngineError
from dew.run.config import read_run
from dew.run.folder import RunFolder, lock


def test_what_many_seeds_say_is_read_from_the_file():
    def measured(what, dapo, dew):
        pairs = [("dapo", seed, x) for seed, x in enumerate(dapo)] + [("dew", seed, x) for seed, x in enumerate(dew)]
        return {"what": what, "runs": [{"arm": a, "seed": seed, "scores": {"area": x}} for a, seed, x in pairs]}

    (line,) = demo.many_seeds([measured("Three seeds", [0.1, 0.2, 0.3], [0.2, 0.2, 0.5])])  # (0.1 + 0 + 0.2) / 3 = 0.1
    assert line.startswith("Three seeds, dew − dapo: +0.100 [") and line.endswith("(ahead in 2 of 3).")


def test_both_runs_of_the_demo_differ_in_the_algorithm_alone():
    settings = read_run(recipe_file(demo.RECIPE)).settings["algorithm_kwargs"]
    baseline, rule = (get_algorithm(name, **settings) for name in demo.DEMO_RUNS)
    assert not baseline.dynamic_sampling  # else one of them could see more answers
    assert (baseline.ratio, baseline.reduce) == (rule.ratio, rule.reduce)
    ours, theirs = asdict(rule), asdict(baseline)
    shared = ours.keys() & theirs.keys()
    assert {"clip_low", "clip_high", "overlong"} <= shared and all(ours[key] == theirs[key] for key in shared)


# ── Child processes ───────────────────────────────────────────────────────────────────────────────────────
DONE = """
import sys, pathlib
from dew.run.folder import RunFolder, lock
RunFolder(sys.argv[1]).write_run({"status": "done"})
"""


def child(folder: Path, code: str) -> Child:
    return Child([sys.executable, "-c", code, str(folder)], folder)


def test_at_most_so_many_children_run_at_a_time(tmp_path, monkeypatch):
    children = [child(tmp_path / str(i), DONE) for i in range(3)]
    at_once, ended = [], []

    real = Child.start

    def start(self):
        real(self)
        at_once.append(sum(c.process is not None and c.process.returncode is None for c in children))

    monkeypatch.setattr(Child, "start", start)
    run_all(children, 2, ended=lambda child: ended.append(child.folder.name))
    assert max(at_once) == 2 and sorted(ended) == ["0", "1", "2"]
    assert all(RunFolder(c.folder).run()["status"] == "done" for c in children)


def test_a_failing_child_shows_its_log_and_stops_the_others(tmp_path):
    bad = child(tmp_path / "bad", "print('0%|  | 0/2 [00:00<?, ?it/s]'); raise SystemExit('error: no such model')")
    slow = child(tmp_path / "slow", "import time; time.sleep(600)")
    with pytest.raises(EngineError, match="bad ended with exit code 1") as caught:
        run_all([slow, bad], 2)
    assert "error: no such model" in str(caught.value) and "it/s" not in str(caught.value)
    assert str(bad.log) in str(caught.value)
    assert slow.process is not None and slow.process.poll() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9"),
        (DONE.replace("done", "stopped"), "stopped before it finished"),
    ],
)
def test_a_child_that_is_killed_or_stopped_is_not_done(tmp_path, code, says):
    with pytest.raises(EngineError, match=says) as caught:
        run_all([child(tmp_path / "one", code)], 1, advice="Resume it.")
    assert str(caught.value).endswith("Resume it.")


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_all_children(tmp_path, number):
    children = [child(tmp_path / str(i), "import time; time.sleep(600)") for i in range(2)]

    def interrupt():
        while not all(c.process for c in children):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    with pytest.raises(typer.Abort):
        run_all(children, 2)
    assert all(c.process is not None and c.process.poll() is not None for c in children)


def test_children_of_a_killed_parent_keep_the_folder_locked(tmp_path):
    with lock(tmp_path):
        orphan = child(tmp_path / "run", "import time; time.sleep(600)")
        orphan.start()
    assert orphan.process is not None
    try:
        with pytest.raises(ConfigError, match="in use"), lock(tmp_path):
            pass
    finally:
        orphan.process.kill()
        orphan.process.wait()
    with lock(tmp_path):
        pass


@pytest.mark.parametrize(
    ("status", "model", "scores", "finished"),
    [
        ("done", True, [], True),
        ("done", True, ["before", "after"], True),
        ("done", True, ["before"], False),
        ("done", True, [{"damaged": 1}], False),
        ("done", False, [], False),
        ("stopped", True, [], False),
    ],
)
def test_a_run_is_finished_when_it_is_evaluated(tmp_path, status, model, scores, finished):
    folder = RunFolder(tmp_path)
    folder.write_run({"status": status})
    if model:
        (tmp_path / "model").mkdir()
    if scores:
        folder.write_scores([{"when": when} for when in scores])
    assert folder.finished() is finished


# ── The whole ─────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.slow
def test_the_demo_as_a_newcomer_types_it(tmp_path):
    words = [sys.executable, "-m", "dew", "demo", "--steps", "8", "--out", "out"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("What this does", "dapo-seed0: step 8/8", "dew-seed0: step 8/8", "one run each", "dew compare"):
        assert said in done.stdout
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    again = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and "2 finished, 0 to do" in again.stdout
    other = subprocess.run([*words, "--steps", "9"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert other.returncode == 1 and "other settings (max_steps 8 and 9)" in other.stderr
