"""A rule in a file of the user that hangs, exits, forks or prints control characters: one error, no false success."""

import json
import os

import pytest
import torch

from dew import Rollouts, get_algorithm
from dew.algorithms import user_rules
from dew.errors import ConfigError
from trl_tiny import COUNTDOWN

RULE = """
import os, sys, time
from dew import GRPO
{0}
class Mine(GRPO):
    name = "mine"
    def advantages(self, rollouts):
        {1}
        return super().advantages(rollouts)
"""
DEEDS = {
    "sys.exit(0)": "exit with code 0",
    "os._exit(0)": "exit with code 0",
    "os.fork()": "fork the process",
    "while True: pass": "longer than 0.2 s",
    "while True:\n            try: time.sleep(9)\n            except Exception: pass": "longer than 0.2 s",
}


@pytest.fixture
def rule(tmp_path, monkeypatch, algorithm_registry):
    monkeypatch.chdir(tmp_path)
    return lambda first, then: (tmp_path / "rule.py").write_text(RULE.format(first, then))


ROLLOUTS = Rollouts(mask=torch.ones(1, 2, 3, dtype=torch.bool), reward=torch.tensor([[1.0, 0.0]]))


@pytest.mark.parametrize("deed", DEEDS)
def test_a_rule_that_ends_or_outlasts_the_run_is_named(rule, deed, monkeypatch):
    rule("", deed)
    mine = get_algorithm("rule.py:Mine")
    if "while" in deed:
        monkeypatch.setattr(user_rules, "SECONDS", 0.2)
    with pytest.raises(ConfigError, match=rf"Mine\.advantages .*{DEEDS[deed]}.* at rule.py, line") as error:
        mine.advantages(ROLLOUTS)
    assert len(error.value.problems) == 1
    rule(deed.replace("\n        ", "\n"), "")
    with pytest.raises(ConfigError, match=rf"rule\.py:Mine.*{DEEDS[deed]}"):
        get_algorithm("rule.py:Mine")


def test_a_rule_prints_text_only(rule, capsys):
    rule("", r"print('\x1b[2Jcleared\x07')")
    before = os._exit, os.fork
    assert get_algorithm("rule.py:Mine").advantages(ROLLOUTS).shape == (1, 2, 3) and before == (os._exit, os.fork)
    assert capsys.readouterr().out == "·[2Jcleared·\n"


def test_dew_train_does_not_end_well_if_the_rule_exits(rule, dew, tmp_path):
    rule("", "os._exit(0)")
    (tmp_path / "r.yaml").write_text(json.dumps({**COUNTDOWN, "output_dir": "run", "max_completion_length": 24}))
    code, _, err = dew("train", "r.yaml", "--algorithm", "rule.py:Mine")
    assert code == 1 and "Mine.advantages tried to exit with code 0 at rule.py, line 8." in " ".join(err.split())


@pytest.mark.parametrize(
    "deed",
    [
        "while True: pass",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("os._exit(0)", "os.fork()", r"raise ValueError('\x1b[2Jcleared')")
        ),
    ],
)
def test_dew_lab_does_not_call_a_study_done_if_the_rule_misbehaves(rule, dew, deed, tmp_path, monkeypatch):
    monkeypatch.setattr(user_rules, "SECONDS", 1.0)
    rule(
        "calls = []", f"calls.append(0)\n        if len(calls) < 3: return super().advantages(rollouts)\n        {deed}"
    )
    few = ["--seeds", "1", "--settings", "{generations: 2}"]
    code, out, err = dew("lab", "--quick", "dapo", "rule.py:Mine", *few, "-o", "study")
    assert code == 1 and err.count("error: ") == 1 and "rule.py, line 1" in " ".join(err.split())
    assert "\x1b[2J" not in out + err and not [*tmp_path.rglob("run.json"), *tmp_path.rglob("summary.md")]
