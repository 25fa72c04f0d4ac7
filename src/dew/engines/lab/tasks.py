"""Generated problems whose answers are written in steps. Problems and verdicts are computed for all rows at once.

    countdown-3, -4, -6, -8   reach a target with some of the numbers: 03,07,02,11:36> 7+2=9;11-3=8;...
    addition-8, -14           sum the numbers one after the other: 47,85,12,...> 47+85=132;132+12=144;...

A problem is a function of uniform random numbers, so a seed gives the same problems whatever other runs are trained.
Countdown needs planning. Addition needs many steps without an error: the demonstrations contain slips, which the warm
start learns, and one slip makes an answer wrong.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dew.errors import ConfigError, Problem

CHARACTERS = "0123456789+-*=,:>;"
PLUS, MINUS, TIMES, EQUALS, COMMA, COLON, ASK, NEXT = range(10, len(CHARACTERS))
EOS = len(CHARACTERS)
OUTPUTS = EOS + 1
"""Number of tokens that a policy can sample: the characters and EOS. PAD and BOS are inputs only."""
PAD, BOS = OUTPUTS, OUTPUTS + 1
VOCABULARY = OUTPUTS + 2
MAX_DIGITS = 6


@dataclass(frozen=True)
class Problems:
    """N problems, or (S, N, ...) for S seeds."""

    prompt: Tensor
    """(N, L) token ids; all prompts have the same length."""
    demonstration: Tensor
    """(N, T) token ids of an answer, PAD after EOS."""
    facts: Tensor
    """(N, F) integers from which the verdict is computed."""

    def __getitem__(self, index: object) -> "Problems":
        return Problems(self.prompt[index], self.demonstration[index], self.facts[index])  # type: ignore[index]


class Answers(NamedTuple):
    """Sampled answers, (R, B, T) each, with log-probability, entropy and Σπ² (`sum_sq`) under the sampling policy."""

    tokens: Tensor
    logp: Tensor
    entropy: Tensor
    mask: Tensor
    """True up to and including the end token."""
    sum_sq: Tensor | None = None


def by_answer(facts: Tensor, answers: Answers) -> Tensor:
    """(R, P, F) facts of problems -> (R, B, F) facts of answers. Answers to the same problem are neighbours."""
    return facts.repeat_interleave(answers.tokens.shape[1] // facts.shape[1], 1)


@dataclass(frozen=True)
class GeneratedTask:
    """A family of problems of one size."""

    name: str
    prompt_length: int
    tokens: int
    """Maximum length of an answer."""
    draws: int
    """Number of uniform numbers that define a candidate problem."""
    build: Callable[[Tensor], tuple[Problems, Tensor]]
    """(N, draws) uniform numbers -> N candidates, and (N,) which of them are valid problems."""
    verdict: Callable[[Tensor, Tensor], Tensor]
    """(N, T) answers and (N, F) facts -> (N,) True where correct."""

    def problems(self, n: int, *generators: torch.Generator, device: str = "cpu") -> Problems:
        """The first n valid candidates of each of S generators: (S, n, ...). More than half of all candidates are."""
        candidates = 3 * n + 64
        u = torch.stack([torch.rand(candidates, self.draws, generator=g, dtype=torch.float64) for g in generators])
        built, valid = self.build(u.to(device).flatten(0, 1))
        first = (~valid).view(-1, candidates).long().argsort(dim=1, stable=True)[:, :n]
        return built[first + candidates * torch.arange(len(generators), device=device)[:, None]]

    def held_out(self, n: int, device: str = "cpu") -> Problems:
        return self.problems(n, generator("held-out"), device=device)[0]

    def rewards(self, answers: Answers, facts: Tensor) -> Tensor:
        """(R, B) rewards of (R, B, T) answers to problems with (R, P, F) facts: 1 if correct, else 0."""
        tokens, facts = answers.tokens, by_answer(facts, answers)
        return self.verdict(tokens.flatten(0, 1), facts.flatten(0, 1)).view(tokens.shape[:2]).float()

    def symbols(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token."""
        return [[*CHARACTERS, "<end>", "", ""][token] for token in tokens]

    def ends(self, token: int) -> bool:
        return token == EOS

    def describe(self, problem: Problems) -> tuple[str, str]:
        return "".join(self.symbols(problem.prompt.tolist())), str(int(problem.facts[-1]))


def generator(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A random generator seeded by `key` alone, e.g. (seed, "answers", generation)."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


def uniforms(keys: Sequence[tuple[object, ...]], *shape: int, device: torch.device | str) -> Tensor:
    """(S, *shape) uniform numbers from the generators of S keys."""
    random = (generator(*key, device=device) for key in keys)
    return torch.stack([torch.rand(shape, generator=g, device=device) for g in random])


def get_task(name: str) -> GeneratedTask:
    if name not in TASKS:
        remedy = f"Choose one of: {', '.join(TASKS)}. Other tasks need a language model: --model."
        raise ConfigError(Problem(f"task {name!r} is not known.", remedy=remedy))
    return TASKS[name]


class Writer:
    """Writes tokens to many rows of different lengths at once."""

    def __init__(self, like: Tensor, width: int) -> None:
        """`like` gives the number of rows and the device."""
        self.width, self.at = width, torch.zeros(len(like), dtype=torch.long, device=like.device)
        self.tokens = torch.full((len(like), width + 1), PAD, device=like.device)  # last column: overflow

    def put(self, token: Tensor | int, where: Tensor | None = None) -> None:
        """Append a token to each row, or to the rows in which `where` is True."""
        where = torch.ones_like(self.at, dtype=torch.bool) if where is None else where
        to = torch.where(where, self.at, self.width).clamp_max(self.width)
        token = token if isinstance(token, Tensor) else torch.full_like(self.at, token)
        self.tokens.scatter_(1, to[:, None], token[:, None])
        self.at += where

    def number(self, value: Tensor, padded: int = 1) -> None:
        """Append numbers in decimal, with at least `padded` digits."""
        for place in reversed(range(4)):
            digit = value // 10**place
            self.put(digit % 10, (digit > 0) | (place < padded))

    def step(self, a: Tensor, op: Tensor | int, b: Tensor, result: Tensor, end: int) -> None:
        """Append `a∘b=result` and `end`, which is NEXT or EOS."""
        self.number(a)
        self.put(op)
        self.number(b)
        self.put(EQUALS)
        self.number(result)
        self.put(end)

    def rows(self) -> tuple[Tensor, Tensor]:
        """The tokens (N, width), and (N,) which rows were not cut off."""
        return self.tokens[:, : self.width], self.at <= self.width


def _prompt(numbers: Tensor, *last: int) -> Tensor:
    """BOS and (N, k) numbers of two digits each, separated by commas; the `last` tokens follow the last numbers."""
    k = numbers.shape[1]
    writer = Writer(numbers, 1 + 3 * k)
    writer.put(BOS)
    for number, separator in zip(numbers.T, [COMMA] * (k - len(last)) + [*last], strict=True):
        writer.number(number, padded=2)
        writer.put(separator)
    return writer.rows()[0]


# ── countdown ───────────────────────────────────────────────────────────────────────────────────────────────
def _countdown(k: int, largest: int, tokens: int) -> GeneratedTask:
    def build(u: Tensor) -> tuple[Problems, Tensor]:
        """Take random steps until one number is left. It is the target, and must have one or two digits."""
        numbers = 1 + (u[:, :k] * largest).long()
        pool, valid, writer = numbers.clone(), numbers[:, 0] > 0, Writer(u, tokens)
        value = pool[:, 0]
        for left, (first, second, kind) in zip(range(k, 1, -1), u[:, k:].T.split(3), strict=True):
            i, j = (first * left).long()[:, None], (second * (left - 1)).long()[:, None]
            a = pool.gather(1, i)
            pool.scatter_(1, i, pool[:, left - 1 : left])
            b, op = pool.gather(1, j), (kind * 3).long()[:, None] + PLUS
            swap = (op == MINUS) & (a < b)
            a, b = torch.where(swap, b, a), torch.where(swap, a, b)
            value = _apply(op, a, b)
            pool.scatter_(1, j, value)
            value = value[:, 0]
            valid &= value < 1000
            writer.step(a[:, 0], op[:, 0], b[:, 0], value, NEXT if left > 2 else EOS)
        answer, whole = writer.rows()
        valid &= whole & (value > 0) & (value < 100)
        facts = torch.cat([numbers, value[:, None]], 1)
        return Problems(_prompt(facts, COLON, ASK), answer, facts), valid

    return GeneratedTask(f"countdown-{k}", 3 * k + 4, tokens, k + 3 * (k - 1), build, _countdown_verdict)


def _apply(op: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(op == PLUS, a + b, torch.where(op == MINUS, a - b, a * b))


def _countdown_verdict(answers: Tensor, facts: Tensor) -> Tensor:
    """(N,) True if every step a∘b=c; is right and uses available numbers, and the last one gives the target.

    A single pass over positions. `part`: whether a row is in the first (0), second (1) or third (2) number of a step.
    """
    pool, target = facts[:, :-1].clone(), facts[:, -1]
    zero = torch.zeros_like(target)
    fine, correct, part = zero == 0, zero == 1, zero
    number, digits, a, op, b = zero, zero, zero, zero, zero
    for token in answers.T:
        digit = token < 10
        is_op, equals, ends = (token >= PLUS) & (token <= TIMES), token == EQUALS, (token == NEXT) | (token == EOS)
        separator = (is_op & (part == 0)) | (equals & (part == 1)) | (ends & (part == 2))
        fine = fine & ((digit & (digits < MAX_DIGITS)) | (separator & (digits > 0)))
        a, b, op = torch.where(is_op, number, a), torch.where(equals, number, b), torch.where(is_op, token, op)
        without_a, has_a = _remove(pool, a)
        without_b, has_b = _remove(without_a, b)
        step = has_a & has_b & (_apply(op, a, b) == number)
        done = fine & ends
        fine = fine & (step | ~ends)
        slot = without_b.argmin(1, keepdim=True)
        pool = torch.where(done[:, None], without_b.scatter(1, slot, number[:, None]), pool)
        stop = done & (token == EOS)
        correct = correct | (stop & step & (number == target))
        fine = fine & ~stop
        number = torch.where(digit, number * 10 + token, 0)
        digits = torch.where(digit, digits + 1, 0)
        part = torch.where(ends, 0, torch.where(digit, part, part + 1))
    return correct


def _remove(pool: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Replace one occurrence of `value` in each row of the pool by −1; also return (N,) whether there was one."""
    match = pool == value[:, None]
    there, at = match.any(1), match.long().argmax(1, keepdim=True)
    return torch.where(there[:, None], pool.scatter(1, at, -1), pool), there


# ── addition ────────────────────────────────────────────────────────────────────────────────────────────────
FAULTLESS = 0.3
"""Share of demonstrations without a slip."""


def _addition(n: int, tokens: int) -> GeneratedTask:
    slip = 1 - FAULTLESS ** (1 / (n - 1))

    def build(u: Tensor) -> tuple[Problems, Tensor]:
        numbers = 1 + (u[:, :n] * 99).long()
        writer, total = Writer(u, tokens), numbers[:, 0]
        for i, (slips, size) in enumerate(u[:, n:].T.split(2), start=1):
            wrong = torch.tensor([1, -1, 10, -10], device=u.device)[(size * 4).long()]
            result = (total + numbers[:, i] + torch.where(slips < slip, wrong, 0)).clamp_min(0)
            writer.step(total, PLUS, numbers[:, i], result, NEXT if i < n - 1 else EOS)
            total = result
        answer, whole = writer.rows()
        return Problems(_prompt(numbers, ASK), answer, numbers.sum(1, keepdim=True)), whole

    return GeneratedTask(f"addition-{n}", 3 * n + 1, tokens, n + 2 * (n - 1), build, _last_number_verdict)


def _last_number_verdict(answers: Tensor, facts: Tensor) -> Tensor:
    """(N,) True if the number between the last = and EOS is the sum."""
    at = torch.arange(answers.shape[1], device=answers.device)
    is_end = answers == EOS
    end = torch.where(is_end.any(1), is_end.long().argmax(1), -1)[:, None]
    equals = torch.where((answers == EQUALS) & (at < end), at, -1).amax(1, keepdim=True)
    inside = (at > equals) & (at < end)
    digits = inside.sum(1)
    plain = (equals[:, 0] >= 0) & (digits > 0) & (digits <= MAX_DIGITS) & ((answers < 10) | ~inside).all(1)
    power = (10 ** torch.arange(MAX_DIGITS, device=answers.device))[(end - 1 - at).clamp(0, MAX_DIGITS - 1)]
    return plain & (torch.where(inside, answers * power, 0).sum(1) == facts[:, 0])


COUNTDOWN = [_countdown(3, 13, 20), _countdown(4, 13, 28), _countdown(6, 13, 46), _countdown(8, 9, 58)]
ADDITION = [_addition(8, 76), _addition(14, 146)]
TASKS = {task.name: task for task in COUNTDOWN + ADDITION}
