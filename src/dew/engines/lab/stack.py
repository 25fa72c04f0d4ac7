"""Train a stack of runs: sample, judge, give credit, update, record. Credit and loss are the algorithm's own.

Runs with the same seed get the same problems and the same random numbers, whatever their arm. A run's numbers do not
depend on the runs stacked with it, except for rounding: a batched product may add up in another order when the number
of replicas, or of rows that train, is another.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dew.algorithms import Algorithm
from dew.algorithms.base import Part, wrong_types
from dew.algorithms.credit import give_credit
from dew.credit import grpo_advantages, has_signal
from dew.engines.lab.arms import Arm, random_rollouts
from dew.engines.lab.tasks import Problems, generator
from dew.errors import ConfigError, Problem, ShapeError
from dew.rollouts import Rollouts
from dew.run.records import AnswerRecord, GroupRecord, Json

RECORDED_GROUPS = 2
"""Groups in a token record."""
CORRECT = 0.5
"""An answer with a larger reward counts as correct in metrics and evaluations."""
TRAINED = ("advantages", "penalty")
"""Fields of `Credit` that the loss reads."""


class Answers(NamedTuple):
    """What the policies sampled, (R, B, T) each."""

    tokens: Tensor
    logp: Tensor
    entropy: Tensor
    mask: Tensor
    """True up to and including the end of an answer."""
    sum_sq: Tensor | None = None
    """Of the sampling policy at each token: the log-probability of the token, the entropy, and Σπ²."""


class Policies(Protocol):
    """R policies that train together: small ones (`tiny`), or adapters on one language model (`lora`)."""

    noise: tuple[int, ...]
    """Axes of the uniform numbers that decide one token."""
    refills: bool
    """Whether any number of answers can be sampled in one call: when some end, others take their places."""

    def sample(self, problems: Tensor, uniforms: Tensor) -> Answers: ...

    def passes(self, problems: Tensor, lengths: Tensor) -> list[slice]:
        """In which parts the rows of an optimizer step are scored: (R, b, ...) problems, (R, b) tokens."""
        ...

    def score(
        self, problems: Tensor, tokens: Tensor, mask: Tensor, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(R, b, T) log π of the tokens, and the entropies, without gradient."""
        ...

    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> Tensor:
        """Take an optimizer step; return (R,) gradient norms before clipping."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


class Task(Protocol):
    """Where problems come from and who judges answers: generated ones (`tasks`), or those of a data set (`text`)."""

    @property
    def name(self) -> str: ...

    @property
    def tokens(self) -> int:
        """Maximum length of an answer."""
        ...

    def problems(self, n: int, *generators: torch.Generator, device: str = "cpu") -> Problems:
        """n problems from each of S generators: (S, n, ...)."""
        ...

    def held_out(self, n: int, device: str = "cpu") -> Problems: ...

    def rewards(self, answers: Answers, facts: Tensor) -> Tensor:
        """(R, B) rewards of (R, B, T) answers to problems with (R, B, F) facts."""
        ...

    def symbols(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token."""
        ...

    def ends(self, token: int) -> bool: ...

    def describe(self, problem: Problems) -> tuple[str, str]:
        """The prompt of one problem and its gold answer."""
        ...


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs of a study share."""

    group_size: int = 16
    """Answers per problem (G)."""
    prompts: int = 32
    """Problems per generation (P)."""
    optimizer_steps: int = 4
    """Optimizer steps per generation."""
    generations: int = 120
    eval_problems: int = 256
    eval_k: int = 16
    """Answers per held-out problem."""
    evaluations: int = 3
    """Evaluations on held-out problems, the last one at the end."""

    def __post_init__(self) -> None:
        least = {"group_size": 2, "width": 8, "alpha": 0.01}
        wrong = wrong_types(self) or [
            f"{f.name}={getattr(self, f.name)}: give at least {least.get(f.name, 1)}."
            for f in fields(self)
            if f.type is not str and getattr(self, f.name) < least.get(f.name, 1)
        ]
        if not wrong and self.optimizer_steps > self.answers:
            wrong.append(f"optimizer_steps={self.optimizer_steps}: there are only {self.answers} answers a generation.")
        if wrong:
            raise ConfigError(wrong)

    @property
    def answers(self) -> int:
        """Answers per generation (B)."""
        return self.prompts * self.group_size

    @property
    def spacing(self) -> float:
        """Generations between two evaluations."""
        return max(1.0, self.generations / self.evaluations)

    def evaluated(self, generation: int) -> bool:
        """Whether there is an evaluation after this generation (counted from 1)."""
        return generation in {math.ceil(self.generations - i * self.spacing) for i in range(self.evaluations)}


@dataclass(frozen=True)
class Replica:
    """One run of the stack."""

    arm: Arm
    seed: int


class Team:
    """Neighbouring replicas with the same algorithm, whose credit and loss are computed in one call where possible.

    Credit: if, on random rollouts, a call with the groups of two runs gives what a call for each gives. Loss: if, on
    the first batch, `vmap` gives the same. Else the algorithm is called for each replica.
    """

    def __init__(self, algorithm: Algorithm, rows: slice, group_size: int, tokens: int) -> None:
        self.algorithm, self.rows = algorithm, rows
        self.vectorised: bool | None = None  # not tried yet
        self.stacked = all(self._same_apart(two) for two in random_rollouts(group_size, tokens))

    def _same_apart(self, two: dict[str, Tensor]) -> bool:
        self.stacked = True
        together = self.credit(two)
        self.stacked = False
        alone = {name: x for name, x in self.credit(two).items() if name in TRAINED}
        return all(torch.allclose(together[name], x, rtol=1e-4, atol=1e-5) for name, x in alone.items())

    def credit(self, given: dict[str, Tensor], *, shaped: bool = False) -> dict[str, Tensor]:
        """(r, P) signal and (r, P, G, T) fields of `Credit`, 0 in groups without signal, which do not train.

        `given` are the fields of `Rollouts` with a leading axis of r replicas. `shaped` adds the reward of each token.
        """
        given = {name: given[name] for name in ("mask", "reward", *self.algorithm.signals)}  # as in an engine
        runs, mask = given["mask"].shape[:2], given["mask"].flatten(0, 1)
        given = {name: x.flatten(0, 1) for name, x in given.items()}
        signal = self.algorithm.signal(Rollouts(**given))
        parts: list[Any] = [slice(None)]
        if not self.stacked:  # as in an engine, which has only the groups with signal of one run
            every = torch.arange(len(mask), device=mask.device).view(runs)
            parts = [groups[keep] for groups, keep in zip(every, signal.view(runs), strict=True) if keep.any()]
        names = ["advantages", "flipped", *["penalty"] * self.algorithm.penalises]
        found = {name: torch.zeros(mask.shape, device=mask.device) for name in [*names, *["shaped"] * shaped]}
        for part in parts:
            rollouts = Rollouts(**{name: x[part] for name, x in given.items()})
            credit = give_credit(self.algorithm, rollouts)
            earned = {name: getattr(credit, name) for name in names}
            earned |= {"shaped": self.algorithm.rewards(rollouts)} if shaped else {}
            for name, x in earned.items():
                found[name][part] = x.to(torch.float32)
        found = {name: torch.where(signal[:, None, None], x, 0) for name, x in found.items()}
        if not all(found[name].isfinite().all() for name in TRAINED if name in found):
            what = f"{self.algorithm.name}: some advantages or penalties are NaN or infinite."
            remedy = "Look for a division by 0, e.g. by the standard deviation of a group without differences."
            raise ShapeError(Problem(what, remedy=remedy))
        return {name: x.unflatten(0, runs) for name, x in (found | {"signal": signal}).items()}

    def loss(self, logp: Tensor, given: dict[str, Tensor], advantages: Tensor, count: Tensor) -> Tensor:
        """(r,) losses of (r, b, T) rows; `given` are the fields of `Part`."""

        def one(logp: Tensor, advantages: Tensor, count: Tensor, given: dict[str, Tensor]) -> Tensor:
            found = self.algorithm.loss(logp, Part(**given), advantages, count=count)
            if not (isinstance(found, tuple) and found[0].ndim == 0):
                what = f"{self.algorithm.name}: loss(...) did not return a single number and statistics."
                raise ShapeError(Problem(what, remedy="Return a pair such as (loss, {}), with a loss of shape ()."))
            return found[0]

        if self.vectorised:
            return torch.func.vmap(one)(logp, advantages, count, given)
        rows = [{name: x[i] for name, x in given.items()} for i in range(len(logp))]
        losses = torch.stack(list(map(one, logp, advantages, count, rows)))
        if self.vectorised is None:
            try:
                together = torch.func.vmap(one)(logp, advantages, count, given)
                self.vectorised = torch.allclose(together, losses, rtol=1e-4, atol=1e-6)
            except Exception:  # whatever a rule does that vmap cannot
                self.vectorised = False
        return losses


class Stack:
    """Replicas of one task that train together. Tokens are recorded of those whose seed is in `recorded`."""

    def __init__(
        self,
        task: Task,
        policies: Policies,
        replicas: Sequence[Replica],
        settings: Settings,
        device: str,
        recorded: Collection[int] = (),
    ) -> None:
        self.task, self.settings, self.device, self.replicas, self.recorded = task, settings, device, replicas, recorded
        self.policies = policies
        self.teams = _teams(replicas, settings.group_size, task.tokens)
        self.needs_entropy = any(team.algorithm.needs_entropy == "current" for team in self.teams)
        self.seeds = sorted({x.seed for x in replicas})
        self.seed_of = torch.tensor([self.seeds.index(x.seed) for x in replicas], device=device)
        self.held_out = task.held_out(settings.eval_problems, device)
        self.history: list[dict[str, Tensor]] = []
        """(R,) metrics of each generation, by the names of docs/metrics.md."""
        self.solved: list[Tensor] = []
        """(R, N) how many of the answers to each held-out problem were correct, at each evaluation."""
        self.records: list[list[GroupRecord]] = [[] for _ in replicas]

    def generation(self, number: int) -> None:
        """Sample, judge, give credit, update and record; `number` counts from 0."""
        s = self.settings
        random = [generator(seed, "problems", number) for seed in self.seeds]
        problems = self.task.problems(s.prompts, *random, device=self.device)[self.seed_of]
        uniforms = self._uniforms("answers", number, s.answers, self.task.tokens, *self.policies.noise)
        answers = self.policies.sample(problems.prompt, uniforms)
        reward = judge(self.task, answers, problems.facts)
        mask, G, correct = answers.mask, s.group_size, reward > CORRECT
        rows = {name: x for name, x in {**answers._asdict(), "reward": reward}.items() if x is not None}
        grouped = {name: x.unflatten(1, (s.prompts, G)) for name, x in rows.items()}
        first_middle_last = (1, (s.generations + 1) // 2, s.generations)
        record = number + 1 in first_middle_last and not set(self.seeds).isdisjoint(self.recorded)
        credits = [
            team.credit({name: x[team.rows] for name, x in grouped.items()}, shaped=record) for team in self.teams
        ]
        signal, flipped = (torch.cat([credit[name] for credit in credits]) for name in ("signal", "flipped"))
        live = mask & signal.repeat_interleave(G, 1)[..., None]
        norm, drift = self._update(problems, answers, credits, live, self._uniforms("order", number, s.answers))
        metrics = {
            "accuracy": correct.float().mean(1),
            "entropy": (answers.entropy * mask).sum((1, 2)) / mask.sum((1, 2)),
            "length/mean": mask.sum((1, 2)) / s.answers,
            "credit/flipped_share": flipped.sum((1, 2, 3)) / live.sum((1, 2)).clamp_min(1),
            "groups/mixed_share": has_signal(correct.unflatten(1, (s.prompts, G))).float().mean(1),
            "length/truncated_share": mask.all(-1).float().mean(1),
            "sampling/logp_difference": drift,
            "grad_norm": norm,
        }
        if s.evaluated(number + 1) and hasattr(self.policies, "score_start"):
            metrics["kl"] = self._kl(problems, answers)
        self.history.append(metrics)
        if record:
            self._record(number + 1, problems, grouped, credits)

    def _update(
        self, problems: Problems, answers: Answers, credits: Sequence[dict[str, Tensor]], live: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The optimizer steps of a generation; (R,) mean gradient norms, and how far the log-probabilities of sampling
        are from those of the first step. `credits` are those of each team."""
        steps, G = self.settings.optimizer_steps, self.settings.group_size
        trains = live.any(-1)
        order = (noise + ~trains).argsort(1)  # rows that train come first, and are dealt out to the steps in turn
        tokens = _take(live.sum(-1), order)
        most, longest = int(trains.sum(1).max()), int(live.sum(-1).max())
        divisors = self._divisors(tokens) / steps  # as in TRL: a token has the same weight in every step
        norms = []
        drift, compared = torch.zeros(2, len(self.replicas), device=live.device)
        for i in range(min(steps, most)):
            step = order[:, i:most:steps]
            for part in self.policies.passes(_take(problems.prompt, step // G), tokens[:, i:most:steps]):
                rows = step[:, part]
                token, old, mask = (_take(x, rows)[..., :longest] for x in (answers.tokens, answers.logp, live))
                prompt = _take(problems.prompt, rows // G)
                logp, entropy = self.policies.score(prompt, token, mask, entropy=self.needs_entropy)
                if not i:
                    drift += ((logp.detach() - old).abs() * mask).sum((1, 2))
                    compared += mask.sum((1, 2))
                total = torch.zeros((), device=live.device)
                for team, credit in zip(self.teams, credits, strict=True):
                    at = team.rows
                    given = {"mask": mask[at], "old_logp": old[at]}
                    if team.algorithm.needs_entropy == "current" and entropy is not None:
                        given["entropy"] = entropy[at]
                    trained = {name: x.flatten(1, 2) for name, x in credit.items() if name in TRAINED}
                    given |= {name: _take(x, rows[at])[..., :longest] for name, x in trained.items()}
                    total = total + team.loss(logp[at], given, given.pop("advantages"), divisors[at]).sum()
                self.policies.backward(total)
            norms.append(self.policies.step())
        norm = torch.stack(norms).mean(0) if norms else torch.zeros(len(self.replicas), device=live.device)
        return norm, drift / compared.clamp_min(1)

    def _kl(self, problems: Problems, answers: Answers) -> Tensor:
        """(R,) KL divergence from the start per token: the mean of log π − log π₀ over a quarter of the answers."""
        policies: Any = self.policies
        some = torch.arange(0, self.settings.answers, 4, device=self.device)
        prompts, tokens = problems.prompt[:, some // self.settings.group_size], answers.tokens[:, some]
        logp, mask = answers.logp[:, some], answers.mask[:, some]
        total = torch.zeros(len(self.replicas), device=mask.device)
        for part in policies.passes(prompts, mask.sum(-1)):
            start = policies.score_start(prompts[:, part], tokens[:, part], mask[:, part])
            total += ((logp[:, part] - start) * mask[:, part]).sum((1, 2))
        return total / mask.sum((1, 2))

    def _divisors(self, tokens: Tensor) -> Tensor:
        """(R,) what the loss of a generation is divided by, from its (R, B) live tokens."""
        sizes = torch.stack([tokens.sum(1), (tokens > 0).sum(1)], 1).tolist()
        by_run = [team.algorithm.divisor(*size) for team in self.teams for size in sizes[team.rows]]
        return torch.tensor(by_run, device=tokens.device).clamp_min(1)

    def evaluate(self, number: int) -> None:
        """pass@1 and pass@k on the held-out problems, added to the metrics of the last generation."""
        k = self.settings.eval_k
        rows = self.settings.eval_problems * k if self.policies.refills else self.settings.answers
        drawn = partial(self._uniforms, noise=self.policies.noise)
        solved = solve(self.task, self.policies.sample, self.held_out, k, rows, drawn, number)
        passes = {1: solved.float().mean((1, 2)), k: solved.any(2).float().mean(1)}
        self.history[-1].update({f"eval/pass@{n}": x for n, x in passes.items()})
        self.solved.append(solved.sum(2))

    def metrics(self) -> list[list[Json]]:
        """The lines of metrics.jsonl of each replica; the step is the generation."""
        lines = [{name: x.tolist() for name, x in metrics.items()} for metrics in self.history]
        return [
            [{"step": step} | {name: round(x[i], 6) for name, x in line.items()} for step, line in enumerate(lines, 1)]
            for i in range(len(self.replicas))
        ]

    def state(self) -> dict[str, Any]:
        """What a stack that was interrupted needs to continue."""
        kept = {"history": self.history, "solved": self.solved, "records": [list(x) for x in self.records]}
        return {"policies": self.policies.state(), **kept}

    def load(self, state: dict[str, Any]) -> None:
        self.policies.load(state["policies"])
        self.history, self.solved, self.records = state["history"], state["solved"], state["records"]

    def _uniforms(self, purpose: str, number: int, *shape: int, noise: Sequence[int] = ()) -> Tensor:
        """(R, *shape, *noise) uniform numbers: those of the replica's seed."""
        shape = (*shape, *noise)
        random = [generator(seed, purpose, number, device=self.device) for seed in self.seeds]
        return torch.stack([torch.rand(shape, generator=g, device=self.device) for g in random])[self.seed_of]

    def _record(
        self, step: int, problems: Problems, rows: dict[str, Tensor], credits: Sequence[dict[str, Tensor]]
    ) -> None:
        """Add token records of some groups, those with signal first. `rows` have axes (R, P, G[, T])."""
        for team, credit in zip(self.teams, credits, strict=True):
            for i in range(team.rows.start, team.rows.stop):
                if self.replicas[i].seed in self.recorded:
                    own = {name: x[i - team.rows.start] for name, x in credit.items()}
                    own |= {name: x[i] for name, x in rows.items()}
                    groups = (~own.pop("signal")).int().argsort(stable=True)[:RECORDED_GROUPS]
                    chosen = {name: x[groups].cpu() for name, x in own.items()}
                    of, numbers = problems[i][groups], groups.tolist()
                    self.records[i] += _group_records(self.task, step, team.algorithm, numbers, of, chosen)


def _group_records(
    task: Task, step: int, algorithm: Algorithm, numbers: Sequence[int], problems: Problems, rows: dict[str, Tensor]
) -> list[GroupRecord]:
    """The token records of P groups, whose `rows` have axes (P, G[, T])."""
    rollouts = Rollouts(mask=rows["mask"], reward=rows["reward"])
    correct, extra = algorithm.correct(rollouts), algorithm.extra(rollouts)
    plain = grpo_advantages(rows["reward"] + extra)
    found = []
    for p, number in enumerate(numbers):
        answers = []
        for g, length in enumerate(rollouts.lengths[p].tolist()):
            by_token = {name: x[p, g, :length].tolist() for name, x in rows.items() if x.ndim == 3}
            answers.append(
                AnswerRecord(
                    tokens=task.symbols(by_token["tokens"]),
                    correct=bool(correct[p, g]),
                    reward=float(rows["reward"][p, g]),
                    extra=float(extra[p, g]),
                    truncated=not task.ends(by_token["tokens"][-1]),
                    entropy=by_token["entropy"],
                    logp=by_token["logp"],
                    shaped=by_token["shaped"],
                    advantage=by_token["advantages"],
                    grpo=[float(plain[p, g])] * length,
                )
            )
        prompt, gold = task.describe(problems[p])
        found.append(GroupRecord(step, number, prompt, answers, gold, algorithm.name, asdict(algorithm)))
    return found


def judge(task: Task, answers: Answers, facts: Tensor) -> Tensor:
    """(R, B) rewards of (R, B, T) answers to problems with (R, P, F) facts."""
    return task.rewards(answers, facts.repeat_interleave(answers.tokens.shape[1] // facts.shape[1], 1))


def solve(
    task: Task, sample: Callable[[Tensor, Tensor], Answers], problems: Problems, k: int, rows: int,
    uniforms: Callable[..., Tensor], number: int,
) -> Tensor:  # fmt: skip
    """(R, N, k) whether k answers to each of N problems are correct, about `rows` answers of a replica at once."""
    found = []
    each = max(1, rows // k)
    for i in range(0, len(problems.facts), each):
        part = problems[i : i + each]
        drawn = uniforms(f"held-out/{i}", number, len(part.facts) * k, task.tokens)
        prompt, facts = (x.expand(len(drawn), *x.shape) for x in (part.prompt, part.facts))
        found.append((judge(task, sample(prompt, drawn), facts) > CORRECT).unflatten(1, (-1, k)))
    return torch.cat(found, 1)


def _teams(replicas: Sequence[Replica], group_size: int, tokens: int) -> list[Team]:
    """Runs of the same algorithm must be neighbours. Engines fill in the generation budget; so does the lab."""
    teams: list[Team] = []
    for algorithm, runs in groupby(replicas, key=lambda x: x.arm.algorithm):
        start = teams[-1].rows.stop if teams else 0
        filled = replace(algorithm, max_tokens=tokens) if algorithm.max_tokens is None else algorithm
        teams.append(Team(filled, slice(start, start + len(list(runs))), group_size, tokens))
    return teams


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """(R, B, ...) -> (R, b, ...): the rows of each replica."""
    return x.gather(1, rows.view(*rows.shape, *[1] * (x.ndim - 2)).expand(*rows.shape, *x.shape[2:]))
