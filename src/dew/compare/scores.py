"""Evaluate a model on held-out problems: scores with intervals, and every answer."""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from dew import rewards
from dew.compare.sampling import Sampled, Sampling, is_vllm, sample
from dew.compare.statistics import Difference, Interval, mean_interval, paired, score_problem
from dew.errors import ConfigError, Problem, RewardError, did_you_mean, unreadable
from dew.files import write_atomically
from dew.rewards import Verdict, Verifier
from dew.rewards.user_function import NOT_FINITE, Rewards, UserFunction, call_reward, required_columns, reward_name
from dew.tasks import Row, Task
from dew.tasks.datasets import Dataset

log = logging.getLogger("dew.compare")

N_PROBLEMS = 256
GIVEN = {"prompts", "completions", "completion_ids"}
"""Arguments of every reward function, besides the columns of the data."""
SET_BY_TRL = {"prompt", "completion", "completion_ids"}
"""Columns of the data that are not passed to reward functions."""


def evaluate(
    model: Any, tokenizer: Any, problems: Task | Iterable[Row], verifier: Verifier | Callable[..., Any] | None = None,
    *, n_problems: int | None = None, threshold: float = 0.5, keep: Path | None = None, **sampling: Any,
) -> "Scores":  # fmt: skip
    """Sample answers to held-out problems and score them with the verifier that training uses.

    `model` is a transformers model, or the `vllm.LLM` that `load_vllm` returns.
    `problems` is a task (256 of its held-out problems, or `n_problems`; always the same ones), or a list or data set of
    rows with a `prompt` (all, or the first `n_problems`). Built-in tasks have a verifier; rows and files need
    `verifier`, which may also be a reward function as TRL calls it: an answer is correct if its reward is above
    `threshold`.
    The answers are written to the file `keep` before they are scored; the same call then does not sample them again.
    Further settings are those of `Sampling`: k, temperature, top_p, greedy, max_new_tokens, batch_size, seed.
    """
    if n_problems is not None and n_problems < 1:
        raise ConfigError(f"{n_problems} problems: evaluate at least one.")
    if verifier is None:
        if isinstance(problems, Iterable) or (isinstance(problems, Dataset) and not problems.built_in):
            remedy = "Write evaluate(..., verifier=dew.rewards.verifier(NAME))."
            raise ConfigError(Problem("Rows and files need a verifier to score the answers.", remedy=remedy))
        verifier = rewards.verifier(problems.name)
    if isinstance(problems, Iterable):
        rows = list(islice(problems, n_problems))
        if not rows or "prompt" not in rows[0]:
            raise ConfigError("No problems to evaluate: the rows are empty or have no column `prompt`.")
        task_name = reward_name(verifier)
    else:
        rows, task_name = problems.rows(n_problems or N_PROBLEMS, split="held_out"), problems.name
    settings = Sampling(**sampling)
    _check_columns(verifier, rows[0])
    model_name = str(model.llm_engine.model_config.model if is_vllm(model) else model.config._name_or_path)
    answers, seconds = _answers(model, tokenizer, rows, settings, model_name, keep)
    k, texts = settings.answers, [answer.text for group in answers for answer in group]
    row_of_each = [row for row in rows for _ in range(k)]
    if isinstance(verifier, Verifier):
        verdicts = verifier.verdicts(texts, row_of_each)
    else:
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        verdicts = _score_by_reward(verifier, texts, ids, row_of_each, threshold)
    scored = [
        ScoredProblem(row["prompt"], row.get("answer"), answers[i], verdicts[i * k : (i + 1) * k])
        for i, row in enumerate(rows)
    ]
    of_train = isinstance(problems, Dataset) and problems.held_out is None
    return Scores(task_name, model_name, settings, scored, seconds, of_train, judge_name(verifier, threshold))


def _answers(
    model: Any, tokenizer: Any, rows: Sequence[Row], sampling: Sampling, name: str, keep: Path | None
) -> tuple[list[list[Sampled]], float]:
    """The answers and the seconds of sampling them: from the file `keep`, else new ones, which are written to it."""
    keys = problem_keys((row["prompt"], row.get("answer")) for row in rows) if keep else []
    files = [(path.name, path.stat()) for path in sorted(Path(name).glob("*.safetensors"))]  # none with a hub's name
    weights = [[file, stat.st_size, stat.st_mtime_ns] for file, stat in files]
    made = {"model": name, "weights": weights, "sampling settings": asdict(sampling), "problems": keys}
    if keep and (found := read_unscored(keep)):
        if other := [what for what, value in made.items() if found.get(what) != value]:
            what = f"{keep} has answers that are not scored yet, of an evaluation with other {' and '.join(other)}."
            raise ConfigError(Problem(what, remedy="Repeat that evaluation, or name a new file."))
        log.warning("%s: scoring the answers that were sampled earlier.", keep)
        return [[Sampled(**answer) for answer in group] for group in found["unscored"]], found["seconds"]
    start = perf_counter()
    answers = sample(model, tokenizer, [row["prompt"] for row in rows], sampling)
    seconds = perf_counter() - start
    if keep:
        unscored = [[asdict(answer) for answer in group] for group in answers]
        write_atomically(keep, json.dumps({**made, "seconds": seconds, "unscored": unscored}).encode())
    return answers, seconds


def judge_name(judge: Any, threshold: float) -> str:
    """The name of a verifier or reward function, without its folder: `math`, `rewards.score > 0.5`."""
    judge = getattr(judge, "__wrapped__", judge)  # trainers wrap it
    if isinstance(judge, Verifier):
        return judge.name
    path = judge.path.replace(".py:", ":") if isinstance(judge, UserFunction) else reward_name(judge)
    return f"{'.'.join(re.split('[/.:]', path)[-2:])} > {threshold:g}"


def _check_columns(judge: Any, row: Row) -> None:
    """Raise if the verifier or reward needs a column that is missing: now, because sampling may take hours."""
    given = set(row) if isinstance(judge, Verifier) else set(row) - SET_BY_TRL | GIVEN
    if missing := [column for column in required_columns(judge) if column not in given]:
        what = f"{reward_name(judge)} needs the column {missing[0]!r}; the data has {', '.join(row)}."
        raise ConfigError(Problem(what, remedy=did_you_mean(missing[0], given) or "Rename or add the column."))


def _score_by_reward(
    reward: Callable[..., Any], texts: list[str], ids: list[list[int]], rows: Sequence[Row], threshold: float
) -> list[Verdict]:
    """Verdicts by a reward function. An answer without a finite reward is `unparsable` and counts as 0."""
    name, n = reward_name(reward), len(texts)
    values = call_as_trl(reward, texts, ids, rows)
    if not_finite := values.count(NOT_FINITE):
        log.warning("The reward %s returned an infinity or a NaN for %d of %d answers.", name, not_finite, n)
    if values.count(None) + not_finite == n:
        remedy = "Evaluate fewer answers at a time if it ran out of time or memory."
        raise RewardError(Problem(f"The reward {name} scored none of the {n} answers.", remedy=remedy))
    nothing = Verdict("unparsable", value=0.0)
    judged = {x: Verdict("correct" if x > threshold else "wrong", value=x) for x in values if x is not None}
    return [nothing if x is None or x == NOT_FINITE else judged[x] for x in values]


def call_as_trl(reward: Callable[..., Any], texts: Sequence[str], ids: list[list[int]], rows: Sequence[Row]) -> Rewards:
    """Call a reward function as TRL does. `texts[i]`, with token ids `ids[i]`, answers the problem `rows[i]`."""
    columns = {key: [row.get(key) for row in rows] for key in rows[0] if key not in SET_BY_TRL}
    prompts = [row["prompt"] for row in rows]
    answers = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return call_reward(reward_name(reward), reward, answers, prompts=prompts, completion_ids=ids, **columns)


@dataclass(frozen=True)
class ScoredProblem:
    prompt: Any
    gold: str | None
    answers: list[Sampled]
    verdicts: list[Verdict]

    @cached_property
    def scores(self) -> dict[str, float]:
        return score_problem(self.verdicts)


@dataclass(frozen=True)
class Scores:
    task: str
    model: str
    sampling: Sampling
    problems: list[ScoredProblem]
    seconds: float
    of_train: bool = False
    """The task has no test split: the problems are the eighth of its training data that `dew train` leaves out."""
    scored_by: str | None = None
    """The verifier, or the reward function with its threshold; None if unknown."""

    @cached_property
    def by_problem(self) -> dict[str, ScoredProblem]:
        keys = problem_keys((p.prompt, p.gold) for p in self.problems)
        return dict(zip(keys, self.problems, strict=True))

    @cached_property
    def scores(self) -> dict[str, Interval]:
        """pass@1 ... pass@k, mean@k and maj@k, each a mean over problems with its 95% interval."""
        found = {}
        for name in self.problems[0].scores:
            values = [p.scores[name] for p in self.problems]
            found[name] = mean_interval(values, span=(min(0.0, *values), max(1.0, *values)))
        return found

    def __getitem__(self, name: str) -> Interval:
        return self.scores[name]

    @property
    def k(self) -> int:
        return len(self.problems[0].answers)

    @property
    def truncated_share(self) -> float:
        cut = [answer.truncated for p in self.problems for answer in p.answers]
        return sum(cut) / len(cut)

    @property
    def statuses(self) -> dict[str, int]:
        """Number of answers that were correct, wrong, unparsable or timed out."""
        return dict(Counter(verdict.status for p in self.problems for verdict in p.verdicts))

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.tokens for p in self.problems for answer in p.answers) / self.seconds

    def summary(self) -> dict[str, Any]:
        """The scores without the answers, as in a run's scores.json."""
        names = ("task", "scored_by", "model", "of_train", "k", "statuses", "truncated_share", "tokens_per_second")
        found = {name: getattr(self, name) for name in (*names, "seconds")} | {"n_problems": len(self.problems)}
        scores = {name: asdict(interval) for name, interval in self.scores.items()}
        return {**found, "scores": scores, "sampling": asdict(self.sampling)}

    def write(self, path: str | Path) -> None:
        """Write everything, including the answers, as JSON."""
        problems = []
        for p in self.problems:
            answers = [asdict(a) | asdict(v) for a, v in zip(p.answers, p.verdicts, strict=True)]
            problems.append({"prompt": p.prompt, "gold": p.gold, "answers": answers})
        content = {**self.summary(), "problems": problems}
        write_atomically(Path(path), json.dumps(content, ensure_ascii=False).encode("utf-8"))

    @classmethod
    def read(cls, path: str | Path) -> "Scores":
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            problems = []
            for p in data["problems"]:
                answers = [Sampled(a["text"], a["tokens"], a["truncated"]) for a in p["answers"]]
                verdicts = [Verdict(a["status"], a["extracted"], a.get("value")) for a in p["answers"]]
                problems.append(ScoredProblem(p["prompt"], p["gold"], answers, verdicts))
            if not problems or not all(len(p.answers) == len(problems[0].answers) > 0 for p in problems):
                raise ValueError("no problems, or problems with different numbers of answers")
            more = {"of_train": data.get("of_train", False), "scored_by": data.get("scored_by")}  # not in older files
            return cls(data["task"], data["model"], Sampling(**data["sampling"]), problems, data["seconds"], **more)
        except OSError as error:
            raise ConfigError(unreadable(Path(path), error)) from None
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            what = f"{path}: not a file of scores that `dew eval --keep` wrote."
            remedy = "To evaluate a model, give its folder; a file of problems is a --task."
            raise ConfigError(Problem(what, remedy=remedy)) from None


def read_unscored(path: Path) -> dict[str, Any]:
    """What `evaluate` kept in this file before scoring; empty if there is no file. Raises if it is another file."""
    if not path.exists():
        return {}
    with suppress(ValueError):
        if path.is_file() and "unscored" in (found := json.loads(path.read_bytes())):
            return dict(found)
    raise ConfigError(Problem(f"{path} already exists.", remedy="Name a new file."))


def problem_keys(problems: Iterable[tuple[Any, Any]]) -> list[str]:
    """A key for each (prompt, gold answer); repeated problems are numbered."""
    keys, seen = [], Counter[str]()
    for text in (json.dumps(problem, default=str) for problem in problems):
        seen[text] += 1
        keys.append(f"{seen[text]} {text}")
    return keys


def check_comparable(a: Scores, task: str, scored_by: str | None, problems: Iterable[str]) -> None:
    """Raise if `a` cannot be compared with scores by `scored_by` on these `problems` (`problem_keys`)."""
    if None not in (a.scored_by, scored_by) and a.scored_by != scored_by:
        what = f"The answers are not scored by the same reward or verifier: {a.scored_by} and {scored_by}."
        raise ConfigError(Problem(what, remedy="Evaluate both with the same --reward and threshold."))
    first, second = a.by_problem.keys(), set(problems)
    if first != second:
        counts = f"{len(first)} of {a.task} and {len(second)} of {task}, {len(first & second)} in common"
        remedy = "Evaluate both with the same task, settings and number of problems."
        raise ConfigError(Problem(f"The scores are on different problems: {counts}.", remedy=remedy))


def compare_scores(
    scores: Scores, than: Scores, *, arm: str = "second", baseline: str = "first", task: str | None = None
) -> dict[str, Difference]:
    """`scores` minus `than`, paired by problem, for every score that both have. `arm` and `baseline`: their names."""
    check_comparable(than, scores.task, scores.scored_by, scores.by_problem)
    found = {}
    for name in (name for name in than.scores if name in scores.scores):
        a, b = ({key: p.scores[name] for key, p in s.by_problem.items()} for s in (scores, than))
        names = {"arm": arm, "baseline": baseline, "score": name, "task": scores.task if task is None else task}
        if difference := paired(a, b, unit="problems", **names):
            found[name] = difference
    return found
