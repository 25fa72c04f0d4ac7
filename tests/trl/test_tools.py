"""examples/tools.py: TRL's environment_factory calls a tool between turns, and credit is compared within turns."""

import runpy
from pathlib import Path

import pytest
import torch

import oracles
import trl_tiny as tiny
from dew.engines.trl import DewTrainer
from dew.errors import RewardError
from dew.run.folder import RunFolder

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "tools.py"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two steps with tool calls and a reward that random weights get often; every group is recorded."""
    folder = tmp_path_factory.mktemp("tools")
    settings = {"algorithm": "gtpo", "algorithm_kwargs": {"compare": "turn"}, "per_device_train_batch_size": 64}
    trainer = EXAMPLE["trainer"](str(folder), 2, **settings, records_every=1, records_groups=4, disable_tqdm=True,
                                 log_completions=True, logging_steps=1)  # fmt: skip
    trainer.reward_funcs[0] = lambda completions, **_: [float("0" in c[0]["content"]) for c in completions]
    seen, inner = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: seen.append(inner(inputs)) or seen[-1]
    trainer.train()
    return RunFolder(folder), seen


def turns(live, values):
    """The values of each run of live tokens."""
    found = [[]]
    for alive, value in zip(live, values, strict=True):
        if alive:
            found[-1].append(value)
        elif found[-1]:
            found.append([])
    return [turn for turn in found if turn]


def test_tool_output_does_not_train(trained):
    folder, seen = trained
    assert len([*folder.path.glob("completions/*.parquet")]) == 2  # the calls have no arguments
    for batch in seen:
        tool = (batch["tool_mask"] == 0) & batch["completion_mask"].bool()
        assert tool.any() and batch["advantages"].any()
        assert not batch["advantages"][tool].any()


def test_every_environment_scores_its_own_answers(tmp_path):
    def trainer(**rewards):
        own = {x: type(x, (EXAMPLE["Box"],), {"get_reward": lambda self, r=r: r}) for x, r in rewards.items()}
        data = EXAMPLE["problems"](2).add_column("environment", list(rewards))
        others = {"processing_class": EXAMPLE["tokenizer"](), "environment_factory": own}
        return DewTrainer(EXAMPLE["policy"](), None, tiny.config(tmp_path), data, **others)

    right = trainer(Right=1.0, Wrong=0.0)
    right.model.train()
    assert right.sample([dict(row) for row in tiny.rows(right)]).outcome.tolist() == [1.0] * 4 + [0.0] * 4
    with pytest.raises(RewardError, match="The reward Text returned str"):
        trainer(Right=1.0, Text="yes").train()


def test_rewards_are_compared_within_turns(trained):
    folder, _ = trained
    several = 0
    for group in folder.records():
        H, shaped = ([turns(a.live or [True] * len(a.tokens), getattr(a, name)) for a in group.answers]
                     for name in ("entropy", "shaped"))  # fmt: skip
        several += sum(len(answer) > 1 for answer in H)
        expected = oracles.gtpo_turn_rewards([a.correct for a in group.answers], H)
        flat = [torch.tensor([x for a in rows for turn in a for x in turn]) for rows in (shaped, expected)]
        torch.testing.assert_close(*flat, rtol=1e-4, atol=1e-4)
    assert several >= 2


def test_the_reward_needs_a_turn_after_the_tool():
    call, shown = {"role": "assistant", "content": "1"}, {"role": "tool", "content": "1"}
    for messages, reward in (([call], 0.0), ([call, shown], 0.0), ([call, shown, call], 1.0)):
        assert EXAMPLE["copied_after_a_peek"]([messages], ["1"]) == [reward]
    assert EXAMPLE["copied_after_a_peek"]([[call, shown, call]], ["0"]) == [0.0]
