"""The comparison of trainer modes: its commands, and the table it makes of verl's metrics."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
verl_modes = pytest.importorskip("verl_modes", reason="benchmarks/ is not here")


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
