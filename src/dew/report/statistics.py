"""How credit is distributed over the tokens of a group, of all groups in a page, and over training.

Credit is the advantage used in training, if the run recorded it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
"""Entropy in nats that counts as near zero: the policy gives one token about 99.9 %."""
MAX_PERIODS = 20
"""Steps, or ranges of steps, in which credit is followed over training."""
MAP = (24, 16)
"""Cells of the map of entropy against credit."""

SIDES = ("correct", "wrong")
Uses = tuple[bool, str, float]
"""Whether the answer is correct, a word in it, and the word's extra credit."""


def summary(group: GroupRecord) -> Json:
    """One group in numbers.

    spread   std of |A| over an answer's tokens / their mean, averaged over answers: 0 if credit is uniform
    flipped  tokens with credit of the wrong sign: A < 0 in an answer whose reward is above the group's mean (with
             rewards of 0 and 1, a correct one), A > 0 in one below it
    sure     share of tokens with an entropy near zero
    telling  how much there is to see: (min + max/10 of the spreads of correct and of wrong answers) · 4p(1 − p) ·
             (1 − sure), p the share of correct answers
    """
    _, entropy, credit, above = _tokens([group])
    right = sum(answer.correct for answer in group.answers)
    spreads: dict[bool, list[float]] = {True: [], False: []}
    for answer in group.answers:
        size = np.abs(_trained(answer, answer.advantage))
        if size.size and np.isfinite(size).all() and size.sum() > 0:
            spreads[answer.correct].append(float(size.std() / size.mean()))
    sides = [sum(found) / max(1, len(found)) for found in spreads.values()]
    every = [*spreads[True], *spreads[False]]
    spread = sum(every) / max(1, len(every))
    sure = float(np.mean(entropy < SURE)) if entropy.size else 0.0
    p = right / max(1, len(group.answers))
    return {
        "answers": len(group.answers),
        "correct": right,
        "tokens": group.size,
        "trained": int(entropy.size),
        "spread": spread if spread > FLAT else 0.0,
        "flipped": int((credit * above < 0).sum()),
        "sure": sure,
        "telling": (min(sides) + max(sides) / 10) * 4 * p * (1 - p) * (1 - sure) if spread > FLAT else 0.0,
    }


def _above(group: GroupRecord) -> list[float]:
    """Each answer's reward minus the group's mean; ±1 by outcome if all rewards are equal."""
    rewards = [answer.reward + answer.extra for answer in group.answers]
    mean = sum(rewards) / max(1, len(rewards))
    if all(reward == rewards[0] for reward in rewards):
        return [1.0 if answer.correct else -1.0 for answer in group.answers]
    return [reward - mean for reward in rewards]


def _tokens(groups: Sequence[GroupRecord]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of every trained token: outcome, entropy, credit (NaN if not recorded or without signal), and `_above`."""
    nothing = np.empty(0)
    sides, entropies, credits_, aboves = [nothing], [nothing], [nothing], [nothing]
    for group in groups:
        no_signal = not any(any(answer.advantage or ()) for answer in group.answers)
        for answer, above in zip(group.answers, _above(group), strict=True):
            entropies.append(_trained(answer, answer.entropy))
            credits_.append(_trained(answer, None if no_signal else answer.advantage))
            sides.append(np.full(entropies[-1].size, answer.correct))
            aboves.append(np.full(entropies[-1].size, above))
    correct, entropy, credit, side = (np.concatenate(parts) for parts in (sides, entropies, credits_, aboves))
    return correct.astype(bool), entropy, credit, side


def statistics(groups: Sequence[GroupRecord]) -> Json:
    """Distributions of entropy and credit, share of credit by entropy, words, reward mass, and all over training."""
    correct, entropy, credit, _ = _tokens(groups)
    uses = [_word_uses(group) for group in groups]
    return {
        "tokens": int(entropy.size),
        "entropy": _histogram(np.maximum(entropy, MIN_ENTROPY), correct, log=True),
        "credit": _histogram(credit, correct),
        "map": _map(entropy, credit),
        "deciles": _deciles(entropy, credit, correct),
        "periods": _periods(groups, uses),
        "words": _words(use for found in uses for use in found),
        "mass": _mass(groups),
    }


def _map(entropy: np.ndarray, credit: np.ndarray) -> Json | None:
    """Tokens by entropy (logarithmic) and credit: counts[row of credit][column of entropy], with the edges."""
    finite = np.isfinite(entropy) & np.isfinite(credit)
    if finite.sum() < 10:
        return None
    x, y = np.maximum(entropy[finite], MIN_ENTROPY), credit[finite]
    (left, right), (low, high) = np.quantile(x, [0.005, 0.995]), np.quantile(y, [0.005, 0.995])
    if right / left < 1.01 or high - low < 1e-6:
        return None
    edges = np.geomspace(left, right, MAP[0] + 1), np.linspace(low, high, MAP[1] + 1)
    edges[0][[0, -1]], edges[1][[0, -1]] = (left, right), (low, high)
    counts, _, _ = np.histogram2d(np.clip(x, left, right), np.clip(y, low, high), edges)
    return {"entropy": edges[0].tolist(), "credit": edges[1].tolist(), "counts": counts.T.astype(int).tolist()}


def _periods(groups: Sequence[GroupRecord], uses: Sequence[list[Uses]]) -> list[Json]:
    """Deciles, flipped share, near-zero share and top words of each recorded step, or of ranges of steps."""
    steps = sorted({group.step for group in groups})
    out = []
    for part in np.array_split(np.array(steps), min(MAX_PERIODS, len(steps))) if steps else ():
        at = [k for k, group in enumerate(groups) if part[0] <= group.step <= part[-1]]
        inside = [groups[k] for k in at]
        correct, entropy, credit, above = _tokens(inside)
        known, scored = np.isfinite(entropy).sum(), np.isfinite(credit).sum()
        words = _words((use for k in at for use in uses[k]), most=5) or {}
        out.append({
            "from": int(part[0]),
            "to": int(part[-1]),
            "deciles": _deciles(entropy, credit, correct) or {},
            "flipped": float((credit * above < 0).sum() / scored) if scored else None,
            "sure": float((entropy < SURE).sum() / known) if known else None,
            "words": {side: [word["word"] for word in found] for side, found in words.items()},
        })  # fmt: skip
    return out


def _trained(answer: AnswerRecord, values: Sequence[float] | None) -> np.ndarray:
    """The values of the trained tokens; NaN if not recorded."""
    live = np.ones(len(answer.tokens), bool) if answer.live is None else np.asarray(answer.live, bool)
    return np.full(live.sum(), np.nan) if values is None else np.asarray(values, float)[live]


def _histogram(values: np.ndarray, correct: np.ndarray, log: bool = False) -> Json | None:
    """Shares per bin for correct and wrong answers. The outermost 0.5 % on each side go into the last bins."""
    finite = np.isfinite(values)
    if not finite.any():
        return None
    low, high = np.quantile(values[finite], [0.005, 0.995])
    if high - low < 1e-9:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    edges = np.geomspace(low, high, BINS + 1) if log else np.linspace(low, high, BINS + 1)
    edges[[0, -1]] = low, high
    out: Json = {"low": float(low), "high": float(high)}
    for name, mask in zip(SIDES, (finite & correct, finite & ~correct), strict=True):
        counts, _ = np.histogram(np.clip(values[mask], low, high), edges)
        out[name] = [float(share) for share in counts / max(1, mask.sum())]
        out[f"mean_{name}"] = float(values[mask].mean()) if mask.any() else None
    return out


def _deciles(entropy: np.ndarray, credit: np.ndarray, correct: np.ndarray) -> Json | None:
    """The share of Σ|credit| of each tenth of the tokens, by increasing entropy, and the tenths' highest entropies."""
    finite = np.isfinite(entropy) & np.isfinite(credit)
    out: Json = {}
    for name, mask in zip(SIDES, (finite & correct, finite & ~correct), strict=True):
        size = np.abs(credit[mask])
        if mask.sum() < 10 or size.sum() == 0:
            continue
        order = np.argsort(entropy[mask], kind="stable")
        tenths = np.array_split(size[order], 10)
        # Means, not sums: uniform credit gives 10.0 % each, even if the number of tokens is not a multiple of ten.
        means = np.array([tenth.mean() for tenth in tenths])
        tops = [float(tenth[-1]) for tenth in np.array_split(entropy[mask][order], 10)]
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
    """Every word of a group, with its credit relative to the average token of the same answer.

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


def _words(uses: Iterable[Uses], most: int = MAX_WORDS) -> Json | None:
    """The words with the most extra credit in correct and in wrong answers; None if credit is uniform."""
    extra: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in SIDES}
    largest = 0.0
    for correct, word, x in uses:
        extra["correct" if correct else "wrong"][word].append(x)
        largest = max(largest, abs(x))
    return {name: _ranked(extra[name], most) for name in SIDES} if largest > FLAT else None


def _ranked(extra: Mapping[str, list[float]], most: int) -> list[Json]:
    """Ranked by mean extra · √uses, which favours neither rare outliers nor frequent words with little extra."""
    rows = [(sum(xs) / len(xs), len(xs), word) for word, xs in extra.items() if len(xs) >= MIN_USES]
    best = sorted((row for row in rows if row[0] > 0), key=lambda row: -row[0] * row[1] ** 0.5)
    return [{"word": word, "uses": uses, "extra": mean} for mean, uses, word in best[:most]]


def _mass(groups: Sequence[GroupRecord]) -> Json | None:
    """Mean |r̃| of each outcome without penalties, and the α1 + α2 that weighting must conserve.

    Weights are relative to the mean of their comparison set, so they average to 1: weighting moves reward between
    tokens and creates none. GRPO-S compares answers, so its mean is over answers.
    """
    found: dict[str, list[np.ndarray]] = {name: [] for name in SIDES}
    for group in groups:
        whole_answers = (group.algorithm or "").lower().replace("-", "").replace("_", "") == "grpos"
        for answer in group.answers:
            if answer.shaped is not None:
                size = np.abs(_trained(answer, answer.shaped) - answer.extra)
                found["correct" if answer.correct else "wrong"].append(size[:1] if whole_answers else size)
    sides = {name: np.concatenate(sizes) for name, sizes in found.items() if sizes}
    out: Json = {name: float(np.nanmean(size)) for name, size in sides.items() if np.isfinite(size).any()}
    expected = {_expected(group.settings) for group in groups}
    return {**out, "expected": expected.pop() if len(expected) == 1 else None} if out else None


def _expected(settings: Mapping[str, Any]) -> float | None:
    for one, two in (("alpha1", "alpha2"), ("beta1", "beta2")):
        if isinstance(settings.get(one), int | float) and isinstance(settings.get(two), int | float):
            return float(settings[one] + settings[two])
    return None
