"""Text problems from a task, data set or file, with a verifier or reward function, to train language models on.

A problem is an index into the training rows followed by the held-out rows. The policy looks up its prompt.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dew.compare.sampling import prompt_ids, prompt_text
from dew.compare.scores import call_as_trl
from dew.engines.lab.lora import Base
from dew.engines.lab.tasks import Answers, Problems, by_answer
from dew.errors import ConfigError, Problem
from dew.rewards import Verifier, load_reward, reward, verifier
from dew.rewards.process import Process, ProcessFailed
from dew.rewards.user_function import NOT_FINITE, is_user_function
from dew.rewards.verifiers import has_verifier
from dew.rewards.worker import encode
from dew.tasks import Row, task

Key = tuple[int, bytes]
"""The index of a problem, and the tokens of an answer as 32-bit integers: lists of millions of numbers are slow."""
HOUR = 3600.0
MOST = 20_000
"""Maximum number of training problems."""
MAX_PROMPT = 1024
"""Problems with longer prompts, in tokens, are left out."""


class TextTask:
    """Problems whose prompts and answers are text."""

    _process: Process | None = None

    def __init__(
        self, name: str, base: Base, tokens: int, held_out: int, reward_func: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        source = task(name, **(settings or {}))
        self.name, self.base, self.tokens = source.name, base, tokens
        splits = [source.rows(MOST, split="train"), source.rows(held_out, split="held_out")]
        given = [[(row, prompt_ids(base.tokenizer, row["prompt"])) for row in rows] for rows in splits]
        kept = [[pair for pair in pairs if len(pair[1]) <= MAX_PROMPT] for pairs in given]
        if not all(kept):
            what = f"{name}: no problems for {'training' if not kept[0] else 'the evaluation'}."
            raise ConfigError(Problem(what, remedy="Give a task with a training and a test split."))
        self.judge = _judge(name, reward_func)
        self.rows, self.prompts = zip(*kept[0], *kept[1], strict=True)
        self.trained = len(kept[0])
        self.digest = blake2b(repr(self.rows).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        self._thread, self._early = ThreadPoolExecutor(1), list[Future[dict[Key, float]]]()

    def problems(self, n: int, *generators: torch.Generator, device: str = "cpu") -> Problems:
        """n different training problems from each generator."""
        if n > self.trained:
            what = f"{self.name}: a generation needs {n} problems, but there are only {self.trained} to train on."
            raise ConfigError(Problem(what, remedy="Lower prompts, with --settings."))
        return _numbers(torch.stack([torch.randperm(self.trained, generator=g)[:n] for g in generators]), device)

    def held_out(self, n: int, device: str = "cpu") -> Problems:
        return _numbers(torch.arange(self.trained, min(len(self.rows), self.trained + n)), device)

    def ended(self, problems: Sequence[int], tokens: Tensor) -> None:
        """Start judging (n, T) answers that have ended while others are still being sampled. Another process does it: a
        thread would compete with sampling for the interpreter."""
        if isinstance(self.judge, Verifier) and has_verifier(self.judge.name):
            self._early.append(self._thread.submit(self._judged, problems, tokens))

    def _judged(self, problems: Sequence[int], tokens: Tensor) -> dict[Key, float]:
        """The rewards from the other process; empty if it fails, and then `rewards` judges the answers itself."""
        ended = torch.isin(tokens, torch.tensor(self.base.ends))
        lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, tokens.shape[1]).tolist()
        answers, judge = list(dict.fromkeys(_keys(problems, tokens, lengths))), self.judge
        texts = self._texts(list(map(_ids, answers)))
        rows = [{name: self.rows[i][name] for name in judge.columns} for i, _ in answers]
        try:
            if self._process is None:
                self._process = Process("dew.rewards.verifiers:serve", {"name": judge.name})
            found: Any = self._process.ask(encode({"texts": texts, "rows": rows}), HOUR)
        except (ProcessFailed, KeyError, TypeError):
            return {}
        return dict(zip(answers, found, strict=True))

    def rewards(self, answers: Answers, facts: Tensor) -> Tensor:
        """(R, B) rewards of (R, B, T) answers to (R, P, 1) problems."""
        lengths, problems = (x.flatten().tolist() for x in (answers.mask.sum(-1), by_answer(facts, answers)))
        keys = _keys(problems, answers.tokens.flatten(0, 1), lengths)
        if isinstance(self.judge, Verifier):
            known = dict[Key, float]()
            while self._early:
                known |= self._early.pop().result()
            new = list(dict.fromkeys(key for key in keys if key not in known))  # equal answers of several runs: once
            rewards = self._scored(self._texts(list(map(_ids, new))), [self.rows[i] for i, _ in new])
            known |= zip(new, rewards, strict=True)
            found = [known[key] for key in keys]
        else:
            ids = list(map(_ids, keys))
            values = call_as_trl(self.judge, self._texts(ids), ids, [self.rows[i] for i in problems])
            found = [0.0 if x is None or x == NOT_FINITE else x for x in values]
        return torch.tensor(found, device=facts.device).view(answers.tokens.shape[:2])

    def _texts(self, ids: Sequence[Sequence[int]]) -> list[str]:
        tokenizer = self.base.tokenizer
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if fast is None or tokenizer.clean_up_tokenization_spaces:
            return [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
        return list(fast.decode_batch(ids, skip_special_tokens=True))  # the same, on all cores

    def _scored(self, texts: Sequence[str], rows: Sequence[Row]) -> list[float]:
        return [verdict.reward for verdict in self.judge.verdicts(texts, rows)]

    def symbols(self, tokens: Sequence[int]) -> list[str]:
        return [self.base.tokenizer.decode([token]) for token in tokens]

    def ends(self, token: int) -> bool:
        return token in self.base.ends

    def describe(self, problem: Problems) -> tuple[str, str]:
        row = self.rows[int(problem.facts)]
        return prompt_text(self.base.tokenizer, row["prompt"]), str(row.get("answer", ""))


def _keys(problems: Sequence[int], tokens: Tensor, lengths: Sequence[int]) -> list[Key]:
    """The keys of (n, T) answers of these lengths."""
    rows = tokens.int().cpu().numpy()
    return [(i, row[:n].tobytes()) for i, row, n in zip(problems, rows, lengths, strict=True)]


def _ids(key: Key) -> list[int]:
    ids: list[int] = np.frombuffer(key[1], np.int32).tolist()
    return ids


def _numbers(numbers: Tensor, device: str) -> Problems:
    found = numbers[..., None].to(device)
    return Problems(found, found, found)


def _judge(task: str, name: str | None) -> Any:
    """The named verifier or reward function, or else the task's own verifier."""
    if name is not None:
        return load_reward(name) if is_user_function(name) else reward(name)
    if not has_verifier(task):
        remedy = "Name a verifier (--reward math) or your own reward function (--reward file.py:function)."
        raise ConfigError(Problem(f"The task {task} has no verifier of its own.", remedy=remedy))
    return verifier(task)
