"""A reward function given by path in a training run: a batch that hangs is left out, and the run continues."""

import trl_tiny
from dew.rewards.user_function import load_reward
from dew.run.folder import RunFolder

MINE = """
import os, time
def outcome(completions, **_):
    if not os.path.exists("slept"):
        open("slept", "w").close()
        time.sleep(1e6)
    return [1.0 if "a" in c else 0.0 for c in completions]
"""


def test_a_batch_whose_reward_hangs_trains_nothing_and_the_next_one_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    trainer = trl_tiny.trainer(tmp_path / "run", load_reward("mine.py:outcome", timeout=2.0), max_steps=3)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    metrics = RunFolder(tmp_path / "run").metrics()
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert not metrics[0].get("accuracy")  # nothing was scored
    assert metrics[-1]["accuracy"] >= 0
    assert any(not p.equal(before[name]) for name, p in trainer.model.named_parameters())
    assert all(p.isfinite().all() for p in trainer.model.parameters())
