"""scripts/run_study.py: the jobs of the study's open steps, and the rules of scripts/gtpo_misreadings.py."""

import argparse
import dataclasses
import sys
from pathlib import Path

import torch
from scripts import run_study as script

from dew import Rollouts, get_algorithm
from dew.algorithms import algorithm_classes
from dew.engines.lab import TinySettings, load_study
from dew.engines.lab.arms import parse_arms
from dew.engines.lab.tasks import generator, get_task
from dew.engines.lab.tiny import new_policy
from dew.run.folder import RunFolder

SCRIPTS = Path(__file__).parents[2] / "scripts"
SMALL = {"group_size": 8, "prompts": 2, "generations": 2, "width": 32, "depth": 1, "eval_problems": 2, "eval_k": 2}


def test_every_rule_of_the_library_is_in_the_study_with_as_many_answers():
    labels = set()
    for step in script.STEPS.values():
        assert TinySettings(**{**script.SHARED, **step.settings}).answers == 256
        arms = [arm.format(gtpo=1e-4, dew=1e-4) for arm in step.arms]
        labels |= {arm.label for arm in parse_arms(arms, [1e-4], controls=False)}
    later = {"gmpo", "dppo", "gepo", "stare", "fipo"}
    assert {name for name, cls in algorithm_classes().items() if not cls.engine_loss} - later <= labels


def test_a_job_trains(tmp_path, monkeypatch):
    """With small policies, and every answer that contains a 3 correct."""
    task, run_study = "countdown-6", sys.modules["dew.engines.lab.study"]
    easy = dataclasses.replace(get_task(task), verdict=lambda answers, facts: (answers == 3).any(1))
    monkeypatch.setattr(run_study, "get_task", lambda _: easy)
    start = new_policy(32, 1, easy.prompt_length + easy.tokens, generator(0))
    facts = {"digest": "none", "pass@1": 0.1, "pass@16": 0.5, "steps": 1}
    monkeypatch.setattr(run_study, "warm_start", lambda *_: (start, facts))
    monkeypatch.setattr(script, "TinySettings", lambda **given: TinySettings(**{**given, **SMALL}))
    options = argparse.Namespace(out=tmp_path, seeds=1, generations=None)
    script.run(f"misreadings/{task}/0", options)
    found = load_study(tmp_path / "misreadings" / task / "0")
    assert len(found) == len(script.STEPS["misreadings"].arms)
    assert all(RunFolder(run.folder).metrics()[0]["grad_norm"] > 0 for run in found)


def rollouts(rewards, entropy):
    reward, H = torch.tensor(rewards), torch.tensor(entropy)
    return Rollouts(mask=torch.ones_like(H, dtype=torch.bool), reward=reward, entropy=H)


def test_micro_batches_are_groups_of_their_own():
    rule, gtpo = get_algorithm(f"{SCRIPTS / 'gtpo_misreadings.py'}:MicroBatches", size=2), get_algorithm("gtpo")
    entropy = torch.rand(1, 4, 3, generator=generator(0)).tolist()
    A = rule.advantages(rollouts([[1.0, 0.0, 0.0, 0.0]], entropy))
    first = gtpo.advantages(rollouts([[1.0, 0.0]], [entropy[0][:2]]))
    assert torch.equal(A[0, :2], first[0]) and not A[0, 2:].any()  # the second half has one outcome


def test_every_group_is_shaped():
    """All answers wrong: GTPO gives no credit, the misreading rewards the tokens with more entropy than the others."""
    rule, gtpo = get_algorithm(f"{SCRIPTS / 'gtpo_misreadings.py'}:EveryGroup"), get_algorithm("gtpo")
    all_wrong = rollouts([[0.0, 0.0]], [[[1.0], [2.0]]])
    A = rule.advantages(all_wrong)
    assert A[0, 1, 0] > 0 > A[0, 0, 0] and not gtpo.advantages(all_wrong).any()
    mixed = rollouts([[1.0, 0.0]], [[[1.0], [2.0]]])
    assert torch.equal(rule.advantages(mixed), gtpo.advantages(mixed))
