"""The engine does not know algorithms: one that a user registers trains as its class defines it."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import dew
import trl_tiny as tiny
from dew.algorithms import Algorithm, list_algorithms
from dew.run.folder import RunFolder

MODULE = '''
"""A module of a user: REINFORCE with a leave-one-out baseline, which only trains the first token of an answer."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from dew import Algorithm, register_algorithm


@register_algorithm
@dataclass(frozen=True, kw_only=True)
class FirstToken(Algorithm):
    name: ClassVar[str] = "first_token"
    scale: ClassVar[bool] = False

    gain: float = 2.0
    """Factor of every advantage."""

    def advantages(self, rollouts):
        others = (rollouts.reward.sum(-1, keepdim=True) - rollouts.reward) / (rollouts.reward.shape[-1] - 1)
        advantages = torch.zeros(rollouts.mask.shape)
        advantages[..., 0] = self.gain * (rollouts.reward - others)
        return torch.where(rollouts.mask, advantages, 0)

    def loss(self, logp, part, advantages, *, count=None):
        loss = -(logp * advantages * part.mask).sum() / count
        return loss, {"mine/loss": loss.detach()}
'''


@pytest.fixture
def first_token(algorithm_registry, tmp_path, monkeypatch):
    """The class, from a module outside dew; forgotten after the test."""
    (tmp_path / "my_algorithms.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("my_algorithms").FirstToken
    del sys.modules["my_algorithms"]


def test_its_advantages_and_loss_are_those_of_the_class(first_token, tmp_path):
    trainer = tiny.ready(tmp_path / "run", algorithm="first_token", algorithm_kwargs={"gain": 3.0})
    assert isinstance(trainer.algorithm, first_token) and trainer.args.scale_rewards == "none"
    batch = tiny.generation(trainer)
    reward = torch.tensor(tiny.outcome(tiny.texts(trainer, batch))).view(-1, 4)
    others = (reward.sum(1, keepdim=True) - reward) / 3
    assert torch.allclose(batch["advantages"][:, 0], 3 * (reward - others).flatten())
    assert batch["advantages"][:, 0].abs().max() > 0.5 and not batch["advantages"][:, 1:].any()

    loss = trainer._compute_loss(trainer.model, batch)
    logp, _, _ = trainer._forward(trainer.model, batch)
    tokens = batch["completion_mask"].sum()
    torch.testing.assert_close(loss, -(logp[:, 0] * batch["advantages"][:, 0]).sum() / tokens)
    assert trainer._statistics.read(trainer.accelerator)["mine/loss"] == pytest.approx(loss.item())


def test_it_learns_and_is_recorded_under_its_name(first_token, tmp_path):
    """The first token alone is trained, so the reward asks for an "a" there."""

    def starts_with_a(completions, **_):
        return [float(text[:1] == "a") for text in completions]

    settings = {"per_device_train_batch_size": 32, "num_generations": 8, "max_steps": 15, "learning_rate": 1e-2}
    trainer = tiny.trainer(tmp_path / "run", starts_with_a, algorithm="first_token", **settings)
    trainer.train()
    folder = RunFolder(tmp_path / "run")
    accuracy = [line["accuracy"] for line in folder.metrics()]
    assert sum(accuracy[:2]) / 2 < 0.4 and sum(accuracy[-2:]) / 2 > 0.8
    assert folder.run()["algorithm"] == {"name": "first_token", "settings": trainer.args.build_algorithm().__dict__}
    assert all("mine/loss" in line for line in folder.metrics())


def test_an_edited_rule_is_another_one_if_the_run_resumes_and_in_reports(tmp_path, caplog):
    text = "from dew import DAPO\n\n\nclass Mine(DAPO):\n    name = 'mine'\n    FACTOR = 1\n"
    settings = {"algorithm": f"{tmp_path}/rules.py:Mine", "save_strategy": "steps", "save_steps": 1}
    sources = []
    for steps, edited in ((1, text), (2, f"{text}\n# a comment"), (3, text.replace("1", "2"))):
        (tmp_path / "rules.py").write_text(edited)
        says = "algorithm: mine, code" in caplog.text
        tiny.trainer(tmp_path / "run", max_steps=steps, **settings).train(resume_from_checkpoint=steps > 1)
        sources.append(RunFolder(tmp_path / "run").run()["source"])
    assert not says and "algorithm: mine, code" in caplog.text
    assert sources[0] == sources[1] != sources[2]


# ── no algorithm's name or class in the engines ─────────────────────────────────────────────────────────────
ENGINES = Path(dew.__file__).parent / "engines"
FILES = sorted(ENGINES.rglob("*.py"))
ALLOWED = {("trl/config.py", "dapo"): 1, ("trl/config.py", "grpo"): 1, ("trl/config.py", "dr_grpo"): 1,
           ("lab/arms.py", "dapo"): 2, ("lab/arms.py", "gtpo"): 1}  # fmt: skip
"""Names of losses, estimators and reward managers of other trainers; examples in error messages."""


def classes(cls=Algorithm):
    return {cls.__name__}.union(*(classes(other) for other in cls.__subclasses__())) - {"Algorithm"}


def mentions(path):
    """Words of string literals (docstrings aside) and identifiers that name an algorithm."""
    tree = ast.parse(path.read_text())
    algorithms = set(list_algorithms()) - {"dew", "trl"}  # also the names of the package and of an engine
    identifiers = classes()
    documented = [x for x in ast.walk(tree) if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
    docstrings = {id(x.value) for x in documented}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found += [word for word in re.findall(r"\w+", node.value.lower()) if word in algorithms]
        names = [getattr(node, "id", None), getattr(node, "attr", None)]
        names += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in names if name in identifiers]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ENGINES).as_posix())
def test_no_algorithm_is_named(path):
    name = path.relative_to(ENGINES).as_posix()
    found = mentions(path)
    assert {word: found.count(word) for word in found} == {w: n for (file, w), n in ALLOWED.items() if file == name}
