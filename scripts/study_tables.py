"""The tables and the figure of docs/study.md and docs/study-details.md, from the runs in docs/results/study.

python scripts/study_tables.py           print the tables
python scripts/study_tables.py --write   put them into the page, and draw docs/images/study-effect.svg
"""

import json
import re
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, mean

from run_study import FIRST, RATES, TASKS
from scipy.stats import f_oneway

from dew.compare import Difference, Interval, Result, paired
from dew.compare.statistics import holm, t_test
from dew.compare.verdicts import markdown_table, signed
from dew.engines.lab import differences
from dew.engines.lab.summary import by_point
from dew.run.records import Json

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results" / "study"
PAGES = (DOCS / "study.md", DOCS / "study-details.md")
SCORES = ("area", "final", "pass@1", "pass@16")
SIZE_SCORES = ("area", "pass@1", "pass@16")
CONTROL = "gtpo(alpha1=1.1,alpha2=0.0)"
LATER = ("../alignment/confirm", "groups-16", "own-4")
POOLED = {
    "gtpo": (
        "select",
        "candidates",
        "confirm",
        "confirm-pools",
        "confirm-dew",
        "learned-confirm",
        "misreadings",
        *LATER,
    ),
    "dew": ("confirm-dew", "learned-confirm", *LATER),
}
"""All steps that compare the rule with DAPO at DAPO's rate and the plan's settings; of dew those on other seeds than
the ones it was selected on."""
S_CONTROL = "beta1=1.1,beta2=0.0)"
NAMES = {
    CONTROL: "gtpo's control",
    "dew(placebo=True)": "dew's placebo",
    FIRST: "dew, first defaults",
    f"grpo_s({S_CONTROL}": "grpo_s, equal weights",
    f"grpo_s(clip_low=0.03,clip_high=0.04,{S_CONTROL}": "the same, bounds 0.03 and 0.04",
    f"grpo_s(clip_low=0.01,clip_high=0.013,{S_CONTROL}": "the same, bounds 0.01 and 0.013",
    "grpo(clip_low=1.0,clip_high=1000.0)": "grpo without clipping",
    "grpo(clip_high=0.28)": "grpo, bounds 0.2 and 0.28",
    "gspo(clip_low=0.03,clip_high=0.04)": "gspo, bounds 0.03 and 0.04",
    "micro_batches": "shaped in micro-batches of four answers",
    "every_group": "groups without signal shaped too",
    "dapo(token_weight=learned)": "learned, half",
    "dapo(token_weight=learned,learned_share=1.0)": "learned, whole",
}


Runs = list[Result]
METRICS: dict[Path | None, list[Json]] = {}
"""The metrics of runs with learned credit, by their folders."""
SHOWN: dict[tuple[str, tuple[float, ...]], float] = {}
"""The p-values of all differences in the tables."""


@cache
def read(name: str) -> Runs:
    """The runs of one study, as `load_study` has them, without unpacking 1,500 small files."""
    with tarfile.open(RESULTS / f"{name}.tar.gz") as archive:
        files = {Path(entry.name): archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]
    arms, found = json.loads(files[Path("grid.json")])["arms"], []
    for folder in dict.fromkeys(path.parent for path in files if path.name == "run.json"):
        run, (scores,) = (json.loads(files[folder / name]) for name in ("run.json", "scores.json"))
        values = {name: score["value"] for name, score in scores["scores"].items()}
        found.append(Result(run["arm"], run["seed"], values, run["data"], run["learning_rate"], folder=folder))
        if "learned" in run["arm"]:
            METRICS[folder] = [json.loads(line) for line in files[folder / "metrics.jsonl"].splitlines()]
    return sorted(found, key=lambda r: (arms.index(r.arm), r.seed))


def tasks_of(runs: Runs) -> list[str]:
    return [task for task in dict.fromkeys((*TASKS, *(r.task for r in runs))) if any(r.task == task for r in runs)]


def average(runs: Sequence[Result], score: str) -> str:
    return f"{mean(r.scores[score] for r in runs):.3f}"


def tables() -> dict[str, str]:
    """The marked tables of the pages, by name."""
    found = {
        "pooled": pooled_table(),
        "rates": rates(read("select")),
        "confirm": confirmed(read("confirm")),
        "effect": effect(read("confirm")),
        "settings": varied(read("settings")),
        "candidates": by_task(read("candidates"), "area", "pass@1", "pass@16"),
        "confirm-dew": by_task(read("confirm-dew"), "area", "pass@1", "pass@16"),
        "pools": by_task(read("confirm-pools"), "area", "pass@1", "pass@16"),
        "grpo_s": by_task(read("grpo_s"), "area", "pass@1"),
        "grpo_s-1": varied(read("grpo_s-1")),
        "sizes": sizes(),
        "misreadings": varied(read("misreadings")),
        "rules": by_task(read("rules"), "area", "pass@1", "pass@16"),
        "learned-rates": rates(read("learned")),
        "learned": by_task(read("learned-confirm"), "area", "pass@1", "pass@16"),
        "learned-head": head(),
        "starts": starts([read(f"start-{n}") for n in (1, 2, 3, 4)]),
    }
    first_sizes()
    found |= {"surviving": surviving()}  # it counts the differences of those above
    return found | {"alignment": by_task(read("../alignment/confirm"), "area", "pass@1", "pass@16")}


def pooled(task: str, arm: str, score: str) -> tuple[int, Interval]:
    """A rule minus DAPO at DAPO's rate, averaged over a seed's runs in different steps, then over seeds."""
    by_seed: dict[int, list[float]] = {}
    for step in POOLED[arm]:
        runs = [r for r in read(step) if (r.task, r.learning_rate) == (task, RATES[task])]
        one, base = ({r.seed: r.scores[score] for r in arm_of(runs, task, name)} for name in (arm, "dapo"))
        for seed in one.keys() & base.keys():
            by_seed.setdefault(seed, []).append(one[seed] - base[seed])
    return len(by_seed), t_test([fmean(x) for x in by_seed.values()])[0]


def pooled_table() -> str:
    """All seeds at DAPO's rate."""
    columns = [(arm, score) for arm in POOLED for score in ("area", "pass@1", "pass@16")]
    head = [f"{arm} {'seeds, area' if score == 'area' else score}" for arm, score in columns]
    rows = []
    for task in TASKS:
        cells = [task]
        for arm, score in columns:
            seeds, d = pooled(task, arm, score)
            cells.append(f"{f'{seeds}: ' if score == 'area' else ''}{d.value:+.3f} ± {d.high - d.value:.3f}")
        rows.append(cells)
    return markdown_table(["− DAPO", *head], rows)


def rates(runs: Runs) -> str:
    """Mean area of every arm at every learning rate."""
    every = sorted({r.learning_rate for r in runs if r.learning_rate})
    rows = []
    for task in tasks_of(runs):
        for arm in dict.fromkeys(r.arm for r in runs):
            at = {rate: [r.scores["area"] for r in runs if (r.task, r.arm, r.learning_rate) == (task, arm, rate)]
                  for rate in every}  # fmt: skip
            best = max((mean(x) for x in at.values() if len(x) == 16), default=0.0)
            shown = [
                f"**{mean(x):.3f}**" if x and mean(x) == best else f"{mean(x):.3f}" if x else "" for x in at.values()
            ]
            rows.append([task, NAMES.get(arm, arm), *shown])
    return markdown_table(["task", "arm", *(f"{rate:g}" for rate in every)], rows)


def confirmed(runs: Runs) -> str:
    """Every arm at its best rate against DAPO at its own, on fresh seeds."""
    rows = []
    for task in tasks_of(runs):
        columns = {score: {d.arm: d for d in differences(runs, task, score)} for score in SCORES}
        for point, own in by_point(runs, task).items():
            arm, rate = own[0].arm, own[0].learning_rate
            cells = [average(own, s) if arm == "dapo" else shown(columns[s][point]) for s in SCORES]
            cells += [average(own, name) for name in ("entropy", "flipped")]
            rows.append([task, NAMES.get(arm, arm), f"{rate:g}", *cells])
    return markdown_table(["task", "arm", "rate", *SCORES, "entropy", "flipped"], rows)


def effect(runs: Runs) -> str:
    """The weighting alone: GTPO minus its control at the same rate, with Holm's correction over the tasks."""
    pairs = {task: [arm_of(runs, task, arm) for arm in ("gtpo", CONTROL)] for task in tasks_of(runs)}
    rows = {task: [task, f"{mean(r.scores['length'] for r in gtpo):.0f}"] for task, (gtpo, _) in pairs.items()}
    for score in SCORES:
        found = [difference(*both, score) for both in pairs.values()]
        for task, d, p in zip(pairs, found, holm([d.p for d in found]), strict=True):
            rows[task].append(shown(replace(d, holm=p)))
    return markdown_table(["task", "tokens", *SCORES], rows.values())


def arm_of(runs: Runs, task: str, arm: str) -> Runs:
    """The runs of an arm that was trained at one learning rate."""
    return [r for r in runs if (r.task, r.arm) == (task, arm)]


def difference(runs: Runs, reference: Runs, score: str) -> Difference:
    """Of two arms, without a correction for others."""
    both = ({r.seed: r.scores[score] for r in arm} for arm in (runs, reference))
    found = paired(*both, arm=runs[0].arm, baseline=reference[0].arm, score=score)
    assert found is not None
    return found


def varied(runs: Runs) -> str:
    """Arms of one task against the first."""
    (task,) = tasks_of(runs)
    columns = {score: {d.arm: d for d in differences(runs, task, score)} for score in SCORES}
    (first, own), *others = by_point(runs, task).items()
    rows = [[first, *(average(own, score) for score in SCORES), "0.000"]]
    for arm, of in others:
        cells = [shown(columns[score][arm]) for score in SCORES]
        rows.append([NAMES.get(arm, arm), *cells, average(of, "flipped")])
    return markdown_table(["arm", *SCORES, "flipped"], rows)


def by_task(runs: Runs, *scores: str) -> str:
    """Arms against the first, a column for each task and score; each task has learning rates of its own."""
    columns = [(task, score) for score in scores for task in tasks_of(runs)]
    rows: dict[str, list[str]] = {r.arm: [] for r in runs}
    for task, score in columns:
        points = by_point(runs, task)
        found = {points[d.arm][0].arm: shown(d) for d in differences(runs, task, score)}
        found[runs[0].arm] = average(arm_of(runs, task, runs[0].arm), score)
        for arm, cells in rows.items():
            cells.append(found[arm])
    named = [[NAMES.get(arm, arm), *cells] for arm, cells in rows.items()]
    return markdown_table(["arm", *map(" ".join, columns)], named)


def sizes() -> str:
    """The rules against DAPO by optimizer steps, each at its own rate, and by group size, on countdown-6."""
    arms = ("gtpo", "dew", "dew(placebo=True)")
    columns = [f"{NAMES.get(arm, arm)} {score}" for score in SIZE_SCORES for arm in ("dapo", *arms)]
    steps = [(f"optimizer steps: {n}", f"own-{n}") for n in (1, 2, 4, 8)]
    steps += [(f"groups of {n}", f"groups-{n}") for n in (4, 8, 16, 32)]
    rows = []
    for name, step in steps:
        dapo, *others = (arm_of(read(step), "countdown-6", arm) for arm in ("dapo", *arms))
        cells = []
        for score in SIZE_SCORES:
            cells += [average(dapo, score), *(shown(difference(arm, dapo, score)) if arm else "" for arm in others)]
        rate = ", ".join(f"{x:g}" for x in sorted({r.learning_rate or 0 for r in read(step)}))
        rows.append([name, rate, *cells])
    return markdown_table(["setting", "rate", *columns], rows)


def starts(by_start: Sequence[Runs]) -> str:
    """Step 10: rules minus DAPO over several warm starts. Holm's correction is over tasks and rules."""
    head = ("score", "task", "rule", "starts", "over starts", "p", "all pairs", "starts differ, p", "minus placebo")
    rows = []
    for score in ("area", "pass@1"):
        found = {
            (task, rule): compared(by_start, task, rule, "dapo", score) for task in TASKS for rule in ("gtpo", "dew")
        }
        tests = [[t_test([fmean(x) for x in pairs])[1] for pairs in found.values()]]
        tests.append([float(f_oneway(*pairs).pvalue) for pairs in found.values()])
        for ((task, rule), pairs), p, apart in zip(found.items(), *map(holm, tests), strict=True):
            placebo = compared(by_start, task, rule, f"{rule}(placebo=True)", score)
            over, than_placebo = (signed(t_test([fmean(x) for x in of])[0]) for of in (pairs, placebo))
            every = signed(t_test([d for x in pairs for d in x])[0])
            rows.append([score, task, rule, str(len(pairs)), over, f"{p:.3f}", every, f"{apart:.3f}", than_placebo])
    return markdown_table(head, rows)


def compared(by_start: Sequence[Runs], task: str, arm: str, than: str, score: str) -> list[tuple[float, ...]]:
    """Of each start with runs of the task, the differences between two arms by seed."""
    of = [runs for runs in by_start if task in tasks_of(runs)]
    return [difference(arm_of(runs, task, arm), arm_of(runs, task, than), score).by_pair for runs in of]


def first_sizes() -> None:
    """Count the differences of this table's first version, with the rejected defaults, among those of the page."""
    for step in (*(f"group-{n}" for n in (4, 8, 32)), *(f"steps-{n}" for n in (1, 2, 8))):
        dapo, *others = (arm_of(read(step), "countdown-6", arm) for arm in ("dapo", "gtpo", FIRST))
        for score in SIZE_SCORES:
            for arm in others:
                shown(difference(arm, dapo, score))


def head() -> str:
    """How well learned credit predicts the outcome, in the first and the last quarter of training."""
    names = {"auc_first": "AUC first third", "auc_middle": "middle", "auc_last": "last", "brier": "Brier score"}
    runs, rows = read("learned-confirm"), []
    for task in tasks_of(runs):
        for arm in (arm for arm in NAMES if "learned" in arm):
            own = arm_of(runs, task, arm)
            curves = {name: [[m[f"value/{name}"] for m in METRICS[r.folder]] for r in own] for name in names}
            cells = [" → ".join(f"{mean(curve[i] for curve in curves[name]):.3f}" for i in (0, 3)) for name in names]
            rows.append([task, NAMES[arm], f"{own[0].learning_rate:g}", *cells])
    return markdown_table(["task", "arm", "rate", *names.values()], rows)


def surviving() -> str:
    """p-values of GTPO and dew on fresh seeds after Holm's correction over every difference in the tables."""
    corrected, runs = dict(zip(SHOWN, holm(list(SHOWN.values())), strict=True)), read("confirm-dew")
    columns = [(arm, score) for arm in ("gtpo", "dew") for score in ("area", "pass@1")]
    rows = []
    for task in tasks_of(runs):
        dapo = arm_of(runs, task, "dapo")
        found = (difference(arm_of(runs, task, arm), dapo, score) for arm, score in columns)
        rows.append([task, *(f"{corrected[d.score, d.by_pair]:.3f}" for d in found)])
    return markdown_table([f"p, of {len(SHOWN)} differences", *map(" ".join, columns)], rows)


def shown(d: Difference) -> str:
    """A star marks p < 0.05, corrected if it is one of several arms."""
    SHOWN[d.score, d.by_pair] = d.p
    return f"{d.value:+.3f} ± {d.high - d.value:.3f}{'*' if d.holm < 0.05 else ''}"


def figure() -> str:
    """Differences from DAPO in area and pass@1 with their intervals, a row per task and arm."""
    runs = read("confirm-dew")
    colours = {"gtpo": "#2864dc", FIRST: "#888888", "dew": "#d75f00"}
    panels = {"area": ("mean accuracy during training", 380), "pass@1": ("pass@1 after training", 720)}
    rows = {
        (t, by_point(runs, t)[d.arm][0].arm): i
        for i, (t, d) in enumerate((t, d) for t in tasks_of(runs) for d in differences(runs, t))
    }
    height, scale, top = 22, 2600, 64
    below = top + height * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="930" height="{below + 40}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="16" y="24" font-size="15">Differences from DAPO (32 seeds, unadjusted 95% intervals)</text>',
    ]
    for (task, arm), i in rows.items():
        y = top + height * i + 12
        if arm == next(a for t, a in rows if t == task):
            parts.append(f'<text x="16" y="{y}">{task}</text>')
        parts.append(f'<text x="110" y="{y}" fill="{colours[arm]}">{NAMES.get(arm, arm)}</text>')
    for score, (title, zero) in panels.items():
        parts.append(f'<text x="{zero - 100}" y="46">{title}</text>')
        parts.append(f'<line x1="{zero}" x2="{zero}" y1="{top - 8}" y2="{below}" stroke="#444"/>')
        for task in tasks_of(runs):
            for d in differences(runs, task, score):
                arm = by_point(runs, task)[d.arm][0].arm
                y = top + height * rows[task, arm] + 8
                x, low, high = (zero + scale * v for v in (d.value, d.low, d.high))
                line = f'x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}" stroke="{colours[arm]}"'
                parts += [
                    f'<line {line} stroke-width="3"/>',
                    f'<circle cx="{x:.1f}" cy="{y}" r="5" fill="{colours[arm]}"/>',
                    f'<text x="{zero + 200}" y="{y + 4}" text-anchor="end">{d.value:+.3f}</text>',
                ]
        parts += [
            f'<text x="{zero + scale * tick:.0f}" y="{below + 18}" text-anchor="middle" fill="#444">{tick:+.2f}</text>'
            for tick in (-0.02, 0, 0.02, 0.04)
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def with_tables(text: str, made: dict[str, str]) -> str:
    """A page with these tables between its marks, `<!-- name -->` and `<!-- end -->`."""
    for name, table in made.items():
        new = f"<!-- {name} -->\n\n{table}\n<!-- end -->"
        text = re.sub(f"<!-- {name} -->.*?<!-- end -->", lambda _, new=new: new, text, flags=re.DOTALL)
    return text


def main() -> None:
    made = tables()
    if "--write" not in sys.argv:
        print("\n\n".join(f"{name}\n{table}" for name, table in made.items()))
        return
    for page in PAGES:
        page.write_text(with_tables(page.read_text(), made))
    (DOCS / "images" / "study-effect.svg").write_text(figure())


if __name__ == "__main__":
    main()
