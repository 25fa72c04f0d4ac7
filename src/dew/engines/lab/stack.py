"""Train a stack of runs: sample, judge, give credit, update, record, evaluate. Credit and loss are the algorithm's own.

Runs with the same seed get the same problems and the same random numbers, whatever their arm. A run's results do not
depend on the other runs of its stack, except for rounding: the order of summation in a batched product may change with
the number of replicas or of rows that train.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dew.algorithms import Algorithm
from dew.credit import grpo_advantages, has_signal
from dew.engines.credit import differ
from dew.engines.lab.arms import TRAINED, Arm, teams
from dew.engines.lab.study_settings import Settings
from dew.engines.lab.tasks import Answers, GeneratedTask, Problems, generator, uniforms
from dew.engines.lab.tiny import TinyPolicies
from dew.rollouts import Rollouts
from dew.run.records import AnswerRecord, GroupRecord, Json

if TYPE_CHECKING:
    from dew.engines.lab.lora import LoraPolicies
    from dew.engines.lab.text import TextTask

RECORDED = 2
"""Groups per record."""
CORRECT = 0.5
"""An answer with a larger reward counts as correct in metrics and evaluations."""


@dataclass(frozen=True)
class Replica:
    """One run of the stack."""

    arm: Arm
    seed: int


class Stack:
    """Replicas of one task that train together. Replicas whose seed is in `recorded` also keep records of tokens."""

    def __init__(
        self, task: "GeneratedTask | TextTask", policies: "TinyPolicies | LoraPolicies", replicas: Sequence[Replica],
        settings: Settings, device: str, recorded: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.task, self.settings, self.device, self.replicas, self.recorded = task, settings, device, replicas, recorded
        self.policies = policies
        self.teams = teams([x.arm.algorithm for x in replicas], settings.group_size, task.tokens)
        self.needs_entropy = any(team.algorithm.needs_entropy == "current" for team in self.teams)
        self.seeds = sorted({x.seed for x in replicas})
        self.seed_of = torch.tensor([self.seeds.index(x.seed) for x in replicas], device=device)
        self.held_out = task.held_out(settings.eval_problems, device)
        self.history: list[dict[str, Tensor]] = []
        """(R,) metrics of each generation, with the names of docs/metrics.md."""
        self.solved: list[Tensor] = []
        """(R, N) number of correct answers to each held-out problem, at each evaluation."""
        self.records: list[list[GroupRecord]] = [[] for _ in replicas]
        self._checked = False

    def generation(self, number: int) -> list[str]:
        """Run one generation: sample, judge, give credit, update and record. `number` counts from 0. Of the first one
        in which rewards differ, return a sentence for each algorithm that loses these differences."""
        s = self.settings
        problems, answers, rows = self.sample(number)
        mask, correct = answers.mask, rows["reward"] > CORRECT
        checks = not self._checked and differ(rows["reward"])
        self._checked |= checks
        losses = [(team.algorithm.label, team.algorithm.graded(rows["reward"])) for team in self.teams if checks]
        credits = [team.credit({name: x[team.rows] for name, x in rows.items()}) for team in self.teams]
        signal, flipped = (torch.cat([credit[name] for credit in credits]) for name in ("signal", "flipped"))
        live = mask & signal.repeat_interleave(s.group_size, 1)[..., None]
        norm, drift = self._update(problems, answers, credits, live, self._uniforms("order", number, s.answers))
        metrics = {
            "accuracy": correct.float().mean((1, 2)),
            "entropy": (answers.entropy * mask).sum((1, 2)) / mask.sum((1, 2)),
            "length/mean": mask.sum((1, 2)) / s.answers,
            "credit/flipped_share": flipped.sum((1, 2, 3)) / live.sum((1, 2)).clamp_min(1),
            "groups/mixed_share": has_signal(correct, torch.ones_like(correct)).float().mean(1),
            "length/truncated_share": mask.all(-1).float().mean(1),
            "sampling/logp_difference": drift,
            "grad_norm": norm,
        }
        if s.evaluated(number + 1) and hasattr(self.policies, "score_start"):
            metrics["kl"] = self._kl(problems, answers)
        self.history.append(metrics)
        if number + 1 in (1, (s.generations + 1) // 2, s.generations):
            self._record(number + 1, problems, rows, credits)
        return [f"{label}: {problem.what} {problem.why}" for label, problem in losses if problem is not None]

    def sample(self, number: int) -> tuple[Problems, Answers, dict[str, Tensor]]:
        """Sample a generation: problems, answers, and the fields of `Rollouts` with axes (R, P, G[, T])."""
        P, G = self.settings.prompts, self.settings.group_size
        random = [generator(seed, "problems", number) for seed in self.seeds]
        problems = self.task.problems(P, *random, device=self.device)[self.seed_of]
        answers = self.policies.sample(problems.prompt, self._noise(number, "answers", P * G))
        rows = {**answers._asdict(), "reward": self.task.rewards(answers, problems.facts)}
        return problems, answers, {name: x.unflatten(1, (P, G)) for name, x in rows.items() if x is not None}

    def _update(
        self, problems: Problems, answers: Answers, credits: Sequence[dict[str, Tensor]], live: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take the optimizer steps of a generation. Return (R,) mean gradient norms, and (R,) mean differences between
        the log-probabilities of sampling and of the first step. `credits` has an entry per team."""
        policies: Any = self.policies
        steps, G = self.settings.optimizer_steps, self.settings.group_size
        trains = live.any(-1)
        order = (noise + ~trains).argsort(1)  # rows that train come first; step i takes every steps-th of them
        tokens = _take(live.sum(-1), order)
        most, longest = int(trains.sum(1).max()), int(live.sum(-1).max())
        sizes = torch.stack([tokens.sum(1), (tokens > 0).sum(1)], 1).tolist()
        by_run = [team.algorithm.divisor(*size) for team in self.teams for size in sizes[team.rows]]
        # As in TRL: a token has the same weight in every step.
        divisors = torch.tensor(by_run, device=tokens.device).clamp_min(1) / steps
        plan = []
        for i in range(min(steps, most)):  # before the first step, so that later ones do not wait for the device
            step = order[:, i:most:steps]
            plan.append((step, list(policies.passes(_take(problems.prompt, step // G), tokens[:, i:most:steps]))))
        norms: list[Tensor] = []
        drift, compared = torch.zeros(2, len(self.replicas), device=live.device)
        for step, passes in plan:
            for part, asked in passes:
                rows = step[:, part]
                token, old, mask = (_take(x, rows)[..., :longest] for x in (answers.tokens, answers.logp, live))
                logp, entropy = policies.score(asked, token, mask, entropy=self.needs_entropy)
                if not norms:
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
                policies.adam.backward(total)
            norms.append(policies.adam.step())
        norm = torch.stack(norms).mean(0) if norms else torch.zeros(len(self.replicas), device=live.device)
        return norm, drift / compared.clamp_min(1)

    def _kl(self, problems: Problems, answers: Answers) -> Tensor:
        """(R,) KL divergence from the start per token: the mean of log π − log π₀ over a quarter of the answers."""
        policies: Any = self.policies
        some = torch.arange(0, self.settings.answers, 4, device=self.device)
        prompts, tokens = problems.prompt[:, some // self.settings.group_size], answers.tokens[:, some]
        logp, mask = answers.logp[:, some], answers.mask[:, some]
        total = torch.zeros(len(self.replicas), device=mask.device)
        for part, asked in policies.passes(prompts, mask.sum(-1)):
            start = policies.score_start(asked, tokens[:, part], mask[:, part])
            total += ((logp[:, part] - start) * mask[:, part]).sum((1, 2))
        return total / mask.sum((1, 2))

    def evaluate(self, number: int) -> None:
        """Add pass@1 and pass@k on the held-out problems to the metrics of the last generation."""
        k = self.settings.eval_k
        rows = self.settings.eval_problems * k if self.policies.refills else self.settings.answers
        solved = solve(self.task, self.policies.sample, self.held_out, k, rows, partial(self._noise, number))
        passes = {1: solved.float().mean((1, 2)), k: solved.any(2).float().mean(1)}
        self.history[-1].update({f"eval/pass@{n}": x for n, x in passes.items()})
        self.solved.append(solved.sum(2))

    def metrics(self) -> list[list[Json]]:
        """The lines of each replica's metrics.jsonl; a step is a generation."""
        lines = [{name: x.tolist() for name, x in metrics.items()} for metrics in self.history]
        return [
            [{"step": step} | {name: round(x[i], 6) for name, x in line.items()} for step, line in enumerate(lines, 1)]
            for i in range(len(self.replicas))
        ]

    def state(self) -> dict[str, Any]:
        """The state from which an interrupted stack can resume."""
        kept = {"history": self.history, "solved": self.solved, "records": [list(x) for x in self.records]}
        return {"policies": {"adam": self.policies.adam.state()}, **kept}

    def load(self, state: dict[str, Any]) -> None:
        self.policies.adam.load(state["policies"]["adam"])
        self.history, self.solved, self.records = state["history"], state["solved"], state["records"]

    def _uniforms(self, purpose: str, number: int, *shape: int) -> Tensor:
        """(R, *shape) uniform numbers, determined by each replica's seed."""
        keys = [(seed, purpose, number) for seed in self.seeds]
        return uniforms(keys, *shape, device=self.device)[self.seed_of]

    def _noise(self, number: int, purpose: str, rows: int) -> Tensor:
        """The uniform numbers that decide the tokens of `rows` answers per replica."""
        return self._uniforms(purpose, number, rows, self.task.tokens, *self.policies.noise)

    def _record(
        self, step: int, problems: Problems, rows: dict[str, Tensor], credits: Sequence[dict[str, Tensor]]
    ) -> None:
        """Record the tokens of some groups. `rows` have axes (R, P, G[, T])."""
        for team, credit in zip(self.teams, credits, strict=True):
            for i in range(team.rows.start, team.rows.stop):
                if self.replicas[i].seed in self.recorded:
                    own = {name: x[i].cpu() for name, x in rows.items()}
                    own |= {name: x[i - team.rows.start].cpu() for name, x in credit.items()}
                    self.records[i] += group_records(self.task, step, team.algorithm, problems[i], own)


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """(R, B, ...) -> (R, b, ...): select the rows (R, b) of each replica."""
    return x.gather(1, rows.view(*rows.shape, *[1] * (x.ndim - 2)).expand(*rows.shape, *x.shape[2:]))


def group_records(
    task: "GeneratedTask | TextTask", step: int, algorithm: Algorithm, problems: Problems, rows: dict[str, Tensor]
) -> list[GroupRecord]:
    """Records of RECORDED groups of a generation, those with signal first. `rows` have axes (P, G[, T])."""
    signal, given = rows["signal"], {name: rows[name] for name in ("mask", "reward", *algorithm.signals)}
    rollouts, shaped = Rollouts(**given), torch.zeros_like(rows["advantages"])
    if signal.any():  # the others do not train
        shaped[signal] = algorithm.rewards(Rollouts(**{name: x[signal] for name, x in given.items()})).float()
    correct, extra = algorithm.correct(rollouts), algorithm.extra(rollouts)
    plain = grpo_advantages(rows["reward"] + extra, rollouts.present)
    by_token = {"entropy": rows["entropy"], "logp": rows["logp"], "shaped": shaped, "advantage": rows["advantages"]}
    found = []
    for p in (~signal).int().argsort(stable=True)[:RECORDED].tolist():
        answers = []
        for g, length in enumerate(rollouts.lengths[p].tolist()):
            tokens = rows["tokens"][p, g, :length].tolist()
            own: dict[str, Any] = {name: x[p, g, :length].tolist() for name, x in by_token.items()}
            answers.append(
                AnswerRecord(
                    tokens=task.symbols(tokens),
                    correct=bool(correct[p, g]),
                    reward=float(rows["reward"][p, g]),
                    extra=float(extra[p, g]),
                    truncated=not task.ends(tokens[-1]),
                    grpo=[float(plain[p, g])] * length,
                    **own,
                )
            )
        prompt, gold = task.describe(problems[p])
        found.append(GroupRecord(step, p, prompt, answers, gold, algorithm.name, asdict(algorithm)))
    return found


# ── scores: correct answers to held-out problems, and means of metrics ──────────────────────────────────────
def solve(
    task: "GeneratedTask | TextTask", sample: Callable[[Tensor, Tensor], Answers], problems: Problems, k: int,
    rows: int, noise: Callable[[str, int], Tensor],
) -> Tensor:  # fmt: skip
    """(R, N, k) whether each of k answers to N problems is correct. About `rows` answers per replica at once.

    `noise`: maps a purpose and a number of answers to the uniform numbers that decide their tokens.
    """
    found = []
    each = max(1, rows // k)
    for i in range(0, len(problems.facts), each):
        part = problems[i : i + each]
        drawn = noise(f"held-out/{i}", len(part.facts) * k)
        prompt, facts = (x.expand(len(drawn), *x.shape) for x in (part.prompt, part.facts))
        found.append((task.rewards(sample(prompt, drawn), facts) > CORRECT).unflatten(1, (-1, k)))
    return torch.cat(found, 1)


def scores_of(metrics: Sequence[Json], averaged: bool = False) -> dict[str, float]:
    """The scores of a run, as defined in docs/lab.md. `averaged`: pass@k over all evaluations instead of the last."""
    last = metrics[-max(1, len(metrics) // 6) :]

    def mean(lines: Sequence[Json], name: str) -> float:
        return round(fmean(line[name] for line in lines if name in line), 6)

    scores = {"area": mean(metrics, "accuracy"), "final": mean(last, "accuracy")}
    passes = [name for name in metrics[-1] if name.startswith("eval/")]
    scores |= {name.removeprefix("eval/"): mean(metrics if averaged else metrics[-1:], name) for name in passes}
    others = {"entropy": "entropy", "length": "length/mean", "truncated": "length/truncated_share", "kl": "kl"}
    scores |= {score: mean(last, name) for score, name in others.items() if name in metrics[-1]}
    return scores | {"flipped": mean(metrics, "credit/flipped_share")}
