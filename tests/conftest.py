"""One torch thread per test process: two on a loaded two-core machine are up to 17 times slower, and a fork in which
accelerate starts more, unless the variable is set, may wait forever. No model hub: every look may take 23 seconds."""

import gc
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, Phase, settings

gc.disable()  # until all modules are imported, which takes a quarter less time so
os.fsync = lambda handle: None  # no test outlives a power failure, and they write thousands of files
# Read by torch, which is not imported here: pytest-xdist's own process needs none.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
settings.register_profile(  # the same examples in every run
    "dew", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile(  # a mutant needs to fail, not to be explained
    "mutants", settings.get_profile("dew"), max_examples=60, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dew"))

LONG = ("test_triton.py", "test_lora.py", "test_browser.py", "test_resume.py", "test_files.py", "test_attacks.py")


def pytest_collection_finish():
    """Training ends with a full garbage collection: leave out the million objects of the imported modules."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # else Triton reports leaks


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Whole files to a process, so that what the tests of a file share is made once; in order."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def pytest_collection_modifyitems(items):
    """Long files first: at the end one process would wait for the other."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(autouse=True)
def _models_are_not_tried_first(monkeypatch):
    """In a process of their own, which takes seconds; security/test_files.py does it."""
    monkeypatch.setattr("dew.run.models._try_loading", lambda folder: None)


@pytest.fixture
def interruptible():
    """Python's own handler of Ctrl-C: tests that a shell started in the background inherit none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def algorithm_registry(monkeypatch):
    """Algorithms that the test registers are forgotten after it."""
    from dew import algorithms

    monkeypatch.setattr(algorithms, "_BY_NAME", dict(algorithms._BY_NAME))
    return algorithms._BY_NAME


@pytest.fixture
def dew(monkeypatch, capsys):
    """Run a command in this process: (exit code, standard output, standard error)."""
    from dew.cli import main

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["dew", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return stop.value.code, captured.out, captured.err

    return run
