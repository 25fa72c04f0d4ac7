"""Which runs of the benchmark follow from which: arms, learning rates and seeds of its stages (docs/benchmark.md)."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from dew.compare import Result
from dew.errors import ConfigError, Problem
from dew.report import benchmark as b
from dew.report.benchmark import Runs
from dew.run.folder import RunFolder

OWN = Path(__file__).resolve().with_name("random_rewards.py")
FINALISTS = (b.BASELINE, "grpo", "dew", "gtpo", "grpo_s")
"""With the best OTHERS of stage 2."""
OTHERS = 3
CONTROLLED = {"A": ("dew", "gtpo")}
"""By task, the rules whose control and placebo are trained in stage 3 in any case. The placebo of another rule follows
if the rule is better than DAPO."""
RANDOM = "random_rewards"
WIDE_RATES = (4e-5, 8e-5, 1.6e-4, 3.2e-4, 6.4e-4)
"""Those of DAPO on B and C. The finalists have three around its best; a rule whose best is at the edge has the next."""
TUNED = {"B": "B-train", "C": "C-train"}
"""Where the learning rates for a task are chosen, if not on A-train."""
SCREENED = 2
"""So many candidates, the best of the screening, join stage 3."""
STANDSTILL = 1e-12
"""A learning rate at which the policy stays what it was at the start."""


def points(stage: str, task: str, runs: Runs) -> list[tuple[str, float]]:
    """The arms of a stage and their learning rates, which follow from the stages before."""
    if stage == "start":
        return [(b.BASELINE, STANDSTILL)]
    if stage == "replication":
        return [(arm, 4e-5) for arm in (b.BASELINE, "dew", str(b.companions("dew")[1]))]
    if stage == "stage1" and task in TUNED.values():
        return _own_rates(task, runs)
    if stage == "stage1":
        means = b.rate_means(runs.get("stage1-A-train", ()))
        done = {arm: of for arm, of in means.items() if of.keys() >= set(b.RATES)}
        third = {arm: b.THIRD[max(b.RATES, key=of.__getitem__)] for arm, of in done.items()}
        return [(arm, rate) for arm in b.ARMS for rate in (*b.RATES, *([third[arm]] if arm in third else []))]
    if stage == "screen":
        every = [(arm, rate) for arm in (b.BASELINE, *b.CANDIDATES) for rate in b.RATES]
        best = {} if _unscreened(runs) else screened(runs)
        return every + [(x, rate) for arm in best if (x := b.companions(arm)[1]) for rate in b.RATES]
    tuned = TUNED.get(task, "A-train")
    rates = chosen_rates(runs, tuned) | (screened(runs) if stage == "stage3" and task not in TUNED else {})
    arms = list(rates) if stage == "stage2" else finalists(runs)
    found = {arm: rates[arm] for arm in arms if arm in rates}
    if stage == "stage3":
        added = {x: arm for arm in CONTROLLED.get(task, ()) for x in b.companions(arm)}
        added |= {b.companions(arm)[1]: arm for arm in better(task, runs)}
        found |= {other: rates[arm] for other, arm in added.items() if other}
    return list((found | ({RANDOM: rates[b.BASELINE]} if task in b.STAGES[stage].random else {})).items())


def _own_rates(task: str, runs: Runs) -> list[tuple[str, float]]:
    """The arms and rates of stage 1 on a task that has rates of its own."""
    means, tried = b.rate_means(runs.get(f"stage1-{task}", ())), list(WIDE_RATES)
    baseline = means.get(b.BASELINE, {})
    if baseline.keys() >= set(tried):
        edges = {tried[0]: [tried[0] / 2], tried[-1]: [tried[-1] * 2]}
        tried += edges.get(max(tried, key=baseline.__getitem__), [])
    every = [(b.BASELINE, rate) for rate in tried]
    if not baseline.keys() >= set(tried):
        return every
    try:
        others = finalists(runs)[1:]
    except ConfigError:  # not known yet: these are finalists in any case
        others = list(FINALISTS[1:])
    best = max(tried, key=baseline.__getitem__)
    for arm in others:
        rates, of = [best / 2, best, best * 2], means.get(arm, {})
        own = max(rates, key=of.__getitem__) if of.keys() >= set(rates) else best
        every += [(arm, rate) for rate in [*rates, *[own * own / best] * (own != best)]]
    return every


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
    found, start = b.rate_means(runs[f"stage1-{tuned}"]), start_of(tuned, runs, "stage1")
    staying = {arm: of for arm, of in found.items() if arm == b.BASELINE or max(of.values()) >= start}
    return {arm: max(of, key=of.__getitem__) for arm, of in staying.items()}


def start_of(task: str, runs: Runs, stage: str = "start") -> float:
    """pass@1 of the policy at the start, on the problems of a stage, which are the first of those of `start`."""
    of = b.SETTINGS | b.STAGES[stage].settings
    entries = [RunFolder(str(r.folder)).scores()[0] for r in runs[f"start-{task}"]]
    return fmean(n / of["eval_k"] for x in entries for counts in x["solved"] for n in counts[: of["eval_problems"]])


def by_seed(runs: Sequence[Result], score: str) -> dict[int, float]:
    """The mean score of an arm over RATES, of the seeds that have both."""
    of: dict[int, list[float]] = {}
    for r in runs:
        of.setdefault(r.seed, []).append(r.scores[score])
    return {seed: fmean(x) for seed, x in of.items() if len(x) == len(b.RATES)}


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
        return max(b.RATES, key=lambda x: fmean(r.scores["pass@1"] for r in of[arm] if r.learning_rate == x))

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
    alpha = alpha_of(task, rows) or 0
    return [arm for arm, d in found.items() if d.value > 0 and d.holm < alpha]


def alpha_of(task: str, rows: Sequence[b.Row]) -> float | None:
    """The alpha of the analysis of stage 3 that the seeds so far allow."""
    return b.look("stage3", task, min(seeds_of(rows), default=0))[1]


def seeds_of(rows: Sequence[b.Row]) -> set[int]:
    """The numbers of seeds that DAPO and the rules have."""
    return {len(row.runs) for row in rows if row.verdict or row.arm == b.BASELINE}
