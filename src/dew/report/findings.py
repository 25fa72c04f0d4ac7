"""What the runs show: one row per metric with paired differences, and findings in words.

The sentences are the same in the terminal (`dew demo`, `dew compare`) and on the page. A finding is
{kind, text, remedy?, link?}; kind is good, bad or note, and the link is an address within the page.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from math import nan
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from dew.alarms import Alarms
from dew.errors import DewError
from dew.evaluate import Scores
from dew.evaluate.comparison import MIN_SEEDS
from dew.evaluate.metrics import Interval, mean_interval, paired_interval
from dew.files import is_plain
from dew.records import Json
from dew.report.readers import Run

MIN_STEPS = 20
"""Shorter runs are not checked for a flat reward."""
MAX_CHECKED = 2000
"""Steps checked again for alarms; of a longer run, the first and the last ones."""
MAX_PAIRED = 16
"""Runs whose evaluated answers are read, to pair scores by problem."""
MAX_ANSWERS = 64 << 20
"""Bytes of one file of evaluated answers."""

METRICS = {
    "accuracy": "share of correct answers in training",
    "reward": "mean reward in training",
    "entropy": "nats per token",
    "length/mean": "tokens per answer",
    "length/truncated_share": "share of truncated answers",
    "groups/mixed_share": "share of groups with correct and wrong answers",
    "credit/flipped_share": "share of tokens with credit of the wrong sign",
}
"""Metrics with a row of their own, after the scores."""
OF_CURVE = {"area": "mean accuracy over training", "final": "mean accuracy in the last sixth of training"}
"""Scores that a study computes from the training accuracy."""
METRIC_OF = {
    "never_correct": "accuracy", "no_signal": "groups/mixed_share", "truncated": "length/truncated_share",
    "entropy_collapse": "entropy", "entropy_explosion": "entropy", "one_token_takes_all": "credit/top1_share",
    "off_policy": "ratio/abs_log", "sampler_stale": "sampler/kl", "sampler_mismatch": "sampler/kl",
    "clipped": "clip/high", "no_gradient": "grad_norm", "not_finite": "grad_norm",
    "reward_flat": "reward", "wrong_sign": "credit/flipped_share", "pass_falls": "eval/pass",
}  # fmt: skip
"""Alarm -> the metric that shows it."""


# ── sentences ───────────────────────────────────────────────────────────────────────────────────────────────


def points(difference: Interval) -> str:
    low, high = (f"{100 * x:+.1f}".replace("-", "−") for x in (difference.low, difference.high))
    return f"{abs(100 * difference.value):.1f} points (95 % interval {low} to {high})"


def change_sentence(who: str, score: str, change: Interval) -> str:
    """How a score changed from before to after training, paired by problem."""
    verb = "rose" if change.value >= 0 else "fell"
    line = f"{who}: {score} {verb} by {points(change)}"
    if change.low <= 0 <= change.high:
        return f"{line}, which is within noise."
    narrower = change.value < 0 and score not in ("pass@1", "accuracy")
    return f"{line}." + (" The model has become more certain of fewer ways to answer." if narrower else "")


def single_verdict(a: str, b: str, score: str, change: Interval) -> str:
    """b against a with one run each, paired by problem."""
    gap = (
        f"{b} − {a} in {score} after training, paired by problem: {'+' if change.value >= 0 else '−'}{points(change)}."
    )
    if change.low <= 0 <= change.high:
        return f"{gap} That is within noise: these runs do not show which of the two is better."
    ahead = b if change.value > 0 else a
    return f"{gap} {ahead} is ahead here, in one run each: another seed may reverse it."


def seeds_verdict(differences: Sequence[Mapping[str, Any]]) -> str:
    """Which of the paired differences (algorithm, baseline, score, verdict, within_noise) exceed noise."""
    clear = "; ".join(f"{d['verdict']} in {score_title(d['score'])}" for d in differences if not d["within_noise"])
    if not clear:
        return "Every difference is within noise: these runs do not separate the algorithms."
    chance = f"About one in twenty of the {len(differences)} intervals at 95 % misses by chance."
    return f"Larger than noise: {clear}. Any others are within noise. {chance}"


def score_title(score: str) -> str:
    return "area under training accuracy" if score == "area" else f"{score} after"


def study_verdict(task: str, differences: Sequence[Mapping[str, Any]]) -> str:
    """One arm of a study against its baseline in all scores."""
    arm, baseline = differences[0]["arm"], differences[0]["baseline"]
    few = next((d["verdict"] for d in differences if d["pairs"] < MIN_SEEDS), None)
    if few:
        return f"{task}: {arm} against {baseline}: {few}."
    ahead: list[str] = []
    behind: list[str] = []
    noise: list[str] = []
    for d in differences:
        title = {"area": "area under training accuracy", "final": "final accuracy"}.get(d["score"], d["score"])
        if d["within_noise"]:
            noise.append(title)
            continue
        interval = "" if ahead or behind else "95 % interval "
        sizes = sorted(abs(d[name]) for name in ("low", "value", "high"))
        low, value, high = (f"{x:.3f}" if x >= 0.001 else f"{x:.1g}" for x in sizes)
        (ahead if d["value"] > 0 else behind).append(f"{title} by {value} ({interval}{low} to {high})")
    if not ahead and not behind:
        return f"{task}: {arm} and {baseline} are within noise of each other in {_listed(noise)}."
    parts = {f"ahead of {baseline}": ahead, f"behind {'it' if ahead else baseline}": behind, "within noise": noise}
    return f"{task}: {arm} is {'; '.join(f'{words} in {_listed(texts)}' for words, texts in parts.items() if texts)}."


def _listed(texts: Sequence[str]) -> str:
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def flipped_sentence(groups: int, of: int, tokens: int, share: float) -> str:
    return (
        f"{groups:,} of {of:,} recorded groups have credit of the wrong sign, rewarded in a wrong answer or penalised "
        f"in a correct one: {tokens:,} tokens, {share:.1%} of those that train."
    )


def sure_sentence(share: float, threshold: float) -> str:
    return (
        f"{share:.0%} of the recorded tokens have an entropy below {threshold:g} nats. Weights there compare numbers "
        "that are close to rounding noise."
    )


# ── alarms checked afterwards ───────────────────────────────────────────────────────────────────────────────


def remarks(metrics: Sequence[Json], alarms: Sequence[Json]) -> list[Json]:
    """The first alarm of each rule, checked afterwards (other trainers have no alarms), and a flat reward."""
    rules = Alarms()
    checked = [*metrics[:MIN_STEPS], *metrics[MIN_STEPS:][-MAX_CHECKED:]]
    found = [alarm for line in checked for alarm in rules.update(line["step"], line)]
    raised = {str(alarm.get("alarm")) for alarm in alarms}
    first: dict[str, Json] = {}
    for remark in [*found, *_flat_reward(metrics)]:
        if remark["alarm"] not in raised:
            first.setdefault(remark["alarm"], remark)
    return list(first.values())


def _flat_reward(metrics: Sequence[Json]) -> list[Json]:
    """A remark if the last fifth is not above the first by twice the standard error of the difference."""
    reward = np.array([m["reward"] for m in metrics if isinstance(m.get("reward"), int | float)], float)
    if len(reward) < MIN_STEPS:
        return []
    fifth = len(reward) // 5
    first, last = reward[:fifth], reward[-fifth:]
    error = np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / fifth)
    if last.mean() - first.mean() > max(2 * error, 1e-9):
        return []
    message = f"The reward does not rise: {first.mean():.3f} in the first fifth, {last.mean():.3f} in the last."
    remedy = "Read some answers under Groups: is the reward right, and are answers both correct and wrong?"
    return [{"alarm": "reward_flat", "message": message, "remedy": remedy}]


# ── one row per metric ──────────────────────────────────────────────────────────────────────────────────────


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last tenth."""
    tenth = max(1, round(len(values) / 10))
    return float(np.mean(values[:tenth])), float(np.mean(values[-tenth:]))


def rows_of(runs: Sequence[Run], arms: Sequence[Json], given: Sequence[Json] = ()) -> list[Json]:
    """Scores, then metrics: {name, note, link, before, after, low, high (one per run), differences}.

    Differences are from the first arm: those that `dew compare` or a study computed if `given`, else paired by seed, or
    by problem if each arm has one run.
    """
    rows = [*_score_rows(runs), *_metric_rows(runs)]
    for row in rows:
        known = [d for d in given if d["score"] == row["name"] or (d["score"], row["name"]) == ("area", "accuracy")]
        row["differences"] = known or _differences(runs, arms, row)
    return rows


def _score_rows(runs: Sequence[Run]) -> list[Json]:
    found: dict[tuple[str, str], Json] = {}
    for i, run in enumerate(runs):
        for entry in run.scores:
            scores = entry.get("scores")
            scores = scores if isinstance(scores, dict) else {}
            for name in _ends_of_pass(scores):
                row = found.setdefault((str(entry.get("task")), name), _row(runs, name, ""))
                row["task"], when = str(entry.get("task")), "before" if entry.get("when") == "before" else "after"
                scored = f"{entry.get('n_problems')} problems × {entry.get('k')} answers"
                row["note"] = f"{entry.get('task')}: {OF_CURVE.get(name, scored)}"
                score = scores[name] if isinstance(scores[name], dict) else {}
                row[when][i] = _number(score.get("value"))
                if when == "after":
                    row["low"][i], row["high"][i] = _number(score.get("low")), _number(score.get("high"))
    return list(found.values())


def _ends_of_pass(scores: Mapping[str, Any]) -> list[str]:
    """The scores of the training accuracy, pass@1 and the largest pass@k; if there is none, the first scores."""
    passes = sorted((int(m[1]), n) for n in scores if (m := re.fullmatch(r"pass@(\d{1,6})", n)))
    found = dict.fromkeys([passes[0][1], passes[-1][1]]) if passes else dict.fromkeys(list(scores)[:4])
    return list(dict.fromkeys([*(name for name in OF_CURVE if name in scores), *found]))


def _metric_rows(runs: Sequence[Run]) -> list[Json]:
    names = {name for run in runs for line in (*run.metrics[:1], *run.metrics[-1:]) for name in line}
    evals = {name for run in runs for line in run.metrics for name in line if name.startswith("eval/pass@")}
    if runs[0].kind == "study":  # has them among its scores
        names, evals = names - {"accuracy"}, set()
    picked = [f"eval/{n}" for n in _ends_of_pass({n.removeprefix("eval/"): 0 for n in evals})] if evals else []
    rows = []
    for name in [*picked, *(name for name in METRICS if name in names)]:
        row = _row(runs, name, METRICS.get(name, "held-out problems, during training"))
        for i, run in enumerate(runs):
            values = [x for line in run.metrics if (x := _number(line.get(name))) is not None]
            if values:
                first, row["after"][i] = ends(values)
                row["before"][i] = first if len(values) > 1 else None
        if any(x is not None for x in row["after"]):
            rows.append(row)
    same = [r for r in rows if r["name"] == "reward" and any(r["after"] == q["after"] for q in rows if q is not r)]
    return [row for row in rows if row not in same]  # an outcome reward alone is the accuracy


def _row(runs: Sequence[Run], name: str, note: str) -> Json:
    link = f"#{'curves' if note else 'overview'}&chart={quote(name, safe='')}"
    return {"name": name, "note": note, "link": link, **{key: [None] * len(runs) for key in _COLUMNS}}


_COLUMNS = ("before", "after", "low", "high")


def _number(x: Any) -> float | None:
    good = isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e300
    return float(x) if good else None


def _differences(runs: Sequence[Run], arms: Sequence[Json], row: Json) -> list[Json]:
    """From the first arm: by seed where both have several seeds, by problem where each has one run."""
    found = []
    for arm in arms:
        reference = _reference(arms, arm)
        if reference is arm:
            continue
        both = [_by_seed(runs, a, row["after"]) for a in (reference, arm)]
        seeds = sorted(both[0].keys() & both[1].keys())
        entry = {"arm": arm["label"], "baseline": reference["label"], "score": row["name"], "pairs": len(seeds)}
        if len(seeds) > 1:
            D = np.array([[both[1][seed] - both[0][seed]] for seed in seeds])
            study = runs[arm["runs"][0]].kind == "study"
            found.append({**entry, "unit": "seeds", **(_t_test(D[:, 0]) if study else vars(paired_interval(D)))})
        elif "task" in row and len(reference["runs"]) == len(arm["runs"]) == 1:
            first, second = runs[reference["runs"][0]], runs[arm["runs"][0]]
            change = _by_problem((first, "after"), (second, "after"), row["name"])
            if change is not None:
                found.append({**entry, "unit": "problems", **vars(change)})
    _holm([d for d in found if "p" in d])
    return [_judged(d) for d in found]


def _reference(arms: Sequence[Json], arm: Json) -> Json:
    """The first arm with the same data, at the same learning rate if it was trained at that."""
    same = [a for a in arms if a["data"] == arm["data"]]
    rate = [a for a in same if a["learning_rate"] == arm["learning_rate"] and a["algorithm"] == same[0]["algorithm"]]
    return rate[0] if rate and rate[0] is not arm else same[0]


def _t_test(D: np.ndarray) -> Json:
    """The mean with its 95 % interval and p-value by Student's t, as `dew lab` computes them."""
    from scipy.stats import t

    n, value = len(D), float(D.mean())
    error = float(D.std(ddof=1)) / n**0.5
    half = float(t.ppf(0.975, n - 1)) * error
    p = 1.0 if value == 0 else float(2 * t.sf(abs(value) / error, n - 1)) if error else 0.0
    return {"value": value, "low": value - half, "high": value + half, "p": p}


def _holm(found: Sequence[Json]) -> None:
    """Holm's correction for many comparisons (1979), in place."""
    least = 0.0
    for i, d in enumerate(sorted(found, key=lambda d: d["p"])):
        least = d["p"] = max(least, min(1.0, d["p"] * (len(found) - i)))


def _judged(d: Json) -> Json:
    few = d["unit"] == "seeds" and d["pairs"] < MIN_SEEDS
    noise = few or (d["p"] >= 0.05 if "p" in d else d["low"] <= 0 <= d["high"])
    verdict = f"{d['arm'] if d['value'] > 0 else d['baseline']} higher"
    if few:
        verdict = f"too few seeds ({d['pairs']} of at least {MIN_SEEDS})"
    elif noise:
        verdict = "within noise"
    return {**d, "within_noise": noise, "verdict": verdict}


def _by_seed(runs: Sequence[Run], arm: Json, values: Sequence[float | None]) -> dict[str, float]:
    return {str(runs[i].facts.get("seed", i)): x for i in arm["runs"] if (x := values[i]) is not None}


@cache
def _answers(folder: Path | None, when: str) -> Scores | None:
    """The evaluated answers of a run; None if it kept none."""
    path = None if folder is None else folder / f"answers-{when}.json"
    if path is None or not path.exists() or not is_plain(path) or path.stat().st_size > MAX_ANSWERS:
        return None
    try:
        scores = Scores.read(path)
        return scores if scores.problems else None
    except DewError:
        return None


def _by_problem(first: tuple[Run, str], second: tuple[Run, str], score: str) -> Interval | None:
    """The second evaluation minus the first, (run, "before" or "after") each, if both have the same problems."""
    found = [_answers(run.folder, when) for run, when in (first, second)]
    if any(scores is None for scores in found):
        return None
    a, b = ({json.dumps(p.prompt): p.scores.get(score, nan) for p in scores.problems} for scores in found if scores)
    if a.keys() != b.keys() or not np.isfinite([*a.values(), *b.values()]).all():
        return None
    return mean_interval([b[prompt] - a[prompt] for prompt in a], span=(-1.0, 1.0))


# ── findings ────────────────────────────────────────────────────────────────────────────────────────────────


def findings_of(
    runs: Sequence[Run],
    arms: Sequence[Json],
    rows: Sequence[Json],
    groups: Sequence[Json],
    verdicts: Sequence[str] = (),
) -> list[Json]:
    """Verdicts (those of a study, if given), then scores, alarms and what the recorded tokens show, the bad first.

    `groups` holds one entry per run: {groups, flipped_groups, flipped, tokens, sure, threshold, weighted}.
    """
    _answers.cache_clear()
    said = [{"kind": "note", "text": verdict, "link": rows[0]["link"] if rows else None} for verdict in verdicts]
    found = [*_score_changes(runs, arms, rows), *_alarms(runs, arms), *_tokens(runs, groups)]
    found += [{"kind": "note", "text": f"{_who(runs, i)}{n}"} for i, run in enumerate(runs) for n in run.notices]
    order = {"bad": 0, "good": 1, "note": 2}
    return [*(said or _verdicts(rows)), *sorted(found, key=lambda finding: order[finding["kind"]])]


def _who(runs: Sequence[Run], i: int) -> str:
    return f"{runs[i].name}: " if len(runs) > 1 else ""


def _verdicts(rows: Sequence[Json]) -> list[Json]:
    scored = [row for row in rows if row["differences"] and ("task" in row or row["name"].startswith("eval/"))]
    scored = scored or [row for row in rows if row["differences"]][:1]
    pairs = [(row, d) for row in scored for d in row["differences"]]
    if not pairs:
        return []
    if pairs[0][1]["unit"] == "problems":
        return [
            {
                "kind": "note",
                "link": row["link"],
                "text": single_verdict(d["baseline"], d["arm"], row["name"], _interval(d)),
            }
            for row, d in pairs
            if row["name"] == "pass@1"
        ]
    if "task" in scored[0] and "p" in pairs[0][1]:  # of a study
        arms = dict.fromkeys(d["arm"] for _, d in pairs)
        texts = [study_verdict(scored[0]["task"], [d for _, d in pairs if d["arm"] == arm]) for arm in arms]
    else:
        texts = [seeds_verdict([d for _, d in pairs])]
    return [{"kind": "note", "link": scored[0]["link"], "text": text} for text in texts]


def _interval(d: Mapping[str, Any]) -> Interval:
    return Interval(d["value"], d["low"], d["high"])


def _score_changes(runs: Sequence[Run], arms: Sequence[Json], rows: Sequence[Json]) -> list[Json]:
    """How each score changed during training; several arms in which it moved the same way share a sentence."""
    scored = [row for row in rows if "task" in row and any(x is not None for x in row["before"])]
    scored = scored or [row for row in rows if row["name"].startswith("eval/pass@")]
    tasks = {row.get("task") for row in scored}
    found: list[Json] = []
    for row in scored:
        score = f"{row['name']} on {row['task']}" if len(tasks) > 1 else row["name"]
        moved: dict[str, list[tuple[float, str]]] = {"bad": [], "good": [], "note": []}
        for arm in arms:
            pairs = [(i, row["before"][i], row["after"][i]) for i in arm["runs"]]
            changes = [(i, b - a) for i, a, b in pairs if a is not None and b is not None]
            if not changes:
                continue
            mean = sum(x for _, x in changes) / len(changes)
            change = _interval_of(runs, row, changes)
            noise = abs(mean) < 0.05 if change is None else change.low <= 0 <= change.high
            kind = "note" if noise else "bad" if mean < 0 else "good"
            who = arm["label"] if len(runs) > 1 else runs[0].name
            if change is not None:
                text = change_sentence(who, score, change)
            else:
                same = sum(x * mean > 0 for _, x in changes)
                text = f"{who}: {score} {'rose' if mean >= 0 else 'fell'} by {abs(100 * mean):.1f} points"
                text += f" on average, in {same} of {len(changes)} runs." if len(changes) > 1 else "."
            moved[kind].append((abs(mean), text))
        for kind, changed in moved.items():
            texts = [text for _, text in changed]
            if len(changed) > 2:
                verb = {"bad": "fell", "good": "rose", "note": "stayed within noise"}[kind]
                by = f", by {100 * min(changed)[0]:.1f} to {100 * max(changed)[0]:.1f} points" if kind != "note" else ""
                texts = [f"{score} {verb} in {len(changed)} of {len(arms)} arms{by}."]
            found += [{"kind": kind, "text": text, "link": row["link"]} for text in texts]
    return found


def _interval_of(runs: Sequence[Run], row: Json, changes: Sequence[tuple[int, float]]) -> Interval | None:
    """Of the change during training: over seeds, or over problems for a single run that kept its answers."""
    if len(changes) >= MIN_SEEDS:
        return paired_interval(np.array([[x] for _, x in changes]))
    if len(changes) > 1 or "task" not in row or len(runs) > MAX_PAIRED:
        return None
    run = runs[changes[0][0]]
    return _by_problem((run, "before"), (run, "after"), row["name"])


def _alarms(runs: Sequence[Run], arms: Sequence[Json]) -> list[Json]:
    """One finding per alarm: the first run that raised it, how often, and how many other runs did (of each arm of a
    study)."""
    raised: dict[str, dict[int, list[Json]]] = {}
    for i, run in enumerate(runs):
        for alarm in [*run.alarms, *remarks(run.metrics, run.alarms)]:
            raised.setdefault(str(alarm.get("alarm")), {}).setdefault(i, []).append(alarm)
    found = []
    for name, by_run in raised.items():
        i, alarms = next(iter(by_run.items()))
        others = len(by_run) - 1
        also = f" Also in {others} more run{'s' * (others > 1)}." if others else ""
        if runs[0].kind == "study":
            raising = [(sum(r in by_run for r in arm["runs"]), arm) for arm in arms]
            also = _listed([f"{n} of {len(arm['runs'])} runs of {arm['label']}" for n, arm in raising if n])
            also = f" In {also}."
        text = f"{_who(runs, i)}{alarms[0].get('message') or name}{_when(alarms)}{also}"
        link = f"#curves&chart={quote(METRIC_OF.get(name, ''), safe='')}"
        remedy = str(alarms[0].get("remedy") or "")
        found.append({"kind": "bad", "alarm": name, "text": text, "remedy": remedy, "link": link})
    return found


def _when(alarms: Sequence[Json]) -> str:
    steps = [alarm["step"] for alarm in alarms if isinstance(alarm.get("step"), int)]
    if not steps:
        return ""
    if len(steps) == 1:
        return f" (step {steps[0]})"
    return f" (step {steps[0]}, and {len(steps) - 1} more, last at step {steps[-1]})"


def _tokens(runs: Sequence[Run], groups: Sequence[Json]) -> list[Json]:
    found = []
    for i, seen in enumerate(groups):
        link = f"#groups&in={i + 1}" if len(runs) > 1 else "#groups"
        if seen["flipped"]:
            share = seen["flipped"] / seen["tokens"]
            text = flipped_sentence(seen["flipped_groups"], seen["groups"], seen["flipped"], share)
            found.append({"kind": "bad", "text": f"{_who(runs, i)}{text}", "link": f"{link}&with=flipped&by=flipped"})
        if seen["weighted"] and seen["sure"] > 0.5 * seen["tokens"]:
            text = sure_sentence(seen["sure"] / seen["tokens"], seen["threshold"])
            found.append({"kind": "note", "text": f"{_who(runs, i)}{text}", "link": f"{link}&with=all&by=sure"})
    return found
