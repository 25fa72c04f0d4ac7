"""The processes behind verdicts: limits that hold, from anywhere, and nothing left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dew.errors import ConfigError, RewardError
from dew.rewards import pool as pools
from dew.rewards.math import math_verdict, math_verdicts
from hostile import hostile, measure

pytest.importorskip("math_verify")
PATIENT = 60.0
ENDLESS = r"\boxed{\int_0^1 \sin(x^{x^x})^{99} \cos(\sqrt{x^{17}+x+1}) dx}"


@pytest.fixture(autouse=True, scope="module")
def _no_processes_left():
    yield
    pools.shutdown()


def statuses(*completions: str, limit: float = PATIENT, gold: str = "x+1") -> list[str]:
    return [v.status for v in math_verdicts(completions, [gold] * len(completions), timeout=limit)]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: list[int], patience: float = 90.0) -> bool:
    end = time.monotonic() + patience
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


# Limits


def test_what_does_not_end_is_ended_and_the_next_is_judged():
    assert statuses(ENDLESS, limit=0.3) == ["timeout"]
    assert statuses(r"\boxed{1+x}", r"\boxed{2+x}") == ["correct", "wrong"]


def test_an_endless_answer_does_not_hold_up_its_neighbours():
    assert statuses(ENDLESS, r"\boxed{1+x}", ENDLESS, limit=10)[1] == "correct"


@pytest.mark.parametrize(
    "text", ["10^10^10", "9!!!!!", "7^{9999999}", "(" * 500 + "1" + ")" * 500, "9" * 5000, "x" * 50_000]
)
def test_the_astronomic_is_not_even_read(text: str):
    assert statuses(rf"\boxed{{{text}}}", limit=PATIENT) == ["unparsable"]


def test_hostile_strings_end_with_a_status():
    for _, completion, gold in hostile(40, seed=1):
        (verdict,) = math_verdicts([completion], [gold], timeout=0.2)
        assert verdict.status in ("correct", "wrong", "unparsable", "timeout")


@pytest.mark.slow
def test_no_verdict_on_ten_thousand_hostile_strings_outlasts_its_limit_by_a_second():
    found = measure(10_000, limit=0.5, threads=4)
    print(found)
    assert found["longest s"] <= 0.5 + 1


# From anywhere


def test_from_many_threads_at_once():
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda i: math_verdict(rf"\boxed{{x+{i % 2 + 1}}}", "1+x", timeout=PATIENT), range(24))
    assert list(found) == [True, False] * 12


def test_signals_of_the_asking_process_are_left_alone():
    before = signal.getsignal(signal.SIGALRM)
    statuses(r"\boxed{1+x}")
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def _in_child(queue) -> None:
    queue.put((os.getpid(), math_verdict(r"\boxed{1+x}", "x+1", timeout=PATIENT), pools.pool()._nursery.pid))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_from_a_daemonic_child_with_a_pool_of_its_own(method: str):
    assert statuses(r"\boxed{1+x}") == ["correct"]  # the parent's pool is up when it forks
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,), daemon=True)
    child.start()
    pid, correct, nursery = queue.get(timeout=120)
    child.join(60)
    assert correct and pid != os.getpid() and nursery != pools.pool()._nursery.pid
    assert gone([nursery])
    assert statuses(r"\boxed{1+x}") == ["correct"]  # and the parent's is still up


# Nothing left behind

SCRIPT = """
import sys
from dew.rewards.math import math_verdicts
from dew.rewards.pool import pool
math_verdicts([r"\\boxed{x+1}", r"\\boxed{x+2}"], ["1+x"] * 2, timeout=60)
nursery = pool()._nursery.pid
print(nursery, *open(f"/proc/{nursery}/task/{nursery}/children").read().split(), flush=True)
if sys.argv[1] == "kill":
    math_verdicts([ENDLESS] * 2, ["1+x"] * 2, timeout=60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("way", ["end", "kill"])
def test_no_process_outlives_the_one_that_asked(way: str):
    code = SCRIPT.replace("ENDLESS", repr(ENDLESS))
    process = subprocess.Popen([sys.executable, "-c", code, way], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) >= 2
    if way == "kill":
        time.sleep(1)  # in the middle of verdicts without end
        process.kill()
    process.wait(60)
    assert gone(pids)


def test_a_worker_that_was_killed_is_replaced():
    assert statuses(r"\boxed{1+x}") == ["correct"]
    for worker in pools.pool()._idle:
        worker.channel.shutdown(2)
    assert statuses(r"\boxed{1+x}", r"\boxed{2+x}") == ["correct", "wrong"]


def test_a_nursery_that_was_killed_is_replaced():
    assert statuses(r"\boxed{1+x}") == ["correct"]
    pool = pools.pool()
    os.kill(pool._nursery.pid, signal.SIGKILL)
    pool._nursery.wait()
    for worker in pool._idle:
        worker.close()
    pool._idle.clear()
    assert statuses(r"\boxed{1+x}", r"\boxed{2+x}") == ["correct", "wrong"]


def test_the_pool_is_started_when_it_is_needed():
    pools.shutdown()
    assert statuses(r"\boxed{42}", gold="42") == ["correct"]
    assert pools.pool()._nursery is None  # plain numbers need no parser
    threads = threading.active_count()
    statuses(r"\boxed{1+x}", r"\boxed{2+x}")
    assert threading.active_count() == threads


# Edges


def test_what_it_needs_is_said_when_it_is_missing(monkeypatch):
    code = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).sendall(b'ModuleNotFoundError: math_verify')"
    monkeypatch.setattr(pools, "_NURSERY", code)
    pools.shutdown()
    with pytest.raises(RewardError, match=r"math_verify.\nThey need math-verify: pip install"):
        statuses(r"\boxed{1+x}")


def test_the_number_of_verifiers(monkeypatch):
    monkeypatch.setenv("DEW_VERIFIERS", "3")
    assert pools.default_size() == 3
    monkeypatch.setenv("DEW_VERIFIERS", "none")
    with pytest.raises(ConfigError, match="1 or more"):
        pools.default_size()
    monkeypatch.delenv("DEW_VERIFIERS")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert pools.default_size() == 1
