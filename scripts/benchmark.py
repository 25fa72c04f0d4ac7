"""Run the benchmark of docs/benchmark.md in pieces, and write its page.

    python scripts/benchmark.py status                        what is finished and what is missing
    python scripts/benchmark.py run STAGE [TASK ...] --model FOLDER --limit-seconds 500
    python scripts/benchmark.py page                          docs/benchmark-results.md and its images

`run` trains the next runs of a stage for about that long, and adds them to --data as an archive. Re-run the same
command until nothing is missing. A stack that was interrupted continues if --work is still there. Once you have seen
how many runs fit into the time, --runs-at-once saves measuring larger stacks.
Stages: start, replication, stage1, screen, stage2, stage3; the later ones follow from the earlier ones' results. Data
sets are those of `dew train` (DEW_DATA). --model is for tasks with the same model; its folder should have the model's
name.
"""

import argparse
import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir
from datetime import datetime
from functools import partial
from html import escape
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
from scipy.stats import f, spearmanr

from dew.compare import Difference, Result, corrected, paired
from dew.compare.grid import run_folders
from dew.compare.statistics import SIGNIFICANT, Interval
from dew.compare.verdicts import listed, markdown_table, signed
from dew.engines.lab.summary import noise
from dew.errors import ConfigError, DewError, Problem
from dew.files import write_atomically
from dew.report import benchmark as b
from dew.report.benchmark import Runs
from dew.run.folder import RunFolder

DOCS = Path(__file__).parents[1] / "docs"
OWN = Path(__file__).resolve().with_name("random_rewards.py")
FINALISTS = (b.BASELINE, "grpo", "dew", "gtpo", "grpo_s")
"""With the best OTHERS of stage 2."""
OTHERS = 3
CONTROLLED = {"A": ("dew", "gtpo")}
"""By task, the rules whose control and placebo are trained in stage 3 in any case. The placebo of another rule follows
if the rule is better than DAPO."""
RANDOM = "random_rewards"
FIRST_RATES = SCREEN_RATES = (4e-5, 8e-5)
THIRD = {4e-5: 2e-5, 8e-5: 1.6e-4}
"""The third rate of stage 1 on A, if this one is the better of the first two."""
WIDE_RATES = (4e-5, 8e-5, 1.6e-4, 3.2e-4, 6.4e-4)
"""Those of DAPO on B and C. The finalists have three around its best."""
TUNED = {"B": "B-train", "C": "C-train"}
"""Where the learning rates for a task are chosen, if not on A-train."""
SCREENED = 2
"""So many candidates, the best of the screening, join stage 3."""
STANDSTILL = 1e-12
"""A learning rate at which the policy stays what it was at the start."""
FILES = ("run.json", "metrics.jsonl", "scores.json")
say = partial(print, flush=True)


# ── which runs follow from which ────────────────────────────────────────────────────────────────────────────


def pack(work: Path, data: Path) -> list[Path]:
    """Write an archive of the finished runs of each study in `work` that are in none yet."""
    written = []
    for folder in sorted(path.parent for path in work.glob("*/grid.json")):
        old = sorted((data / folder.name).glob("*.jsonl.gz"))
        packed = {name for archive in old for name in b.archived(archive)}
        homes = [home.relative_to(folder) for home in run_folders(folder)]
        names = [str(home / name) for home in homes if str(home / FILES[0]) not in packed for name in FILES]
        if names:
            path = data / folder.name / f"{len(old) + 1:03}.jsonl.gz"
            lines = [json.dumps({"file": x, "text": (folder / x).read_text()}) + "\n" for x in ["grid.json", *names]]
            write_atomically(path, gzip.compress("".join(lines).encode(), mtime=0))
            written.append(path)
    return written


def points(stage: str, task: str, runs: Runs) -> list[tuple[str, float]]:
    """The arms of a stage and their learning rates, which follow from the stages before."""
    if stage == "start":
        return [(b.BASELINE, STANDSTILL)]
    if stage == "replication":
        return [(arm, 4e-5) for arm in (b.BASELINE, "dew", str(b.companions("dew")[1]))]
    if stage == "stage1" and task in TUNED.values():
        of = b.rate_means(runs.get(f"stage1-{task}", ())).get(b.BASELINE, {})
        best = [max(WIDE_RATES, key=of.__getitem__)] if of.keys() >= set(WIDE_RATES) else []
        try:
            others = finalists(runs)[1:]
        except ConfigError:  # not known yet: these are finalists in any case
            others = list(FINALISTS[1:])
        return [(b.BASELINE, rate) for rate in WIDE_RATES] + [
            (x, r * f) for r in best for x in others for f in (0.5, 1, 2)
        ]
    if stage == "stage1":
        means = b.rate_means(runs.get("stage1-A-train", ()))
        done = {arm: of for arm, of in means.items() if of.keys() >= set(FIRST_RATES)}
        third = {arm: THIRD[max(FIRST_RATES, key=of.__getitem__)] for arm, of in done.items()}
        return [(arm, rate) for arm in b.ARMS for rate in (*FIRST_RATES, *([third[arm]] if arm in third else []))]
    if stage == "screen":
        every = [(arm, rate) for arm in (b.BASELINE, *b.CANDIDATES) for rate in SCREEN_RATES]
        best = {} if _unscreened(runs) else screened(runs)
        return every + [(x, rate) for arm in best if (x := b.companions(arm)[1]) for rate in SCREEN_RATES]
    tuned = TUNED.get(task, "A-train")
    rates = chosen_rates(runs, tuned) | (screened(runs) if stage == "stage3" and task not in TUNED else {})
    arms = list(rates) if stage == "stage2" else finalists(runs)
    found = {arm: rates[arm] for arm in arms if arm in rates}
    if stage == "stage3":
        added = {x: arm for arm in CONTROLLED.get(task, ()) for x in b.companions(arm)}
        added |= {b.companions(arm)[1]: arm for arm in better(task, runs)}
        found |= {other: rates[arm] for other, arm in added.items() if other}
    return list((found | ({RANDOM: rates[b.BASELINE]} if task in b.STAGES[stage].random else {})).items())


def texts(points: Iterable[tuple[str, float]]) -> list[str]:
    """As `study` takes them."""
    return [f"{f'{OWN}:RandomRewards' if arm == RANDOM else arm}@{rate:g}" for arm, rate in points]


def missing(stage: str, task: str, runs: Runs) -> list[tuple[str, float, int]]:
    """Arm, learning rate and seed of the runs that are not finished."""
    have, of = {(r.arm, r.learning_rate, r.seed) for r in runs.get(f"{stage}-{task}", ())}, b.STAGES[stage]
    every, seeds = points(stage, task, runs), range(of.first_seed, of.first_seed + of.seeds[task])
    return [x for seed in seeds for point in every if (x := (*point, seed)) not in have]


def chosen_rates(runs: Runs, tuned: str = "A-train") -> dict[str, float]:
    """The best learning rate of each rule that is not worse than the start at every rate, by stage 1."""
    for stage in ("start", "stage1"):
        if n := len(missing(stage, tuned, runs)):
            what = f"The learning rates are not known yet: {stage} on {tuned} lacks {n} runs."
            raise ConfigError(Problem(what, remedy=f"Run: python scripts/benchmark.py run {stage} {tuned}"))
    found, start = b.rate_means(runs[f"stage1-{tuned}"]), start_of(tuned, runs)
    staying = {arm: of for arm, of in found.items() if arm == b.BASELINE or max(of.values()) >= start}
    return {arm: max(of, key=of.__getitem__) for arm, of in staying.items()}


def start_of(task: str, runs: Runs) -> float:
    return fmean(r.scores["pass@1"] for r in runs[f"start-{task}"])


def by_seed(runs: Sequence[Result], score: str) -> dict[int, float]:
    """The mean score of an arm over SCREEN_RATES, of the seeds that have both."""
    of: dict[int, list[float]] = {}
    for r in runs:
        of.setdefault(r.seed, []).append(r.scores[score])
    return {seed: fmean(x) for seed, x in of.items() if len(x) == len(SCREEN_RATES)}


def _unscreened(runs: Runs) -> list[str]:
    of, seeds = b.by_arm(runs.get("screen-A-train", ())), b.STAGES["screen"].seeds["A-train"]
    return [arm for arm in (b.BASELINE, *b.CANDIDATES) if len(by_seed(of.get(arm, ()), "pass@1")) < seeds]


def screened(runs: Runs) -> dict[str, float]:
    """The SCREENED best candidates, by mean pass@1 over seeds and rates, and the better rate of each."""
    if left := _unscreened(runs):
        what = f"The candidates are not screened yet: {', '.join(left)}."
        raise ConfigError(Problem(what, remedy="Run: python scripts/benchmark.py run screen"))
    of = b.by_arm(runs["screen-A-train"])
    means = {arm: fmean(by_seed(of[arm], "pass@1").values()) for arm in b.CANDIDATES}

    def rate(arm: str) -> float:
        return max(SCREEN_RATES, key=lambda x: fmean(r.scores["pass@1"] for r in of[arm] if r.learning_rate == x))

    return {arm: rate(arm) for arm in sorted(means, key=lambda arm: -means[arm])[:SCREENED]}


def finalists(runs: Runs) -> list[str]:
    """FINALISTS, the OTHERS with the best mean pass@1 in stage 2, and the best candidates."""
    if n := len(missing("stage2", "A", runs)):
        what = f"The finalists are not known yet: stage2 lacks {n} runs."
        raise ConfigError(Problem(what, remedy="Run: python scripts/benchmark.py run stage2"))
    rules = {arm: of for arm, of in b.by_arm(runs["stage2-A"]).items() if arm in b.ARMS}
    means = {arm: fmean(r.scores["pass@1"] for r in of) for arm, of in rules.items()}
    others = sorted((arm for arm in means if arm not in FINALISTS), key=lambda arm: -means[arm])
    return [*(arm for arm in FINALISTS if arm in means), *others[:OTHERS], *screened(runs)]


def better(task: str, runs: Runs) -> list[str]:
    """The rules that are better than DAPO in stage 3, after Holm's correction, in an analysis of the plan."""
    rows = b.stage_rows("stage3", task, runs)
    found = {row.arm: row.than_baseline[b.SCORES[0]] for row in rows if row.verdict}
    alpha = b.alpha_of("stage3", task, min(seeds_of(rows), default=0)) or 0
    return [arm for arm, d in found.items() if d.value > 0 and d.holm < alpha]


def seeds_of(rows: Sequence[b.Row]) -> set[int]:
    """The numbers of seeds that DAPO and the rules have."""
    return {len(row.runs) for row in rows if row.verdict or row.arm == b.BASELINE}


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────


def run(options: argparse.Namespace) -> None:
    began, data, work = perf_counter(), options.data.resolve(), options.work.resolve()
    tasks = options.tasks or list(b.STAGES[options.stage].seeds)
    models = {b.TASKS[task].model for task in tasks}
    if options.model and len(models) > 1:
        what = f"--model {options.model} for tasks with different models: {', '.join(sorted(models))}."
        raise ConfigError(Problem(what, remedy="Name the tasks of one model, e.g. run stage2 A B --model FOLDER"))
    if "DEW_DATA" in os.environ:
        os.environ["DEW_DATA"] = str(Path(os.environ["DEW_DATA"]).resolve())

    def keep() -> None:
        for path in pack(work, data):
            say(f"{path}: {path.stat().st_size / 1e3:.0f} kB")

    for task in tasks:
        runs = b.read(data, work)
        keep()  # what a call finished that was killed
        left, every = options.limit_seconds + began - perf_counter(), points(options.stage, task, runs)
        chosen = [x for x in every if not options.rules or x[0] in options.rules]
        todo = [x for x in missing(options.stage, task, runs) if x[:2] in chosen]
        say(f"{options.stage}-{task}: {len(todo)} runs are missing.")
        if not todo or left <= 0:
            continue
        model = Path(options.model or "").resolve()
        local = options.model is not None and model.is_dir()
        with chdir(model.parent if local else "."):  # run.json has the model's name, not this machine's path
            b.train(
                options.stage,
                task,
                texts(chosen),
                work / f"{options.stage}-{task}",
                model=model.name if local else options.model or b.TASKS[task].model,
                limit_seconds=left,
                runs_at_once=options.runs_at_once,
                say=lambda line: (keep(), say(line)),
            )
        keep()


def status(data: Path) -> None:
    with TemporaryDirectory() as folder:
        runs = b.read(data, Path(folder))
        for stage, task in ((stage, task) for stage, of in b.STAGES.items() for task in of.seeds):
            try:
                todo = missing(stage, task, runs)
                arms = ", ".join(dict.fromkeys(f"{arm}@{rate:g}" for arm, rate, _ in todo))
                text = f"{len(todo)} missing{': ' if arms else ''}{arms}"
            except ConfigError as error:
                text = error.problems[0].what
            print(f"{stage}-{task}: {len(runs.get(f'{stage}-{task}', ()))} runs, {text}")


def write_page(data: Path, docs: Path = DOCS) -> None:
    with TemporaryDirectory() as folder:
        text, images = page(b.read(data, Path(folder)))
    (docs / "benchmark-results.md").write_text(text)
    for name, image in images.items():
        (docs / "images" / name).write_text(image)


# ── the page ────────────────────────────────────────────────────────────────────────────────────────────────

NOTES = """The plan is on [its own page](benchmark.md). `python scripts/benchmark.py page` writes this one from
the runs in `docs/results/benchmark/`. Where the plan is silent: `entropy_advantage` and `kl_cov` weight tokens in their
loss, which no placebo permutes; without a placebo they cannot win. The interim look of stage 3 on task A spends an
alpha of 0.005, which leaves 0.045 for the last one. The first runs of `w_reinforce` and `reinforce_pp` are kept apart
and do not count (addition 29 of the plan)."""


def page(runs: Runs) -> tuple[str, dict[str, str]]:
    """Markdown, the result first, and SVG files by name."""
    parts, images, replication = ["# The benchmark's results"], dict[str, str](), _replication(runs)
    parts.append(_answer(runs, replication.partition("\n")[0]))
    for stage in ("stage3", "stage2"):
        rows = {task: found for task in b.STAGES[stage].seeds if (found := b.stage_rows(stage, task, runs))}
        if rows:
            images[name := f"benchmark-{stage}.svg"] = forest({b.TASKS[task].title: x for task, x in rows.items()})
            parts += [f"## Stage {stage[-1]}", f"![pass@1 − DAPO, with a band of ±{b.MARGIN}](images/{name})", b.ABOUT]
        for task, found in rows.items():
            given = [row.than_baseline[b.SCORES[0]] for row in found if row.verdict]
            seeds = " to ".join(str(n) for n in sorted({end(seeds_of(found)) for end in (min, max)}))
            about = f"{seeds} of {b.STAGES[stage].seeds[task]} seeds."
            parts += [f"### {task}: {b.TASKS[task].title}", about, b.table(found)]
            parts += [*noise(given, runs[f"{stage}-{task}"]), *_components(found, runs.get("stage1-A-train", ()))]
    if screen := _screening(runs.get("screen-A-train", ())):
        text, images["benchmark-screen.svg"] = screen
        parts += ["## Screening of further candidates", text]
    if replication:
        parts += ["## Replication", replication]
    tried = {task: of for task in b.STAGES["stage1"].seeds if (of := b.rate_means(runs.get(f"stage1-{task}", ())))}
    parts += ["## Stage 1: the learning rate of each rule"] * bool(tried)
    for task, of in tried.items():
        parts += [f"### {task}: {b.TASKS[task].title}", _rates(of, task, runs)]
    parts += ["## Runs", _progress(runs) if any(runs.values()) else "No run has been made yet.", NOTES]
    return "\n\n".join(part.strip() for part in parts) + "\n", images


def _answer(runs: Runs, replication: str) -> str:
    """The result so far, in a few sentences."""
    rows = {task: found for task in b.STAGES["stage3"].seeds if (found := b.stage_rows("stage3", task, runs))}
    if not rows:
        first = "**No rule is known to beat DAPO in pass@1 on a language model.**"
        second = "Stage 3, which decides it, has not been run."
        return " ".join([first, second, *_second(runs), replication])
    words = ("win", "level", "loss", "open")
    of = {word: {task: [row.arm for row in x if row.verdict == word] for task, x in rows.items()} for word in words}
    of["better"] = {task: [arm for arm in better(task, runs) if arm not in of["win"][task]] for task in rows}
    text = {word: "; ".join(f"{', '.join(x)} ({task})" for task, x in arms.items() if x) for word, arms in of.items()}
    unfinished = [about for task, n in b.STAGES["stage3"].seeds.items() if (about := _unfinished(task, n, rows))]
    so_far = " so far" if unfinished else ""
    won = f"Rules that win against DAPO in pass@1{so_far}: {text['win']}."
    parts = [f"**{won if text['win'] else f'No rule wins against DAPO in pass@1{so_far}.'}**"]
    parts += [f"Stage 3 is not finished: {'; '.join(unfinished)}."] * bool(unfinished)
    parts += [f"Better than DAPO, but not known to be better than a placebo: {text['better']}."] * bool(text["better"])
    return " ".join([*parts, *(f"{word.capitalize()}: {text[word] or 'none'}." for word in words[1:])])


def _unfinished(task: str, planned: int, rows: Mapping[str, Sequence[b.Row]]) -> str:
    """How many of the planned seeds of stage 3 a task has, and what that allows; empty if it has all."""
    seeds = min(seeds_of(rows.get(task, ())), default=0)
    alpha = b.alpha_of("stage3", task, seeds)
    about = "no verdicts yet" if alpha is None else f"interim analysis with alpha {alpha:g}"
    return f"{task} has {seeds} of {planned} seeds{f' ({about})' if seeds else ''}" if seeds < planned else ""


def _second(runs: Runs) -> list[str]:
    rows = b.stage_rows("stage2", "A", runs)
    found = {row.arm: row.than_baseline[b.SCORES[0]] for row in rows if row.verdict}
    if not found:
        return []
    try:
        planned = set(chosen_rates(runs))
    except ConfigError:  # stage 1 is not finished
        planned = set(b.ARMS)
    most = max(d.pairs for d in found.values())
    lacking = [x for x in b.ARMS[1:] if x in planned and (x not in found or found[x].pairs < most)]
    clear = [arm for arm, d in found.items() if d.holm < SIGNIFICANT] or ["none"]
    seeds = f"{most} of {b.STAGES['stage2'].seeds['A']} seeds"
    return [
        f"In stage 2 ({seeds}), of {len(found)} rules at their own rates, {listed(clear)} "
        f"{'differ' if len(clear) > 1 else 'differs'} from DAPO.",
        *[f"Runs of {listed(lacking)}, which are also planned, are missing there."] * bool(lacking),
    ]


def _components(rows: Sequence[b.Row], tuning: Sequence[Result]) -> Iterator[str]:
    """How much rules differ, how much seeds, and how much a rule's learning rate changes."""
    by_rule = {row.arm: {r.seed: r.scores[b.SCORES[0]] for r in row.runs} for row in rows if row.arm in b.ARMS}
    seeds = sorted(set.intersection(*map(set, by_rule.values()))) if by_rule else []
    scores = np.array([[of[seed] for seed in seeds] for of in by_rule.values()])
    tuned = {arm: list(of.values()) for arm, of in b.rate_means(tuning).items() if arm in by_rule and len(of) > 1}
    if min(scores.shape) < 2 or len(tuned) < 2:
        return
    rules, seeded = scores.mean(1), scores.mean(0)
    rest = scores - rules[:, None] - seeded + scores.mean()
    (n, k), free = scores.shape, (len(rules) - 1) * (len(seeds) - 1)
    error = (rest**2).sum() / free
    ratio = k * rules.var(ddof=1) / error
    between, over = (max(0.0, x.var(ddof=1) - error / m) ** 0.5 for x, m in ((rules, k), (seeded, n)))
    alike = spearmanr([max(tuned[arm]) for arm in tuned], [fmean(by_rule[arm].values()) for arm in tuned]).statistic
    ranges = sorted(max(of) - min(of) for of in tuned.values())
    differ = "more than by chance" if (p := f.sf(ratio, n - 1, free)) < SIGNIFICANT else "no more than by chance"
    yield (
        f"How much rules differ (not planned in advance): in pass@1, the standard deviation between {n} rules is "
        f"{between:.3f}, between seeds {over:.3f}, of the rest {error**0.5:.3f}. Taken together, the rules differ "
        f"{differ} (F({n - 1}, {free}) = {ratio:.2f}, p = {p:.4f}). The rank correlation of their pass@1 with that in "
        f"stage 1, which has other seeds and problems, is {alike:.2f}. In stage 1 the learning rate changes a rule's "
        f"pass@1, a mean of few seeds, by {ranges[0]:.3f} to {ranges[-1]:.3f}, in the median by {median(ranges):.3f}."
    )


def _progress(runs: Runs) -> str:
    lines = []
    for job, of in ((job, runs[job]) for job in runs if runs[job]):
        stage, _, task = job.partition("-")
        facts = [RunFolder(str(r.folder)).run() for r in of]
        times = {(x["started"], x["finished"]) for x in facts}  # those of a stack are the same
        began, ended = (sum(datetime.fromisoformat(x).timestamp() for x in xs) for xs in zip(*times, strict=True))
        try:
            todo = str(len(missing(stage, task, runs)))
        except ConfigError:
            todo = "not known yet"
        machine = ", ".join(sorted({str(x["machine"]["gpu"] or "CPU") for x in facts}))
        start = f"{start_of(task, runs):.3f}" if runs.get(f"start-{task}") else ""
        about = [stage, f"{task}: {b.TASKS[task].title}", Path(facts[0]["warm_start"]["model"]).name, start]
        lines.append([*about, str(len(of)), todo, f"{(ended - began) / 60:.0f}", machine])
    head = ["stage", "task", "model", "pass@1 at the start", "runs", "missing", "minutes", "machine"]
    return markdown_table(head, lines)


def _replication(runs: Runs) -> str:
    rows = b.stage_rows("replication", "A", runs)
    found = [row.than_baseline[b.SCORES[0]] for row in rows if row.arm == "dew" and row.than_baseline]
    if not found:
        return ""
    d = found[0]
    value, half = json.loads((b.COMMITTED.parent / "lora-20-seeds.json").read_text())["table"]["dew − dapo"][2]
    old = Interval(value, value - half, value + half)
    word = "agrees" if d.low <= old.high and old.low <= d.high else "does not agree"
    both = (
        f"In the replication, `dew` − DAPO is {signed(d)} over {d.pairs} seeds; the prototype's, {signed(old)}, {word}."
    )
    return "\n\n".join([both, b.table(rows), *noise(found, runs["replication-A"])])


def _rates(means: Mapping[str, Mapping[float, float]], task: str, runs: Runs) -> str:
    every, lines = sorted({rate for of in means.values() for rate in of}), []
    for arm, of in means.items():
        cells = {rate: f"**{x:.3f}**" if x == max(of.values()) else f"{x:.3f}" for rate, x in of.items()}
        lines.append([arm, *(cells.get(rate, "") for rate in every)])
    start = f"At the start: {start_of(task, runs):.3f}." if runs.get(f"start-{task}") else ""
    return markdown_table(["pass@1", *(f"{rate:g}" for rate in every)], lines) + f"\n{start}"


def _screening(runs: Sequence[Result]) -> tuple[str, str] | None:
    """Candidates against DAPO and their placebos, as text and as an image."""
    of = b.by_arm(runs)

    def differences(score: str, pairs: Mapping[str, str | None]) -> dict[str, Difference]:
        values = {arm: by_seed(x, score) for arm, x in of.items()}
        found = (paired(values[x], values[y], arm=x, baseline=y, score=score) for x, y in pairs.items() if y in of)
        return {d.arm: d for d in corrected(d for d in found if d)}

    candidates = [arm for arm in b.CANDIDATES if arm in of]
    than = [differences(score, dict.fromkeys(candidates, b.BASELINE)) for score in b.SCORES]
    placebo = differences(b.SCORES[0], {arm: b.companions(arm)[1] for arm in candidates})
    lines = []
    for arm, d in than[0].items():
        others = [signed(x[arm]) for x in than[1:]]
        lines.append(
            [arm, str(d.pairs), signed(d), f"{d.holm:.3f}", *others, *map(signed, filter(None, [placebo.get(arm)]))]
        )
    if not lines:
        return None
    head = ("candidate", "seeds", "pass@1 − DAPO", "p", "area − DAPO", "pass@4 − DAPO", "pass@1 − placebo")
    cells = [[*line, *[""] * (len(head) - len(line))] for line in lines]
    planned, rates = b.STAGES["screen"].seeds["A-train"], " and ".join(f"{rate:g}" for rate in SCREEN_RATES)
    clear = ", ".join(arm for arm, d in than[0].items() if d.holm < SIGNIFICANT) or "none"
    about = f"""{max(d.pairs for d in than[0].values())} of {planned} seeds. A seed's value is its mean over the
learning rates {rates}; p is Holm's, over the candidates. Different from DAPO: {clear}. Commit ed304a7e has the
settings of `dew` that did not advance and have been removed since.

![pass@1 − DAPO of the candidates](images/benchmark-screen.svg)

"""
    rows = [b.Row(arm, of[arm], {b.SCORES[0]: d}) for arm, d in than[0].items()]
    return about + markdown_table(head, cells), forest({b.TASKS["A-train"].title: rows})


STYLE = """text { fill: #222 } .back { fill: #fff } .band { fill: #eee } .axis { stroke: #888 }
g { color: #2864dc; stroke: currentcolor; fill: currentcolor } .win { color: #188038 } .loss { color: #c5221f }
.plain { color: #888 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .back { fill: #16181c } .band { fill: #2a2d33 }
g { color: #8ab4f8 } .win { color: #81c995 } .loss { color: #f28b82 } .plain { color: #888 } }"""


def forest(tasks: Mapping[str, Sequence[b.Row]]) -> str:
    """An SVG of the differences from the baseline in pass@1: a line for each arm, a panel for each task."""
    arms = list(dict.fromkeys(row.arm for rows in tasks.values() for row in rows if row.than_baseline))
    shown = [row.than_baseline[b.SCORES[0]] for rows in tasks.values() for row in rows if row.than_baseline]
    most = min(max([2 * b.MARGIN, *(abs(x) for d in shown for x in (d.low, d.high))]), 0.2)
    left, width, top, line = 14 + 7 * max(map(len, arms), default=0), 240, 60, 20
    below, total = top + line * len(arms), left + width * len(tasks) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {below + 34}" width="{total}" '
        f'font-family="sans-serif" font-size="12"><style>{STYLE}</style>',
        '<rect class="back" width="100%" height="100%"/>',
        '<text x="12" y="22" font-size="14">pass@1 − DAPO, 95% intervals over seeds</text>',
        *(f'<text x="12" y="{top + line * i + 14}">{escape(arm)}</text>' for i, arm in enumerate(arms)),
    ]
    for column, (title, rows) in enumerate(tasks.items()):
        zero, scale = left + width * (column + 0.5), (width / 2 - 26) / most
        parts += [
            f'<text x="{zero}" y="46" text-anchor="middle">{title}</text>',
            f'<rect class="band" x="{zero - b.MARGIN * scale:.1f}" y="{top}" width="{2 * b.MARGIN * scale:.1f}" '
            f'height="{below - top}"/><line class="axis" x1="{zero}" x2="{zero}" y1="{top}" y2="{below}"/>',
            *(f'<text x="{zero + x * scale:.1f}" y="{below + 18}" text-anchor="middle">{x:+.3f}</text>'
              for x in (-most, 0, most)),
        ]  # fmt: skip
        for row in (row for row in rows if row.than_baseline):
            d, y = row.than_baseline[b.SCORES[0]], top + line * arms.index(row.arm) + 10
            x, low, high = (zero + max(-most, min(most, v)) * scale for v in (d.value, d.low, d.high))
            parts.append(
                f'<g class="{row.verdict or "plain"}" stroke-width="2"><line x1="{low:.1f}" x2="{high:.1f}" '
                f'y1="{y}" y2="{y}"/><circle cx="{x:.1f}" cy="{y}" r="4"/></g>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "status", "page"])
    parser.add_argument("stage", nargs="?", choices=list(b.STAGES), default="start")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="default: all of the stage")
    parser.add_argument("--data", type=Path, default=b.COMMITTED, help="folder of archives (docs/results/benchmark)")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark"), help="folder of the studies")
    parser.add_argument("--model", help="folder of the tasks' model (default: its name on the hub)")
    parser.add_argument("--rules", nargs="+", help="of the stage, e.g. dapo dew gtpo (default: all)")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    parser.add_argument("--runs-at-once", type=int, help="of a stack (default: as many as fit into memory and time)")
    options = parser.parse_args()
    known = b.STAGES[options.stage].seeds
    if not set(options.tasks) <= known.keys():
        parser.error(f"{options.stage} has the tasks {', '.join(known)}")
    commands = {"run": lambda: run(options), "status": lambda: status(options.data)}
    try:
        commands.get(options.command, lambda: write_page(options.data))()
    except DewError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
