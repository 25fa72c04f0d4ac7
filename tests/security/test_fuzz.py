"""A few random inputs at every door with each run of the tests, and every find that fuzzing ever made."""

import pytest

import fuzz
from dew.errors import DewError


@pytest.mark.parametrize("name", fuzz.DOORS)
def test_only_dews_own_errors_come_out(name):
    refused = fuzz.fuzz(name)
    if name in ("recipe, text", "recipe, values", "records, bytes", "records, values", "run folder"):
        assert refused < fuzz.DOORS[name][2]  # a door that refuses everything would not have been tried


NESTED = "[" * 100_000
FINDS = [
    ("recipe, text", "!!bool 1"),
    ("recipe, text", "a: &a [*a]"),
    ("recipe, values", {"reward_funcs": 87687975965}),
    ("recipe, values", {"task": f"{'a' * 300}/x"}),
    ("recipe, values, TRL's parser", {"deepspeed": 52}),
    ("recipe, values, TRL's parser", {"algorithm": 45}),
    ("records, values", {"answers": []}),
    ("records, values", {"answers": [{"tokens": "ab", "entropy": [1, 2]}]}),
    ("records, values", {"answers": [{"tokens": ["a"], "entropy": [0.5], "live": [None]}]}),
    ("records, bytes", b'{"answers": ' + NESTED.encode()),
    ("run folder", {"alarms.jsonl": '{"step": []}\n{}'}),
    ("run folder", {"alarms.jsonl": '{"step": 1, "alarm": [1]}'}),
    ("run folder", {"metrics.jsonl": '{"step": 1, "entropy": null}'}),
    ("run folder", {"metrics.jsonl": '{"step": 1, "accuracy": 1%s}' % ("0" * 400)}),
    ("run folder", {"scores.json": "[1, null]"}),
    ("run folder", {"scores.json": r'[{"when": "after", "scores": {"\ud800": {"value": 1}}}]'}),
    ("run folder", {"metrics.jsonl": '{"step": 1, "accuracy": "x", "groups/sampled": "y"}'}),
    ("run folder", {"metrics.jsonl": NESTED, "run.json": NESTED}),
    ("rows of problems", NESTED.encode()),
    ("rows of problems", b'{"answer": "\\ud800", "prompt": "\\ud800"}'),
    ("guide's answers", b'{"prompt": "p", "completion": "1", "logprobs": ["x", "y"]}'),
    ("guide's answers", b'{"prompt": "p", "completion": "1", "logprobs": 5}'),
    ("guide's answers", NESTED.encode()),
    ("runs of other trainers", b'{"log_history": null, "global_step": 1}'),
    ("runs of other trainers", b'{"log_history": []}'),
    ("gold columns", ("0-0=0", [], [])),
    ("gold columns", (r"\boxed{1}", "ab", None)),
]


@pytest.mark.parametrize(("door", "given"), FINDS, ids=range(len(FINDS)))
def test_what_was_found_once_is_refused_with_advice(door, given):
    try:
        fuzz.DOORS[door][0](given)
    except DewError as error:
        assert 20 < len(str(error)) < 3000


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.DOORS)
def test_many_inputs(name):
    fuzz.fuzz(name, 100)
