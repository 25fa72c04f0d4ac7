"""What an evaluation found: scores with intervals, and every answer for reading."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dew.errors import ConfigError
from dew.evaluate.intervals import Interval, mean_interval
from dew.evaluate.metrics import score_problem
from dew.evaluate.sampling import Sampled, Sampling
from dew.files import write_atomically
from dew.rewards import Verdict


@dataclass(frozen=True)
class Problem:
    """One problem with its answers, its verdicts and its scores."""

    prompt: Any
    gold: str | None
    answers: list[Sampled]
    verdicts: list[Verdict]
    scores: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scores", score_problem(self.verdicts))


@dataclass(frozen=True)
class Scores:
    task: str
    model: str
    sampling: Sampling
    problems: list[Problem]
    seconds: float
    scores: dict[str, Interval] = field(init=False)
    """pass@1 ... pass@k, mean@k and maj@k, each a mean over problems with its 95 % interval."""

    def __post_init__(self) -> None:
        names = self.problems[0].scores
        means = {name: mean_interval([p.scores[name] for p in self.problems]) for name in names}
        object.__setattr__(self, "scores", means)

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
        """How many answers were correct, wrong, unparsable or timed out."""
        return dict(Counter(verdict.status for p in self.problems for verdict in p.verdicts))

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.tokens for p in self.problems for answer in p.answers) / self.seconds

    def summary(self) -> dict[str, Any]:
        """The scores without the answers, as a run's scores.json keeps them."""
        return {
            "task": self.task,
            "model": self.model,
            "n_problems": len(self.problems),
            "k": self.k,
            "scores": {name: asdict(interval) for name, interval in self.scores.items()},
            "statuses": self.statuses,
            "truncated_share": self.truncated_share,
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
            "sampling": asdict(self.sampling),
        }

    def to_json(self) -> dict[str, Any]:
        """Everything, answers included; `from_json` reads it back."""
        problems = [
            {
                "prompt": p.prompt,
                "gold": p.gold,
                "answers": [asdict(a) | asdict(v) for a, v in zip(p.answers, p.verdicts, strict=True)],
            }
            for p in self.problems
        ]
        return {**self.summary(), "problems": problems}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Scores":
        problems = [
            Problem(
                p["prompt"],
                p["gold"],
                [Sampled(a["text"], a["tokens"], a["truncated"]) for a in p["answers"]],
                [Verdict(a["status"], a["extracted"]) for a in p["answers"]],
            )
            for p in data["problems"]
        ]
        return cls(data["task"], data["model"], Sampling(**data["sampling"]), problems, data["seconds"])

    def write(self, path: str | Path) -> None:
        write_atomically(Path(path), json.dumps(self.to_json(), ensure_ascii=False).encode("utf-8"))

    @classmethod
    def read(cls, path: str | Path) -> "Scores":
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OSError) as error:
            raise ConfigError(f"{path}: not the answers that `dew eval --keep` writes ({error!r:.200}).") from None


@dataclass(frozen=True)
class Difference:
    """Two scores on the same problems."""

    a: float
    b: float
    difference: Interval
    """b − a, resampled by problem."""

    @property
    def within_noise(self) -> bool:
        """True if the interval of the difference contains 0: these problems do not tell the two apart."""
        return self.difference.low <= 0 <= self.difference.high


def compare(a: Scores, b: Scores) -> dict[str, Difference]:
    """b against a, paired by problem, for every score that both have."""
    first = {json.dumps(p.prompt): p for p in a.problems}
    second = {json.dumps(p.prompt): p for p in b.problems}
    if first.keys() != second.keys():
        raise ConfigError(
            f"Compared on different problems: {len(first)} and {len(second)}, "
            f"{len(first.keys() & second.keys())} in common. "
            "Evaluate both with the same task, settings and number of problems."
        )
    pairs = [(first[key].scores, second[key].scores) for key in first]
    return {
        name: Difference(
            a[name].value,
            b[name].value,
            mean_interval([after[name] - before[name] for before, after in pairs], span=(-1.0, 1.0)),
        )
        for name in a.scores
        if name in b.scores
    }
