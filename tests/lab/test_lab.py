"""`dew lab`: tasks, stacked training, studies. Runs here have tiny policies and rewards that need no warm start."""

import dataclasses
import itertools
import json
import math
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from dew.algorithms import algorithm_classes, get_algorithm
from dew.algorithms.base import Part
from dew.cli.lab import _report
from dew.compare.statistics import Interval, holm, t_test
from dew.engines.lab import Settings, Study, differences, load_study, markdown, study
from dew.engines.lab import warm_start as warm
from dew.engines.lab.arms import parse_arms
from dew.engines.lab.stack import Replica, Stack, Team, _random_rollouts
from dew.engines.lab.summary import difference
from dew.engines.lab.tasks import BOS, CHARACTERS, EOS, PAD, TASKS, generator, get_task
from dew.engines.lab.tiny import Adam, forward, new_policy, numerics, sample
from dew.errors import ConfigError, DewError, RecordError
from dew.rollouts import Rollouts
from dew.run.folder import lock

TINY = Settings(
    group_size=4,
    prompts=4,
    optimizer_steps=2,
    generations=5,
    width=32,
    depth=2,
    eval_problems=4,
    eval_k=2,
    evaluations=2,
)
EASY = dataclasses.replace(get_task("countdown-3"), verdict=lambda answers, facts: (answers == 3).any(1))
"""Correct is any answer that contains a 3: an untrained policy has groups with signal."""
OWN_LOSS = [name for name, cls in algorithm_classes().items() if not cls.engine_loss]
START = new_policy(32, 2, EASY.prompt_length + EASY.tokens, generator(0))


def stack(arms, seeds=(0,), device="cpu"):
    replicas = [Replica(arm, seed) for arm in parse_arms(arms, [1e-3], controls=False) for seed in seeds]
    return Stack(EASY, START, replicas, TINY, device)


def ids(text, width=None):
    tokens = [*(CHARACTERS.index(c) for c in text), EOS]
    return tokens + [PAD] * ((width or len(tokens)) - len(tokens))


def text(tokens):
    return "".join(CHARACTERS[t] if t < EOS else "" for t in tokens.tolist())


# ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────────


def countdown_oracle(answer, numbers, target):
    """Plain Python: replay the steps."""
    pool, value = list(numbers), None
    for step in answer.split(";"):
        left, equals, right = step.partition("=")
        op = next((c for c in left if c in "+-*"), None)
        a, _, b = left.partition(op) if op else ("", "", "")
        if not (equals and a.isdigit() and b.isdigit() and right.isdigit()):
            return False
        for used in (int(a), int(b)):
            if used not in pool:
                return False
            pool.remove(used)
        value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op]
        if value != int(right):
            return False
        pool.append(value)
    return value == target


def test_countdown_verdicts_by_hand():
    cases = [
        ("3+7=10;10-2=8", True),
        ("7+3=10;10-2=8;", False),  # nothing after the last step
        ("3+7=10", False),  # not the target
        ("3+3=6;6+2=8", False),  # 3 is there once
        ("3+7=11;11-3=8", False),  # wrong sum
        ("10-2=8", False),  # 10 is not there
        ("3+7=10;10-2=8=8", False),
        ("+3=8", False),
    ]
    answers = torch.tensor([ids(answer, 20) for answer, _ in cases])
    facts = torch.tensor([[3, 7, 2, 8]]).expand(len(cases), -1)
    assert get_task("countdown-3").verdict(answers, facts).tolist() == [correct for _, correct in cases]
    cut = torch.tensor([ids("3+7=10;10-2=8")[:-1]])  # without EOS
    assert not get_task("countdown-3").verdict(cut, facts[:1]).any()


def test_countdown_verdicts_equal_a_replay():
    """Demonstrations with random characters replaced."""
    task, random = get_task("countdown-4"), generator("oracle")
    problems = task.problems(300, random)[0]
    answers = problems.demonstration.clone()
    at = torch.randint(0, 22, (300, 1), generator=random)
    changed = torch.where(
        answers.gather(1, at) < EOS, torch.randint(0, 18, (300, 1), generator=random), answers.gather(1, at)
    )
    answers[100:] = answers.scatter(1, at, changed)[100:]
    found = task.verdict(answers, problems.facts)
    expected = [
        countdown_oracle(text(a), facts[:-1].tolist(), facts[-1].item())
        for a, facts in zip(answers, problems.facts, strict=True)
    ]
    assert found.tolist() == expected
    assert found[:100].all() and 0 < found[100:].float().mean() < 0.5


def test_addition_verdicts_by_hand():
    cases = {"3+7=10;10+2=12": True, "=12": True, "3+7=12;1": False, "12": False, "3+9=": False, "3+9=0000012": False}
    answers = torch.tensor([ids(answer, 16) for answer in cases])
    facts = torch.full((len(cases), 1), 12)
    assert get_task("addition-8").verdict(answers, facts).tolist() == list(cases.values())


@pytest.mark.parametrize("name", TASKS)
def test_problems_are_well_formed(name):
    task = get_task(name)
    problems = task.problems(50, generator(1), generator(2))
    assert problems.prompt.shape == (2, 50, task.prompt_length) and (problems.prompt[..., 0] == BOS).all()
    assert problems.demonstration.shape == (2, 50, task.tokens)
    assert ((problems.demonstration == EOS).sum(-1) == 1).all()
    alone = task.problems(50, generator(2))
    assert torch.equal(alone.prompt[0], problems.prompt[1])  # a seed's problems do not depend on other seeds
    solved = task.verdict(problems.demonstration.flatten(0, 1), problems.facts.flatten(0, 1)).float().mean()
    assert solved == 1 if name.startswith("countdown") else 0.1 < solved < 0.6


# ── policies ────────────────────────────────────────────────────────────────────────────────────────────────


def test_sampling_with_a_cache_equals_the_whole_forward_pass():
    prompts = EASY.problems(3, generator(5)).prompt
    answers = sample(START, prompts, torch.rand(1, 6, EASY.tokens, generator=generator(6)))
    inputs = torch.cat([prompts.repeat_interleave(2, 1), answers.tokens[..., :-1]], -1)
    logp = forward(START, inputs, last=EASY.tokens).log_softmax(-1)
    own = logp.gather(-1, answers.tokens.clamp_max(EOS)[..., None])[..., 0]
    expected = {"logp": own, "entropy": -(logp.exp() * logp).sum(-1), "sum_sq": logp.exp().square().sum(-1)}
    for name, x in expected.items():
        torch.testing.assert_close(getattr(answers, name)[answers.mask], x[answers.mask], rtol=1e-4, atol=1e-5)


def test_adam_equals_torch_and_a_replica_without_gradient_stands_still():
    p = torch.randn(3, 4, 2, generator=generator(1)).requires_grad_()
    alone = [torch.nn.Parameter(x.detach().clone()) for x in p]
    rates = torch.tensor([1e-2, 1e-3, 1e-2])
    ours, theirs = (
        Adam({"p": p}, rates),
        [torch.optim.Adam([x], r.item(), betas=(0.9, 0.99)) for x, r in zip(alone, rates, strict=True)],
    )
    for step in range(4):
        g = torch.randn(3, 4, 2, generator=generator("g", step)) * 2
        g[2] = {1: 0, 2: torch.nan}.get(step, 1) * g[2]
        p.grad = g.clone()
        norms = ours.step(1.0)
        for i, (x, adam) in enumerate(zip(alone, theirs, strict=True)):
            x.grad = g[i].clone()
            norm = torch.nn.utils.clip_grad_norm_([x], 1.0).item()
            assert norm == pytest.approx(norms[i].item(), rel=1e-5, nan_ok=True)
            if i != 2 or step not in (1, 2):
                adam.step()
    torch.testing.assert_close(p.detach(), torch.stack([x.detach() for x in alone]), rtol=1e-5, atol=1e-6)


class Ordinary(torch.nn.Module):
    """One policy written the usual way: no replica axis, no cache."""

    def __init__(self):
        super().__init__()
        for name, p in START.items():
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(p[0].clone()))

    def forward(self, tokens):
        n = tokens.shape[1]
        x = self.embed[tokens] + self.position[:n]
        for i in range(2):
            q, k, v = (F.layer_norm(x, (32,)) @ getattr(self, f"{i}_qkv")).chunk(3, -1)
            scores = (q @ k.mT / math.sqrt(32)).masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
            x = x + scores.softmax(-1) @ v @ getattr(self, f"{i}_project")
            x = x + F.relu(F.layer_norm(x, (32,)) @ getattr(self, f"{i}_up")) @ getattr(self, f"{i}_down")
        return (F.layer_norm(x, (32,)) @ self.out).log_softmax(-1)


def ordinary_run(algorithm, seed, rate, generations):
    """The same training with the library's credit and loss, answer by answer."""
    s, policy = TINY, Ordinary()
    algorithm = dataclasses.replace(algorithm, max_tokens=EASY.tokens)
    adam = torch.optim.Adam(policy.parameters(), rate, betas=(0.9, 0.99))
    for g in range(generations):
        prompts = EASY.problems(s.prompts, generator(seed, "problems", g)).prompt[0].repeat_interleave(s.group_size, 0)
        u = torch.rand(16, EASY.tokens, generator=generator(seed, "answers", g))
        rows, done = prompts, torch.zeros(16, dtype=torch.bool)
        with torch.no_grad():
            for t in range(EASY.tokens):
                token = (policy(rows)[:, -1].exp().cumsum(-1) < u[:, t, None]).sum(-1).clamp_max(EOS)
                rows = torch.cat([rows, torch.where(done, PAD, token)[:, None]], 1)
                done |= token == EOS
        answers = rows[:, EASY.prompt_length :]
        mask, target = answers != PAD, answers.clamp_max(EOS)[..., None]

        def score(rows, target):
            logp = policy(rows[:, :-1])[:, EASY.prompt_length - 1 :]
            return logp.gather(-1, target)[..., 0], -(logp.exp() * logp).sum(-1).detach()

        with torch.no_grad():
            old, H = score(rows, target)
        reward = EASY.verdict(answers, None).float()
        grouped = {"mask": mask, "entropy": H, "logp": old, "reward": reward}
        rollouts = Rollouts(**{k: x.unflatten(0, (s.prompts, s.group_size)) for k, x in grouped.items()})
        keep = algorithm.signal(rollouts)
        A = torch.zeros(rollouts.mask.shape)
        A[keep] = algorithm.advantages(
            Rollouts(**{k: getattr(rollouts, k)[keep] for k in ("mask", "entropy", "logp", "reward")})
        )
        A, trains = A.flatten(0, 1), keep.repeat_interleave(s.group_size)
        order = torch.rand(16, generator=generator(seed, "order", g)).argsort()
        order = order[trains[order]]
        for i in range(s.optimizer_steps):
            part = order[i :: s.optimizer_steps]
            logp, now = score(rows[part], target[part])
            given = Part(mask=mask[part], old_logp=old[part], entropy=now)
            loss, _ = algorithm.loss(logp, given, A[part])
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            adam.step()
    return policy


def test_a_replica_equals_an_ordinary_run():
    arms, seeds = ["dapo", "gtpo", "grpo_s", "forking_tokens", "entropy_advantage", "dr_grpo"], (0, 7)
    runs = stack(arms, seeds)
    for g in range(3):
        runs.generation(g)
    assert [team.stacked for team in runs.teams] == [True, True, True, False, True, True]
    for at in (1, 2, 5, 7, 8, 11):
        name, seed = runs.replicas[at].arm.label, runs.replicas[at].seed
        alone = dict(ordinary_run(runs.replicas[at].arm.algorithm, seed, 1e-3, 3).named_parameters())
        moved = 0.0
        for key, p in runs.parameters.items():
            torch.testing.assert_close(
                p[at].detach(), alone[key.replace(".", "_")].detach(), rtol=0, atol=1e-5, msg=name
            )
            moved = max(moved, (p[at] - START[key][0]).abs().max().item())
        assert moved > 1e-3, name


def test_replicas_do_not_leak_into_one_another():
    """Replicas with a huge learning rate, or with NaN for weights, change no other replica's numbers."""

    def train(disturb):
        runs = stack(["dapo", "grpo", "gtpo", "dr_grpo"], (0, 1))
        disturb(runs)
        for g in range(3):
            runs.generation(g)
        return runs

    def disturb(runs):
        runs.parameters["0.up"].data[[2, 7]] = torch.nan  # grpo, seed 0; dr_grpo, seed 1
        runs.adam.rates[4] = 0.1  # gtpo, seed 0

    calm, disturbed = train(lambda runs: None), train(disturb)
    others = [i for i in range(8) if i not in (2, 4, 7)]
    for key, p in calm.parameters.items():  # to rounding: rows are padded to those of the fullest replica
        torch.testing.assert_close(p[others], disturbed.parameters[key][others], rtol=0, atol=1e-6)
    assert not torch.allclose(calm.parameters["out"][4], disturbed.parameters["out"][4], atol=1e-3)


def test_rules_that_look_at_the_whole_batch_are_called_for_each_replica():
    names = {
        "gtpo": True,
        "gtpo(scope=batch)": False,
        "forking_tokens": False,
        "clip_cov": False,
        "otb": True,
    }
    assert [team.stacked for team in stack(list(names)).teams] == list(names.values())


def test_every_registered_algorithm_trains():
    """From the same answers to the same problems, for the same seed."""
    runs = stack(OWN_LOSS, (0, 1))
    runs.generation(0)
    for name in ("accuracy", "entropy"):
        by_seed = runs.history[name][0].view(-1, 2)
        assert by_seed.eq(by_seed[0]).all() and by_seed[0, 0] != by_seed[0, 1]
    runs.generation(1)
    moved = (runs.parameters["0.up"] - START["0.up"]).detach().flatten(1).abs().amax(1)
    assert moved.isfinite().all() and (moved > 0).all()


def test_penalties_reach_the_loss_of_their_own_rows(monkeypatch):
    """A penalty of 5 on half of the live tokens, those with the larger covariance of advantage and log π."""
    runs, seen = stack(["dapo", "kl_cov(cov_share=0.5,cov_coef=5.0)"]), []
    loss = Team.loss

    def spy(team, logp, given, advantages, count):
        seen.append((given, advantages))
        return loss(team, logp, given, advantages, count)

    monkeypatch.setattr(Team, "loss", spy)
    runs.generation(0)
    steps = [(given["penalty"], given["old_logp"], A, given["mask"]) for given, A in seen if "penalty" in given]
    penalty, old, A, mask = (torch.cat([x[0] for x in parts]) for parts in zip(*steps, strict=True))
    covariance = (A - A[mask].mean()) * (old - old[mask].mean())
    assert len(seen) == 4 and penalty.unique().tolist() == [0, 5] and not penalty[~mask].any()
    assert covariance[penalty > 0].min() >= covariance[mask & (penalty == 0)].max()


@pytest.mark.gpu
def test_the_same_numbers_again_on_a_gpu():
    def train():
        with numerics():
            runs = stack(OWN_LOSS, (0, 1), "cuda")
            for g in range(3):
                runs.generation(g)
            return runs.parameters

    first, second = train(), train()
    assert all(torch.equal(first[name], second[name]) for name in first)


def trained_with(cuda_graphs, task, device):
    replicas = [Replica(arm, seed) for arm in parse_arms(["dapo", "gtpo"], [1e-3], controls=False) for seed in (0, 1)]
    start = new_policy(32, 2, task.prompt_length + task.tokens, generator(0))
    with numerics():
        runs = Stack(task, start, replicas, TINY, device, cuda_graphs)
        for g in range(3):
            runs.generation(g)
        runs.evaluate(3)
    return runs, [*runs.parameters.values(), *(torch.stack(x) for x in runs.history.values())]


@pytest.mark.gpu
@pytest.mark.parametrize("task", [EASY, get_task("countdown-4"), get_task("addition-8")], ids=lambda task: task.name)
def test_cuda_graphs_give_the_same_numbers(task, recwarn):
    (_, eager), (runs, replayed) = (trained_with(x, task, "cuda") for x in (False, True))
    assert all(map(torch.equal, eager, replayed)) and not recwarn.list
    assert runs.answer.function not in runs.answer.graphs.values()


def test_where_no_cuda_graph_can_be_made_the_kernels_are_launched_one_by_one(monkeypatch):
    def refuse(_):
        raise RuntimeError("not permitted")

    for name, found in {"graph": refuse, "CUDAGraph": object, "current_stream": object, "set_stream": id}.items():
        monkeypatch.setattr(torch.cuda, name, found)
    _, eager = trained_with(False, EASY, "cpu")
    with pytest.warns(UserWarning, match="No CUDA graph"):
        _, replayed = trained_with(True, EASY, "cpu")
    assert all(map(torch.equal, eager, replayed))


@pytest.mark.parametrize("name", ["dapo", "gtpo", "gtpo over the batch", "kl_cov", "reinforce_pp"])
def test_credit_of_several_runs_is_that_of_each(name):
    """Whether the runs can be stacked or, with statistics of a batch, not."""
    name, _, scope = name.partition(" over the ")
    algorithm = get_algorithm(name, max_tokens=10, **({"scope": scope} if scope else {}))
    given = _random_rollouts(6, 10)
    credit, kept = Team(algorithm, slice(0, 2), 6, 10).credit(given)
    assert kept.tolist() == [[False, True, True, True]] * 2 and not credit[:, :, 0].any()
    for i in range(2):
        own = algorithm.advantages(Rollouts(**{field: x[i, 1:] for field, x in given.items()}))
        torch.testing.assert_close(credit[i, 0, 1:], own, rtol=1e-4, atol=1e-5)


# ── arms ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_arms_from_text():
    arms = parse_arms(["dapo", "gtpo(alpha2=0.5, pool=joint)@3e-5", "gtpo(entropy_clip=(0.1,2.0))"], [1e-4, 2e-4])
    assert [(arm.label, arm.learning_rate) for arm in arms[:2]] == [("dapo", 1e-4), ("dapo", 2e-4)]
    assert (arms[2].label, arms[2].learning_rate) == ("gtpo(pool=joint,alpha2=0.5)", 3e-5)
    assert (
        arms[2].control == arms[3].label == "gtpo(pool=joint,alpha1=1.5,alpha2=0.0)" and arms[3].learning_rate == 3e-5
    )
    assert arms[4].algorithm.entropy_clip == (0.1, 2.0)
    assert len(parse_arms(["dapo", "gtpo", "dapo"], [1e-4], controls=False)) == 2


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ("gtop", "Did you mean 'gtpo'?"),
        ("early_tokens", "For a class of your own, write file.py:Class"),
        ("gtpo(alpah2=1)", "Did you mean 'alpha2'?"),
        ("gtpo(alpha2)", "cannot be read"),
        ("gtpo(0.5)", "cannot be read"),
        ("gtpo(alpha2=0.5,alpha2=0.3)", "alpha2 given twice"),
        ("gtpo(alpha2=-1)", "a wrong answer would be rewarded"),
        ("gtpo@fast", "Write it like @3e-5"),
        ("missing.py:Rule", "cannot be imported"),
        ("trl", "Its credit and loss are the engine's"),
        ("dew.algorithms:Nothing", "no class 'Nothing'"),
        ("dapo(kl_coef=0.1)", "no reference policy"),
    ],
)
def test_mistakes_in_an_arm_are_explained(arm, words, algorithm_registry):
    with pytest.raises(ConfigError) as error:
        parse_arms(["dapo", arm], [1e-4])
    assert words in str(error.value) and arm in str(error.value)


# ── studies ─────────────────────────────────────────────────────────────────────────────────────────────────

RULE = """
from dataclasses import dataclass
from typing import ClassVar
from dew.algorithms.baselines import DAPO

@dataclass(frozen=True, kw_only=True)
class Halved(DAPO):
    name: ClassVar[str] = "halved"
    share: float = 0.5

    def advantages(self, rollouts):
        return self.share * super().advantages(rollouts)
"""
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in dataclasses.asdict(TINY).items()]


@pytest.fixture
def easy(monkeypatch, tmp_path):
    """Studies of the easy task, started from an almost untrained policy."""
    monkeypatch.setitem(TASKS, EASY.name, EASY)
    for name, value in {"DEMONSTRATIONS": 32, "PROBED": 4, "TESTED": 4, "BATCH": 4, "CHECK": 2, "TARGET": -1.0}.items():
        monkeypatch.setattr(warm, name, value)
    return {
        "tasks": [EASY.name],
        "settings": TINY,
        "learning_rates": [1e-3],
        "warm_starts": tmp_path / "warm",
        "device": "cpu",
    }


def test_a_users_rule_in_the_table(easy, tmp_path, monkeypatch, dew, algorithm_registry):
    (tmp_path / "rules.py").write_text(RULE)
    monkeypatch.chdir(tmp_path)
    words = ["dapo", "rules.py:Halved(share=0.25)", "gtpo", "--task", EASY.name, "--seeds", "2", "-o", "out"]
    code, out, err = dew("lab", *words, "--warm-starts", "warm", *FLAGS)
    assert code == 0, err
    for row in ("| dapo (its own values) |", "| halved(share=0.25) |", "| gtpo |", "| gtpo(alpha1=1.1,alpha2=0.0) |"):
        assert row in out
    assert "difference from its control" in out and "too few" in out
    found = load_study("out")
    assert [run["seed"] for run in found.runs if run["arm"] == "halved(share=0.25)"] == [0, 1]
    assert len(found.runs) == 8 and all(len(run["curves"]["accuracy"]) == 5 for run in found.runs)
    assert [e["generation"] for e in found.runs[0]["evaluations"]] == [3, 5]
    assert (tmp_path / "out" / "summary.md").read_text().strip() in out
    same = {**easy, "learning_rates": [5e-5], "output": "out", "say": (said := []).append}
    other = RULE.partition("DAPO\n")[2].replace("alved", "other")
    (tmp_path / "rules.py").write_text(RULE + other)
    again = study(["rules.py:Halved(share=0.25)"], seeds=2, **same)  # another rule in the file: nothing to train
    assert again.runs == found.runs and "all 2 runs are finished" in said[-1] and "Compared with dapo" in said[0]
    (tmp_path / "rules.py").write_text(RULE.replace("self.share *", "2 * self.share *"))
    again = study(["rules.py:Halved(share=0.25)"], seeds=1, **same)  # a changed rule trains again
    first, second = ([run for run in x.runs if run["arm"] == "halved(share=0.25)"] for x in (found, again))
    assert len(second) == 1 and second[0]["source"] != first[0]["source"]  # and is not mixed with runs of the old one
    assert "The code of halved(share=0.25) has changed: the 2 runs" in "".join(said)


def test_a_rule_with_a_loss_of_nan_is_named_and_any_setting_can_be_written(easy, tmp_path):
    """A mean over the tokens of each answer divides by 0 for answers that do not train."""
    rule = RULE.replace("share: float = 0.5", "places: frozenset = frozenset({1})").partition("    def ")[0]
    rule += "    def loss(self, logp, part, advantages, *, count=None):\n"
    rule += "        return ((logp * advantages * part.mask).sum(-1) / part.mask.all(-1)).mean(), {}\n"
    (tmp_path / "rule.py").write_text(rule)
    said = []
    study(["dapo", f"{tmp_path}/rule.py:Halved"], seeds=1, output=tmp_path / "out", say=said.append, **easy)
    assert "halved: updates were skipped in" in said[-1] and not any("dapo: updates" in line for line in said)
    assert load_study(tmp_path / "out").runs[1]["algorithm_settings"]["places"] == "frozenset({1})"


def mistaken(tmp_path, head="@dataclass(frozen=True, kw_only=True)\nclass Rule(DAPO):", body="", name='name = "mine"'):
    """What the lab says to a rule with a mistake."""
    imports = "from dataclasses import dataclass\nfrom dew.algorithms import DAPO, Algorithm"
    (tmp_path / "rule.py").write_text(f"{imports}\n{head}\n    {name}\n    {body}\n")
    try:
        (arm,) = parse_arms([f"{tmp_path}/rule.py:Rule"], [1e-3])
        team, rows = Team(arm.algorithm, slice(0, 2), 4, 6), torch.zeros(2, 3, 6)
        team.loss(rows, {"mask": rows > 0, "old_logp": rows}, rows, torch.ones(2))
    except DewError as error:
        return str(error)
    return ""


def test_mistakes_in_a_users_rule_are_explained(tmp_path, dew, monkeypatch):
    says = partial(mistaken, tmp_path)
    advantages = "def advantages(self, rollouts): return super().advantages(rollouts)"
    assert says(body=advantages) == ""
    assert "returned shape (8, 4); expected (P, G, T) = (8, 4, 6)" in says(body=f"{advantages}.mean(-1)")
    assert "returned NoneType, not a tensor" in says(body="def advantages(self, rollouts): pass")
    assert "advantages or penalties are NaN or infinite" in says(body=f"{advantages} / 0 * 0")
    undeclared = says(body=f"{advantages} * rollouts.entropy")
    assert "at rule.py, line 6" in undeclared and 'Write needs_entropy = "old"' in undeclared
    assert says(body=f"{advantages} * rollouts.entropy", name='name = "mine"; needs_entropy = "old"') == ""
    assert 'Write "old" for the entropy' in says(name='name = "mine"; needs_entropy = True')
    assert 'Write e.g. name = "mine"' in says(name="pass")
    assert "mine needs the setting 'keep'. Give it a default" in says(body="keep: float")
    assert "its setting 'scale' clashes with" in says(body="scale: float = 2.0")
    assert "is not a data class. Decorate the class" in says(head="class Rule(DAPO):", body="keep: float = 2.0")
    assert "Decorate the class with @dataclass(frozen=True" in says(head="@dataclass\nclass Rule(DAPO):")
    assert "has no credit. Define advantages" in says(head="class Rule(Algorithm):")
    assert "ZeroDivisionError: division by zero at rule.py, line 6" in says(body="1 / 0")
    loss = "def loss(self, logp, part, advantages, *, count=None): return {}"
    for wrong in ("logp.sum()", "(logp.sum(-1), {})"):
        assert "loss(...) did not return a single number" in says(body=loss.format(wrong))
    assert says(body=loss.format("(logp.sum(), {})")) == ""
    (tmp_path / "two.py").write_text(RULE + RULE.partition("DAPO\n")[2].replace("Halved", "Copied"))
    with pytest.raises(ConfigError, match="another arm has the same name 'halved'"):
        parse_arms([f"{tmp_path}/two.py:Halved", f"{tmp_path}/two.py:Copied"], [1e-3])
    with pytest.raises(AttributeError):
        says(body="def advantages(self, rollouts): return rollouts.rewards")
    monkeypatch.setattr("dew.engines.lab.study", lambda arms, **_: Team(get_algorithm(*arms), slice(0, 2), 4, 6))
    _, _, err = dew("lab", f"{tmp_path}/rule.py:Rule", "-o", tmp_path / "out")
    assert "AttributeError at rule.py, line 6: 'Rollouts' object has no attribute 'rewards'" in err


def test_an_interrupted_study_resumes_with_the_same_numbers(easy, tmp_path, monkeypatch):
    module = sys.modules["dew.engines.lab.study"]
    said = []
    whole = study(["dapo", "grpo"], seeds=2, output=tmp_path / "whole", say=said.append, **easy)
    monkeypatch.setattr(module, "memory", lambda *_: 0.3 * module._free("cpu"))  # two runs at a time

    def interrupt(progress):
        if progress.finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(["dapo", "grpo"], seeds=2, output=tmp_path / "cut", say=said.append, progress=interrupt, **easy)
    assert len(load_study(tmp_path / "cut").runs) == 2
    resumed = study(["dapo", "grpo"], seeds=2, output=tmp_path / "cut", say=said.append, **easy)

    def numbers(found):
        return {(run["arm"], run["seed"]): run["curves"] for run in found.runs}

    assert numbers(whole).keys() == numbers(resumed).keys()
    for key, curves in numbers(whole).items():
        for name, curve in curves.items():
            assert numbers(resumed)[key][name] == pytest.approx(curve, abs=1e-5), (key, name)
    again = study(["dapo", "grpo"], seeds=2, output=tmp_path / "cut", say=said.append, **easy)
    assert again.runs == resumed.runs and "all 4 runs are finished" in said[-1]
    later = study(["dapo"], seeds=1, first_seed=100, output=tmp_path / "later", say=said.append, **easy)
    merged = load_study(tmp_path / "cut", tmp_path / "later")
    assert len(merged.runs) == 5 and merged.runs[-1] == json.loads(json.dumps(later.runs[0]))


def test_folders_are_checked_before_training(tmp_path, dew, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(warm, "_train", lambda *_: pytest.fail("trained"))
    monkeypatch.chdir(tmp_path)
    for folders, says in (
        ("file", "file is a file"),
        ("file/x", "Not a directory"),
        ("x --warm-starts file", "exists"),
    ):
        code, _, err = dew("lab", "dapo", "--device", "cpu", "-o", *folders.split())
        assert code == 1 and says in err
    with lock(tmp_path / "busy"):
        code, _, err = dew("lab", "dapo", "-o", "busy")
    assert code == 1 and "busy is in use by another command" in err


def test_mistakes_in_a_study_are_explained(easy, tmp_path):
    def error(arms=("dapo",), **changed):
        with pytest.raises(ConfigError) as found:
            study(arms, **{**easy, "output": tmp_path / "x", "say": lambda _: None, **changed})
        return str(found.value)

    assert "Choose one of: countdown-3, countdown-4" in error(tasks=["countdown"])
    assert "Give at least 1" in error(seeds=0)
    assert "learning rate 2" in error(learning_rates=[2.0])
    assert "no such GPU" in error(device="cuda:99")
    assert "CUDA graphs need a GPU" in error(device="cpu", cuda_graphs=True)
    assert "is not known" in error(device="gpu")
    assert "is not known" in error(device="meta")
    assert "Name at least one rule" in error(arms=())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert "is not empty and holds no study" in error(output=tmp_path / "full")
    study(["dapo"], output=tmp_path / "old", seeds=1, say=lambda _: None, **easy)
    other = dataclasses.replace(TINY, prompts=8)
    assert "other settings (prompts 4 and 8)" in error(output=tmp_path / "old", settings=other)

    def edit(folder, **changes):
        content = json.loads((tmp_path / "old" / "study.json").read_text())
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "study.json").write_text(json.dumps(content | changes))
        return tmp_path / folder

    other = edit("other", tasks={EASY.name: {"warm_start": "other"}})
    assert "started from policy other, others from" in error(output=other)
    with pytest.raises(ConfigError, match=r"others from other\. They cannot be paired"):
        load_study(tmp_path / "old", other)
    with pytest.raises(RecordError, match=r"format 2, expected 1\. Update dew"):
        load_study(edit("newer", format=2, added=[]))
    with pytest.raises(RecordError, match="not a study; it is damaged"):
        load_study(edit("damaged", added=[]))
    with pytest.raises(ConfigError, match="multiple of 32"):
        Settings(width=100)


def test_training_makes_the_chosen_gpu_the_current_one(easy, tmp_path, monkeypatch):
    """Triton launches kernels on the current GPU, wherever their tensors are."""

    def enter(device):
        assert device == "cuda:1"
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["dew.engines.lab.study"], "_device", str)
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    monkeypatch.setattr(torch.cuda, "device", enter)
    with pytest.raises(KeyboardInterrupt):
        study(["dapo"], output=tmp_path / "out", **easy | {"device": "cuda:1"})


def test_a_slow_warm_start_says_how_long_it_takes(easy, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(warm, "CHECK", 12)
    monkeypatch.setattr(warm, "perf_counter", itertools.count(0, 30).__next__)  # ten steps in 30 s
    warm.warm_start(EASY, 32, 2, "cpu", tmp_path, said.append)
    assert "36 s per 12 steps here" in said[1]


def test_a_damaged_warm_start_is_trained_again(easy, tmp_path):
    said = []
    first = warm.warm_start(EASY, 32, 2, "cpu", tmp_path, said.append)
    path = next(tmp_path.glob("*.pt"))
    said.clear()
    assert warm.warm_start(EASY, 32, 2, "cpu", tmp_path, said.append).digest == first.digest and not said
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    again = warm.warm_start(EASY, 32, 2, "cpu", tmp_path, said.append)
    assert (
        "damaged" in said[0] and "once for each task and size" in said[1] and again.digest == first.digest
    )  # training is deterministic
    assert warm.warm_start(EASY, 32, 2, "cpu", tmp_path, said.append).digest == first.digest


# ── statistics ──────────────────────────────────────────────────────────────────────────────────────────────


def invented(scores):
    """A study with these areas: {(arm, rate): [by seed]}."""
    runs = [
        {"task": "t", "arm": arm, "learning_rate": rate, "seed": seed, "control": "c" if arm == "b" else None,
         "scores": dict.fromkeys(("area", "final", "pass@1", "pass@k", "entropy", "length", "flipped"), x)}
        for (arm, rate), values in scores.items() for seed, x in enumerate(values)
    ]  # fmt: skip
    arms = list(dict.fromkeys(arm for arm, _ in scores))
    return Study(Settings(), arms, {"t": {"pass@1": 0.1, "pass@16": 0.5}}, runs)


def test_paired_difference_by_hand():
    """D = 1, 2, 3: mean 2, s = 1; t(0.975, 2) = 4.3027, so ± 4.3027 / √3 = 2.4841. t = 2√3 = 3.4641, p = 0.0742."""
    found = difference(invented({("a", 1.0): [5, 5, 5], ("b", 1.0): [6, 7, 8]}), "t", ("b", 1.0), ("a", 1.0), "area")
    assert (found.value, found.seeds) == (2, 3)
    assert (found.low, found.high) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-4)
    assert found.p == pytest.approx(0.0742, abs=1e-4)
    assert found.verdict == "too few seeds (3 of at least 5)"


def test_holm_by_hand():
    """Sorted 0.01, 0.03, 0.04: times 3, 2, 1 = 0.03, 0.06, 0.04; the last may not be below the one before: 0.06."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_equal_runs_have_an_interval_of_0():
    assert t_test([0.0] * 6) == (Interval(0.0, 0.0, 0.0), 1.0)


def test_comparisons_at_the_same_rate_at_the_best_rates_and_with_the_control():
    base = [0.5, 0.52, 0.51, 0.53, 0.5, 0.52]
    worse, better = [x - 0.1 + i * 0.001 for i, x in enumerate(base)], [x + 0.1 - i * 0.001 for i, x in enumerate(base)]
    found = invented(
        {("a", 1.0): base, ("a", 2.0): worse, ("b", 1.0): worse, ("b", 2.0): better, ("c", 2.0): base[::-1]}
    )
    same = differences(found, "t")
    assert [(d.arm, d.reference, d.verdict) for d in same] == [
        (("b", 1.0), ("a", 1.0), "behind"),
        (("b", 2.0), ("a", 2.0), "ahead"),
        (("c", 2.0), ("a", 2.0), "ahead"),
    ]
    best = differences(found, "t", compare="best")
    assert [(d.arm, d.reference, d.verdict) for d in best] == [
        (("b", 2.0), ("a", 1.0), "ahead"),
        (("c", 2.0), ("a", 1.0), "within noise"),
    ]
    assert best[0].value == pytest.approx(0.0975)
    assert [(d.arm, d.reference) for d in differences(found, "t", compare="control")] == [(("b", 2.0), ("c", 2.0))]
    page = markdown(found)
    assert "b (2) is ahead by 0.097" in page and "within noise: c" in page and "confirm them on others" in page


def test_verdicts_of_arms_that_are_equal_or_have_few_seeds():
    """An arm with few seeds does not hide the verdict on the others, and equal runs are not called noise."""
    base, better = [0.5, 0.52, 0.51, 0.53, 0.5], [0.6, 0.63, 0.61, 0.63, 0.6]
    page = markdown(invented({("a", 1.0): base, ("b", 1.0): better, ("c", 1.0): base, ("d", 1.0): base[:2][::-1]}))
    assert "b is ahead by 0.102" in page and "every run of c is identical to that of a" in page
    assert "too few seeds (2) to judge d: train with --seeds 5" in page and "within noise" not in page


def test_a_task_without_runs_of_the_baseline_has_no_verdict_but_differences_from_controls():
    found = invented({("b", 1.0): [0.6, 0.7], ("c", 1.0): [0.5, 0.5]})
    found.arms.insert(0, "a")
    assert differences(found, "t") == [] and "no other arm was trained with the seeds of a, the baseline" in markdown(
        found
    )
    assert [d.value for d in differences(found, "t", compare="control")] == [pytest.approx(0.15)]
    with pytest.raises(ConfigError, match="Did you mean 'control'"):
        differences(found, "t", compare="controls")


def test_json_of_a_single_seed_has_no_infinity(tmp_path, capsys):
    _report(invented({("a", 1.0): [0.5], ("b", 1.0): [0.6]}), tmp_path, as_json=True)
    (found,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["arm"] == ["b", 1.0] and found["low"] is None and found["high"] is None
