"""What the runs show, in words: verdicts, scores that rose or fell, alarms, and what the recorded tokens tell.

The sentences are the same in the terminal (`dew demo`, `dew compare`) and on the page. A finding is
{kind, text, remedy?, link?}; kind is good, bad or note, and the link is an address within the page.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from dew.compare.comparison import MIN_SEEDS
from dew.compare.statistics import Interval, paired_interval
from dew.report.readers import Run
from dew.report.results import EVAL_PASS, by_problem
from dew.report.tokens import SURE
from dew.run.alarms import Alarms
from dew.run.records import Json

MIN_STEPS = 20
"""Shorter runs are not checked for a flat reward."""
MAX_CHECKED = 2000
"""Steps checked again for alarms; of a longer run, the first and the last ones."""
MAX_PAIRED = 16
"""Runs whose evaluated answers are read, to pair scores by problem."""

METRIC_OF = {
    "never_correct": "accuracy", "no_signal": "groups/mixed_share", "truncated": "length/truncated_share",
    "entropy_collapse": "entropy", "entropy_explosion": "entropy", "one_token_takes_all": "credit/top1_share",
    "off_policy": "ratio/abs_log", "sampler_mismatch": "sampler/kl",
    "clipped": "clip/high", "never_clips": "kl/approx", "no_gradient": "grad_norm", "not_finite": "grad_norm",
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
    sign = "+" if change.value >= 0 else "−"
    gap = f"{b} − {a} in {score} after training, paired by problem: {sign}{points(change)}."
    if change.low <= 0 <= change.high:
        return f"{gap} That is within noise: these runs do not show which of the two is better."
    ahead = b if change.value > 0 else a
    return f"{gap} {ahead} is ahead here, in one run each: another seed may reverse it."


def seeds_verdict(differences: Sequence[Mapping[str, Any]]) -> str:
    """Which of the paired differences (algorithm, baseline, score, verdict, within_noise) exceed noise."""
    clear = "; ".join(f"{d['verdict']} in {score_title(d['score'])}" for d in differences if not d["within_noise"])
    if not clear and any("too few seeds" in d["verdict"] for d in differences):
        return f"Too few seeds to tell a difference from noise; train at least {MIN_SEEDS}."
    if not clear:
        return "Every difference is within noise: these runs do not separate the algorithms."
    chance = f"About one in twenty of the {len(differences)} intervals at 95 % misses by chance."
    return f"Larger than noise: {clear}. Any others are within noise. {chance}"


TITLES = {"area": "area under training accuracy", "final": "final accuracy"}
"""Scores of the training accuracy; the others are measured after it."""


def score_title(score: str) -> str:
    return TITLES.get(score, f"{score} after")


def study_verdicts(task: str, differences: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence for each arm of a study that differs from its baseline, and one for all that do not."""
    by_arm: dict[str, list[Mapping[str, Any]]] = {}
    for d in differences:
        by_arm.setdefault(d["arm"], []).append(d)
    noise = [arm for arm, found in by_arm.items() if all(d["within_noise"] and d["pairs"] >= MIN_SEEDS for d in found)]
    texts = [f"{task}: {_arm_verdict(arm, found)}." for arm, found in by_arm.items() if arm not in noise]
    if noise:
        found = by_arm[noise[0]]
        scores, verb = _listed([TITLES.get(d["score"], d["score"]) for d in found]), "is" if len(noise) == 1 else "are"
        texts.append(f"{task}: {_listed(noise)} {verb} within noise of {found[0]['baseline']} in {scores}.")
    return texts


def _arm_verdict(arm: str, differences: Sequence[Mapping[str, Any]]) -> str:
    baseline = differences[0]["baseline"]
    few = next((d["verdict"] for d in differences if d["pairs"] < MIN_SEEDS), None)
    if few:
        return f"{arm} against {baseline}: {few}"
    ahead: list[str] = []
    behind: list[str] = []
    noise: list[str] = []
    for d in differences:
        title = TITLES.get(d["score"], d["score"])
        if d["within_noise"]:
            noise.append(title)
            continue
        interval = "" if ahead or behind else "95 % interval "
        sizes = sorted(abs(d[name]) for name in ("low", "value", "high"))
        low, value, high = (f"{x:.3f}" if x >= 0.001 else f"{x:.1g}" for x in sizes)
        (ahead if d["value"] > 0 else behind).append(f"{title} by {value} ({interval}{low} to {high})")
    parts = {f"ahead of {baseline}": ahead, f"behind {'it' if ahead else baseline}": behind, "within noise": noise}
    return f"{arm} is {'; '.join(f'{words} in {_listed(texts)}' for words, texts in parts.items() if texts)}"


def _listed(texts: Sequence[str]) -> str:
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


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


# ── findings ────────────────────────────────────────────────────────────────────────────────────────────────


def findings_of(
    runs: Sequence[Run],
    arms: Sequence[Json],
    rows: Sequence[Json],
    seen: Sequence[Json],
    verdicts: Sequence[str] = (),
) -> list[Json]:
    """Verdicts (those of a study, if given), then scores, alarms and what the recorded tokens show, the bad first.

    `seen` counts the recorded tokens of each run: {groups, flipped_groups, flipped, tokens, sure, weighted}.
    """
    said = [{"kind": "note", "text": verdict, "link": rows[0]["link"] if rows else None} for verdict in verdicts]
    found = [*_score_changes(runs, arms, rows), *_alarms(runs, arms), *_tokens(runs, arms, seen)]
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
        found = [(row, d, Interval(d["value"], d["low"], d["high"])) for row, d in pairs if row["name"] == "pass@1"]
        said = [(row, single_verdict(d["baseline"], d["arm"], row["name"], change)) for row, d, change in found]
        return [{"kind": "note", "link": row["link"], "text": text} for row, text in said]
    if "task" in scored[0] and "p" in pairs[0][1]:  # of a study
        texts = study_verdicts(scored[0]["task"], [d for _, d in pairs])
    else:
        texts = [seeds_verdict([d for _, d in pairs])]
    return [{"kind": "note", "link": scored[0]["link"], "text": text} for text in texts]


def _score_changes(runs: Sequence[Run], arms: Sequence[Json], rows: Sequence[Json]) -> list[Json]:
    """How each score changed during training; several arms in which it moved the same way share a sentence."""
    scored = [row for row in rows if "task" in row and any(x is not None for x in row["before"])]
    scored = scored or [row for row in rows if EVAL_PASS.match(row["name"])]
    tasks = {row.get("task") for row in scored}
    found: list[Json] = []
    for row in scored:
        score = f"{row['name']} on {row['task']}" if len(tasks) > 1 else row["name"]
        changes = [change for arm in arms if (change := _score_change(runs, arm, row, score))]
        for kind, verb in (("bad", "fell"), ("good", "rose"), ("note", "stayed within noise")):
            texts = [text for of, _, text in changes if of == kind]
            if len(texts) > 2:
                sizes = [100 * size for of, size, _ in changes if of == kind]
                by = f", by {min(sizes):.1f} to {max(sizes):.1f} points" if kind != "note" else ""
                texts = [f"{score} {verb} in {len(texts)} of {len(arms)} arms{by}."]
            found += [{"kind": kind, "text": text, "link": row["link"]} for text in texts]
    return found


def _score_change(runs: Sequence[Run], arm: Json, row: Json, score: str) -> tuple[str, float, str] | None:
    """An arm's change of a score: the kind of finding, its size, and a sentence; None if it was not measured twice."""
    ends = [(i, row["before"][i], row["after"][i]) for i in arm["runs"]]
    changes = [(i, after - before) for i, before, after in ends if before is not None and after is not None]
    if not changes:
        return None
    mean = sum(x for _, x in changes) / len(changes)
    change = _interval_of(runs, row, changes)
    noise = abs(mean) < 0.05 if change is None else change.low <= 0 <= change.high
    who = arm["label"] if len(runs) > 1 else runs[0].name
    if change is not None:
        text = change_sentence(who, score, change)
    else:
        same = sum(x * mean > 0 for _, x in changes)
        text = f"{who}: {score} {'rose' if mean >= 0 else 'fell'} by {abs(100 * mean):.1f} points"
        text += f" on average, in {same} of {len(changes)} runs." if len(changes) > 1 else "."
    return "note" if noise else "bad" if mean < 0 else "good", abs(mean), text


def _interval_of(runs: Sequence[Run], row: Json, changes: Sequence[tuple[int, float]]) -> Interval | None:
    """Of the change during training: over seeds, or over problems for a single run that kept its answers."""
    if len(changes) >= MIN_SEEDS:
        return paired_interval(np.array([[x] for _, x in changes]))
    if len(changes) > 1 or "task" not in row or len(runs) > MAX_PAIRED:
        return None
    run = runs[changes[0][0]]
    return by_problem((run, "before"), (run, "after"), row["name"])


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
            counts = [f"{n} of {len(arm['runs'])} runs of {arm['label']}" for n, arm in raising if n]
            also = f" In {_listed(counts)}."
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


def _tokens(runs: Sequence[Run], arms: Sequence[Json], seen: Sequence[Json]) -> list[Json]:
    """What the recorded tokens of each arm show."""
    found = []
    for arm in arms if seen else ():
        count = {name: sum(seen[i][name] for i in arm["runs"]) for name in seen[0]}
        who = f"{arm['label']}: " if len(runs) > 1 else ""
        link = f"#groups&in={arm['runs'][0] + 1}" if len(arm["runs"]) == 1 < len(runs) else "#groups"
        if count["flipped"]:
            text = (
                f"{who}{count['flipped_groups']:,} of {count['groups']:,} recorded groups have credit of the wrong "
                f"sign, rewarded in a wrong answer or penalised in a correct one: {count['flipped']:,} tokens, "
                f"{100 * count['flipped'] / count['tokens']:.1f} % of those that train."
            )
            found.append({"kind": "bad", "text": text, "link": f"{link}&with=flipped&by=flipped"})
        if count["weighted"] and count["sure"] > 0.5 * count["tokens"]:
            text = (
                f"{who}{100 * count['sure'] / count['tokens']:.0f} % of the recorded tokens have an entropy below "
                f"{SURE:g} nats. Weights there compare numbers that are close to rounding noise."
            )
            found.append({"kind": "note", "text": text, "link": f"{link}&with=all&by=sure"})
    return found
