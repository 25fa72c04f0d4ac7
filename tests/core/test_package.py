"""The package as a whole: correct annotations, a runnable example."""

import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import beartype
import jaxtyping
import pytest
import torch

import dew.credit
import dew.losses
from groups import pad

ROOT = Path(__file__).parents[2]


def test_annotated_shapes_are_correct():
    """The annotations, checked at run time by beartype on a batch of two groups."""
    entropy, mask = pad([[1, 3], [3], [1, 2], [3]])
    entropy, mask = entropy.nan_to_num(0).expand(2, 4, 2), mask.expand(2, 4, 2)
    correct = torch.tensor([True, True, False, False]).expand(2, 4)

    def checked(function):
        return jaxtyping.jaxtyped(typechecker=beartype.beartype)(function)

    credit = {name: checked(getattr(dew.credit, name)) for name in dew.credit.__all__}
    rewards = credit["gtpo_rewards"](correct, entropy, mask, extra=torch.zeros(2, 4))
    A = credit["gtpo_advantages"](rewards, mask, correct=correct)
    by_answer = credit["grpo_s_rewards"](correct, entropy, mask)
    credit["grpo_s_advantages"](by_answer, mask.any(-1))
    credit["grpo_advantages"](by_answer, scale=False)
    credit["has_signal"](correct)
    credit["soft_overlong"](mask.sum(-1), limit=4, buffer=2)
    credit["group_overlong"](mask.sum(-1), correct)
    credit["forking_mask"](entropy, mask)
    credit["entropy_advantages"](by_answer, entropy, mask)
    checked(dew.losses.policy_loss)(entropy, entropy, A, mask, weight=torch.ones(2, 4, 1))
    with pytest.raises(jaxtyping.TypeCheckError):
        credit["gtpo_rewards"](correct, entropy[..., :1], mask)


def test_public_names_keep_their_signatures():
    """Other people's code calls these: adding a keyword is fine, moving or renaming one is not."""
    fixed = {
        "gtpo_rewards": "correct entropy mask alpha1 alpha2 compare average entropy_clip",
        "gtpo_advantages": "rewards mask pool",
        "grpo_s_rewards": "correct entropy mask beta1 beta2 average entropy_clip",
        "grpo_s_advantages": "rewards present pool", "grpo_advantages": "rewards present scale",
        "has_signal": "correct present", "soft_overlong": "lengths limit buffer",
        "group_overlong": "lengths correct present gamma", "forking_mask": "entropy mask keep",
        "entropy_advantages": "advantages entropy mask alpha kappa", "maxrl_advantages": "rewards present",
        "qae_advantages": "rewards present quantile", "w_reinforce_advantages": "correct present positive",
        "reinforce_pp_advantages": "rewards mask present", "clip_cov_mask": "advantages logp mask share low high",
        "kl_cov_mask": "advantages logp mask share", "steer_weights": "advantages logp entropy mask least",
        "token_baseline_advantages": "rewards logp sum_sq mask", "entropy_bands": "logp mask low high",
        "future_weights": "log_w advantages mask half_life low high", "group_relative": "rewards present",
        "wrong_sign": "advantages rewards present",
    }  # fmt: skip
    assert set(fixed) == set(dew.credit.__all__)
    for name, parameters in fixed.items():
        actual = list(inspect.signature(getattr(dew.credit, name)).parameters)
        assert actual[: len(parameters.split())] == parameters.split(), name


def test_the_example_prints_its_tables(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    runpy.run_path(str(ROOT / "examples" / "one_group.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert all(word in out for word in ("GRPO", "GTPO", "GRPO-S"))


def test_the_report_without_the_packages_of_the_commands():
    code = "import sys; sys.modules['psutil'] = None; import dew.report"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "psutil is missing. Run: pip install 'dew-rl[cli]'" in done.stderr


def test_a_training_loop_of_ones_own(monkeypatch):
    """The example, then the lines of docs/howto.md with its variables: credit as from single functions."""
    for name in ("grpo_s", "dew", "dapo", "gtpo"):
        monkeypatch.setattr(sys, "argv", ["logits_to_loss.py", name])
        x = runpy.run_path(str(ROOT / "examples" / "logits_to_loss.py"))
        assert x["model"][1].weight.grad.any() and x["count"] == (32 if name == "grpo_s" else x["mask"].sum())
    howto = (ROOT / "docs" / "howto.md").read_text().partition("## Use my own training loop?")[2]
    exec(re.search(r"```python\n(.*?)```", howto, re.DOTALL)[1], x)
    correct, entropy, mask = (x[n].unflatten(0, (8, 4)).transpose(0, 1) for n in ("reward", "entropy", "mask"))
    A = dew.credit.gtpo_advantages(dew.credit.gtpo_rewards(correct > 0.5, entropy, mask, alpha2=0.2), mask)
    assert dew.credit.has_signal(correct > 0.5).all() and x["loss"].isfinite()
    torch.testing.assert_close(x["advantages"], A.transpose(0, 1).flatten(0, 1))
