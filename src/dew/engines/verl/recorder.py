"""The folder of a run on verl: metrics and token records. verl's trackers also get the metrics of each batch (`dew/`).

Groups that verl's filter drops never reach the trainer, but verl reports their number and outcomes, which are included.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dew.algorithms import Algorithm
from dew.engines.recorder import Numbers, RunLog, answer_metrics, credit_metrics, due, entropy_sums, group_records
from dew.engines.verl.config import RunSettings, read
from dew.engines.verl.estimators import CreditedBatch
from dew.run.settings import ACTOR, ROLLOUT, SETTINGS

TIMES = {"gen": "generation", "reward": "reward", "old_log_prob": "scoring", "adv": "credit", "update_actor": "update"}
NAMES = {"actor/loss": "loss", "actor/grad_norm": "grad_norm", "actor/lr": "learning_rate", "actor/kl_loss": "kl/ref",
         "rollout_corr/k3_kl": "sampler/kl"}  # fmt: skip
"""verl's name of a metric -> dew's."""
KEYS = {
    **{name: SETTINGS[name].verl for name in ("learning_rate", "max_completion_length")},
    "num_generations": f"{ROLLOUT}.n",
    "outcome_reward": "acc in what the reward function returns",
    "num_iterations": f"{ACTOR}.ppo_epochs",
    "steps_per_generation": f"data.train_batch_size / {ACTOR}.ppo_mini_batch_size",
}
"""TRL's name of a setting that remedies of alarms advise to change -> verl's."""
DROPPED, DROPPED_SCORES = "training/filter_groups/evicted_samples", "_dapo_filtered_reward_counts"
SUMS = ("groups/kept", "groups/mixed", "tokens")


class Recorder(RunLog):
    chosen = False
    """Whether the config sets the threshold."""

    def __init__(self, settings: RunSettings, algorithm: Algorithm) -> None:
        super().__init__(settings.folder, names=KEYS)
        self.settings, self.algorithm = settings, algorithm
        self._batches: list[tuple[int, Numbers]] = []
        self._recorded = 0

    def start(self, config: Any, steps: int, done: int) -> None:
        gpus = int(read(config, "trainer.n_gpus_per_node", 1)) * int(read(config, "trainer.nnodes", 1))
        model, data = str(read(config, "actor_rollout_ref.model.path")), str(read(config, "data.train_files"))
        self.sampled = int(read(config, "data.train_batch_size")) * int(read(config, f"{ROLLOUT}.n"))
        saved = str(Path(str(read(config, "trainer.default_local_dir"))).absolute())
        facts = {"model": model, "data": data, "seed": read(config, "data.seed"), "steps": steps, "checkpoints": saved}
        self.chosen = read(config, "algorithm.dew.threshold") is not None
        if not done:  # an earlier run in the folder ended before its first checkpoint
            self.folder.clear(whole=False)
        self.begin(self.algorithm, ["verl", "ray"], gpus, **facts)
        self.resume(done)

    def add(self, step: int, batch: CreditedBatch, truncated: Tensor) -> Numbers:
        """Return the metrics of a batch. A step has several batches if verl syncs parameters less often than that."""
        numbers = batch_numbers(batch, truncated, self.algorithm.threshold)
        here = batch.credit.scored  # without padding rows
        self.check_rewards(step, self.algorithm, batch.rows.outcome[here], batch.credit.advantages, self.chosen)
        self._batches.append((int(here.sum()), numbers))
        return numbers

    def due(self, step: int) -> bool:
        """Whether to write a token record: at most one per step, for its first batch."""
        return self._recorded != step and due(step, self.settings.records_every, 1)

    def record(self, step: int, batch: CreditedBatch, columns: dict[str, Any], tokenizer: Any) -> None:
        groups = group_records(step, self.algorithm, columns, batch.credit, tokenizer, self.settings.records_groups)
        self.folder.write_records(step, groups, self.settings.records_keep)
        self._recorded = step

    def step_end(self, step: int, metrics: dict[str, Any], timing: dict[str, float]) -> None:
        batches, self._batches = self._batches, []
        lost = max(0.0, 1 - sum(n for n, _ in batches) / self.sampled)  # verl drops answers whose reward raised
        self.write(step, {"unscored_share": lost, **step_numbers(batches, metrics, timing, self.algorithm.threshold)})


def batch_numbers(batch: CreditedBatch, truncated: Tensor, threshold: float) -> Numbers:
    rows, credit, here = batch.rows, batch.credit, batch.credit.scored
    if not here.any():
        return {}
    columns = {"outcome": rows.outcome, "extra": rows.extra, "length": rows.mask.sum(-1), "truncated": truncated}
    answers = {name: column[here] for name, column in columns.items()}
    numbers = {**answer_metrics(answers, [], threshold), **credit_metrics(rows, credit)}
    if rows.entropy is not None:
        sums = entropy_sums(rows.entropy, rows.mask & here[:, None], credit.correct.float())
        numbers.update({name: float(total / count) for name, (total, count) in sums.items() if count})
    numbers["groups/kept"] = float(len(rows.group[here].unique()))
    numbers["groups/mixed"] = float(len(rows.group[credit.signal].unique()))
    numbers["tokens"] = float(answers["length"].sum())
    return numbers


def step_numbers(
    batches: Sequence[tuple[int, Numbers]], metrics: dict[str, Any], timing: dict[str, float], threshold: float
) -> Numbers:
    """Return the metrics of a step: means over its batches, weighted by answers, and verl's own metrics and times."""
    numbers: Numbers = {}
    for name in dict.fromkeys(name for _, batch in batches for name in batch):
        values = [(n, batch[name]) for n, batch in batches if name in batch]
        if name in SUMS:
            numbers[name] = sum(x for _, x in values)
        elif name.endswith("/max"):
            numbers[name] = max(x for _, x in values)
        else:
            numbers[name] = sum(n * x for n, x in values) / sum(n for n, _ in values)
    _count_groups(numbers, metrics, threshold)
    numbers.update({to: float(metrics[name]) for name, to in NAMES.items() if name in metrics})
    for name, value in metrics.items():
        if name.startswith("actor/dew/"):
            numbers[name.removeprefix("actor/dew/")] = float(value)
        elif name.startswith("val-core/"):
            numbers[name.replace("val-core/", "eval/", 1)] = float(value)
    numbers.update({f"seconds/{to}": float(timing[name]) for name, to in TIMES.items() if name in timing})
    tokens = numbers.pop("tokens", 0.0)
    if numbers.get("seconds/generation"):
        numbers["tokens_per_second"] = tokens / numbers["seconds/generation"]
    return numbers


def _count_groups(numbers: Numbers, metrics: dict[str, Any], threshold: float) -> None:
    """Count sampled groups, and include dropped groups, whose answers all have the same outcome, in the accuracy."""
    kept, mixed = numbers.get("groups/kept", 0.0), numbers.pop("groups/mixed", 0.0)
    dropped, outcomes = float(metrics.get(DROPPED, 0.0)), metrics.get(DROPPED_SCORES) or {}
    numbers["groups/dropped"], numbers["groups/sampled"] = dropped, kept + dropped
    if not kept:
        return
    numbers["groups/mixed_share"] = mixed / (kept + dropped)
    if "accuracy" in numbers and sum(outcomes.values()) == dropped:
        solved = sum(n for outcome, n in outcomes.items() if outcome > threshold)
        numbers["accuracy"] = (numbers["accuracy"] * kept + solved) / (kept + dropped)


def record_columns(batch: CreditedBatch, data: dict[str, Any], truncated: Tensor) -> dict[str, Any]:
    """Return the answers as columns for `group_records`. `data`: padded tensors and lists under verl's names."""
    rows, join, last = batch.rows, batch.conversations.join, batch.conversations.last_row
    infos = [data["reward_extra_info"][b] for b in last]
    return {
        "group": rows.group,
        "filler": ~batch.credit.scored,
        "prompt_ids": data["prompts"][last],
        "prompt_mask": data["prompt_mask"][last],
        "completion_ids": join(data["responses"]),
        "total_length": torch.where(rows.mask, torch.arange(1, rows.mask.shape[1] + 1), 0).amax(-1),
        "mask": rows.mask,
        "verdict": [info.get("verdict") or None for info in infos],
        "extracted": [info.get("extracted") or None for info in infos],
        "truncated": truncated,
        "entropy": rows.entropy,
        "logp": join(data["old_log_probs"]),
        "outcome": rows.outcome,
        "gold": [data["gold"][b] for b in last],
    }
