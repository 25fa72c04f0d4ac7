"""Statistics of how credit is distributed over the tokens of a group, and of all groups in a page.

Credit is the advantage used in training, if it was recorded.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import compress, takewhile
from operator import eq

import numpy as np

from dew.run.records import AnswerRecord, GroupRecord, Json

BINS = 40
MIN_USES = 5
MAX_WORDS = 20
FLAT = 1e-3
"""Credit that varies less than this within every answer counts as uniform, as in GRPO."""
MIN_ENTROPY = 1e-4
"""Start of the logarithmic entropy axis."""
SURE = 0.01
"""Entropy in nats below which a token counts as certain: it has a probability of about 99.9%."""

SIDES = ("correct", "wrong")
Uses = tuple[bool, str, float]
"""(whether the answer is correct, a word in it, the word's extra credit)"""


def _tokens(group: GroupRecord) -> np.ndarray:
    """(3, N) outcome, entropy and credit of every trained token.

    NaN: not recorded. Credit is also NaN in groups without signal.
    """
    live, entropy, credit = (_column(group, name) for name in ("live", "entropy", "advantage"))
    correct = [float(answer.correct) for answer in group.answers for _ in answer.tokens]
    if not credit.any():
        credit = np.full_like(credit, np.nan)
    return np.stack([correct, entropy, credit])[:, live != 0]


def _column(group: GroupRecord, name: str) -> np.ndarray:
    """Return a signal of all tokens of a group, answer after answer; NaN if it was not recorded."""
    signals = [(len(answer.tokens), getattr(answer, name)) for answer in group.answers]
    return np.concatenate([[], *(np.full(n, np.nan) if x is None else np.asarray(x, float) for n, x in signals)])


def above_mean(group: GroupRecord) -> np.ndarray:
    """Return each answer's reward minus the group's mean. Credit of the other sign is wrong (`dew.credit.wrong_sign`).

    0 if the difference is only rounding. If all rewards are equal, +1 for correct and −1 for wrong answers.
    """
    rewards = np.array([answer.reward + answer.extra for answer in group.answers])
    if (rewards == rewards[:1]).all():
        return np.array([1.0 if answer.correct else -1.0 for answer in group.answers])
    away = rewards - rewards.mean()
    return np.where(np.abs(away) > 1e-5 * np.abs(rewards).max(), away, 0.0)


def summary(group: GroupRecord) -> Json:
    """Return statistics of one group.

    spread   std of |A| over an answer's tokens / their mean, averaged over answers: 0 if credit is uniform
    flipped  tokens with credit of the wrong sign
    sure     share of tokens with an entropy near zero
    telling  how informative the group is: (min + max/10 of the spreads of correct and of wrong answers) · 4p(1 − p) ·
             (1 − sure), where p is the share of correct answers
    """
    _, entropy, _ = _tokens(group)
    flipped = 0
    spreads: dict[bool, list[float]] = {True: [], False: []}
    for answer, above in zip(group.answers, above_mean(group), strict=True):
        live = [True] * len(answer.tokens) if answer.live is None else answer.live
        credit = np.array(list(compress(answer.advantage or (), live)))
        flipped += int((credit * above < 0).sum())
        size = np.abs(credit)
        if size.size and np.isfinite(size).all() and size.sum() > 0:
            spreads[answer.correct].append(float(size.std() / size.mean()))
    sides = [sum(found) / max(1, len(found)) for found in spreads.values()]
    every = [*spreads[True], *spreads[False]]
    spread = sum(every) / max(1, len(every))
    right = sum(answer.correct for answer in group.answers)
    sure = float(np.mean(entropy < SURE)) if entropy.size else 0.0
    p = right / max(1, len(group.answers))
    return {
        "answers": len(group.answers),
        "correct": right,
        "tokens": group.size,
        "trained": entropy.size,
        "spread": spread if spread > FLAT else 0.0,
        "flipped": flipped,
        "sure": sure,
        "telling": (min(sides) + max(sides) / 10) * 4 * p * (1 - p) * (1 - sure) if spread > FLAT else 0.0,
    }


def nearest_correct(group: GroupRecord, answer: AnswerRecord) -> tuple[int, int] | None:
    """For a wrong answer, find the correct answer with the longest common prefix: (length of the prefix, its index)."""
    right = [(j, other.tokens) for j, other in enumerate(group.answers) if other.correct and not answer.correct]
    found = [(sum(takewhile(bool, map(eq, answer.tokens, tokens))), j) for j, tokens in right]
    return max(found, key=lambda pair: pair[0], default=None)


def around_divergence(answer: AnswerRecord, at: int) -> tuple[list[float], list[float]] | None:
    """Return the shares of |credit| and of trained tokens before, at and after position `at`; None without credit."""
    live = np.ones(len(answer.tokens)) if answer.live is None else np.asarray(answer.live, float)
    size = np.abs(np.asarray(answer.advantage or 0.0, float)) * live
    if not size.any() or not np.isfinite(size).all():
        return None
    credit, tokens = ([float(x.sum()) for x in np.split(of / of.sum(), [at, at + 1])] for of in (size, live))
    return credit, tokens


def statistics(groups: Sequence[GroupRecord]) -> Json:
    """Return distributions of entropy and credit, shares of credit by entropy, and words with much credit."""
    if not groups:
        return {"tokens": 0}
    wrong = [(answer, at[0]) for g in groups for answer in g.answers if (at := nearest_correct(g, answer))]
    around = [shares for answer, at in wrong if (shares := around_divergence(answer, at))]
    correct, entropy, credit = tokens = np.concatenate([_tokens(group) for group in groups], axis=1)
    return {
        "tokens": entropy.size,
        "entropy": _histogram(np.maximum(entropy, MIN_ENTROPY), correct, log=True),
        "credit": _histogram(credit, correct),
        "deciles": _deciles(tokens),
        "blame": np.mean([blame for blame, _ in around], axis=0).tolist() if around else None,
        "blame_even": np.mean([even for _, even in around], axis=0).tolist() if around else None,
        "words": _words(use for group in groups for use in _word_uses(group)),
    }


def _histogram(values: np.ndarray, correct: np.ndarray, log: bool = False) -> Json | None:
    """Return shares per bin for correct and wrong answers. The outermost 0.5% on each side go into the end bins."""
    finite = np.isfinite(values)
    if not finite.any():
        return None
    low, high = np.quantile(values[finite], [0.005, 0.995])
    if high - low < 1e-9:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    edges = np.geomspace(low, high, BINS + 1) if log else np.linspace(low, high, BINS + 1)
    edges[[0, -1]] = low, high
    out: Json = {"low": float(low), "high": float(high)}
    for name, mask in zip(SIDES, (finite & (correct == 1), finite & (correct == 0)), strict=True):
        counts, _ = np.histogram(np.clip(values[mask], low, high), edges)
        out[name] = [float(share) for share in counts / max(1, mask.sum())]
        out[f"mean_{name}"] = float(values[mask].mean()) if mask.any() else None
    return out


def _deciles(tokens: np.ndarray) -> Json | None:
    """Return the share of Σ|credit| and the highest entropy of each tenth of the tokens, by increasing entropy."""
    correct, entropy, credit = tokens
    finite = np.isfinite(entropy) & np.isfinite(credit)
    out: Json = {}
    for name, mask in zip(SIDES, (finite & (correct == 1), finite & (correct == 0)), strict=True):
        order = np.argsort(entropy[mask], kind="stable")
        size, sorted_entropy = np.abs(credit[mask][order]), entropy[mask][order]
        if size.size < 10 or size.sum() == 0:
            continue
        # With means instead of sums, uniform credit gives 10.0% each for any number of tokens.
        means = np.array([tenth.mean() for tenth in np.array_split(size, 10)])
        tops = [float(tenth[-1]) for tenth in np.array_split(sorted_entropy, 10)]
        out[name] = {"shares": [float(share) for share in means / means.sum()], "tops": tops}
    return out or None


def split_words(tokens: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Join tokens into words, with their indices: a token that continues in letters belongs to the previous word."""
    words: list[tuple[str, list[int]]] = []
    for i, token in enumerate(tokens):
        if words and token[:1].isalpha() and words[-1][0][-1:].isalpha():
            text, indices = words[-1]
            words[-1] = (text + token, [*indices, i])
        else:
            words.append((token, [i]))
    return words


def _word_uses(group: GroupRecord) -> list[Uses]:
    """Return every word of a group with its credit relative to the average token of the same answer.

    extra = mean |A| of the word's tokens / mean |A| of the answer − 1
    """
    uses: list[Uses] = []
    for answer in group.answers:
        size = np.abs(np.asarray(answer.advantage or (), float))
        if len(size) < 2 or not np.isfinite(size).all() or size.sum() == 0:
            continue
        relative = (size / size.mean() - 1).tolist()
        for word, indices in split_words(answer.tokens):
            if word.strip() and len(word) <= 40:
                extra = relative[indices[0]] if len(indices) == 1 else sum(relative[i] for i in indices) / len(indices)
                uses.append((answer.correct, word.strip(), extra))
    return uses


def _words(uses: Iterable[Uses]) -> Json | None:
    """Return the words with the most extra credit in correct and in wrong answers, or None if credit is uniform.

    They are ranked by mean extra · √uses, which favours neither rare outliers nor frequent words with little extra.
    """
    extra: dict[bool, dict[str, list[float]]] = {True: defaultdict(list), False: defaultdict(list)}
    for correct, word, x in uses:
        extra[correct][word].append(x)
    if all(abs(x) <= FLAT for words in extra.values() for xs in words.values() for x in xs):
        return None
    out: Json = {}
    for name, words in zip(SIDES, extra.values(), strict=True):
        rows = [(sum(xs) / len(xs), len(xs), word) for word, xs in words.items() if len(xs) >= MIN_USES]
        best = sorted((row for row in rows if row[0] > 0), key=lambda row: -row[0] * row[1] ** 0.5)
        out[name] = [{"word": word, "uses": n, "extra": mean} for mean, n, word in best[:MAX_WORDS]]
    return out
