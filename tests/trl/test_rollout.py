"""Dynamic sampling and overlong penalties: groups without signal, by the outcome reward alone, are replaced."""

from types import SimpleNamespace

import pytest
import torch

import trl_tiny as tiny
from dew import DAPO
from dew.engines.trl.batch import Batch
from dew.engines.trl.rollout import PromptStream, fill_batch, round_size
from dew.run.folder import RunFolder

ONE_PROCESS = SimpleNamespace(
    num_processes=1, process_index=0, gather=lambda x: x, pad_across_processes=lambda x, **_: x
)


def sampler(outcomes, size=2):
    """A function that samples: prompts are numbers, and the answers to prompt i have the rewards `outcomes[i]`."""
    rounds = []

    def sample(prompts):
        rounds.append(prompts)
        ids = torch.tensor([i for i in prompts for _ in range(size)])
        correct = torch.tensor([outcomes[i][j] for i in prompts for j in range(size)]).float()
        width = 1 + len(rounds)  # each round has longer answers than the one before
        mask = torch.ones(len(ids), width, dtype=torch.bool)
        none, lengths = torch.zeros(len(ids), dtype=torch.bool), mask.sum(-1)
        inputs = {"prompt_ids": ids[:, None].repeat(1, width), "completion_mask": mask.long()}
        inputs["num_items_in_batch"] = torch.tensor(1)
        rows = {"group": torch.arange(len(ids)) // size, "mask": mask, "outcome": correct, "extra": 0.0 * correct}
        rows |= {"total_length": lengths, "length": lengths, "truncated": none, "filler": none, "finite": ~none}
        rows |= {"entropy": None, "parts": correct[:, None], "gold": [str(i) for i in ids.tolist()]}
        return Batch(inputs=inputs, **rows, answers={"outcome": correct}, groups={})

    return sample, rounds


def fill(outcomes, quota, max_rounds, size=2, oversample=1.0):
    sample, rounds = sampler(outcomes, size)

    algorithm = DAPO(max_rounds=max_rounds, oversample=oversample)
    stream = PromptStream(outcomes, seed=0, shuffle=False)
    fills = {"prompt_ids": -1}
    return fill_batch(sample, algorithm, stream, ONE_PROCESS, quota=quota, size=size, fills=fills), rounds, stream


MIXED, SOLVED, FAILED = (1, 0), (1, 1), (0, 0)


def test_groups_without_signal_are_replaced_by_further_prompts():
    """Round 1: prompts 0-2, one mixed. Two missing at a third kept: 3 more. Round 2: prompts 3-5, two mixed."""
    batch, rounds, stream = fill([SOLVED, MIXED, FAILED, MIXED, SOLVED, MIXED, MIXED], quota=3, max_rounds=4)
    assert rounds == [[0, 1, 2], [3, 4, 5]]
    assert batch.inputs["prompt_ids"][:, -1].tolist() == [1, 1, 3, 3, 5, 5]
    assert batch.gold == list("113355")
    assert batch.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.groups == {"sampled": 6, "kept": 3, "dropped": 3, "refilled": 2, "rounds": 2, "short": 0, "mixed": 3}
    assert stream.position == 6
    assert len(batch.answers["outcome"]) == 12, "answers of dropped groups are reported too"


def test_prompts_are_padded_on_the_left_and_completions_on_the_right():
    batch, _, _ = fill([SOLVED, MIXED, MIXED], quota=2, max_rounds=4)
    assert batch.inputs["prompt_ids"].tolist()[0] == [-1, 1, 1]
    assert batch.inputs["completion_mask"].tolist()[0] == [1, 1, 0]
    assert batch.inputs["completion_mask"].tolist()[2] == [1, 1, 1]
    assert batch.mask.tolist()[0] == [True, True, False]


@pytest.mark.parametrize(
    ("outcomes", "oversample", "rounds", "trained", "groups"),
    [
        ([(float("nan"), 1, 0)] * 4, 1.0, [[0, 1]], [0, 1], {"dropped": 0, "refilled": 0, "short": 0, "mixed": 2}),
        ([SOLVED, FAILED, MIXED, MIXED], 1.0, [[0, 1], [2, 3]], [2, 3], {"dropped": 2, "refilled": 2, "rounds": 2}),
        # more prompts per round, of which the first with signal are kept
        ([SOLVED, MIXED, FAILED, MIXED, MIXED, FAILED], 2.5, [[0, 1, 2, 3, 4]], [1, 3], {"dropped": 3, "mixed": 3}),
    ],
    ids=["a full batch, in which the first answers have no reward", "none in the first round", "oversampling"],
)
def test_rounds(outcomes, oversample, rounds, trained, groups):
    size = len(outcomes[0])
    batch, taken, stream = fill(outcomes, quota=2, max_rounds=4, size=size, oversample=oversample)
    assert taken == rounds and stream.position == sum(map(len, rounds))
    assert batch.inputs["prompt_ids"][::size, -1].tolist() == trained
    assert {**groups, "kept": 2}.items() <= batch.groups.items()


@pytest.mark.parametrize("outcomes", [[SOLVED, MIXED, SOLVED, SOLVED, SOLVED, SOLVED], [SOLVED, FAILED, SOLVED, MIXED]])
def test_after_the_last_round_missing_groups_are_masked(outcomes):
    batch, rounds, _ = fill(outcomes, quota=2, max_rounds=2)
    assert len(rounds) == 2
    assert batch.groups["short"] == 1 and batch.groups["kept"] == 1 and batch.groups["dropped"] == 3
    assert batch.filler.tolist() == [False, False, True, True]
    assert batch.mask.any(-1).tolist() == batch.inputs["completion_mask"].bool().any(-1).tolist()
    assert batch.mask.any(-1).tolist() == [True, True, False, False]


def test_the_size_of_a_round():
    """At first the maximum; then missing / share kept; always divisible among the processes."""
    assert round_size(most=4, missing=4, sampled=0, mixed=0, step=1) == 4
    assert round_size(most=4, missing=2, sampled=4, mixed=2, step=1) == 4
    assert round_size(most=4, missing=1, sampled=4, mixed=3, step=1) == 2
    assert round_size(most=4, missing=3, sampled=4, mixed=4, step=2) == 4


# ── in the trainer ────────────────────────────────────────────────────────────────────────────────────────
def shaped_reward(completions, **_):
    """Varies within every group, and never decides."""
    return [len(text) / 7 for text in completions]


def hard_prompts_fail(prompts, completions, **_):
    """Odd first digits are never solved: their groups have no signal, however the other reward varies."""
    return [float(int(p[0]) % 2 == 0 and "abcde".find(c[:1]) >= 0) for p, c in zip(prompts, completions, strict=True)]


def train(folder, **settings):
    plain = {"algorithm": "dapo", "num_generations": 8, "per_device_train_batch_size": 16, "max_steps": 3}
    plain["outcome_reward"] = "hard_prompts_fail"
    trainer = tiny.trainer(folder, [hard_prompts_fail, shaped_reward], **{**plain, **settings})
    kept = []
    inner = trainer._compute_loss

    def spy(model, inputs):
        live = inputs["completion_mask"].bool().any(-1)
        kept.extend(trainer.processing_class.batch_decode(inputs["prompt_ids"][live], skip_special_tokens=True))
        return inner(model, inputs)

    trainer._compute_loss = spy
    trainer.train()
    return trainer, kept


@pytest.mark.parametrize("algorithm", ["dapo", "dew"])
def test_the_filter_reads_the_outcome_reward_alone_and_reports_the_groups(algorithm, tmp_path):
    _, kept = train(tmp_path, algorithm=algorithm)
    assert kept and all(int(prompt[0]) % 2 == 0 for prompt in kept)
    for line in RunFolder(tmp_path).metrics():
        assert line["groups/sampled"] == line["groups/kept"] + line["groups/dropped"]
        assert line["groups/kept"] + line["groups/short"] == 2
        assert line["groups/refilled"] <= line["groups/kept"]
        assert 1 <= line["groups/rounds"] <= 4
        assert line["accuracy"] < 0.6, "over all sampled groups, half of which cannot be solved"


def test_answers_that_may_exceed_the_context_of_the_model_are_one_warning(tmp_path, caplog):
    """Prompts have 4 tokens."""
    for context, room in ((9, 5), (4, None), (10, None)):
        caplog.clear()
        policy = tiny.model(max_position_embeddings=context)
        tiny.trainer(tmp_path / str(context), policy=policy).train()
        says = (
            f"A prompt of 4 tokens and max_completion_length=6 make 10 tokens, and the model has {context} positions. "
        )
        says += f"Set max_completion_length to at most {room}." if room else "Remove the longest prompts."
        assert caplog.text.count(says) == (context < 10) == ("positions" in caplog.text)


def test_soft_overlong_penalises_length_but_never_decides(tmp_path):
    """Limit 6, buffer 4: an answer of n tokens is penalised by −(n − 2)/4, at least −1."""
    kwargs = {"overlong": "soft", "overlong_buffer": 4, "dynamic_sampling": False}
    trainer = tiny.ready(tmp_path, tiny.has_a, algorithm="dapo", algorithm_kwargs=kwargs)
    batch = tiny.generation(trainer)
    lengths = batch["completion_mask"].sum(1)
    raw = torch.tensor(tiny.has_a(tiny.texts(trainer, batch)))
    total = (raw - ((lengths - 2) / 4).clamp(0, 1)).view(-1, 4)
    expected = (total - total.mean(1, keepdim=True)) / (total.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(batch["advantages"][:, 0], expected.flatten(), rtol=1e-4, atol=1e-5)
    assert batch["verdict"].tolist() == raw.long().tolist()
