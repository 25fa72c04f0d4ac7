"""The table of `dew train --dry-run`."""

import pytest

pytest.importorskip("trl")

from dew.cli.recipes import get
from dew.engines.trl.launch import parse
from dew.preflight.memory import plan
from dew.run.config import read_run


def planned(name, **changed):
    return plan(parse(read_run(get(name), changed), dry=True))


def test_a_recipe_for_a_gpu():
    found = planned("gsm8k/qwen2.5-0.5b-instruct", num_iterations=2, algorithm_kwargs='{"alpha2": 0.2}')
    assert found["algorithm"] == "gtpo(alpha2=0.2)"
    # 200 steps, two on every generation of 8 x 64 completions
    assert found["length"] == "200 optimizer steps on 100 generations: 51,200 completions of at most 512 tokens"
    assert found["memory"].startswith("about ") and " h on 80 GB (H100)" in found["time"]


def test_the_length_is_not_invented():
    """4096 problems in three epochs are the maximum; a data set of the hub has as many rows as it has."""
    epochs = {"max_steps": -1, "num_train_epochs": 3}
    assert planned("tiny/countdown", **epochs)["length"].startswith("at most ")
    assert "length" not in planned("tiny/countdown", **epochs, task=None, scores=None, dataset_name="some/data")


def test_lora_takes_less_memory_than_full_training():
    both = [planned(f"math/qwen2.5-1.5b-instruct{kind}")["memory"] for kind in ("", "-lora")]
    full, lora = (float(text.split()[1]) for text in both)
    assert lora < full


def test_a_recipe_for_a_cpu_and_a_model_that_is_not_here():
    assert "dew preflight" in planned("tiny/countdown")["time"]
    found = planned("tiny/countdown", model_name_or_path="nobody/nothing-at-all")
    assert "not estimated" in found["memory, time"]
