"""A verl run's folder: the metrics and token records that `dew report` reads.

verl's own trackers go on as they are; they also get the numbers below, under `dew/`. Groups that verl's filter
dropped never reach the trainer: of them only the number and the accuracy are known, and both are counted in.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dew.algorithms import Algorithm
from dew.engines.metrics import Numbers, answer_metrics, credit_metrics, entropy_sums
from dew.engines.recording import RunLog, due, git_commit, group_records, machine, versions
from dew.engines.verl.carrying import Found
from dew.engines.verl.settings import RunSettings, read

SECONDS = {
    "gen": "seconds/generation",
    "reward": "seconds/reward",
    "old_log_prob": "seconds/scoring",
    "adv": "seconds/credit",
    "update_actor": "seconds/update",
}
NAMES = {
    "actor/loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/kl_loss": "kl/ref",
}
"""verl's name -> dew's, where both mean the same."""

DROPPED, DROPPED_SCORES = "training/filter_groups/evicted_samples", "_dapo_filtered_reward_counts"
JUDGE = "verl"


def run_facts(config: Any, algorithm: Algorithm, settings: RunSettings) -> dict[str, Any]:
    """Who ran what on which machine."""
    workers = int(read(config, "trainer.n_gpus_per_node", 1)) * int(read(config, "trainer.nnodes", 1))
    estimator = str(read(config, "algorithm.adv_estimator"))
    return {
        "name": Path(settings.folder).name,
        "engine": "verl",
        "algorithm": {"name": estimator, "settings": asdict(algorithm)},
        "model": str(read(config, "actor_rollout_ref.model.path")),
        "data": str(read(config, "data.train_files")),
        "seed": read(config, "data.seed"),
        "versions": versions("torch", "transformers", "verl", "ray"),
        "machine": machine(workers),
        "git_commit": git_commit(),
    }


class Recorder:
    """Collects what the parts of a step tell and writes it when the step ends."""

    def __init__(self, settings: RunSettings, algorithm: Algorithm, limit: int) -> None:
        self.settings, self.algorithm, self.limit = settings, algorithm, limit
        self.log = RunLog(settings.folder)
        self._parts: list[tuple[int, Numbers]] = []
        self._recorded = 0

    def due(self, step: int) -> bool:
        """Whether this step's tokens are wanted: one record a step, of its first batch."""
        return self._recorded != step and due(step, self.settings.records_every, 1)

    def put(self, found: Found, truncated: Tensor) -> Numbers:
        """The numbers of a batch; a step has several where verl syncs its parameters every few batches."""
        numbers = batch_numbers(found, truncated, self.algorithm.threshold)
        self._parts.append((len(found.rows.group), numbers))
        return numbers

    def record(self, step: int, found: Found, columns: dict[str, Any], tokenizer: Any) -> None:
        groups = group_records(
            step, self.algorithm, columns, found.credit, tokenizer, self.settings.records_groups, JUDGE
        )
        self.log.folder.write_records(step, groups, self.settings.records_keep)
        self._recorded = step

    def step_end(self, step: int, metrics: dict[str, Any], timing: dict[str, float]) -> None:
        parts, self._parts = self._parts, []
        self.log.write(step, step_numbers(parts, metrics, timing))


def batch_numbers(found: Found, truncated: Tensor, threshold: float) -> Numbers:
    """What can be said about the answers of a batch, by the names of docs/metrics.md."""
    rows, credit = found.rows, found.credit
    here = credit.scored
    answers = {
        "guided": rows.guided[here],
        "outcome": rows.outcome[here],
        "extra": rows.extra[here],
        "length": rows.mask.sum(-1)[here],
        "truncated": truncated[here],
    }
    if not here.any():
        return {}
    numbers = answer_metrics(answers, [], threshold)
    numbers.update(credit_metrics(rows, credit))
    if rows.entropy is not None:
        sums = entropy_sums(rows.entropy, rows.mask, credit.correct.float(), here)
        numbers.update({name: float(total / count) for name, (total, count) in sums.items() if count})
    groups = rows.group[here].unique()
    numbers["groups/kept"] = float(len(groups))
    numbers["groups/mixed"] = float(len(rows.group[credit.signal].unique()))
    numbers["tokens"] = float(answers["length"].sum())
    return numbers


SUMS = ("groups/kept", "groups/mixed", "tokens")


def step_numbers(parts: Sequence[tuple[int, Numbers]], metrics: dict[str, Any], timing: dict[str, float]) -> Numbers:
    """A step's line: its batches, weighted by their answers, with verl's own numbers and times."""
    numbers: Numbers = {}
    for name in dict.fromkeys(name for _, part in parts for name in part):
        values = [(n, part[name]) for n, part in parts if name in part]
        if name in SUMS:
            numbers[name] = sum(x for _, x in values)
        elif name.endswith("/max"):
            numbers[name] = max(x for _, x in values)
        else:
            numbers[name] = sum(n * x for n, x in values) / sum(n for n, _ in values)
    _count_groups(numbers, sum(n for n, _ in parts), metrics)
    numbers.update({to: float(metrics[name]) for name, to in NAMES.items() if name in metrics})
    for name, value in metrics.items():
        if name.startswith("actor/dew/"):
            numbers[name.removeprefix("actor/dew/")] = float(value)
        elif name.startswith("val-core/"):
            numbers[name.replace("val-core/", "eval/", 1)] = float(value)
    numbers.update({to: float(timing[name]) for name, to in SECONDS.items() if name in timing})
    tokens = numbers.pop("tokens", 0.0)
    if numbers.get("seconds/generation"):
        numbers["tokens_per_second"] = tokens / numbers["seconds/generation"]
    return numbers


def _count_groups(numbers: Numbers, answers: int, metrics: dict[str, Any]) -> None:
    """Groups sampled, and the accuracy over all of them: a dropped group's answers share one known verdict."""
    kept, mixed = numbers.get("groups/kept", 0.0), numbers.pop("groups/mixed", 0.0)
    dropped = float(metrics.get(DROPPED, 0.0))
    numbers["groups/dropped"], numbers["groups/sampled"] = dropped, kept + dropped
    if not kept:
        return
    numbers["groups/mixed_share"] = mixed / (kept + dropped)
    verdicts = metrics.get(DROPPED_SCORES) or {}
    if "accuracy" in numbers and sum(verdicts.values()) == dropped:
        size = answers / kept
        right = numbers["accuracy"] * answers + size * sum(float(v > 0.5) * n for v, n in verdicts.items())
        numbers["accuracy"] = right / (answers + size * dropped)


def record_columns(found: Found, data: dict[str, Any], truncated: Tensor) -> dict[str, Any]:
    """The answers of a batch as `group_records` wants them. `data`: padded tensors and lists by verl's names."""
    rows, conversations = found.rows, found.conversations
    last = conversations.last_row
    infos = [data["reward_extra_info"][b] for b in last.tolist()]
    return {
        "group": rows.group,
        "filler": ~found.credit.scored,
        "prompt_ids": data["prompts"][last],
        "prompt_mask": data["prompt_mask"][last],
        "completion_ids": conversations.join(data["responses"]),
        "tokens": torch.where(rows.mask, torch.arange(1, rows.mask.shape[1] + 1), 0).amax(-1),
        "mask": rows.mask,
        "table": [
            {("extra", f"{JUDGE}/{name}"): info[name] or None for name in ("verdict", "extracted") if name in info}
            for info in infos
        ],
        "truncated": truncated,
        "guided": rows.guided,
        "entropy": rows.entropy,
        "logp": conversations.join(data["old_log_probs"]),
        "outcome": rows.outcome,
        "gold": [data["gold"][b] for b in last.tolist()],
    }
