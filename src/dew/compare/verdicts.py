"""Verdicts as sentences and tables in Markdown, the same in the terminal, in files and in the HTML report."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from statistics import fmean, stdev
from typing import Any

from dew.compare.grid import Result, main_scores
from dew.compare.statistics import MIN_SEEDS, Difference

TITLES = {"area": "mean accuracy in training", "final": "accuracy at the end of training"}
"""Scores measured during training; the others, such as pass@1, are measured after it."""


def title(score: str) -> str:
    return TITLES.get(score, score)


# ── sentences ───────────────────────────────────────────────────────────────────────────────────────────────
def verdicts(differences: Sequence[Difference]) -> list[str]:
    """One sentence for each arm that differs from its baseline, then one for all arms within noise, one for those with
    too few seeds and one for identical ones. Differences in `entropy` only show whether runs are identical: scores may
    also be equal because no problem was ever solved."""
    same_entropy = {(d.arm, d.baseline) for d in differences if d.score == "entropy" and d.equal and d.pairs > 1}
    judged = [d for d in differences if d.score != "entropy"]
    arms: dict[tuple[str, str, str], list[Difference]] = {}
    for d in judged:
        arms.setdefault((d.task, d.arm, d.baseline), []).append(d)
    texts: list[tuple[str, str]] = []
    alike: dict[tuple[str, str, str], dict[str, list[Difference]]] = {}
    for (task, arm, baseline), found in arms.items():
        enough = [d for d in found if not d.too_few]
        if all(d.equal for d in found) and (arm, baseline) in same_entropy:
            kind = "identical"
        elif not all(d.within_noise for d in enough):
            texts.append((task, _arm_verdict(arm, baseline, enough)))
            continue
        else:
            kind = "noise" if enough else "few"
        alike.setdefault((kind, task, baseline), {})[arm] = enough or found
    for kind in ("noise", "few", "identical"):
        texts += [(task, _alike(kind, of, base)) for (k, task, base), of in alike.items() if k == kind]
    several = len({d.task for d in judged}) > 1
    return [f"{task}: {text}" if several and task else text for task, text in texts]


def _arm_verdict(arm: str, baseline: str, differences: Sequence[Difference]) -> str:
    ahead: list[str] = []
    behind: list[str] = []
    noise = [title(d.score) for d in differences if d.within_noise]
    for d in (d for d in differences if not d.within_noise):
        interval = "" if ahead or behind else "95% interval "
        low, value, high = map(_size, sorted(abs(x) for x in (d.low, d.value, d.high)))
        (ahead if d.value > 0 else behind).append(f"{title(d.score)} by {value} ({interval}{low} to {high})")
    parts = {f"ahead of {baseline}": ahead, f"behind {'it' if ahead else baseline}": behind, "within noise": noise}
    text = f"{arm} is {'; '.join(f'{words} in {listed(texts)}' for words, texts in parts.items() if texts)}."
    return text + (" This is one run each: another seed may reverse it." if differences[0].unit == "problems" else "")


def _alike(kind: str, arms: Mapping[str, Sequence[Difference]], baseline: str) -> str:
    """One sentence for all arms of a kind: identical to the baseline, with too few seeds, or within noise."""
    if kind == "identical":
        why = "its credit is the same or differs by a constant factor, which Adam cancels, or neither trained"
        return f"Every run of {listed(list(arms))} is identical to that of {baseline}: {why}."
    if kind == "few":
        seeds = min(d.pairs for of in arms.values() for d in of)
        return f"Too few seeds to compare {listed(list(arms))} with {baseline}: {seeds} of at least {MIN_SEEDS}."
    first, *_ = arms.values()
    widths = {d.score: max(x.high - x.value for of in arms.values() for x in of if x.score == d.score) for d in first}
    scores = listed([f"{title(score)} (±{_size(width)})" for score, width in widths.items()])
    one = ", with one run each" if first[0].unit == "problems" else ""
    return f"{listed(list(arms))} {'is' if len(arms) == 1 else 'are'} within noise of {baseline} in {scores}{one}."


def _size(x: float) -> str:
    return f"{x:.3f}" if x >= 0.001 else f"{x:.1g}"


def listed(texts: Sequence[str]) -> str:
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────
def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *rows])


def spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{fmean(values):.3f}"


def signed(d: Any) -> str:
    """A difference or an interval: +0.050 [+0.010, +0.090]. A single seed has no interval."""
    return f"{d.value:+.3f}" + (f" [{d.low:+.3f}, {d.high:+.3f}]" if isfinite(d.high) else "")


def difference_table(differences: Sequence[Difference]) -> str:
    """A table with a row per pair of arms and a column per score; bold if the difference is not within noise."""
    scores = list(dict.fromkeys(d.score for d in differences))
    rows: dict[tuple[str, str], dict[str, Difference]] = {}
    for d in differences:
        rows.setdefault((d.arm, d.baseline), {})[d.score] = d
    table = []
    for (arm, baseline), found in rows.items():
        seeds = max((d.pairs for d in found.values() if d.unit == "seeds"), default=1)
        bold = {s: "" if d.within_noise or d.unit == "problems" else "**" for s, d in found.items()}
        cells = [f"{bold[s]}{signed(found[s])}{bold[s]}" if s in found else "" for s in scores]
        table.append([f"{arm} − {baseline}", str(seeds), *cells])
    return markdown_table(["difference", "seeds", *map(title, scores)], table)


def table_note(differences: Sequence[Difference]) -> str:
    bold = f"p < 0.05 after Holm's correction, with {MIN_SEEDS} seeds or more"
    text = f"Paired by seed, with 95% intervals of Student's t; bold: {bold}.\n"
    if any(d.unit == "problems" for d in differences):
        text += "With one seed, scores are paired by problem: the interval covers other problems, not other seeds.\n"
    return text


def summary(results: Sequence[Result], differences: Sequence[Difference]) -> str:
    """The verdicts, the mean of each arm, and the differences from the baseline."""
    scores = main_scores(score for score in results[0].scores if all(score in r.scores for r in results))
    rows = []
    for arm in dict.fromkeys(r.arm for r in results):
        runs = [r for r in results if r.arm == arm]
        means = [spread([r.scores[score] for r in runs]) for score in scores]
        rows.append([arm, str(len(runs)), *means, f"{fmean(r.groups for r in runs):,.0f}"])
    text = markdown_table(["arm", "seeds", *map(title, scores), "groups sampled per run"], rows)
    text += "\nMean ± standard deviation over seeds.\n" * ("±" in text)
    if not differences:
        return text
    return "\n\n".join([*verdicts(differences), text, difference_table(differences), table_note(differences)])
