"""What the runs show, in words: verdicts, scores that rose or fell, alarms, and what the recorded tokens tell.

A finding is {kind, text, remedy?, link?}; kind is good, bad or note, and the link is an address within the page.
"""

from collections.abc import Sequence
from urllib.parse import quote

import numpy as np

from dew.compare import Difference, paired, verdicts
from dew.compare.results import by_problem
from dew.compare.verdicts import change_sentence, listed
from dew.report.readers import Run
from dew.report.results import EVAL_PASS, answers_of
from dew.report.tokens import SURE
from dew.run.alarms import Alarms
from dew.run.records import Json

MIN_STEPS = 20
"""Shorter runs are not checked for a flat reward."""
MAX_CHECKED = 20_000
"""Steps of all runs that are checked again for alarms: the first and the last ones of each."""
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


# ── alarms checked afterwards ───────────────────────────────────────────────────────────────────────────────


def remarks(metrics: Sequence[Json], alarms: Sequence[Json], most: int = MAX_CHECKED) -> list[Json]:
    """The first alarm of each rule, checked afterwards (other trainers have no alarms), and a flat reward."""
    rules = Alarms()
    checked = [*metrics[:MIN_STEPS], *metrics[MIN_STEPS:][-most:]]
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


def findings_of(runs: Sequence[Run], arms: Sequence[Json], rows: Sequence[Json], seen: Sequence[Json]) -> list[Json]:
    """Verdicts, then scores, alarms and what the recorded tokens show, the bad first.

    `seen` counts the recorded tokens of each run: {groups, flipped_groups, flipped, tokens, sure, weighted}.
    """
    found = [*_score_changes(runs, arms, rows), *_alarms(runs, arms), *_tokens(runs, arms, seen)]
    found += [{"kind": "note", "text": f"{_who(runs, i)}{n}"} for i, run in enumerate(runs) for n in run.notices]
    order = {"bad": 0, "good": 1, "note": 2}
    return [*_verdicts(rows), *sorted(found, key=lambda finding: order[finding["kind"]])]


def _who(runs: Sequence[Run], i: int) -> str:
    return f"{runs[i].name}: " if len(runs) > 1 else ""


def _verdicts(rows: Sequence[Json]) -> list[Json]:
    scored = [row for row in rows if row["differences"] and ("task" in row or row["name"].startswith("eval/"))]
    scored = scored or [row for row in rows if row["differences"]][:1]
    judged = [*scored, *(row for row in rows if row["name"] == "entropy" and row not in scored)]
    texts = verdicts([d for row in judged for d in row["differences"]])
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
    change = _difference(runs, arm, row)
    if change is None:
        return None
    noise = abs(change.value) < 0.05 if change.too_few else change.within_noise
    text = change_sentence(arm["label"] if len(runs) > 1 else runs[0].name, change, score)
    return "note" if noise else "bad" if change.value < 0 else "good", abs(change.value), text


def _difference(runs: Sequence[Run], arm: Json, row: Json) -> Difference | None:
    """The change during training: over problems for a single run that kept its answers, else over seeds."""
    after, before = ({i: x for i in arm["runs"] if (x := row[when][i]) is not None} for when in ("after", "before"))
    common = [i for i in after if i in before]
    if len(common) == 1 and "task" in row and len(runs) <= MAX_PAIRED:
        folder = runs[common[0]].folder
        if found := by_problem(answers_of(folder), answers_of(folder, "before"), row["name"]):
            return found
    return paired(after, before, arm="after", baseline="before", score=row["name"])


def _alarms(runs: Sequence[Run], arms: Sequence[Json]) -> list[Json]:
    """One finding per alarm: the first run that raised it, how often, and how many other runs did, or of each arm."""
    raised: dict[str, dict[int, list[Json]]] = {}
    for i, run in enumerate(runs):
        for alarm in [*run.alarms, *remarks(run.metrics, run.alarms, MAX_CHECKED // len(runs))]:
            raised.setdefault(str(alarm.get("alarm")), {}).setdefault(i, []).append(alarm)
    found = []
    for name, by_run in raised.items():
        i, alarms = next(iter(by_run.items()))
        others = len(by_run) - 1
        also = f" Also in {others} more run{'s' * (others > 1)}." if others else ""
        if any(len(arm["runs"]) > 1 for arm in arms):
            raising = [(sum(r in by_run for r in arm["runs"]), arm) for arm in arms]
            counts = [f"{n} of {len(arm['runs'])} runs of {arm['label']}" for n, arm in raising if n]
            also = f" In {listed(counts)}."
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
                f"{100 * count['flipped'] / count['tokens']:.1f}% of those that train."
            )
            found.append({"kind": "bad", "text": text, "link": f"{link}&with=flipped&by=flipped"})
        if count["weighted"] and count["sure"] > 0.5 * count["tokens"]:
            text = (
                f"{who}{100 * count['sure'] / count['tokens']:.0f}% of the recorded tokens have an entropy below "
                f"{SURE:g} nats. Weights there compare numbers that are close to rounding noise."
            )
            found.append({"kind": "note", "text": text, "link": f"{link}&with=all&by=sure"})
    return found
