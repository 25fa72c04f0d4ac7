"""What every engine records about a run: its metrics, its machine, and the credit of each token."""

import logging
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from typing import IO, Any

import torch
from torch import Tensor

from dew import __version__
from dew.algorithms import Algorithm, source_digest
from dew.credit import forking_mask, grpo_advantages
from dew.engines.compat import installed
from dew.engines.credit import Credit, Rows, check_outcomes, differ
from dew.errors import in_one_line, renamed
from dew.ops import H_FLOOR
from dew.run.alarms import Alarms
from dew.run.folder import RunFolder, hold
from dew.run.records import AnswerRecord, GroupRecord

logger = logging.getLogger("dew")
alarm_log = logging.getLogger("dew.alarms")
"""A separate logger, because commands show alarms themselves, next to the metrics."""

Numbers = dict[str, float]
Columns = dict[str, Any]
"""Columns of a batch by name: tensors or lists with one row per answer."""

GOLD_COLUMNS = ("gold", "answer", "solution", "ground_truth", "target")


class RunLog:
    """Writes the metrics and alarms of each step and the status of the run; writes nothing if `writes` is False."""

    def __init__(self, folder: str, writes: bool = True, names: Mapping[str, str] | None = None) -> None:
        """`names`: the engine's names of settings that the remedies of alarms name as TRL does."""
        self.folder = RunFolder(folder)
        self.alarms = Alarms()
        self._writes, self._names = writes, names or {}
        self._rewards_seen = False
        self._lock: IO[Any] | None = None

    def check_rewards(
        self, step: int, algorithm: Algorithm, outcomes: Tensor, advantages: Tensor, chosen: bool
    ) -> None:
        """In the first generation whose outcome rewards differ, raise if the algorithm cannot use them, warn if only in
        part.

        `chosen`: the config sets the threshold, so graded rewards are used as intended.
        """
        if self._rewards_seen or not differ(outcomes):
            return
        self._rewards_seen = True
        problem = None if chosen else check_outcomes(algorithm, outcomes, advantages, self._names)
        if problem is not None and self._writes:
            self._warn({"step": step, "alarm": "graded_reward", "message": problem.says,
                        "remedy": problem.remedy, "value": None, "threshold": algorithm.threshold})  # fmt: skip

    def write(self, step: int, numbers: dict[str, Any]) -> None:
        if not self._writes:
            return
        self.folder.append_metrics({"step": step, "time": time.time(), **numbers})
        for alarm in self.alarms.update(step, numbers):
            self._warn({**alarm, "remedy": renamed(alarm["remedy"], self._names)})

    def _warn(self, alarm: dict[str, Any]) -> None:
        self.folder.append_alarm(alarm)
        alarm_log.warning("step %d: %s %s", alarm["step"], alarm["message"], alarm["remedy"])

    def resume(self, step: int) -> None:
        """Resume after `step`: restore the alarms from the metrics up to it."""
        if self._writes and step:
            self.alarms.restore(self.folder.metrics(), until=step)

    def begin(self, algorithm: Algorithm, packages: Sequence[str], processes: int, **facts: Any) -> None:
        """Write run.json: algorithm, versions and machine. `packages`: the engine, followed by what it is built on."""
        if not self._writes:
            return
        self.alarms = Alarms(algorithm, algorithm.uses_threshold, lambda: list(self.folder.checkpoints()))
        run = {
            "name": self.folder.path.name,
            "engine": packages[0],
            "algorithm": {"name": algorithm.name, "settings": asdict(algorithm)},
            "uses_threshold": algorithm.uses_threshold,
            "versions": versions("torch", "transformers", "math-verify", "sympy", *packages),
            "machine": {
                "platform": platform.platform(),
                "cpus": os.cpu_count(),
                "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                "processes": processes,
            },
            "git_commit": git_commit(),
            "started": self.folder.run().get("started", datetime.now(UTC).isoformat(timespec="seconds")),
            "status": "running",
            "finished": None,
            "error": None,
        }
        if algorithm.written:
            run["source"] = source_digest(type(algorithm))
        self._lock = hold(self.folder.path)
        self.folder.write_run({**run, **facts})
        for warning in algorithm.warnings():
            logger.warning("%s: %s", algorithm.name, warning)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Write how the run in the `with` block ended."""
        try:
            yield
        except BaseException as error:
            with suppress(OSError):  # the disk may be full
                self.end("stopped" if isinstance(error, KeyboardInterrupt) else "failed", error)
            raise
        self.end("done")

    def end(self, status: str, error: BaseException | None = None) -> None:
        """Write how the run ended. The first process that fails writes its error; the others lose the connection."""
        run, failed = self.folder.run(), status == "failed"
        if self._writes or (failed and run.get("status") == "running"):
            text = run.get("error") or (in_one_line(error)[:1000] if error is not None and failed else None)
            finished = datetime.now(UTC).isoformat(timespec="seconds")
            alarms = {"alarms": self.alarms.steps} if self._writes else {}
            self.folder.write_run({"status": status, "finished": finished, "error": text, **alarms})
            if self._lock:
                self._lock.close()


def versions(*names: str) -> dict[str, str | None]:
    return {"dew": __version__, **{name: installed(name) for name in names}}


def git_commit() -> str | None:
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def entropy_sums(entropy: Tensor, mask: Tensor, correct: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """(sum, count) of the entropy over the tokens in `mask`: all, in O⁺ (correct = 1) and in O⁻ (correct = 0)."""
    H = torch.where(mask, entropy.detach(), 0)
    in_correct, in_wrong = mask & (correct == 1)[:, None], mask & (correct == 0)[:, None]
    return {
        "entropy": (H.sum(), mask.sum()),
        "entropy/correct": ((H * in_correct).sum(), in_correct.sum()),
        "entropy/wrong": ((H * in_wrong).sum(), in_wrong.sum()),
        "entropy/floor_share": (((H <= H_FLOOR) & mask).sum(), mask.sum()),
    }


def credit_metrics(rows: Rows, credit: Credit) -> Numbers:
    A, mask = credit.advantages, rows.mask & credit.signal[:, None]
    numbers: dict[str, Tensor] = {}
    for name, side in (("correct", credit.correct), ("wrong", ~credit.correct)):
        values = A[mask & side[:, None]]
        if values.numel():
            numbers[f"credit/mean_{name}"] = values.mean()
            numbers[f"credit/std_{name}"] = values.std(correction=0)
    size = torch.where(mask, A.abs(), 0)
    total = size.sum(-1)
    if (total > 0).any():
        numbers["credit/tokens"] = (size[total > 0] > 0).sum(-1).float().mean()
        if credit.flipped is not None:
            numbers["credit/flipped_share"] = credit.flipped.sum() / mask.sum()
        share = size.amax(-1)[total > 0] / total[total > 0]
        numbers["credit/top1_share"] = share.mean()
        numbers["credit/max_weight"] = (share * (size[total > 0] > 0).sum(-1)).amax()
        side = (2 * rows.group + credit.correct).unique(return_inverse=True)[1]
        alive = mask.new_zeros(mask.shape, dtype=torch.int32).index_add_(0, side, mask.int())[side]
        numbers["credit/alone_share"] = ((alive == 1) & mask).sum() / mask.sum()
        if rows.entropy is not None:
            top = forking_mask(rows.entropy, mask, keep=0.2)
            numbers["credit/top20_share"] = size[top].sum() / total.sum()
    return _numbers(numbers)


def answer_metrics(answers: dict[str, Tensor], reward_names: list[str], threshold: float) -> Numbers:
    """Rewards, accuracy and lengths over every answer that the policy sampled, dropped groups included."""
    scored = ~answers["outcome"].isnan()
    length, correct = answers["length"].float(), answers["outcome"] > threshold
    numbers: dict[str, Tensor] = {
        "length/mean": length.mean(),
        "length/max": length.amax(),
        "length/truncated_share": answers["truncated"].float().mean(),
    }
    if scored.any():
        numbers["reward"] = (answers["outcome"] + answers["extra"])[scored].mean()
        numbers["accuracy"] = correct[scored].float().mean()
    for i, name in enumerate(reward_names):
        part = answers["parts"][:, i]
        if not part.isnan().all():
            numbers[f"reward/{name}"] = part.nanmean()
    for name, side in (("correct", scored & correct), ("wrong", scored & ~correct)):
        if side.any():
            numbers[f"length/{name}"] = length[side].mean()
    return _numbers(numbers)


def _numbers(tensors: dict[str, Tensor]) -> Numbers:
    if not tensors:
        return {}
    return dict(zip(tensors, torch.stack([x.float() for x in tensors.values()]).tolist(), strict=True))


def gold_of(row: dict[str, Any]) -> str | None:
    return next((str(row[name]) for name in GOLD_COLUMNS if row.get(name) is not None), None)


def due(step: int, every: int, steps_per_generation: float) -> bool:
    """Whether to record the generation that starts at `step`: the first, and those with a multiple of `every`."""
    if every == 0:
        return False
    last = step + max(1, round(steps_per_generation)) - 1
    return step == 1 or last // every > (step - 1) // every


def group_records(
    step: int, algorithm: Algorithm, columns: Columns, credit: Credit, tokenizer: Any, groups: int,
    rewards: Sequence[str] = (),
) -> list[GroupRecord]:  # fmt: skip
    """Records of at most `groups` groups, those with signal first. `rewards`: names of the columns of `parts`."""
    ids = list(dict.fromkeys(columns["group"][~columns["filler"]].tolist()))
    mixed, text = set(columns["group"][credit.signal].tolist()), cache(lambda token: tokenizer.decode([token]))
    chosen = sorted(ids, key=lambda g: g not in mixed)[:groups]
    records = []
    for group in sorted(chosen):
        rows = (columns["group"] == group).nonzero()[:, 0]
        first = int(rows[0])
        prompt = tokenizer.decode(columns["prompt_ids"][first][columns["prompt_mask"][first].bool()].tolist())
        answers = _answers(columns, credit, rows, text, rewards)
        gold, settings = columns["gold"][first], asdict(algorithm)
        records.append(GroupRecord(step, group, prompt, answers, gold, algorithm.name, settings))
    return records


def _answers(
    columns: Columns, credit: Credit, rows: Tensor, text: Callable[[int], str], names: Sequence[str]
) -> list[AnswerRecord]:
    scored = credit.scored[rows]
    plain = grpo_advantages((columns["outcome"] + credit.extra)[None, rows], scored[None])[0]
    by_token = {name: columns.get(name) for name in ("entropy", "logp")}
    by_token |= {"shaped": credit.shaped, "advantage": credit.advantages}
    answers = []
    for row, grpo in zip(rows.tolist(), plain.tolist(), strict=True):
        if not credit.scored[row]:
            continue
        length = int(columns["total_length"][row])
        live = columns["mask"][row, :length]
        answers.append(
            AnswerRecord(
                tokens=[*map(text, columns["completion_ids"][row, :length].tolist())],
                correct=bool(credit.correct[row]),
                reward=float(columns["outcome"][row]),
                extra=float(credit.extra[row]),
                rewards=dict(zip(names, columns["parts"][row].tolist(), strict=True)) if names else {},
                truncated=bool(columns["truncated"][row]),
                extracted=columns["extracted"][row],
                verdict=columns["verdict"][row],
                guided="guided" in columns and bool(columns["guided"][row]),
                live=None if live.all() else live.tolist(),
                grpo=[grpo] * length,
                **{name: x[row, :length].float().tolist() for name, x in by_token.items() if x is not None},
            )
        )
    return answers
