"""The comparison of trainer modes: its commands, and the table it makes of verl's metrics."""

import json
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
verl_modes = pytest.importorskip("verl_modes", reason="benchmarks/ is not here")
verl_turns = pytest.importorskip("verl_turns", reason="benchmarks/ is not here")


def test_the_commands_differ_in_algorithm_and_mode_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verl_modes.py", str(tmp_path), "--print", "--runs", "verl_grpo", "grpo", "gtpo"])
    verl_modes.main()
    theirs, grpo, gtpo = (line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith("#"))
    assert "verl.trainer.main_ppo" in theirs and "trainer.v1.trainer_mode=sync" in theirs
    assert "dew.engines.verl.main" in grpo and "trainer.v1.trainer_mode=dew_sync" in grpo
    assert not any(word.startswith("+algorithm.dew") for word in theirs)
    assert "algorithm.adv_estimator=gtpo" in gtpo and "algorithm.adv_estimator=grpo" in theirs
    shared = {word.split("=")[0] for word in theirs[3:]} - {"algorithm.adv_estimator"}
    assert shared <= {word.split("=")[0] for word in grpo}


def test_the_table_has_medians_after_the_warm_up_and_the_cost(tmp_path):
    """Medians of 10, 12, 11 and of 11.22, 11.5, 11; the first two steps and the validation are left out.

    ln 1.122, ln (11.5/12) and 0 have the mean 0.0242 and the standard error 0.0471, times 4.303 for the interval."""
    runs = {"verl_grpo": (90, 50, 10, 12, 11), "gtpo": (90, 50, 11.22, 11.5, 11), "grpo_s": (90, 50, 10, 12, 11, 12)}
    for name, seconds in runs.items():
        memory = "actor/perf/max_memory_allocated_gb"
        lines = [{"perf/time_per_step": s, memory: s, "actor/entropy": 0.5} for s in seconds]
        steps = [{"step": i, "data": data} for i, data in enumerate([{"val-core/acc": 1.0}, *lines])]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, steps)))
    _, _, theirs, gtpo, grpo_s, _, together = verl_modes.table(tmp_path).splitlines()
    assert theirs.startswith("| verl_grpo | 3 | 11.000 |") and theirs.endswith("| 12.000 | 0.500 |  |  |")
    assert gtpo.startswith("| gtpo | 3 | 11.220 |") and gtpo.endswith("| +2.4% [-16.3%, +25.5%] |")
    assert grpo_s.startswith("| grpo_s | 4 | 11.500 |") and grpo_s.endswith("| +0.0% [+0.0%, +0.0%] |")
    assert together.endswith(": +1.2% [-8.5%, +12.0%]")  # half of gtpo's logarithms


def test_runs_that_take_turns_train_one_step_each_in_order(tmp_path):
    """Three steps of one run and two of the other, which then ends; a third dies before its first step."""
    order = []

    def run(name, steps):
        for step in range(1, steps + 2):  # verl asks before each step and once after the last
            verl_turns.wait_for_turn(str(tmp_path / name))
            order.append((name, step))

    threads = {name: threading.Thread(target=run, args=(name, steps)) for name, steps in (("a", 3), ("b", 2))}
    for thread in threads.values():
        thread.start()
    ended = {name: lambda t=thread: not t.is_alive() for name, thread in threads.items()}
    verl_turns.take_turns(tmp_path, {"dead": lambda: True, **ended})
    assert order == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3), ("a", 4)]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [[], ["--alternate"]])
def test_a_run_over_its_limit_is_stopped(tmp_path, monkeypatch, capsys, flags):
    wait = ["sh", "-c", "echo begins; exec sleep 60"]
    monkeypatch.setattr(verl_modes, "command", lambda *_: wait)
    monkeypatch.setattr(verl_modes.data, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(verl_modes.data, "prepare_data", lambda *_: None)
    monkeypatch.setattr(verl_modes.data, "write_data", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["verl_modes.py", str(tmp_path), "--runs", "gtpo", "--limit", "0.5", *flags])
    verl_modes.main()
    shown = capsys.readouterr().out
    assert "gtpo: stopped after 0.5 s" in shown and "begins" in shown


def test_changes_for_several_runs_on_one_gpu(monkeypatch):
    """Log-probabilities in chunks, sockets of their own, shorter waits. vLLM's worker is a stand-in."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("verl", reason="verl is not installed: this runs with `make test-verl`")
    worker = ModuleType("vllm.v1.worker.gpu_worker")

    class Worker:
        def sleep(self, level=1):
            raise AssertionError(f"Memory usage increased after sleeping. {level}" if level < 3 else "unknown level")

    worker.Worker = Worker
    monkeypatch.setitem(sys.modules, worker.__name__, worker)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker", ModuleType("vllm.v1.worker"))
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/ray-of-this-run")
    import verl_one_gpu
    from verl.trainer.ppo.v1 import replay_buffer
    from verl.utils import torch_functional

    logits, labels = torch.randn(2, 700, 11), torch.randint(11, (2, 700))
    expected = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(torch_functional.logprobs_from_logits(logits, labels), expected)

    class Socket:
        @verl_one_gpu.own_socket
        def __init__(self, zmq_handle, device):
            self.handle, self.device = zmq_handle, device

    assert Socket(zmq_handle="ipc:///tmp/a.sock", device=1).handle == "ipc:///tmp/ray-of-this-run/a.sock"
    waited = []
    monkeypatch.setattr(replay_buffer.time, "sleep", waited.append)
    buffer = object.__new__(replay_buffer.ReplayBuffer)
    buffer._wait_for_next_poll("train", replay_buffer.time.time())
    assert waited == [0.05]
    worker.Worker().sleep(level=2)
    with pytest.raises(AssertionError, match="unknown level"):
        worker.Worker().sleep(level=3)
