"""scripts/run_study.py: the jobs of the study's open steps, and the rules of scripts/gtpo_misreadings.py."""

from pathlib import Path

import torch
from scripts import run_study as script

from dew import Rollouts, get_algorithm
from dew.algorithms import algorithm_classes
from dew.engines.lab import TinySettings
from dew.engines.lab.arms import parse_arms
from dew.engines.lab.tasks import generator

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_every_rule_of_the_library_is_in_the_study_with_as_many_answers():
    labels = set()
    for step in script.STEPS.values():
        assert TinySettings(**{**script.SHARED, **step.settings}).answers == 256
        arms = [arm.format(gtpo=1e-4, dew=1e-4) for arm in step.arms]
        labels |= {arm.label for arm in parse_arms(arms, [1e-4], controls=False)}
    later = {"gmpo", "dppo", "gepo", "stare", "fipo"}
    assert {name for name, cls in algorithm_classes().items() if not cls.engine_loss} - later <= labels


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
