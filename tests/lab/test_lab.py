"""`dew lab`: tasks, stacked training, studies. Runs here have tiny policies and rewards that need no warm start."""

import dataclasses
import json
import math
import re
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dew.algorithms import algorithm_classes, get_algorithm
from dew.algorithms.base import Part
from dew.compare import Result
from dew.engines.lab import TinySettings, differences, load_study, markdown, study
from dew.engines.lab import warm_start as warm
from dew.engines.lab.arms import Team, parse_arms, random_rollouts
from dew.engines.lab.stack import Replica, Stack
from dew.engines.lab.tasks import BOS, CHARACTERS, EOS, PAD, TASKS, generator, get_task
from dew.engines.lab.tiny import Adam, TinyPolicies, forward, new_policy, numerics, sample
from dew.errors import ConfigError, DewError
from dew.rollouts import Rollouts
from dew.run.folder import RunFolder, lock

TINY = TinySettings(
    group_size=4, prompts=4, optimizer_steps=2, generations=5, width=32, depth=2, eval_problems=4, eval_k=2,
    evaluations=2,
)  # fmt: skip
EASY = dataclasses.replace(get_task("countdown-3"), verdict=lambda answers, facts: (answers == 3).any(1))
"""Correct is any answer that contains a 3: an untrained policy has groups with signal."""
OWN_LOSS = [name for name, cls in algorithm_classes().items() if not cls.engine_loss]
START = new_policy(32, 2, EASY.prompt_length + EASY.tokens, generator(0))


def stack(arms, seeds=(0,), device="cpu"):
    replicas = [Replica(arm, seed) for arm in parse_arms(arms, [1e-3], controls=False) for seed in seeds]
    rates = torch.tensor([x.arm.learning_rate for x in replicas], device=device)
    return Stack(EASY, TinyPolicies(START, rates), replicas, TINY, device)


def ids(text, width=None):
    tokens = [*(CHARACTERS.index(c) for c in text), EOS]
    return tokens + [PAD] * ((width or len(tokens)) - len(tokens))


def text(tokens):
    return "".join(TASKS["countdown-4"].symbols(tokens.tolist())).removesuffix("<end>")


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


def test_countdown_verdicts_equal_a_replay():
    """By hand, and demonstrations with random characters replaced."""
    cases = {
        "3+7=10;10-2=8": True,
        "7+3=10;10-2=8;": False,  # nothing after the last step
        "3+7=10": False,  # not the target
        "3+3=6;6+2=8": False,  # 3 is there once
        "3+7=11;11-3=8": False,  # wrong sum
        "10-2=8": False,  # 10 is not there
        "3+7=10;10-2=8=8": False,
        "+3=8": False,
    }
    assert [countdown_oracle(answer, [3, 7, 2], 8) for answer in cases] == list(cases.values())
    task, random = get_task("countdown-4"), generator("oracle")
    answers = torch.tensor([ids(answer, 20) for answer in cases])
    assert task.verdict(answers, torch.tensor([[3, 7, 2, 8]] * len(cases))).tolist() == list(cases.values())
    assert not task.verdict(answers[:1, :13], torch.tensor([[3, 7, 2, 8]])).any()  # without EOS
    problems = task.problems(300, random)[0]
    answers, at = problems.demonstration.clone(), torch.randint(0, 22, (300, 1), generator=random)
    kept, drawn = answers.gather(1, at), torch.randint(0, 18, (300, 1), generator=random)
    answers[100:] = answers.scatter(1, at, torch.where(kept < EOS, drawn, kept))[100:]
    found = task.verdict(answers, problems.facts)
    pairs = zip(answers, problems.facts.tolist(), strict=True)
    assert found.tolist() == [countdown_oracle(text(answer), facts[:-1], facts[-1]) for answer, facts in pairs]
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
    ours = Adam({"p": p}, rates)
    theirs = [torch.optim.Adam([x], r.item(), betas=(0.9, 0.99)) for x, r in zip(alone, rates, strict=True)]
    for step in range(4):
        g = torch.randn(3, 4, 2, generator=generator("g", step)) * 2
        g[2] = {1: 0, 2: torch.nan}.get(step, 1) * g[2]
        p.grad.copy_(g)
        norms = ours.step()
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
    adam, norms = torch.optim.Adam(policy.parameters(), rate, betas=(0.9, 0.99)), []
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
        A[keep] = algorithm.advantages(Rollouts(**{k: getattr(rollouts, k)[keep] for k in grouped}))
        A, trains = A.flatten(0, 1), keep.repeat_interleave(s.group_size)
        order = torch.rand(16, generator=generator(seed, "order", g)).argsort()
        order = order[trains[order]]
        for i in range(s.optimizer_steps):
            part = order[i :: s.optimizer_steps]
            logp, now = score(rows[part], target[part])
            given = Part(mask=mask[part], old_logp=old[part], entropy=now)
            count = algorithm.divisor(int(mask[order].sum()), len(order)) / s.optimizer_steps
            loss, _ = algorithm.loss(logp, given, A[part], count=count)
            adam.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).item())
            adam.step()
    return dict(policy.named_parameters()), torch.tensor(norms).view(generations, -1).mean(1)


def test_a_replica_equals_an_ordinary_run():
    """Gradient norms, and the parameters to a thousandth of how far they moved: where a gradient is almost 0, Adam
    divides rounding, which differs between CPUs, by little more than itself."""
    runs = stack(["dapo", "gtpo", "grpo_s", "forking_tokens", "entropy_advantage", "dr_grpo"], (0, 7))
    for g in range(3):
        runs.generation(g)
    assert [team.stacked for team in runs.teams] == [True, True, True, False, True, True]
    for at in (1, 2, 5, 7, 8, 11):
        arm, seed = runs.replicas[at].arm, runs.replicas[at].seed
        alone, norms = ordinary_run(arm.algorithm, seed, 1e-3, 3)
        own = torch.stack([metrics["grad_norm"][at] for metrics in runs.history])
        torch.testing.assert_close(own, norms, rtol=1e-4, atol=0, msg=arm.label)
        for key, p in runs.policies.parameters.items():
            expected = alone[key.replace(".", "_")].detach()
            moved = (expected - START[key][0]).norm()
            assert (p[at].detach() - expected).norm() < 1e-3 * moved and moved > 1e-3, (arm.label, key)


def test_replicas_do_not_leak_into_one_another():
    """Replicas with a huge learning rate, or with NaN for weights, change no other replica's numbers."""

    def train(disturb):
        runs = stack(["dapo", "grpo", "gtpo", "dr_grpo"], (0, 1))
        disturb(runs)
        for g in range(3):
            runs.generation(g)
        return runs

    def disturb(runs):
        runs.policies.parameters["0.up"].data[[2, 7]] = torch.nan  # grpo, seed 0; dr_grpo, seed 1
        runs.policies.adam.rates[4] = 0.1  # gtpo, seed 0

    calm, disturbed = train(lambda runs: None), train(disturb)
    others = [i for i in range(8) if i not in (2, 4, 7)]
    before, after = calm.policies.parameters, disturbed.policies.parameters
    for key, p in before.items():  # to rounding: rows are padded to those of the fullest replica
        torch.testing.assert_close(p[others], after[key][others], rtol=0, atol=1e-6)
    assert not torch.allclose(before["out"][4], after["out"][4], atol=1e-3)


def test_every_registered_algorithm_trains():
    """From the same answers to the same problems, for the same seed."""
    runs = stack(OWN_LOSS, (0, 1))
    runs.generation(0)
    for name in ("accuracy", "entropy"):
        by_seed = runs.history[0][name].view(-1, 2)
        assert by_seed.eq(by_seed[0]).all() and by_seed[0, 0] != by_seed[0, 1]
    runs.generation(1)
    assert all(team.vectorised for team in runs.teams)  # one call for all runs of a rule
    moved = (runs.policies.parameters["0.up"] - START["0.up"]).detach().flatten(1).abs().amax(1)
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
            return runs.policies.parameters

    first, second = train(), train()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("text", "stacked"),
    [
        ("dapo", True), ("gtpo", True), ("otb", True), ("dew(compare=relative)", True),
        ("reinforce_pp", False), ("kl_cov", False), ("clip_cov", False), ("stare", False), ("gepo", False),
        ("gtpo(scope=batch)", False), ("forking_tokens", False), ("dapo(overlong=soft,overlong_buffer=4)", True),
        ("w_reinforce", True), ("w_reinforce(dynamic_sampling=true)", True),
    ],
)  # fmt: skip
def test_credit_of_several_runs_is_that_of_each(text, stacked):
    """In one call if the rule treats each group on its own, else in a call for each run. As in an engine, a group with
    a single outcome, here the first, trains if it has credit and dynamic sampling does not drop it."""
    algorithm, given = dataclasses.replace(get_algorithm(text), max_tokens=10), random_rollouts(6, 10)[1]
    team = Team(algorithm, slice(0, 2), 6, 10)
    assert all(Team(algorithm, slice(0, 2), G, T).stacked == stacked for G, T in ((6, 10), (4, 7), (4, 20), (6, 20)))
    credit = team.credit(given)
    dropped = int(algorithm.dynamic_sampling)
    assert credit["signal"][:, 1:].all() and not credit["flipped"][:, 0].any()
    assert credit["signal"][:, 0].all() == (text in ("reinforce_pp", "w_reinforce"))
    for i in range(2):
        rollouts = Rollouts(**{field: x[i, dropped:] for field, x in given.items()})
        own = {"advantages": algorithm.advantages(rollouts)}
        total = rollouts.reward + algorithm.extra(rollouts)
        above = torch.sign((total - total.mean(-1, keepdim=True)).round(decimals=5))[..., None]
        own["flipped"] = (own["advantages"] * above < 0).float()
        for name, x in own.items():
            torch.testing.assert_close(credit[name][i, dropped:], x, rtol=1e-4, atol=1e-5)


# ── arms ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_arms_from_text():
    arms = parse_arms(["dapo", "gtpo(alpha2=0.5, pool=joint)@3e-5", "gtpo(entropy_clip=(0.1,2.0))"], [1e-4, 2e-4])
    assert [(arm.label, arm.learning_rate) for arm in arms[:2]] == [("dapo", 1e-4), ("dapo", 2e-4)]
    assert (arms[2].label, arms[2].learning_rate) == ("gtpo(pool=joint,alpha2=0.5)", 3e-5)
    assert arms[2].control == arms[3].label == "gtpo(pool=joint,alpha1=1.5,alpha2=0.0)"
    assert arms[3].learning_rate == 3e-5
    assert arms[2].placebo == arms[4].label == "gtpo(placebo=True,pool=joint,alpha2=0.5)"
    assert arms[5].algorithm.entropy_clip == (0.1, 2.0)
    assert all(get_algorithm(arm.label) == arm.algorithm for arm in arms)
    with pytest.raises(ConfigError, match=r"arm 'dapo\(clip_low=0.2\)@1e-4': the same as 'dapo'\."):
        parse_arms(["dapo", "gtpo", "dapo(clip_low=0.2)@1e-4"], [1e-4])
    assert len(parse_arms(["dapo", "dapo@2e-4"], [1e-4, 1e-4])) == 2
    soft = parse_arms(["gtpo(overlong=soft,overlong_buffer=64)"], [1e-4])  # the budget is the task's, not known here
    assert [bool(arm.placebo) for arm in soft] == [True, False, False]


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ("early_tokens", "For a class of your own, write file.py:Class"),
        ("gtpo(alpha2)", "cannot be read"),
        ("gtpo(0.5)", "cannot be read"),
        ("gtpo(alpha2=0.5", "cannot be read"),
        ("gtpo(alpha2=0.5)(alpha2=0.3)", "cannot be read"),
        ("gtpo(alpha2=0.5,alpha2=0.3)", "gives a setting twice"),
        ("gtpo@fast", "such as 3e-5"),
        ("gtpo@", "such as 3e-5"),
        ("trl", "Its credit and loss are the engine's"),
        ("dew.algorithms:Nothing", "no class 'Nothing'"),
        ("dapo(kl_coef=0.1)", "no reference policy"),
    ],
)
def test_mistakes_in_an_arm_are_explained(arm, words, algorithm_registry, dew, tmp_path):
    code, _, err = dew("lab", "dapo", arm, "-o", tmp_path / "out")
    assert code == 1 and words in err and arm in err
    assert not (tmp_path / "out").exists()


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
QUARTER = "halved(share=0.25)"


@pytest.fixture
def easy(monkeypatch, tmp_path):
    """Studies of the easy task, started from an almost untrained policy."""
    monkeypatch.setitem(TASKS, EASY.name, EASY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in {"DEMONSTRATIONS": 32, "PROBED": 4, "TESTED": 4, "BATCH": 4, "CHECK": 2, "TARGET": -1.0}.items():
        monkeypatch.setattr(warm, name, value)
    return {"tasks": [EASY.name], "settings": TINY, "learning_rates": [1e-3], "device": "cpu"}


def test_a_users_rule_in_the_table(easy, tmp_path, monkeypatch, dew, algorithm_registry):
    (tmp_path / "rules.py").write_text(RULE)
    monkeypatch.chdir(tmp_path)
    words = ["dapo", "rules.py:Halved(share=0.25)", "gtpo", "--task", EASY.name, "--seeds", "2", "-o", "out"]
    code, out, err = dew("lab", *words, "--controls", "--settings", json.dumps(dataclasses.asdict(TINY)))
    assert code == 0, err
    summary = (tmp_path / "out" / "summary.md").read_text()
    for row in ("| dapo | 2 |", f"| {QUARTER} − dapo |", "| gtpo − gtpo(alpha1=1.1,alpha2=0.0) |", "Too few seeds"):
        assert row in summary
    assert "Too few seeds" in out and "gtpo − dapo" in out and "|" not in out
    found = load_study("out")
    assert len(found) == 10 and [r.seed for r in found if r.arm == QUARTER] == [0, 1]
    same = {**easy, "learning_rates": [5e-5], "output": "out", "say": (said := []).append}
    other = RULE.partition("DAPO\n")[2].replace("alved", "other")
    (tmp_path / "rules.py").write_text(RULE + other)
    again = study(["rules.py:Halved(share=0.25)"], seeds=2, **same)  # another rule in the file: nothing to train
    assert again == found and said == ["All 2 runs are finished."]
    (tmp_path / "rules.py").write_text(RULE.replace("self.share *", "2 * self.share *"))
    again = study(["rules.py:Halved(share=0.25)"], seeds=1, **same)  # a changed rule trains again
    assert [r.seed for r in again if r.arm == QUARTER] == [0]  # and is not mixed with runs of the old one
    assert again[0].arm == "dapo" and f"The code of {QUARTER} has changed: its earlier runs (2)" in "".join(said)


def test_a_run_of_the_lab_is_an_ordinary_run_folder(easy, tmp_path, dew):
    study(["dapo", "kl_cov"], seeds=2, output=tmp_path / "out", say=lambda _: None, **easy)
    folders = [tmp_path / "out" / EASY.name / f"kl_cov-lr0.001-seed{seed}" for seed in (0, 1)]
    run = RunFolder(folders[0])
    facts, metrics, (scores,) = run.run(), run.metrics(), run.scores()
    assert facts["engine"] == "lab" and facts["algorithm"]["name"] == facts["arm"] == "kl_cov"
    assert (facts["data"], facts["learning_rate"], facts["seed"], facts["status"]) == (EASY.name, 1e-3, 0, "done")
    assert facts["settings"] == dataclasses.asdict(TINY) and len(facts["warm_start"]["digest"]) == 12
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in metrics if "eval/pass@2" in line and "eval/pass@1" in line] == [3, 5]
    expected = {"area": sum(m["accuracy"] for m in metrics) / 5, "pass@2": metrics[-1]["eval/pass@2"]}
    expected |= {"final": metrics[-1]["accuracy"], "length": metrics[-1]["length/mean"]}
    assert {name: scores["scores"][name]["value"] for name in expected} == pytest.approx(expected)
    groups = list(run.records())
    assert [group.step for group in groups] == [1, 1, 3, 3, 5, 5] and not RunFolder(folders[1]).record_files()
    group = groups[0]
    assert group.prompt.endswith(">") and group.algorithm == "kl_cov" and len(group.answers) == 4
    for answer in group.answers:
        assert answer.correct == ("3" in answer.text) == (answer.reward == 1.0)
        assert answer.truncated == (answer.tokens[-1] != "<end>")
        assert answer.shaped == pytest.approx([answer.reward] * len(answer.tokens))
        assert len(answer.entropy) == len(answer.logp) == len(answer.tokens)
    rewards = torch.tensor([[answer.reward for answer in group.answers]])
    mask = torch.ones(1, 4, 1, dtype=torch.bool)
    expected = get_algorithm("dapo").advantages(Rollouts(mask=mask, reward=rewards)).flatten()
    assert [a.advantage[0] for a in group.answers] == pytest.approx(expected.tolist(), abs=1e-4)
    code, _, err = dew("report", tmp_path / "out")
    assert code == 0, err


def test_an_arm_that_loses_differences_between_rewards_is_named(easy, tmp_path, monkeypatch):
    graded = dataclasses.replace(EASY, verdict=lambda answers, facts: (answers == 3).float().mean(1))
    monkeypatch.setitem(TASKS, EASY.name, graded)
    said: list[str] = []
    study(["dew", "gtpo"], seeds=2, output=tmp_path / "out", say=said.append, **easy)
    [line] = [x for x in said if "different values" in x]
    assert line.startswith("gtpo: The outcome reward has")


def test_a_rule_with_a_loss_of_nan_is_named_and_any_setting_can_be_written(easy, tmp_path):
    """A mean over the tokens of each answer divides by 0 for answers that do not train."""
    rule = RULE.replace("share: float = 0.5", "places: frozenset = frozenset({1})").partition("    def ")[0]
    rule += "    def loss(self, logp, part, advantages, *, count=None):\n"
    rule += "        return ((logp * advantages * part.mask).sum(-1) / part.mask.all(-1)).mean(), {}\n"
    rule += "\n\nclass Zeros(DAPO):\n    name = 'zeros'\n    advantages = lambda self, x: 0 * super().advantages(x)\n"
    (tmp_path / "rule.py").write_text(rule)
    arms, said = ["dapo", *(f"{tmp_path}/rule.py:{name}" for name in ("Halved", "Zeros"))], []
    found = study(arms, seeds=1, output=tmp_path / "out", say=said.append, **easy)
    assert re.match(r"halved: updates skipped in \d of 5 generations", said[-2]) and "min left" in said[-3]
    assert said[-1] == "zeros: nothing was trained: the gradient was 0 in every generation of every run."
    run = RunFolder(found[1].folder)
    assert run.run()["algorithm"]["settings"]["places"] == "frozenset({1})"
    assert None in [line["grad_norm"] for line in run.metrics()]


def mistaken(tmp_path, head="@dataclass(frozen=True, kw_only=True)\nclass Rule(DAPO):", body="", name='name = "mine"'):
    """What the lab says to a rule with a mistake."""
    tmp_path /= "me@work"
    tmp_path.mkdir(exist_ok=True)
    imports = "from dataclasses import dataclass\nfrom dew.algorithms import DAPO, Algorithm"
    (tmp_path / "rule.py").write_text(f"{imports}\n{head}\n    {name}\n    {body}\n")
    try:
        (arm,) = parse_arms([f"{tmp_path}/rule.py:Rule"], [1e-3], controls=False)
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
    own = "def __init__(self, keep=2.0): self.keep = keep"
    assert "Rule.__init__ does not take all settings of the class" in says(head="class Rule(DAPO):", body=own)
    assert "has no credit. Define advantages" in says(head="class Rule(Algorithm):")
    assert "but no penalties. Define penalties" in says(name='name = "mine"; penalises = True')
    assert "ZeroDivisionError: division by zero at rule.py, line 6" in says(body="1 / 0")
    loss = "def loss(self, logp, part, advantages, *, count=None): return {}"
    for wrong in ("logp.sum()", "(logp.sum(-1), {})"):
        assert "loss(...) did not return a single number" in says(body=loss.format(wrong))
    assert says(body=loss.format("(logp.sum(), {})")) == ""
    (tmp_path / "two.py").write_text(RULE + RULE.partition("DAPO\n")[2].replace("Halved", "Copied"))
    with pytest.raises(ConfigError, match="another arm has the same name 'halved'"):
        parse_arms([f"{tmp_path}/two.py:Halved", f"{tmp_path}/two.py:Copied"], [1e-3])
    assert "'rewards'" in says(body="def advantages(self, rollouts): return rollouts.rewards")
    monkeypatch.setattr("dew.engines.lab.study", lambda arms, **_: Team(get_algorithm(*arms), slice(0, 2), 4, 6))
    _, _, err = dew("lab", f"{tmp_path}/me@work/rule.py:Rule", "-o", tmp_path / "out")
    assert "no 'rewards' at rule.py, line 6" in err and "Did you mean 'reward'?" in err


def test_an_interrupted_study_resumes_with_the_same_numbers(easy, tmp_path, monkeypatch):
    module, easy = sys.modules["dew.engines.lab.study"], {**easy, "seeds": 2, "say": (said := []).append}
    whole = study(["dapo", "grpo"], output=tmp_path / "whole", **easy)
    monkeypatch.setattr(module, "memory", lambda *_: 0.3 * module._free("cpu"))  # two runs at a time

    def interrupt(line):
        if "min left" in line and "more runs" not in line:  # in the second stack
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(["dapo", "grpo"], output=tmp_path / "cut", **easy | {"say": interrupt})
    assert len(load_study(tmp_path / "cut")) == 2
    half = tmp_path / "cut" / EASY.name / "grpo-lr0.001-seed1"  # a run that was being written
    half.mkdir()
    (half / "metrics.jsonl").write_text('{"step": 9, "accuracy": 1.0}\n{"st')
    resumed = study(["dapo", "grpo"], output=tmp_path / "cut", **easy)
    assert [(r.arm, r.seed) for r in whole] == [(r.arm, r.seed) for r in resumed]
    for one, other in zip(whole, resumed, strict=True):
        assert one.scores == pytest.approx(other.scores, abs=1e-5)
        for a, b in zip(RunFolder(one.folder).metrics(), RunFolder(other.folder).metrics(), strict=True):
            assert a == pytest.approx(b, abs=1e-5)
    again = study(["dapo", "grpo"], output=tmp_path / "cut", **easy)
    assert again == resumed and said[-1] == "All 4 runs are finished."
    later = study(["dapo"], first_seed=100, output=tmp_path / "later", **easy | {"seeds": 1})
    merged = load_study(tmp_path / "cut", tmp_path / "later")
    assert len(merged) == 5 and later[0] in merged


def test_folders_are_checked_before_training(tmp_path, dew, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(warm, "_train", lambda *_: pytest.fail("trained"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "file")
    for folder, says in (("file", "file is a file"), ("file/x", "Not a directory"), ("x", "Not a directory")):
        code, _, err = dew("lab", "dapo", "-o", folder)
        assert code == 1 and says in err
    with lock(tmp_path / "busy"):
        code, _, err = dew("lab", "dapo", "-o", "busy")
    assert code == 1 and "busy is in use by another command" in err


def test_mistakes_in_a_study_are_explained(easy, tmp_path, dew):
    def error(arms=("dapo",), **changed):
        with pytest.raises(ConfigError) as found:
            study(arms, **{**easy, "output": tmp_path / "x", "say": lambda _: None, **changed})
        return str(found.value)

    assert "Choose one of: countdown-3, countdown-4" in error(tasks=["countdown"])
    assert "Give at least 1" in error(seeds=0)
    assert "learning rate 2" in error(learning_rates=[2.0])
    assert "Name at least one rule" in error(arms=())
    assert not (tmp_path / "x").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert "is not empty" in error(output=tmp_path / "full")
    (result,) = study(["dapo"], output=tmp_path / "old", seeds=1, say=lambda _: None, **easy)
    other = dataclasses.replace(TINY, prompts=8)
    assert "other settings (prompts 4 and 8)" in error(output=tmp_path / "old", settings=other)
    RunFolder(result.folder).write_run({"warm_start": {"digest": "other"}})
    assert "started from policy other" in error(output=tmp_path / "old", seeds=2)
    with pytest.raises(ConfigError, match="multiple of 32"):
        TinySettings(width=100)
    for settings, says in (("{widht: 64}", "Did you mean 'width'"), ("{width: big}", "width='big' is not a whole")):
        code, _, err = dew("lab", "dapo", "--settings", settings, "-o", tmp_path / "x")
        assert code == 1 and says in err
    said = [dew("lab", "unknown", "--quick", *flags)[1] for flags in ([], ["--seeds", 8], ["--benchmark"])]
    assert "Two seeds" in said[0] and "Use --seeds 8" in said[0] and not said[1]
    assert "Two seeds" in said[2] and "--seeds" not in said[2]


@pytest.mark.parametrize(("seconds", "saved"), [(0.0, [1, 2, 3, 4]), (1.0, [1, 3])])
def test_checkpoints_take_a_small_share_of_the_time(seconds, saved, easy, tmp_path, monkeypatch):
    """By this clock a generation takes 31 s. A checkpoint that takes 1 s is followed by a pause of 50 s."""
    module, clock, found = sys.modules["dew.engines.lab.study"], [0.0], []

    def generation(self, number):
        clock[0] += 31
        return train(self, number)

    def save(folder, task, stack, made):
        found.append(len(stack.history))
        clock[0] += seconds

    train = Stack.generation
    monkeypatch.setattr(Stack, "generation", generation)
    monkeypatch.setattr(module, "_save", save)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    how = easy | {"settings": dataclasses.replace(TINY, generations=5)}
    study(["dapo"], output=tmp_path / "x", seeds=1, say=lambda _: None, **how)
    assert found == saved


def test_a_stack_that_does_not_fit_in_memory_is_halved(easy, tmp_path, monkeypatch):
    def generation(self, number):
        if len(self.replicas) > fits:
            raise torch.OutOfMemoryError
        return train(self, number)

    train, fits, said = Stack.generation, 2, []
    monkeypatch.setattr(Stack, "generation", generation)
    how = {"output": tmp_path / "x", "seeds": 3, "say": said.append, **easy}
    assert len(study(["dapo"], **how)) == 3 and "3 runs at a time; continuing with 2" in "".join(said)
    fits = 0
    with pytest.raises(ConfigError, match="GB are free"):
        study(["gtpo"], **how)


def test_studies_that_cannot_be_paired_are_not_merged(easy, tmp_path):
    study(["dapo"], seeds=1, output=tmp_path / "a", say=str, **easy)
    for name, old, new in (("b", "", ""), ("c", '"prompts": 4', '"prompts": 8'), ("d", '"dapo": ""', '"dapo": "1"')):
        shutil.copytree(tmp_path / "a", tmp_path / name)
        grid = tmp_path / name / "grid.json"
        grid.write_text(grid.read_text().replace(old, new))
    RunFolder(next((tmp_path / "b").rglob("run.json")).parent).write_run({"warm_start": {"digest": "other"}, "seed": 7})
    words = {"b": "They cannot be paired", "c": "different settings", "d": "code of a rule", "": "holds no study"}
    for other, says in words.items():
        with pytest.raises(ConfigError, match=says):
            load_study(tmp_path / "a", tmp_path / other)


def test_training_makes_the_chosen_gpu_the_current_one(easy, tmp_path, monkeypatch):
    """Triton launches kernels on the current GPU, wherever their tensors are."""

    def enter(device):
        assert device == "cuda:1"
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    monkeypatch.setattr(torch.cuda, "device", enter)
    with pytest.raises(KeyboardInterrupt):
        study(["dapo"], output=tmp_path / "out", **easy | {"device": "cuda:1"})


def test_warm_starts_are_kept_and_damaged_ones_trained_again(easy, tmp_path):
    said = []
    start = partial(warm.warm_start, EASY, TinySettings(width=32, depth=2), "cpu", tmp_path, said.append)
    first = start()[1]
    said.clear()
    assert start()[1] == first and not said
    path = next(tmp_path.glob("*.pt"))
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    again = start()[1]
    assert "damaged" in said[0] and again == first  # training is deterministic
    said.clear()
    assert start()[1] == first and not said
    other = warm.warm_start(EASY, TinySettings(width=32, depth=2, start=1), "cpu", tmp_path, said.append)[1]
    assert other["digest"] != first["digest"] and start()[1] == first


# ── differences ─────────────────────────────────────────────────────────────────────────────────────────────
def invented(scores):
    """Results with these areas: {(arm, rate): [by seed]}."""
    names = ("area", "final", "pass@1", "pass@16", "entropy", "length", "flipped")
    return [
        Result(arm, seed, dict.fromkeys(names, x), "t", rate, "c" if arm == "b" else None)
        for (arm, rate), values in scores.items() for seed, x in enumerate(values)
    ]  # fmt: skip


def test_comparisons_at_the_same_rate_at_the_best_rates_and_with_the_control():
    base = [0.5, 0.52, 0.51, 0.53, 0.5, 0.52]
    worse, better = [x - 0.1 + i * 0.001 for i, x in enumerate(base)], [x + 0.1 - i * 0.001 for i, x in enumerate(base)]
    found = invented({("a", 1): base, ("a", 2): worse, ("b", 1): worse, ("b", 2): better, ("c", 2): base[::-1]})

    def compared(compare):
        return [(d.arm, d.baseline, d.verdict) for d in differences(found, "t", compare=compare)]

    assert compared("baseline") == [
        ("b @ 1", "a @ 1", "behind"), ("b @ 2", "a @ 2", "ahead"), ("c @ 2", "a @ 2", "ahead")
    ]  # fmt: skip
    assert compared("best") == [("b @ 2", "a @ 1", "ahead"), ("c @ 2", "a @ 1", "within noise")]
    assert compared("control") == [("b @ 2", "c @ 2", "ahead")]
    best, _ = differences(found, "t", compare="best")
    assert best.value == pytest.approx(0.0975) and best.pairs == 6
    page = markdown(found)
    assert "b @ 2 is ahead of a @ 1" in page and "c @ 2 is within noise of a @ 1" in page
    assert "confirm them on others" in page
    with pytest.raises(ConfigError, match="Did you mean 'control'"):
        differences(found, "t", compare="controls")


@pytest.mark.parametrize("seeds", [2, 6])
def test_the_number_of_seeds_that_it_takes_is_not_guessed_from_two(seeds, tmp_path):
    base, other = [0.5] * seeds, [0.5 + 0.1 * (i % 2) for i in range(seeds)]
    found = invented({("a", 1.0): base, ("b", 1.0): other, ("c", 1.0): base, ("d", 1.0): [0.6]})
    found[-1] = dataclasses.replace(found[-1], seed=99)
    RunFolder(tmp_path).write_scores([{"k": 4, "solved": [[1, 2, 3]]}])
    text = markdown([dataclasses.replace(result, folder=tmp_path) for result in found])
    assert ("deviation of 0.0548;" in text) == (seeds == 6)  # identical runs, such as c's, say nothing about noise
    assert "No seed in common with a, so not compared: d." in text


def test_a_task_without_runs_of_the_baseline_has_no_verdict_but_differences_from_controls():
    elsewhere = dataclasses.replace(invented({("a", 1.0): [0.5]})[0], task="other")
    found = [elsewhere, *invented({("b", 1.0): [0.6, 0.7], ("c", 1.0): [0.5, 0.5]})]
    assert differences(found, "t") == []
    assert "no other arm was trained with the seeds of a, the baseline" in markdown(found)
    assert [d.value for d in differences(found, "t", compare="control")] == [pytest.approx(0.15)]
