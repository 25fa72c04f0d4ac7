"""Dynamic sampling and overlong punishment: groups without signal make room, by raw correctness alone."""

import pytest
import torch

import trl_tiny as tiny
from dew.engines.trl.sampling import PromptStream, Sampled, _Pool, fill_batch
from dew.records import RunFolder


class Alone:
    """An accelerator of one process."""

    num_processes, process_index = 1, 0

    def pad_across_processes(self, x, **_):
        return x

    def gather(self, x):
        return x


def rounds_of(verdicts, size=2):
    """A sampler whose prompts are numbers: prompt i has the verdicts `verdicts[i]`, `size` answers each."""
    asked = []

    def sample(prompts):
        asked.append(prompts)
        ids = torch.tensor([i for i in prompts for _ in range(size)])
        correct = torch.tensor([verdicts[i][j] for i in prompts for j in range(size)])
        width = 1 + len(asked)  # each round has longer answers than the one before
        mask = torch.ones(len(ids), width, dtype=torch.bool)
        local = {"prompt_ids": ids[:, None].repeat(1, width), "completion_mask": mask.long(), "number": torch.tensor(1)}
        shared = {
            "group": torch.arange(len(ids)) // size,
            "mask": mask,
            "outcome": correct.float(),
            "filler": torch.zeros(len(ids), dtype=torch.bool),
        }
        return Sampled(local=local, shared=shared, answers=[{"outcome": correct.float()}])

    return sample, asked


def fill(verdicts, quota, max_rounds, size=2, oversample=1.0):
    sample, asked = rounds_of(verdicts, size)

    def judge(shared):
        by_group = shared["outcome"].view(-1, size)
        return (by_group.amax(1) != by_group.amin(1)).repeat_interleave(size)

    stream = PromptStream(len(verdicts), seed=0, shuffle=False)
    batch = fill_batch(
        sample,
        judge,
        stream,
        Alone(),
        quota=quota,
        size=size,
        max_rounds=max_rounds,
        oversample=oversample,
        fills={"prompt_ids": -1},
    )
    return batch, asked, stream


MIXED, SOLVED, FAILED = (1, 0), (1, 1), (0, 0)


def test_groups_without_signal_make_room_for_further_prompts():
    """Round 1: prompts 0-2, one mixed. Two missing at a third kept: 3 more. Round 2: prompts 3-5, two mixed."""
    batch, asked, stream = fill([SOLVED, MIXED, FAILED, MIXED, SOLVED, MIXED, MIXED], quota=3, max_rounds=4)
    assert asked == [[0, 1, 2], [3, 4, 5]]
    assert batch.shared["prompt_ids"][:, -1].tolist() == [1, 1, 3, 3, 5, 5]
    assert batch.shared["group"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.groups == {"sampled": 6, "kept": 3, "dropped": 3, "refilled": 2, "rounds": 2, "short": 0, "mixed": 3}
    assert stream.position == 6
    assert len(torch.cat([a["outcome"] for a in batch.answers])) == 12, "dropped answers are told too"


def test_prompts_are_padded_on_the_left_and_completions_on_the_right():
    batch, _, _ = fill([SOLVED, MIXED, MIXED], quota=2, max_rounds=4)
    assert batch.local["prompt_ids"].tolist()[0] == [-1, 1, 1]
    assert batch.local["completion_mask"].tolist()[0] == [1, 1, 0]
    assert batch.local["completion_mask"].tolist()[2] == [1, 1, 1]


def test_a_full_batch_takes_one_round():
    batch, asked, _ = fill([MIXED] * 4, quota=3, max_rounds=4)
    assert asked == [[0, 1, 2]]
    assert batch.groups["refilled"] == batch.groups["dropped"] == batch.groups["short"] == 0


def test_oversampling_takes_more_prompts_in_a_round_and_keeps_the_first_with_signal():
    batch, asked, stream = fill([SOLVED, MIXED, FAILED, MIXED, MIXED, FAILED], quota=2, max_rounds=4, oversample=2.5)
    assert asked == [[0, 1, 2, 3, 4]] and stream.position == 5
    assert batch.shared["prompt_ids"][:, -1].tolist() == [1, 1, 3, 3]
    assert batch.groups == {"sampled": 5, "kept": 2, "dropped": 3, "refilled": 0, "rounds": 1, "short": 0, "mixed": 3}


def test_after_the_last_round_the_missing_groups_are_masked():
    batch, asked, _ = fill([SOLVED, MIXED, SOLVED, SOLVED, SOLVED, SOLVED], quota=2, max_rounds=2)
    assert len(asked) == 2
    assert batch.groups["short"] == 1 and batch.groups["kept"] == 1
    assert batch.shared["filler"].tolist() == [False, False, True, True]
    assert batch.shared["mask"].any(-1).tolist() == batch.local["completion_mask"].bool().any(-1).tolist()
    assert batch.shared["mask"].any(-1).tolist() == [True, True, False, False]


def test_rounds_divide_among_the_processes():
    """3 answers a group on 2 processes: an even number of groups each round."""
    pool = _Pool(quota=4, most=4, kept=[{}], sampled=4, mixed=4)
    assert pool.next_round(step=2) == 4
    assert _Pool(quota=4, most=4).next_round(step=1) == 4


# in the trainer


def shaped_reward(completions, **_):
    """Varies within every group, and decides nothing."""
    return [len(text) / 7 for text in completions]


def hard_prompts_fail(prompts, completions, **_):
    """Odd first digits are never solved: their groups have no signal, however the other reward varies."""
    return [float(int(p[0]) % 2 == 0 and "abcde".find(c[:1]) >= 0) for p, c in zip(prompts, completions, strict=True)]


def train(folder, **settings):
    plain = {"algorithm": "dapo", "num_generations": 8, "per_device_train_batch_size": 16, "max_steps": 3}
    trainer = tiny.trainer(
        folder, [hard_prompts_fail, shaped_reward], outcome_reward="hard_prompts_fail", **{**plain, **settings}
    )
    kept = []
    inner = trainer._compute_loss

    def spy(model, inputs):
        live = inputs["completion_mask"].bool().any(-1)
        kept.extend(trainer.processing_class.batch_decode(inputs["prompt_ids"][live], skip_special_tokens=True))
        return inner(model, inputs)

    trainer._compute_loss = spy
    trainer.train()
    return trainer, kept


def test_the_filter_looks_at_raw_correctness_alone(tmp_path):
    _, kept = train(tmp_path)
    assert kept, "nothing was trained on"
    assert all(int(prompt[0]) % 2 == 0 for prompt in kept)


def test_what_was_sampled_kept_dropped_and_refilled_is_told(tmp_path):
    trainer, _ = train(tmp_path, log_completions=True)
    for line in RunFolder(tmp_path).metrics():
        assert line["groups/sampled"] == line["groups/kept"] + line["groups/dropped"]
        assert line["groups/kept"] + line["groups/short"] == 2
        assert line["groups/refilled"] <= line["groups/kept"]
        assert 1 <= line["groups/rounds"] <= 4
        assert line["accuracy"] < 0.6, "over all sampled groups, half of which cannot be solved"
    table = {key: list(trainer._logs[key]) for key in ("prompt", "completion", "advantages")}
    assert len(table["advantages"]) == len(table["prompt"]) == 16
    groups = [table["prompt"][i : i + 8] for i in (0, 8)]
    assert all(len(set(group)) == 1 for group in groups)
    for i, group in enumerate(groups):  # a kept group has advantages of both signs, a filler has none
        advantages = table["advantages"][8 * i : 8 * i + 8]
        solvable = int(group[0][0]) % 2 == 0
        assert (max(advantages) > 0 > min(advantages)) if solvable else advantages == [0.0] * 8


def test_soft_overlong_punishes_length_but_never_decides(tmp_path):
    """Limit 6, buffer 4: an answer of n tokens is charged −(n − 2)/4, at least −1."""
    trainer = tiny.trainer(
        tmp_path,
        others={"rollout_func": tiny.scripted},
        algorithm="dapo",
        algorithm_kwargs={"overlong": "soft", "overlong_buffer": 4, "dynamic_sampling": False},
    )
    trainer.model.train()
    batch = trainer._generate_and_score_completions(tiny.rows(trainer))
    lengths = batch["completion_mask"].sum(1)
    texts = trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    raw = torch.tensor(tiny.has_a(texts))
    total = (raw - ((lengths - 2) / 4).clamp(0, 1)).view(-1, 4)
    expected = (total - total.mean(1, keepdim=True)) / (total.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(batch["advantages"][:, 0], expected.flatten(), rtol=1e-4, atol=1e-5)
    assert batch["verdict"].tolist() == raw.long().tolist()


@pytest.mark.parametrize("algorithm", ["gtpo", "grpo_s", "dapo"])
def test_group_overlong_trains(algorithm, tmp_path):
    trainer = tiny.trainer(tmp_path, algorithm=algorithm, algorithm_kwargs={"overlong": "group"}, num_generations=8)
    trainer.train()
    assert len(RunFolder(tmp_path).metrics()) == 2
