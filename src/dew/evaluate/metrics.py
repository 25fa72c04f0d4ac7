"""Scores of one problem from the verdicts on its answers."""

from collections import defaultdict
from collections.abc import Sequence
from math import comb

from dew.errors import ConfigError
from dew.rewards import Verdict


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n answers, drawn without replacement, hold one of the c correct ones.

        pass@k = 1 − C(n−c, k) / C(n, k)

    Unbiased for the chance that k fresh answers hold a correct one (Chen et al., 2021, Eq. 1).
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ConfigError(
            f"pass_at_k(n={n}, c={c}, k={k}): of n answers, c ≤ n are correct and k ≤ n are drawn, k ≥ 1. "
            "Sample at least k answers per problem."
        )
    return 1 - comb(n - c, k) / comb(n, k)


def mean_at_k(verdicts: Sequence[Verdict]) -> float:
    """The share of correct answers."""
    return sum(verdict.correct for verdict in verdicts) / len(verdicts)


def maj_at_k(verdicts: Sequence[Verdict]) -> float:
    """1 if the most frequent answer is correct; a tie counts by the share of tied answers that are.

    Answers vote by what was extracted from them. One from which nothing could be extracted has no vote.
    """
    votes: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.extracted is not None:
            votes[verdict.extracted].append(verdict)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    winners = [same[0].correct for same in votes.values() if len(same) == most]
    return sum(winners) / len(winners)


def score_problem(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Every score of one problem: pass@1, 2, 4, ... up to the number of answers, mean@k and maj@k."""
    n, c = len(verdicts), sum(verdict.correct for verdict in verdicts)
    ks = sorted({2**i for i in range(n.bit_length())} | {n})
    scores = {f"pass@{k}": pass_at_k(n, c, k) for k in ks}
    return {**scores, f"mean@{n}": mean_at_k(verdicts), f"maj@{n}": maj_at_k(verdicts)}
