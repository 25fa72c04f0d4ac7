"""The tables and the figure of docs/study.md, from the runs in docs/results/study.

python scripts/study_tables.py           print the tables
python scripts/study_tables.py --write   put them into docs/study.md, and draw docs/images/study-effect.svg
"""

import re
import sys
from pathlib import Path
from statistics import mean

from dew.engines.lab import load_study
from dew.engines.lab.study import Study
from dew.engines.lab.summary import SCORES, Difference, difference, differences, points, values

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results" / "study"
CONTROL = "gtpo(alpha1=1.1,alpha2=0.0)"
S_CONTROL = "beta1=1.1,beta2=0.0)"
FIRST = "dew(spread=correct,alpha1=0.0,alpha2=1.0)"
NAMES = {
    CONTROL: "gtpo's control",
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


def tables() -> dict[str, str]:
    """The marked tables of docs/study.md, by name."""
    found = {path.parent.name: load_study(path.parent) for path in sorted(RESULTS.glob("*/study.json"))}
    return {
        "rates": rates(found["select"]),
        "confirm": confirmed(found["confirm"]),
        "effect": effect(found["confirm"]),
        "settings": varied(found["settings"]),
        "candidates": by_task(found["candidates"], "area", "pass@k"),
        "confirm-dew": by_task(found["confirm-dew"], "area", "pass@1", "pass@k"),
        "pools": by_task(found["confirm-pools"], "area", "pass@k"),
        "grpo_s": by_task(found["grpo_s"], "area", "pass@1"),
        "grpo_s-1": varied(found["grpo_s-1"]),
        "sizes": sizes(found),
        "misreadings": varied(found["misreadings"]),
        "rules": by_task(found["rules"], "area", "pass@k"),
        "learned-rates": rates(found["learned"]),
        "learned": by_task(found["learned-confirm"], "area", "pass@1", "pass@k"),
        "learned-head": head(found["learned-confirm"]),
    }


def rates(study: Study) -> str:
    """Mean area of every arm at every learning rate."""
    every = sorted({run["learning_rate"] for run in study.runs})
    lines = [f"| task | arm | {' | '.join(f'{rate:g}' for rate in every)} |", "|---" * (2 + len(every)) + "|"]
    for task in study.tasks:
        for arm in study.arms:
            found = [list(values(study, task, (arm, rate), "area").values()) for rate in every]
            best = max((mean(x) for x in found if len(x) == 16), default=0.0)
            shown = [f"**{mean(x):.3f}**" if x and mean(x) == best else f"{mean(x):.3f}" if x else "" for x in found]
            lines.append(f"| {task} | {NAMES.get(arm, arm)} | {' | '.join(shown)} |")
    return "\n".join(lines)


def confirmed(study: Study) -> str:
    """Every arm at its best rate against DAPO at its own, on fresh seeds."""
    lines = ["| task | arm | rate | area | final | pass@1 | pass@16 | entropy | flipped |", "|---" * 9 + "|"]
    for task in study.tasks:
        columns = {score: {d.arm: d for d in differences(study, task, score)} for score in SCORES}
        for point in points(study, task):
            if point[0] == "dapo":
                cells = [f"{mean(values(study, task, point, score).values()):.3f}" for score in SCORES]
            else:
                cells = [shown(columns[score][point]) for score in SCORES]
            others = [f"{mean(values(study, task, point, name).values()):.3f}" for name in ("entropy", "flipped")]
            name = NAMES.get(point[0], point[0])
            lines.append(f"| {task} | {name} | {point[1]:g} | {' | '.join(cells + others)} |")
    return "\n".join(lines)


def effect(study: Study) -> str:
    """The weighting alone: GTPO minus its control at the same rate."""
    lines = ["| task | tokens | area | final | pass@1 | pass@16 |", "|---" * 6 + "|"]
    for task in study.tasks:
        gtpo = next(p for p in points(study, task) if p[0] == "gtpo")
        cells = [shown(difference(study, task, gtpo, (CONTROL, gtpo[1]), score)) for score in SCORES]
        length = mean(values(study, task, gtpo, "length").values())
        lines.append(f"| {task} | {length:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def varied(study: Study) -> str:
    """Arms of one task against the first."""
    (task,) = study.tasks
    columns = {score: {d.arm: d for d in differences(study, task, score)} for score in SCORES}
    first, *others = points(study, task)
    own = [f"{mean(values(study, task, first, score).values()):.3f}" for score in SCORES]
    lines = ["| arm | area | final | pass@1 | pass@16 | flipped |", "|---" * 6 + "|"]
    lines += [f"| {first[0]} | {' | '.join(own)} | 0.000 |"]
    for point in others:
        flipped = mean(values(study, task, point, "flipped").values())
        cells = " | ".join(shown(columns[score][point]) for score in SCORES)
        lines.append(f"| {NAMES.get(point[0], point[0])} | {cells} | {flipped:.3f} |")
    return "\n".join(lines)


def by_task(study: Study, *scores: str) -> str:
    """Arms against the first, a column for each task and score; each task has learning rates of its own."""
    columns = [(task, score) for score in scores for task in study.tasks]
    heads = [f"{task} {score}".replace("@k", "@16") for task, score in columns]
    rows: dict[str, list[str]] = {arm: [] for arm in study.arms}
    for task, score in columns:
        found = {d.arm[0]: shown(d) for d in differences(study, task, score)}
        first = points(study, task)[0]
        found[first[0]] = f"{mean(values(study, task, first, score).values()):.3f}"
        for arm in study.arms:
            rows[arm].append(found[arm])
    lines = [f"| arm | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    return "\n".join(lines + [f"| {NAMES.get(arm, arm)} | {' | '.join(cells)} |" for arm, cells in rows.items()])


def sizes(found: dict[str, Study]) -> str:
    """GTPO and dew against DAPO by group size and by optimizer steps, on countdown-6."""
    lines = ["| setting | dapo area | gtpo area | dew area | dapo pass@16 | gtpo pass@16 | dew pass@16 |"]
    lines += ["|---" * 7 + "|"]
    rows = [(f"groups of {n}", f"group-{n}" if n != 16 else "candidates") for n in (4, 8, 16, 32)]
    rows += [(f"optimizer steps: {n}", f"steps-{n}" if n != 4 else "candidates") for n in (1, 2, 4, 8)]
    for name, step in rows:
        study, task, cells = found[step], "countdown-6", []
        dapo, gtpo, dew = (next(p for p in points(study, task) if p[0] == arm) for arm in ("dapo", "gtpo", FIRST))
        for score in ("area", "pass@k"):
            cells.append(f"{mean(values(study, task, dapo, score).values()):.3f}")
            both = (difference(study, task, arm, dapo, score) for arm in (gtpo, dew))
            cells += [shown(d, d is not None and d.p < 0.05) for d in both]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def head(study: Study) -> str:
    """How well learned credit predicts the outcome, in the first and the last quarter of training."""
    names = {"auc_first": "AUC first third", "auc_middle": "middle", "auc_last": "last", "brier": "Brier score"}
    lines = [f"| task | arm | rate | {' | '.join(names.values())} |", "|---" * (3 + len(names)) + "|"]
    for task in study.tasks:
        for arm, rate in points(study, task):
            runs = [run["curves"] for run in study.runs if (run["task"], run["arm"]) == (task, arm) and run["curves"]]
            cells = [" → ".join(f"{mean(run[name][i] for run in runs):.3f}" for i in (0, 3)) for name in names if runs]
            if runs:
                lines.append(f"| {task} | {NAMES[arm]} | {rate:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(d: Difference | None, beyond_noise: bool | None = None) -> str:
    assert d is not None
    star = d.holm < 0.05 if beyond_noise is None else beyond_noise
    return f"{d.value:+.3f} ± {d.high - d.value:.3f}{'*' if star else ''}"


def figure() -> str:
    """Differences from DAPO with their intervals, a row per task and arm."""
    study = load_study(RESULTS / "confirm-dew")
    colours = {"gtpo": "#2864dc", FIRST: "#888888", "dew": "#d75f00"}
    rows = [(t, d) for t in study.tasks for d in differences(study, t)]
    height, zero, scale, top = 22, 350, 7000, 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{top + height * len(rows) + 40}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="16" y="24" font-size="15">Mean accuracy during training, difference from DAPO '
        "(32 seeds, unadjusted 95 % intervals)</text>",
        f'<line x1="{zero}" x2="{zero}" y1="{top - 8}" y2="{top + height * len(rows)}" stroke="#444"/>',
    ]
    for i, (task, d) in enumerate(rows):
        y = top + height * i + 8
        x, low, high = (zero + scale * v for v in (d.value, d.low, d.high))
        colour = colours[d.arm[0]]
        if i == 0 or rows[i - 1][0] != task:
            parts.append(f'<text x="16" y="{y + 4}">{task}</text>')
        parts += [
            f'<text x="110" y="{y + 4}" fill="{colour}">{NAMES.get(d.arm[0], d.arm[0])}</text>',
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>',
            f'<circle cx="{x:.1f}" cy="{y}" r="5" fill="{colour}"/>',
            f'<text x="640" y="{y + 4}">{d.value:+.3f}</text>',
        ]
    base = top + height * len(rows) + 18
    for tick in (-0.01, 0, 0.01, 0.02, 0.03):
        parts.append(f'<text x="{zero + scale * tick - 16:.0f}" y="{base}" fill="#444">{tick:+.2f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    page = DOCS / "study.md"
    if "--write" not in sys.argv:
        print("\n\n".join(f"{name}\n{table}" for name, table in tables().items()))
        return
    text = page.read_text()
    for name, table in tables().items():
        start, end = f"<!-- {name} -->\n\n", "\n\n<!-- end -->"
        text = re.sub(f"<!-- {name} -->.*?<!-- end -->", lambda _, t=start + table + end: t, text, flags=re.DOTALL)
    page.write_text(text)
    (DOCS / "images" / "study-effect.svg").write_text(figure())


if __name__ == "__main__":
    main()
