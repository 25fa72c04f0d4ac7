"""The metrics of a step (named as in docs/metrics.md), skipped steps, and what a run writes to its folder."""

import json
import logging
import math
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from dew.compare.statistics import passes
from dew.engines.credit import Credit
from dew.engines.recorder import Numbers, RunLog, answer_metrics, credit_metrics, entropy_sums, group_records
from dew.engines.trl.batch import Batch, gather_columns
from dew.engines.trl.config import BATCH
from dew.engines.trl.rewards import outcome_columns
from dew.errors import EngineError, Problem

logger = logging.getLogger("dew")

EVERY_STEP = (
    "reward", "reward/", "accuracy", "unscored_share", "entropy", "entropy/", "credit/", "groups/", "clip/", "ratio/",
    "kl/", "sampler/", "length/", "guide/", "seconds/", "tokens_per_second", "loss", "grad_norm", "steps/",
    "reward_std", "rewards/", "completions/", "step_time", "frac_reward_zero_std",
)  # fmt: skip
"""Metrics that are written at every step; `x/` stands for all names that begin with it. Last row: TRL's names."""


class StepStatistics:
    """Means over the tokens of an optimizer step: summed per micro-batch, reduced over processes once per step."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}

    def add(self, stats: dict[str, Tensor], tokens: Tensor) -> None:
        for name, value in stats.items():
            if name.endswith("/max"):
                seen = self._largest.get(name)
                self._largest[name] = value if seen is None else torch.maximum(seen, value)
            else:
                self._add(name, value * tokens, tokens)

    def add_entropy(self, verdict: Tensor, own: Tensor, entropy: Tensor) -> None:
        """Add the entropies of the policy's `own` tokens."""
        for name, (total, count) in entropy_sums(entropy, own, verdict).items():
            self._add(name, total, count)

    def add_loss(self, loss: Tensor) -> None:
        # The step's loss is the sum over micro-batches and the mean over processes, so each process counts once.
        self._add("loss", loss, torch.zeros_like(loss) if "loss" in self._sums else torch.ones_like(loss))

    def _add(self, name: str, total: Tensor, count: Tensor) -> None:
        pair = torch.stack((total.detach().float(), count.detach().float()))
        seen = self._sums.get(name)
        self._sums[name] = pair if seen is None else seen + pair

    def read(self, accelerator: Any) -> Numbers:
        """Return the means over all processes and reset. A collective call."""
        sums, largest, self._sums, self._largest = self._sums, self._largest, {}, {}
        numbers: Numbers = {}
        if sums:
            totals = accelerator.reduce(torch.stack(list(sums.values())), reduction="sum").tolist()
            numbers = {n: total / count for n, (total, count) in zip(sums, totals, strict=True) if count}
        if largest:
            gathered = accelerator.gather(torch.stack(list(largest.values())).float().unsqueeze(0)).amax(0).tolist()
            numbers.update(zip(largest, gathered, strict=True))
        return numbers


def pass_at(outcome: Tensor, threshold: float, size: int) -> Numbers:
    """Return pass@1, 2, 4, ... up to the group size, over the groups in which every answer has an outcome."""
    groups = outcome.view(-1, size)
    found = [passes(size, c) for c in (groups > threshold)[~groups.isnan().any(-1)].sum(-1).tolist()]
    return {name: sum(x[name] for x in found) / len(found) for name in found[0]} if found else {}


def generation_metrics(trainer: Any, batch: Batch, credit: Credit) -> Numbers:
    """Return the metrics of a generation's answers, credit and groups."""
    answers, groups, names = batch.answers, batch.groups, trainer.reward_func_names
    numbers = {**answer_metrics(answers, names, trainer.algorithm.threshold), **credit_metrics(batch, credit)}
    unscored = (answers["parts"] if trainer.algorithm.engine_loss else answers["outcome"][:, None]).isnan().all(-1)
    numbers["unscored_share"] = unscored.float().mean().item()
    if not unscored.all():  # TRL's own loss needs any reward, not the outcome
        numbers["reward"] = (answers["outcome"].nan_to_num() + answers["extra"])[~unscored].mean().item()
    numbers.update({f"groups/{name}": float(n) for name, n in groups.items() if name != "mixed"})
    mixed = groups.get("mixed", int(credit.mixed(trainer.group_size).sum()))
    numbers["groups/mixed_share"] = mixed / groups["sampled"]
    if trainer.model.training and (seconds := trainer._recorder.seconds["generation"]) > 0:
        numbers["tokens_per_second"] = float(answers["length"].sum()) / seconds
    return numbers


def sampler_metrics(logp: Tensor, sampler_logp: Tensor, mask: Tensor, accelerator: Any) -> Numbers:
    """Return the sampler's KL from the policy and the mean ratio between them. A collective call."""
    log_ratio = (logp - sampler_logp)[mask].double()
    log_ratio = log_ratio[log_ratio.isfinite()]  # vLLM returns none for some tokens
    ratio = log_ratio.exp()
    sums = torch.stack(((ratio - 1 - log_ratio).sum(), ratio.sum(), torch.ones_like(ratio).sum()))
    kl, total, count = accelerator.reduce(sums, reduction="sum").tolist()
    return {"sampler/kl": kl / count, "sampler/ratio": total / count} if count else {}


PATIENCE = 3
"""Number of consecutive skipped steps that stop the run. Steps on the same bad generation count once."""


def not_finite(parts: Tensor, finite: Tensor, advantages: Tensor, names: Sequence[str]) -> str | None:
    """Return what is not finite, if anything: (N, F) rewards (NaN: none), logits ((N,) `finite`), (N, T) advantages."""
    for name, bad in zip(names, parts.isinf().sum(0).tolist(), strict=True):
        if bad:
            return f"reward {name!r} of {bad} answers"
    if not finite.all():
        return "logits"
    return None if advantages.isfinite().all() else "advantages"


def finite_only(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Remove infinities and NaNs, which would spoil every mean that includes them."""
    return {name: x for name, x in numbers.items() if not isinstance(x, float) or math.isfinite(x)}


class NonFinite:
    """Skips steps with an infinity or NaN in rewards, logits, advantages, loss or gradient. Three in a row stop the
    run. A skipped step leaves weights and optimizer unchanged, but advances schedule and prompts."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"generation": None, "counted": False, "row": []}
        """What is not finite in the current generation, whether that was counted, and the consecutive skipped steps."""

    def start(self, generation: str | None) -> None:
        self.state |= {"generation": generation, "counted": False}

    def check(self, step: int, norm: float, *, loss: float = 0.0, scaled: bool) -> str | None:
        """Return why the step must be skipped, or None. Overflows of a loss scaler, which are normal, do not count."""
        generation, row = self.state["generation"], self.state["row"]
        found: str | None = generation or (None if math.isfinite(loss) else "loss")
        overflow = found is None and scaled
        if found is None and not math.isfinite(norm):
            found = f"gradient: norm {norm}"
        if found is None:
            row.clear()
            return None
        if not overflow and not (generation and self.state["counted"]):
            row.append(f"step {step}, {found}")
            self.state["counted"] = True
        if len(row) >= PATIENCE:
            what = f"{PATIENCE} steps in a row had an infinity or a NaN and were skipped; the weights are unchanged: "
            remedy = "Check the reward function and the algorithm, lower the learning rate, or use bf16, not fp16."
            raise EngineError(Problem(f"{what}{'; '.join(row)}.", remedy=remedy))
        return found


# ── the run's folder ────────────────────────────────────────────────────────────────────────────────────────
class Recorder(RunLog, TrainerCallback):  # type: ignore[misc]
    """Collects the metrics of a step and writes them when it ends. Only the main process writes."""

    def __init__(self, folder: str, writes: bool) -> None:
        super().__init__(folder, writes)
        self.seconds: dict[str, float] = defaultdict(float)
        self._nested = 0.0
        self._numbers: Numbers = {}
        self._start = time.perf_counter()
        self._trackers: dict[str, list[float]] = {}
        """TRL's lists of values to report to the trackers."""

    def start(self, trainer: Any) -> None:
        self._trackers = trainer._metrics["train"]
        args, info = trainer.args, getattr(trainer.train_dataset, "info", None)
        names, outcomes = trainer.reward_func_names, outcome_columns(trainer)
        if args.outcome_reward is None and len(outcomes) == 1 < len(names):
            text = "an answer counts as correct if its reward %s is above %g; outcome_reward can name another."
            logger.info(text, names[outcomes[0]], trainer.algorithm.threshold)
        made = {name: getattr(args, name) for name in (*BATCH, "num_iterations")}
        self.begin(
            trainer.algorithm,
            ["trl"],
            trainer.accelerator.num_processes,
            model=getattr(trainer.model.config, "_name_or_path", "") or type(trainer.model).__name__,
            data=getattr(info, "dataset_name", None),
            seed=args.seed,
            learning_rate=float(args.learning_rate),
            rewards=", ".join(names),
            batches={**made, "processes": trainer.accelerator.num_processes},
            max_completion_length=args.max_completion_length,
            chat_template_kwargs=args.chat_template_kwargs,
        )

    def put(self, numbers: Numbers) -> None:
        self._numbers.update(numbers)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of the `with` block, without nested phases. Waits for the GPU to finish."""
        start, outer, self._nested = _now(), self._nested, 0.0
        try:
            yield
        finally:
            elapsed = _now() - start
            self.seconds[name] += elapsed - self._nested
            self._nested = outer + elapsed

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.resume(state.global_step)
        if self._writes:
            self.folder.write_run({"steps": state.max_steps})

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._start = time.perf_counter()
        self.seconds.clear()  # an evaluation may have added to them

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        spent = {f"seconds/{name}": seconds for name, seconds in self.seconds.items()}
        spent["seconds/update"] = time.perf_counter() - self._start - sum(spent.values())
        for name, seconds in spent.items():
            self._trackers.setdefault(name, []).append(seconds)
        self.write(state.global_step, {**self._numbers, **spent})
        self._numbers.clear()
        self.seconds.clear()

    def record(self, batch: Batch, credit: Credit, trainer: Any) -> None:
        tokenizer, args = trainer._tokenizer, trainer.args
        names = ("prompt_ids", "prompt_mask", "completion_ids", "guided")
        ids = {name: batch.inputs[name] for name in names if name in batch.inputs}
        fills = dict.fromkeys(("prompt_ids", "completion_ids"), tokenizer.pad_token_id)
        columns = {**batch.columns, **gather_columns(trainer.accelerator, ids, fills)}
        if self._writes:
            step, names = trainer.state.global_step + 1, trainer.reward_func_names
            records = group_records(step, trainer.algorithm, columns, credit, tokenizer, args.records_groups, names)
            self.folder.write_records(step, records, args.records_keep)

    def logged(self, step: int, logs: dict[str, Any]) -> None:
        """Write what else was logged at this step: learning rate, evaluation, metrics of TRL and reward functions."""
        others = {
            name.replace("eval_", "eval/", 1) if name.startswith("eval_") else name: value
            for name, value in logs.items()
            if isinstance(value, int | float)
            and re.sub("/.*", "/", name) not in EVERY_STEP
            and not name.startswith(("train_", "total_flos"))
        }
        if others:
            self.write(step, others)


# ── the console ─────────────────────────────────────────────────────────────────────────────────────────────
class ConsoleLines(logging.Handler):
    """Prints dew's messages without breaking a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(f"dew: {self.format(record)}", file=sys.stderr)


def show_logs() -> None:
    """Show dew's messages if the program has not configured logging."""
    if not logger.hasHandlers():
        logger.addHandler(ConsoleLines())
        logger.setLevel(logging.INFO)


ON_A_LINE = (
    "loss", "grad_norm", "learning_rate", "reward", "accuracy", "entropy", "groups/mixed_share", "length/mean",
    "length/truncated_share", "ratio/abs_log", "sampler/kl", "tokens_per_second", "step_time", "runtime", "epoch",
)  # fmt: skip
"""The metrics that are printed, at most 15; trackers and metrics.jsonl have all of them."""


def with_text_arguments(messages: Any) -> Any:
    """Return messages with the arguments of tool calls as JSON: TRL's table in Parquet cannot hold an empty mapping."""

    def in_text(call: Any) -> Any:
        given = call["function"].get("arguments") or {}
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": text}}

    if isinstance(messages, str):
        return messages
    return [{**m, "tool_calls": [*map(in_text, m["tool_calls"] or ())]} if "tool_calls" in m else m for m in messages]


def shorten_log_lines(trainer: Any) -> None:
    def short(on_log: Any, args: Any, state: Any, control: Any, logs: Any, **others: Any) -> None:
        if len(logs) > len(ON_A_LINE):
            chosen = [x for x in logs if re.sub("^(eval|train)_(.*_)?", "", x) in ON_A_LINE or "pass@" in x]
            logs = {x: logs[x] for x in chosen[: len(ON_A_LINE)]}
        on_log(args, state, control, logs=dict(logs), **others)

    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ProgressCallback | PrinterCallback):
            callback.on_log = partial(short, callback.on_log)


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
