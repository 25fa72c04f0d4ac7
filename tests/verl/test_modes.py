"""The comparison of trainer modes: its commands, and the table it makes of verl's metrics."""

import json
import sys
import threading
from pathlib import Path

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
    for name, seconds in (("verl_grpo", (90, 50, 10, 12, 11)), ("gtpo", (90, 50, 11.22, 11.5, 11))):
        memory = "actor/perf/max_memory_allocated_gb"
        lines = [{"perf/time_per_step": s, memory: s, "actor/entropy": 0.5} for s in seconds]
        steps = [{"step": i, "data": data} for i, data in enumerate([{"val-core/acc": 1.0}, *lines])]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, steps)))
    _, _, theirs, gtpo = verl_modes.table(tmp_path).splitlines()
    assert theirs.startswith("| verl_grpo | 3 | 11.000 |") and theirs.endswith("| 12.000 | 0.500 |  |  |")
    assert gtpo.startswith("| gtpo | 3 | 11.220 |") and gtpo.endswith("| +2.4% [-16.3%, +25.5%] |")


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
