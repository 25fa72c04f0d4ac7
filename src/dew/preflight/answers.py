"""A sample of the model's answers, drawn and judged by the trainer that will train: what the first step will see."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from dew.engines.credit import judge
from dew.engines.trl.launch import Parsed, build_trainer
from dew.evaluate import Interval, mean_interval
from dew.preflight.check import Check, failed, ok, warning
from dew.preflight.data import Data

TRUNCATED_WARNING, TRUNCATED_FAILURE = 0.3, 0.7
MIXED_WARNING = 0.1
CONCLUSIVE = 8
"""So many groups without a mixed one are no accident: with a quarter of them mixed it happens once in ten."""


@dataclass(frozen=True)
class Answers:
    """N answers, the G to one prompt in a row."""

    size: int
    """G."""
    outcome: list[float | None]
    """(N,) of the reward that decides; None where it gave none."""
    parts: list[list[float | None]]
    """(N, R) of every reward."""
    extra: list[float]
    """(N,) what the others add."""
    signal: list[bool]
    """A group each: whether the engine would keep it."""
    truncated: list[bool]
    lengths: list[int]
    entropy: float
    """Mean over tokens, in nats."""
    texts: list[str]
    seconds: float

    @property
    def group_means(self) -> list[float]:
        groups = [self.outcome[i : i + self.size] for i in range(0, len(self.outcome), self.size)]
        judged = [[value for value in group if value is not None] for group in groups]
        return [sum(group) / len(group) for group in judged if group]


def sample(parsed: Parsed, data: Data, count: int) -> Answers:
    """About `count` answers: whole groups, to prompts spread over the data."""
    from transformers.utils.logging import disable_progress_bar

    size = parsed.args.num_generations
    groups = min(max(1, math.ceil(count / size)), len(data.rows))
    chosen = [data.rows[i * len(data.rows) // groups] for i in range(groups)]
    disable_progress_bar()
    with TemporaryDirectory() as folder:
        trainer = build_trainer(replace(parsed, args=_apart(parsed.args, folder)))
        trainer.model.train()
        began = perf_counter()
        batch = trainer.sample([dict(row) for row in chosen for _ in range(size)])
        seconds = perf_counter() - began
        signal = judge(trainer.algorithm, batch).signal[::size].tolist()
        texts = trainer.processing_class.batch_decode(batch.inputs["completion_ids"], skip_special_tokens=True)
    assert batch.entropy is not None
    return Answers(
        size=size,
        outcome=_values(batch.outcome.tolist()),
        parts=[_values(row) for row in batch.parts.tolist()],
        extra=batch.extra.tolist(),
        signal=signal,
        truncated=batch.truncated.tolist(),
        lengths=batch.length.tolist(),
        entropy=float(batch.entropy[batch.mask].mean()) if batch.mask.any() else 0.0,
        texts=texts,
        seconds=seconds,
    )


def _apart(args: Any, folder: str) -> Any:
    """The same settings, leaving nothing behind in the run's folder and telling nobody."""
    args = copy.copy(args)
    args.output_dir, args.report_to, args.disable_tqdm = folder, [], True
    args.records_every = 1  # so that entropy is kept
    return args


def _values(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]


def check(answers: Answers, limit: int) -> list[Check]:
    return [check_length(answers, limit), check_groups(answers), check_reward(answers), check_entropy(answers)]


def check_length(answers: Answers, limit: int) -> Check:
    n, cut = len(answers.truncated), sum(answers.truncated)
    share = cut / n
    longest, mean = max(answers.lengths), sum(answers.lengths) / n
    facts = {"truncated": cut, "answers": n, "share": share, "limit": limit, "mean": mean, "longest": longest}
    says = f"{cut} of {n} answers ({share:.0%}) are cut off at max_completion_length={limit}; mean {mean:.0f} tokens."
    if share <= TRUNCATED_WARNING:
        return ok("truncated", says, **facts)
    remedy = f"Raise max_completion_length, to {2 * limit} to begin with, or ask for shorter answers in the prompt."
    return (failed if share > TRUNCATED_FAILURE else warning)("truncated", says, remedy, **facts)


def check_groups(answers: Answers) -> Check:
    n, mixed = len(answers.signal), sum(answers.signal)
    facts = {"groups": n, "mixed": mixed, "answers_per_group": answers.size}
    says = f"{mixed} of {n} groups have both a correct and a wrong answer; only those teach."
    if mixed >= max(1, MIXED_WARNING * n):
        return ok("groups", says, **facts)
    means = answers.group_means
    rate = sum(means) / len(means) if means else 0.0
    easier = "harder problems" if rate > 0.5 else "easier problems, a model that was taught the format"
    remedy = f"Take {easier}, or more answers per prompt (num_generations); a larger --answers makes this surer."
    return (failed if mixed == 0 and n >= CONCLUSIVE else warning)("groups", says, remedy, **facts)


def check_reward(answers: Answers) -> Check:
    means = answers.group_means
    n, missing = len(answers.outcome), sum(value is None for value in answers.outcome)
    if not means:
        return failed(
            "mean reward", f"The reward judged none of {n} answers.", "Let it return a number, not None.", n=n
        )
    given = [value for value in answers.outcome if value is not None]
    interval: Interval = mean_interval(means, span=(min(0.0, *given), max(1.0, *given)))
    facts = {"mean": interval.value, "low": interval.low, "high": interval.high, "answers": n, "not_judged": missing}
    says = f"Mean {interval.value:.3f}, 95 % interval {interval.low:.3f} to {interval.high:.3f}, over {n} answers"
    says += f"; {missing} were not judged." if missing else "."
    if missing > 0.01 * n:
        return warning("mean reward", says, "See why the reward returns None for them: they do not train.", **facts)
    if min(given) == max(given):
        remedy = "Read some answers (dew eval keeps them): without differences there is nothing to learn from."
        return warning("mean reward", f"{says[:-1]}, and every one earned the same.", remedy, **facts)
    return ok("mean reward", says, **facts)


def check_entropy(answers: Answers) -> Check:
    H = answers.entropy
    says = f"Mean {H:.3f} nats per token; {len(answers.texts)} answers took {answers.seconds:.1f} s."
    facts = {"nats": H, "seconds": answers.seconds, "tokens": sum(answers.lengths)}
    if H < 0.01:
        remedy = "Raise temperature, or begin with a model that hesitates: answers that are all alike teach nothing."
        return warning("entropy", says, remedy, **facts)
    return ok("entropy", says, **facts)
