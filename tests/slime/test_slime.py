"""The function for slime's --custom-advantage-function-path, on rollout data as slime 0.3.1 hands it over."""

from argparse import Namespace

import pytest
import torch
import torch.distributed as dist

import dew_slime as slime
import trl_tiny
from dew import Rollouts, get_algorithm
from dew.errors import ConfigError, EngineError

GTPO = {"calculate_per_token_loss": True, "use_rollout_entropy": True, "dew_algorithm": "gtpo"}


def arguments(**changed):
    """The attributes that the function reads, with slime's defaults."""
    flags = {"advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.28, "normalize_advantages": False}
    flags |= {"n_samples_per_prompt": 4, "rollout_max_response_len": 8, "calculate_per_token_loss": False}
    return Namespace(**{**flags, "use_rollout_entropy": False, **changed})


def batch(order=range(8), seed=0):
    """Two groups of four answers with 2 to 8 tokens; answers in this order, as a balanced schedule mixes them."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (8,), generator=random).tolist()
    entropy = [torch.rand(n, generator=random) + 0.1 for n in lengths]
    masks = [torch.ones(n, dtype=torch.int) for n in lengths]
    masks[3][0] = 0  # a token of a tool
    rewards = [1, 0, 0, 1, 0, 1, 1, 1]
    return {
        "sample_indices": [40 + i for i in order],
        "loss_masks": [masks[i] for i in order],
        "entropy": [entropy[i] for i in order],
        "log_probs": [-entropy[i] for i in order],
        "rewards": [0.0 for _ in order],  # normalised by slime, and not read
        "local_raw_reward": [rewards[i] for i in order],
        "response_lengths": [lengths[i] for i in order],
    }


def test_flags_that_contradict_the_algorithm_are_listed_together():
    with pytest.raises(ConfigError, match=r"(?s)slime lacks.*--eps-clip-high 0\.28.*--normalize-advantages"):
        wrong = arguments(dew_algorithm="grpo_s", normalize_advantages=True, eps_clip_high=0.2)
        slime.advantages(wrong, batch())
    with pytest.raises(ConfigError, match=r"(?s)--n-samples-per-prompt 1.*use --use-kl-loss"):
        slime.advantages(arguments(**GTPO | {"dew_algorithm": "gtpo(kl_coef=0.1)", "n_samples_per_prompt": 1}), batch())


@pytest.mark.parametrize(("name", "flags"), [("gtpo", GTPO), ("grpo", {})])
def test_advantages_are_those_of_the_algorithm(name, flags):
    whole, mixed = batch(), batch([5, 0, 3, 7, 1, 6, 2, 4])
    for data in (whole, mixed):
        clip = {"eps_clip_high": None} if name == "grpo" else {}
        slime.advantages(arguments(**{**flags, "dew_algorithm": name}, **clip), data)
        assert data["returns"] is data["advantages"]
    pad = torch.nn.utils.rnn.pad_sequence
    rollouts = Rollouts(
        mask=pad(whole["loss_masks"], True).bool().view(2, 4, -1),
        reward=torch.tensor(whole["local_raw_reward"]).float().view(2, 4),
        entropy=pad(whole["entropy"], True).view(2, 4, -1),
    )
    expected = get_algorithm(name, max_tokens=8).advantages(rollouts).flatten(0, 1)
    for data in (whole, mixed):
        for index, found in zip(data["sample_indices"], data["advantages"], strict=True):
            row = expected[index - 40][: len(found)]
            torch.testing.assert_close(found, row)
            assert row.any()
    assert whole["advantages"][3][0] == 0


def test_groups_that_span_ranks_are_gathered(tmp_path):
    def run(rank):
        dist.init_process_group("gloo")
        slime._data_parallel_group = lambda: dist.group.WORLD
        data = batch([[0, 5, 3], [7, 1, 6, 2, 4]][rank])
        slime.advantages(arguments(**GTPO), data)
        torch.save(dict(zip(data["sample_indices"], data["advantages"], strict=True)), tmp_path / f"rank{rank}.pt")
        dist.destroy_process_group()

    assert trl_tiny.in_children(run, 2) == [0, 0]
    found = {**torch.load(tmp_path / "rank0.pt"), **torch.load(tmp_path / "rank1.pt")}
    alone = batch()
    slime.advantages(arguments(**GTPO), alone)
    for index, expected in zip(alone["sample_indices"], alone["advantages"], strict=True):
        assert torch.equal(found[index], expected)


def test_incomplete_groups_and_split_answers_are_errors():
    with pytest.raises(EngineError, match="do not have 4 answers"):
        slime.advantages(arguments(**GTPO), batch(range(7)))
    data = batch()
    data["entropy"][0] = data["entropy"][0][:0]
    with pytest.raises(EngineError, match="context-parallel-size 1"):
        slime.advantages(arguments(**GTPO), data)
    del data["entropy"]
    with pytest.raises(EngineError, match="use-rollout-entropy"):
        slime.advantages(arguments(**GTPO), data)


def test_graded_rewards_are_a_warning_and_an_error_if_nothing_can_be_learned(caplog):
    data = {**batch(), "local_raw_reward": [0.9, 0.1, 0.4, 0.8, 0.2, 1.0, 1.0, 1.0]}
    args = arguments(**{**GTPO, "dew_algorithm": "gtpo(alpha2=0.5)"})
    for rewards in ([0.0] * 8, data["local_raw_reward"], data["local_raw_reward"]):
        slime.advantages(args, {**data, "local_raw_reward": rewards})
    assert caplog.text.count("different values") == 1 and "dew_algorithm: gtpo(alpha2=0.5,pool=outcome)" in caplog.text
    low = {**data, "local_raw_reward": [x / 2 for x in data["local_raw_reward"]]}
    with pytest.raises(ConfigError, match="nothing can be learned"):
        slime.advantages(arguments(**GTPO), low)
    slime.advantages(arguments(**{**GTPO, "dew_algorithm": "gtpo(threshold=0.5)"}), low)  # it is meant
