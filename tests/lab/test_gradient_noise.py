"""scripts/gradient_noise.py on the bundled model, and its page."""

import argparse
import json

import pytest
from scripts import gradient_noise as script


@pytest.mark.slow
def test_without_weights_the_gradient_of_dew_is_that_of_dapo():
    settings = {"prompts": 8, "group_size": 8, "max_new_tokens": 28, "rank": 2}
    given = {"model": "tiny", "task": "countdown", "adapter": None, "batches": 2, "first_seed": 600}
    rules = ["dapo", "dew", "dew(alpha1=1.1,alpha2=0.0)"]
    *_, found = script.measure(argparse.Namespace(**given, rules=rules, settings=json.dumps(settings)))
    found = found["rules"]
    assert list(found) == rules and all(len(x) == 2 for of in found.values() for x in of.values())
    for value, like in zip(found["dapo"]["norm"], found[rules[2]]["norm"], strict=True):
        assert value == pytest.approx(like, rel=1e-3) and value > 0


def test_the_page_has_the_tables_of_the_committed_measurements():
    text = script.PAGE.read_text()
    assert script.with_tables(text, script.tables()) == text, "run scripts/gradient_noise.py page"
