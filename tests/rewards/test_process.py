"""The worker pool of the math verifier: hard limits, usable from anywhere, no processes left behind."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dew.errors import RewardError
from dew.rewards import process
from dew.rewards.math import math_verdict, math_verdicts, workers
from dew.rewards.process import worker_count
from hostile import hostile
from processes import gone, wait_until_busy

pytest.importorskip("math_verify")
PATIENT = 60.0
ENDLESS = r"\boxed{\int_0^1 \sin(x^{x^x})^{99} \cos(\sqrt{x^{17}+x+1}) dx}"


@pytest.fixture(autouse=True, scope="module")
def _no_processes_left():
    yield
    workers.close()


def statuses(*completions: str, limit: float = PATIENT, gold: str = "x+1") -> list[str]:
    return [v.status for v in math_verdicts(completions, [gold] * len(completions), timeout=limit)]


# ── Time limits ───────────────────────────────────────────────────────────────────────────────────────────
def test_an_endless_answer_times_out_and_the_others_are_checked():
    checked = ["timeout", "correct", "timeout"]
    assert any(statuses(ENDLESS, r"\boxed{1+x}", ENDLESS, limit=s) == checked for s in (1, 5, 20))  # if others compute
    assert statuses(r"\boxed{1+x}", r"\boxed{2+x}") == ["correct", "wrong"]


@pytest.mark.parametrize(
    "text",
    ["10^10^10", "9!!!!!", "7^{9999999}", "(" * 500 + "1" + ")" * 500, "9" * 5000, "x" * 50_000, "." * 3900 + "y"],
)
def test_huge_expressions_are_not_parsed(text: str):
    workers.start()
    start = time.thread_time()
    assert statuses(rf"\boxed{{{text}}}", limit=PATIENT) == ["unparsable"]
    assert time.thread_time() - start < 0.3  # in this process


def test_hostile_strings_get_a_status():
    completions, golds = zip(*hostile(40, seed=1), strict=True)
    verdicts = math_verdicts(completions, golds, timeout=0.2)
    assert {verdict.status for verdict in verdicts} <= {"correct", "wrong", "unparsable", "timeout"}


def test_the_reply_of_a_process_that_has_ended_is_read():
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b"3\n")
    assert process.Channel(ours).ask(b"", 1) == 3


# ── Threads, forks, signals ───────────────────────────────────────────────────────────────────────────────
def test_from_many_threads_at_once():
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda i: math_verdict(rf"\boxed{{x+{i % 2 + 1}}}", "1+x", timeout=PATIENT), range(24))
    assert list(found) == [True, False] * 12


def _in_child(queue) -> None:
    queue.put((os.getpid(), math_verdict(r"\boxed{1+x}", "x+1", timeout=PATIENT), workers._server.popen.pid))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_daemonic_child_has_its_own_workers(method: str):
    assert statuses(r"\boxed{1+x}") == ["correct"]  # the parent's workers are running when it forks
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,), daemon=True)
    child.start()
    pid, correct, server = queue.get(timeout=120)
    child.join(60)
    assert correct and pid != os.getpid() and server != workers._server.popen.pid
    assert gone(server)
    assert statuses(r"\boxed{1+x}") == ["correct"]  # and the parent's workers still run


# ── No processes left behind ──────────────────────────────────────────────────────────────────────────────
SCRIPT = """
import sys
from dew.rewards.math import math_verdicts, workers
math_verdicts([r"\\boxed{x+1}", r"\\boxed{x+2}"], ["1+x"] * 2, timeout=60)
server = workers.start().popen.pid
print(server, *open(f"/proc/{server}/task/{server}/children").read().split(), flush=True)
if sys.argv[1] == "kill":
    math_verdicts([ENDLESS] * 2, ["1+x"] * 2, timeout=60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("way", ["end", "kill"])
def test_no_process_outlives_its_parent(way: str):
    code = SCRIPT.replace("ENDLESS", repr(ENDLESS))
    process = subprocess.Popen([sys.executable, "-c", code, way], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) >= 2
    if way == "kill":
        wait_until_busy(pids[-1])  # the answers are being parsed
        process.kill()
    process.wait(60)
    assert gone(*pids)


def test_workers_and_a_server_that_were_killed_are_replaced():
    assert statuses(r"\boxed{1+x}") == ["correct"]
    for worker in workers._idle:
        worker.socket.shutdown(2)
    assert statuses(r"\boxed{1+x}", r"\boxed{2+x}") == ["correct", "wrong"]
    os.kill(workers._server.popen.pid, signal.SIGKILL)
    workers._server.popen.wait()
    for worker in workers._idle:
        worker.close()
    workers._idle.clear()
    assert statuses(r"\boxed{1+x}", r"\boxed{2+x}") == ["correct", "wrong"]


def test_workers_start_when_they_are_needed():
    workers.close()
    assert statuses(r"\boxed{42}", gold="42") == ["correct"]
    assert workers._server is None  # plain numbers need no parser
    workers.start()
    threads = threading.active_count()
    statuses(r"\boxed{1+x}", r"\boxed{2+x}")
    assert threading.active_count() == threads


# ── Edges ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_missing_math_verify_is_reported_with_the_remedy(monkeypatch):
    monkeypatch.setattr(process, "_BOOT", "import sys; sys.modules['math_verify'] = None" + process._BOOT)
    workers.close()
    with pytest.raises(RewardError, match=r"math_verify.*Install math-verify: pip install") as error:
        statuses(r"\boxed{1+x}")
    assert "pip install" in error.value.problems[0].remedy
    assert workers._server is None


def test_workers_do_not_import_torch():
    code = "import sys, dew.rewards.latex; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_number_of_workers(monkeypatch):
    monkeypatch.setattr(process, "cores", lambda: 12)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert worker_count() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert worker_count() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert worker_count() == 1
