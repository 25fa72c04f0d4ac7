"""Who got how much, over all groups of a page: the numbers behind the pictures of the Credit view.

Credit is the advantage that was trained on; where a run recorded none, there is nothing to tell.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from dew.records import AnswerRecord, GroupRecord, Json

BINS = 40
FEWEST_USES = 5
WORDS = 20
FLAT = 1e-3
"""Credit that varies less than this within all answers is the same for every token, as GRPO's is."""

SIDES = ("correct", "wrong")


def statistics(groups: Sequence[GroupRecord]) -> Json:
    """Distributions of entropy and credit, share of credit by entropy, words, conserved mass."""
    tokens = [
        (group, answer, *_live(answer)) for group in groups for answer in group.answers if answer.tokens
    ]
    side = (
        np.concatenate([np.full(e.size, a.correct) for _, a, e, _ in tokens]) if tokens else np.empty(0, bool)
    )
    entropy = np.concatenate([e for _, _, e, _ in tokens]) if tokens else np.empty(0)
    credit = np.concatenate([c for _, _, _, c in tokens]) if tokens else np.empty(0)
    side = side.astype(bool)
    return {
        "tokens": int(entropy.size),
        "entropy": _histogram(entropy, side),
        "credit": _histogram(credit, side),
        "deciles": _deciles(entropy, credit, side),
        "words": _words(groups),
        "mass": _mass(groups),
    }


def _live(answer: AnswerRecord) -> tuple[np.ndarray, np.ndarray]:
    """Entropy and credit of the tokens that train; NaN where not recorded."""
    live = np.ones(len(answer.tokens), bool) if answer.live is None else np.asarray(answer.live, bool)
    nothing = np.full(len(answer.tokens), np.nan)
    entropy = nothing if answer.entropy is None else np.asarray(answer.entropy, float)
    credit = nothing if answer.advantage is None else np.asarray(answer.advantage, float)
    return entropy[live], credit[live]


def _histogram(values: np.ndarray, correct: np.ndarray) -> Json | None:
    """Shares per bin for right and wrong answers. The outermost 0.5 % on each side fall into the last bins."""
    finite = np.isfinite(values)
    if not finite.any():
        return None
    low, high = np.quantile(values[finite], [0.005, 0.995])
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, BINS + 1)
    out: Json = {"low": float(low), "high": float(high)}
    for name, mask in zip(SIDES, (finite & correct, finite & ~correct), strict=True):
        counts, _ = np.histogram(np.clip(values[mask], low, high), edges)
        out[name] = [float(share) for share in counts / max(1, mask.sum())]
        out[f"mean_{name}"] = float(values[mask].mean()) if mask.any() else None
    return out


def _deciles(entropy: np.ndarray, credit: np.ndarray, correct: np.ndarray) -> Json | None:
    """The share of Σ|credit| that each tenth of the tokens holds, from the surest tokens to the least sure."""
    finite = np.isfinite(entropy) & np.isfinite(credit)
    out: Json = {}
    for name, mask in zip(SIDES, (finite & correct, finite & ~correct), strict=True):
        size = np.abs(credit[mask])
        if mask.sum() < 10 or size.sum() == 0:
            continue
        tenths = np.array_split(size[np.argsort(entropy[mask], kind="stable")], 10)
        # A tenth holds its mean times its nominal tenth: 10.0 % each where credit is flat, whatever n % 10 is.
        means = np.array([tenth.mean() for tenth in tenths])
        out[name] = [float(share) for share in means / means.sum()]
    return out or None


def split_words(tokens: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Tokens joined to words: a word starts where a token starts with a space or is no letter."""
    words: list[tuple[str, list[int]]] = []
    for i, token in enumerate(tokens):
        joins = bool(words) and token[:1].isalpha() and words[-1][0][-1:].isalpha()
        if joins:
            text, members = words[-1]
            words[-1] = (text + token, [*members, i])
        else:
            words.append((token, [i]))
    return words


def _words(groups: Sequence[GroupRecord]) -> Json | None:
    """Words whose tokens got more credit (blame) than the average token of the same answer.

    extra = |A| of the word's tokens over the mean |A| of the answer, minus 1. Ranked by its sum over the run.
    """
    extra: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in SIDES}
    varies = False
    for answer in (answer for group in groups for answer in group.answers):
        if answer.advantage is None or len(answer.tokens) < 2:
            continue
        size = np.abs(np.asarray(answer.advantage, float))
        if not np.isfinite(size).all() or size.sum() == 0:
            continue
        size = size / size.mean() - 1
        varies |= bool(np.abs(size).max() > FLAT)
        side = extra["correct" if answer.correct else "wrong"]
        for word, members in split_words(answer.tokens):
            if word.strip() and len(word) <= 40:
                side[word.strip()].append(float(size[members].mean()))
    return {name: _ranked(extra[name]) for name in SIDES} if varies else None


def _ranked(extra: dict[str, list[float]]) -> list[Json]:
    rows = [
        {"word": word, "uses": len(xs), "extra": float(np.mean(xs)), "total": float(np.sum(xs))}
        for word, xs in extra.items()
        if len(xs) >= FEWEST_USES
    ]
    return sorted(rows, key=lambda row: -row["total"])[:WORDS]


def _mass(groups: Sequence[GroupRecord]) -> Json | None:
    """Mean |r̃| of each side without its charges, beside the α1 + α2 that weighting must conserve.

    Weights are values over the mean of their comparison set, so they average to 1: weighting moves reward from
    token to token and makes none. GRPO-S compares answers, so there the mean is over answers.
    """
    out: Json = {}
    for name, side in zip(SIDES, (True, False), strict=True):
        found: list[np.ndarray] = []
        for group in groups:
            whole_answers = (group.algorithm or "").lower() in ("grpos", "grpo_s", "grpo-s")
            for answer in group.answers:
                if answer.shaped is None or answer.correct != side:
                    continue
                live = (
                    np.ones(len(answer.tokens), bool)
                    if answer.live is None
                    else np.asarray(answer.live, bool)
                )
                size = np.abs(np.asarray(answer.shaped, float)[live] - answer.extra)
                found.append(size[:1] if whole_answers else size)
        if found and sum(x.size for x in found):
            out[name] = float(np.nanmean(np.concatenate(found)))
    expected = {_expected(group.settings) for group in groups}
    return {**out, "expected": expected.pop() if len(expected) == 1 else None} if out else None


def _expected(settings: Any) -> float | None:
    for one, two in (("alpha1", "alpha2"), ("beta1", "beta2")):
        if isinstance(settings.get(one), int | float) and isinstance(settings.get(two), int | float):
            return float(settings[one] + settings[two])
    return None
