"""Mixed policy: the guide's answers join the group, with their own ratios and weights."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

import trl_tiny as tiny
from dew import DAPO, GTPO
from dew.engines.credit import Rows, give_credit
from dew.engines.trl.guide import GuideAnswer, MixedPolicy, RecordedGuide
from dew.engines.trl.loss import loss_part
from dew.errors import ConfigError, EngineError
from dew.run.folder import RunFolder

A, B, EOS = 3 + tiny.LETTERS.index("a"), 3 + tiny.LETTERS.index("b"), 1


class Always:
    """A guide that always gives the same answer."""

    def __init__(self, ids, logps=None):
        self.fixed = GuideAnswer(ids, logps)

    def count(self, prompt, wanted):
        return wanted

    def answer(self, prompt, prompt_ids, count, turn):
        return [self.fixed] * count


def guided(folder, guide, rewards=tiny.has_a, **settings):
    """A trainer whose answers are sampled, and the guide's added to them."""
    plain = {"algorithm": "dapo", "algorithm_kwargs": {"dynamic_sampling": False}}
    return tiny.ready(folder, rewards, others={"guide": guide}, **{**plain, **settings})


# ── the group ─────────────────────────────────────────────────────────────────────────────────────────────
def test_a_guide_that_gives_fewer_answers_than_it_was_asked_for_is_an_error(tmp_path):
    guide = Always([A, EOS])
    guide.answer = lambda *_: [guide.fixed]
    trainer = guided(tmp_path, guide, guide_completions=2)
    with pytest.raises(EngineError, match="guide: asked for 2 answers, got 1"):
        tiny.generation(trainer)


def test_guided_answers_come_last_in_the_group_and_count_in_its_baseline(tmp_path):
    trainer = guided(tmp_path, Always([A, EOS], [-0.5, -0.25]), guide_completions=2)
    batch = tiny.generation(trainer)
    assert batch["guided"].tolist() == [False, False, True, True] * 2
    assert batch["completion_ids"][2, :2].tolist() == batch["completion_ids"][7, :2].tolist() == [A, EOS]
    assert batch["guide_logps"][2, :2].tolist() == [-0.5, -0.25]
    reward = (batch["verdict"] == 1).float().view(2, 4)
    assert reward[:, 2:].all()
    expected = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(batch["advantages"][:, 0], expected.flatten(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["dapo", "kl_cov"])
def test_accuracy_and_lengths_are_of_the_policys_answers(algorithm, tmp_path):
    def only_the_guide(completions, **_):
        return [float(text == "a") for text in completions]

    guided(tmp_path, Always([A, EOS]), only_the_guide, max_steps=2, algorithm=algorithm).train()
    for line in RunFolder(tmp_path).metrics():
        assert line["accuracy"] < 0.2 and line["guide/accuracy"] == 1.0
        assert line["length/mean"] > 2
        assert line["ratio/mean"] == pytest.approx(1.0)
        assert "guide/ratio/mean" in line


SLOW = pytest.mark.slow


@pytest.mark.parametrize("algorithm", ["gtpo", pytest.param("grpo_s", marks=SLOW), pytest.param("dapo", marks=SLOW)])
def test_the_policy_learns_from_a_guide_where_it_always_fails(algorithm, tmp_path):
    """The outcome "ab" is hardly ever sampled; only the guide shows it."""

    def outcome(completions, **_):
        return [float(text == "ab") for text in completions]

    settings = {"max_steps": 25, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    guided(tmp_path, Always([A, B, EOS]), outcome, algorithm=algorithm, algorithm_kwargs={}, **settings).train()
    lines = RunFolder(tmp_path).metrics()
    assert lines[0]["accuracy"] == 0.0 and lines[0]["guide/rescued_share"] > 0
    assert max(line["accuracy"] for line in lines[-5:]) > 0.3


# ── ratio and weight, worked by hand ──────────────────────────────────────────────────────────────────────
def policy(**settings):
    """A mixed policy outside of a trainer."""
    args = SimpleNamespace(guide_weight=0.25, guide_failed_weight=0.5, guide_completions=1)
    plain = {"algorithm": DAPO(**settings), "accelerator": Accelerator(cpu=True), "tools": None, "use_vllm": False}
    return MixedPolicy(SimpleNamespace(args=args, **plain), Always([A]))


def rows(correct, guided_rows, group=None):
    count = len(correct)
    found = Rows(
        group=torch.tensor(group or [0] * count), mask=torch.ones(count, 2, dtype=torch.bool),
        outcome=torch.tensor(correct, dtype=torch.float32), extra=torch.zeros(count), entropy=torch.ones(count, 2),
    )  # fmt: skip
    filler = torch.zeros(count, dtype=torch.bool)
    return SimpleNamespace(**vars(found), filler=filler, inputs={"guided": torch.tensor(guided_rows)})


def part(guided_rows, guide_logps, logp, weight=1.0, correction=None, advantage=1.0, **settings):
    count, logp = len(guided_rows), torch.as_tensor(logp)
    inputs = {"advantages": torch.full((count, 2), advantage), "completion_mask": torch.ones(count, 2)}
    inputs |= {"guided": torch.tensor(guided_rows), "guide_logps": torch.tensor(guide_logps)}
    inputs["row_weight"] = torch.full((count,), weight)
    if correction is not None:
        inputs["importance_sampling_ratio"] = torch.full((count, 1), correction)
    return policy(**settings).parts(inputs, logp, loss_part(inputs, logp, torch.ones(count, 2)))


def test_the_ratio_of_a_recorded_token_is_taken_against_the_guide():
    """log w = −1 − (−1.1) = 0.1: inside the clip, so the loss of A = 1 is −e^0.1 = −1.10517."""
    logp, batch = part([False, True], [[0.0, 0.0], [-1.1, -1.1]], [[-2.0, -2.0], [-1.0, -1.0]])["guide/"]
    loss, stats = DAPO().loss(logp, batch, torch.ones(2, 2), count=2)
    assert loss.item() == pytest.approx(-1.105171, rel=1e-5)
    assert stats["ratio/mean"].item() == pytest.approx(1.105171, rel=1e-5)


def test_the_ratio_of_a_token_without_log_probability_is_shaped():
    """x = 0.4: x / (x + 0.1) = 0.8. Its slope in log x is x·0.1/(x+0.1)² = 0.16."""
    log_x = torch.tensor([[0.4, 0.4]]).log().requires_grad_()
    logp, batch = part([True], [[float("nan")] * 2], log_x)["guide/"]
    loss, _ = DAPO(clip_low=0.5).loss(logp, batch, torch.ones(1, 2), count=2)
    assert loss.item() == pytest.approx(-0.8, rel=1e-5)
    (slope,) = torch.autograd.grad(loss, log_x)
    assert slope.flatten().tolist() == pytest.approx([-0.08, -0.08], rel=1e-5), "−0.16 each, over 2 tokens"


def test_own_and_guided_rows_are_separate_and_the_sampler_correction_is_for_own_rows():
    parts = part([False, True], [[0.0] * 2, [-1.0] * 2], [[-1.0] * 2] * 2, weight=0.5, correction=3.0)
    own, others = parts[""][1], parts["guide/"][1]
    assert own.mask.tolist() == [[True, True], [False, False]]
    assert others.mask.tolist() == [[False, False], [True, True]]
    assert own.weight[0].item() == 1.5 and others.weight[1].item() == 0.5


def test_groups_that_only_the_guide_solved_are_a_batch_of_their_own():
    """Two groups of three. In the second both own answers failed: it has 3 rows of 2 tokens, 6 tokens of its own.

    The first has 6 tokens too, so λ₀ = 0.5 stays 0.5; with one more own group of 6 tokens it becomes 0.5 · 12/6 = 1.
    """
    correct, who = [1, 0, 1, 0, 0, 1], [False, False, True] * 2
    two, three = (
        rows(correct, who, [0, 0, 0, 1, 1, 1]),
        rows([*correct, 1, 0, 0], [*who, False, False, True], [0, 0, 0, 1, 1, 1, 2, 2, 2]),
    )
    assert policy().solved_alone(two).tolist() == [False] * 3 + [True] * 3
    for batch, count, failed, last in ((two, 6, 0.5, []), (three, 12, 1.0, [1.0, 1.0, 0.25])):
        alone = policy().solved_alone(batch)
        columns, numbers = policy().weigh(batch, give_credit(DAPO(), batch, apart=alone), alone)
        assert columns["divisor"] == count
        assert columns["row_weight"].tolist() == [1.0, 1.0, 0.25, failed, failed, failed, *last]
        assert numbers["guide/rescued_share"] == pytest.approx(3 / len(alone))


def test_a_failed_group_does_not_affect_the_others():
    """scope="batch" compares across groups, but not with one that only the guide solved."""
    alone = rows([1, 0, 1], [False, False, True])
    both = rows([1, 0, 1, 0, 0, 1], [False, False, True] * 2, [0, 0, 0, 1, 1, 1])
    algorithm = GTPO(scope="batch")
    expected = give_credit(algorithm, alone).advantages
    found = give_credit(algorithm, both, apart=policy().solved_alone(both)).advantages[:3]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


# ── recorded answers ───────────────────────────────────────────────────────────────────────────────────────
def write(path, *lines):
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def test_a_file_of_answers_with_and_without_log_probabilities(tmp_path):
    path = write(
        tmp_path / "g.jsonl",
        {"prompt": "0+0=", "completion": "ab"},
        {"prompt": "0+0=", "token_ids": [A, EOS], "logprobs": [-1.0, -2.0]},
        {"prompt": "1+0=", "completion": "ab", "logprobs": [-1.0, -2.0]},
    )
    guide = RecordedGuide(path, tiny.tokenizer(), limit=6)
    assert guide.count("0+0=", 5) == 2 and guide.count("never asked", 5) == 0
    assert guide.answer("0+0=", [], 2, turn=0) == [GuideAnswer([A, B, EOS]), GuideAnswer([A, EOS], [-1.0, -2.0])]
    assert guide.answer("0+0=", [], 1, turn=1) == [GuideAnswer([A, EOS], [-1.0, -2.0])], "cycled through"
    assert guide.answer("1+0=", [], 1, turn=0)[0].logps == [-1.0, -2.0, 0.0], "the end counts as certain"


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ('{"prompt": "a"}', "g.jsonl:1 is not a recorded answer"),
        ("nonsense", "g.jsonl:1 is not a recorded answer"),
        ('{"prompt": "a", "completion": "ab", "logprobs": [1]}', "1 logprobs for 3 tokens"),
        ('{"prompt": "a", "completion": "a", "token_ids": [3, 999]}', "token id 999 is not in the policy's vocabulary"),
        ("", "is empty"),
    ],
)
def test_a_bad_file_is_rejected(line, advice, tmp_path):
    (tmp_path / "g.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=advice):
        RecordedGuide(str(tmp_path / "g.jsonl"), tiny.tokenizer(), limit=6)


def test_prompts_missing_from_the_file_are_answered_by_the_policy_alone(tmp_path):
    trainer = partial(tiny.ready, tmp_path / "run", others={}, guide_completions=2)
    with pytest.raises(ConfigError, match=r"it has none of the prompts of the data, e\.g\. '0\+0='"):
        trainer(guide=write(tmp_path / "other.jsonl", {"prompt": "0 + 0 =", "completion": "ab"}))
    batch = tiny.generation(trainer(guide=write(tmp_path / "g.jsonl", {"prompt": "0+0=", "completion": "ab"})))
    assert batch["guided"].nonzero().tolist() == [[3]] and batch["guide_logps"][3].isnan().all()


# ── together with other features ──────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("surrogate", ["clip", "cispo", "geo_mean", "dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("A", [-1.0, 1.0])
def test_the_guides_ratio_is_bounded_for_either_sign(surrogate, A):
    """π_θ = 0.1, π_φ = 2e-5: the ratio is 5,000. Beyond 1.28 nothing flows back; CISPO clips the weight: 1.28 / 2."""
    logp, guides = torch.tensor([[0.1, 0.1]]).log().requires_grad_(), torch.full((1, 2), 2e-5).log().tolist()
    guide_logp, batch = part([True], guides, logp, advantage=A, surrogate=surrogate)["guide/"]
    loss, _ = DAPO(surrogate=surrogate).loss(guide_logp, batch, torch.full((1, 2), A), count=2)
    assert surrogate != "clip" or loss.item() == pytest.approx(-1.28 * A)
    gradient = -0.64 * A if surrogate == "cispo" else 0
    assert torch.autograd.grad(loss, logp)[0].tolist() == [[pytest.approx(gradient)] * 2]


def test_dynamic_sampling_on_two_processes_keeps_groups_whole(tmp_path):
    """A round of 5 prompts x 4 answers would be 10 rows on each of 2 processes; 6 prompts are 12."""

    def run(rank):
        kwargs = {"oversample": 1.25, "max_rounds": 1}
        trainer = guided(tmp_path, Always([A, EOS]), algorithm_kwargs=kwargs, max_steps=1)
        inner, counts = trainer._generate, []
        trainer._generate = lambda prompts: counts.append(len(prompts)) or inner(prompts)
        trainer.train()
        assert counts == [12]

    assert tiny.in_children(run, count=2) == [0, 0]


def test_columns_of_a_rollout_function_stay_with_their_rows(tmp_path):
    """The policy's rows keep their own value, and the guide's have none."""
    seen = []

    def rollout(prompts, trainer):
        return {**tiny.scripted(prompts, trainer), "place": list(range(len(prompts)))}

    def outcome(completions, place, **_):
        seen.append(place)
        return [float("a" in text) for text in completions]

    tiny.generation(tiny.ready(tmp_path, outcome, others={"guide": Always([A, EOS]), "rollout_func": rollout}))
    assert seen == [[0, 1, 2, None, 3, 4, 5, None]]


def test_a_guide_given_as_an_object_is_checked_like_a_named_one(tmp_path):
    with pytest.raises(ConfigError, match="guide_completions=4 of num_generations=4"):
        guided(tmp_path, Always([A, EOS]), guide_completions=4)
    with pytest.raises(ConfigError, match="guide with kl_coef"):
        guided(tmp_path, Always([A, EOS]), algorithm="grpo", algorithm_kwargs={"kl_coef": 0.1})
