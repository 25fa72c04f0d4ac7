"""The settings of a study, shared by all of its runs."""

import math
from dataclasses import dataclass, fields

from dew.errors import ConfigError, wrong_types

HEAD = 32
"""Width of an attention head of a small policy."""


@dataclass(frozen=True, kw_only=True)
class Settings:
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
        least = {"group_size": 2, "width": 8, "alpha": 0.01, "start": 0}
        wrong = wrong_types(self) or [
            f"{f.name}={getattr(self, f.name)}: give at least {least.get(f.name, 1)}."
            for f in fields(self)
            if f.type is not str and getattr(self, f.name) < least.get(f.name, 1)
        ]
        if not wrong and self.optimizer_steps > self.answers:
            wrong.append(f"optimizer_steps={self.optimizer_steps}: a generation has only {self.answers} answers.")
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


@dataclass(frozen=True, kw_only=True)
class TinySettings(Settings):
    """Settings of a study on small policies."""

    width: int = 128
    depth: int = 3
    """Layers of the policy."""
    start: int = 0
    """Number of the warm start: each has different initial weights and another order of demonstrations."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width > HEAD and self.width % HEAD:
            raise ConfigError(f"width={self.width}: give a multiple of {HEAD}, the width of an attention head.")


@dataclass(frozen=True, kw_only=True)
class LoraSettings(Settings):
    """Settings of a study on a language model."""

    group_size: int = 8
    prompts: int = 16
    generations: int = 30
    eval_problems: int = 512
    eval_k: int = 4
    max_new_tokens: int = 512
    """Maximum length of an answer."""
    rank: int = 16
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    target_modules: str = "all"
    """Names of the linear layers that get adapters, e.g. "q_proj,v_proj"; "all": every one except the head."""
    pass_tokens: int = 49_152
    """Maximum tokens in one pass of an update; fewer if memory is short."""

    @property
    def spacing(self) -> float:
        """Generations between evaluations: the mean of the last few is the score."""
        return max(1.0, self.generations / 10)


QUICK = LoraSettings(
    prompts=8, optimizer_steps=2, generations=20, eval_problems=32, eval_k=4, evaluations=2, max_new_tokens=48, rank=8,
    alpha=16.0, pass_tokens=8192,
)  # fmt: skip
