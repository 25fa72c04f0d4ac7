"""Check the numbers on the evidence pages against committed files.

    python scripts/page_numbers.py            list what is wrong or has no source
    python scripts/page_numbers.py --write    correct the numbers, and write the tables of `tables`

A paragraph or list item with a decimal number or a percentage has a comment that computes its numbers in order, with
the functions below; a difference gives its value and half the width of its interval:

    GTPO is ahead by 0.020 ± 0.007. <!-- = diff("confirm-dew", "countdown-6", "gtpo") -->
    These are 6,360 runs. <!-- check: number_of_runs() == 6360 -->

Numbers are compared as they are written, with sign and digits. Left alone are code, tables (of benchmarks they are the
record; the others are made by this and other scripts), versions, sizes of models, `95%`, and settings like `β = 0.1`.
"""

import csv
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median, stdev  # noqa: F401, pages use them
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import study_tables as study

from dew.algorithms import get_algorithm
from dew.compare import Difference, Interval, paired, statistics
from dew.compare.statistics import holm, pass_at_k
from dew.compare.verdicts import markdown_table, signed
from dew.preflight import machine
from dew.report import benchmark

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md"]
PAGES += [
    ROOT / "docs" / f"{name}.md"
    for name in ("study", "study-details", "results", "real-models", "preferences", "lab", "kernels")
]
PAGES += sorted((ROOT / "benchmarks" / "results").glob("*.md"))
GUIDES = [ROOT / "docs" / f"{name}.md" for name in ("trl", "preflight")]
"""Pages with settings and thresholds among their numbers: only a block with a comment is checked."""
PAGES += GUIDES
NUMBER = re.compile(r"(?<![\w.,:/@-])[+−-]?\d[\d,]*(?:\.\d+(?: ?%)?| ?%)(?![\w.]*\w)")
IGNORED = re.compile(
    r"<!--.*?-->|`[^`]*`|\]\([^)]*\)|\d+(?:\.\d+){2,}\S*|\d+(?:\.\d+)? ?[BM]\b|95 ?%|(?:α|β) = [\d.]+|p < 0.05"
    r"|(?:torch|transformers|TRL|trl|vLLM|verl|triton|Liger|Ray|Python(?: \d\.\d+ to)?|[Vv]ersion) \d[\d.]*",
    re.DOTALL,
)


# ── the small policies: docs/results/study ──────────────────────────────────────────────────────────────────


def runs_of(step: str, task: str, arm: str, rate: float | None = None) -> dict[int, Any]:
    arm = {"control": study.CONTROL, "first": study.FIRST}.get(arm, arm)
    return {r.seed: r for r in study.arm_of(study.read(step), task, arm) if rate in (None, r.learning_rate)}


def half(found: Any) -> float:
    return found.high - found.value


def setting(value: float) -> float:
    """A number that was chosen, not measured."""
    return value


def mean(step: str, task: str, arm: str, score: str = "area", rate: float | None = None) -> float:
    return fmean(r.scores[score] for r in runs_of(step, task, arm, rate).values())


def diff(
    step: str, task: str, arm: str, score: str = "area", base: str = "dapo", rate: float | None = None
) -> Difference:
    """Of two arms of a step of the study, paired by seed."""
    runs, reference = (list(runs_of(step, task, name, rate).values()) for name in (arm, base))
    return study.difference(runs, reference, score)


def pooled(task: str, arm: str, score: str = "area") -> Interval:
    """A rule minus DAPO over all seeds at DAPO's rate."""
    return study.pooled(task, arm, score)[1]


def number_of_runs() -> int:
    return sum(len(study.read(path.name.removesuffix(".tar.gz"))) for path in study.RESULTS.glob("*.tar.gz"))


def holm_tasks(step: str, arm: str, base: str, task: str, score: str = "area") -> float:
    """The p-value on a task after Holm's correction over all tasks."""
    tasks = study.tasks_of(study.read(step))
    return dict(zip(tasks, holm([diff(step, t, arm, score, base).p for t in tasks]), strict=True))[task]


def welch(arm: str, task: str) -> float:
    """p of a rule's gain over DAPO being the same on countdown-6 and on a variant, by Welch's test."""
    from scipy.stats import ttest_ind

    both = (diff("../alignment/confirm", name, arm).by_pair for name in ("countdown-6", task))
    return float(ttest_ind(*both, equal_var=False).pvalue)


def steps_test(arm: str, score: str = "area") -> tuple[Interval, float]:
    """How much larger a rule's gain over DAPO is with eight optimizer steps than with one, paired by seed, and p."""
    many, one = (diff(f"own-{n}", "countdown-6", arm, score).by_pair for n in (8, 1))
    return statistics.t_test([a - b for a, b in zip(many, one, strict=True)])


def by_steps(arm: str, score: str = "area") -> Interval:
    return steps_test(arm, score)[0]


def by_steps_p(arm: str) -> float:
    """After Holm's correction over the two rules."""
    rules = ("gtpo", "dew")
    return dict(zip(rules, holm([steps_test(rule)[1] for rule in rules]), strict=True))[arm]


# ── real models and preference pairs ────────────────────────────────────────────────────────────────────────


@cache
def stored(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def real(arm: str, base: str = "dapo", score: str = "gsm8k pass@1") -> Difference:
    """Three seeds of a 0.5B model; score: `area`, or the set and pass@k."""
    content = stored("real-model-seeds/counts.json")
    difference = runpy.run_path(str(ROOT / "examples" / "real_model_seeds.py"))["difference"]
    arm, base = ({"control": study.CONTROL}.get(name, name) for name in (arm, base))
    task, _, k = score.partition(" pass@")
    return difference(content["runs"], content["settings"]["k"], arm, base, task if k else "", int(k or 0))


def seeds_needed(difference: float, like: Difference) -> int:
    """Pairs of runs that find a difference with a power of 80%, if pairs spread like these."""
    return statistics.seeds_needed(stdev(like.by_pair), difference)


@cache
def benchmark_runs() -> benchmark.Runs:
    with TemporaryDirectory() as work:
        return benchmark.read(RESULTS / "benchmark", Path(work))


def replication(
    one: str, other: str, score: str = "pass@1", job: str = "replication-A", rate: float | None = None
) -> Difference:
    """Two arms of the benchmark's replication on GSM8K, or of another stage; a seed has its mean over the rates."""
    of = benchmark.by_arm(r for r in benchmark_runs()[job] if rate in (None, r.learning_rate))
    values = [
        {r.seed: fmean(x.scores[score] for x in of[arm] if x.seed == r.seed) for r in of[arm]} for arm in (one, other)
    ]
    found = paired(*values, arm=one, baseline=other, score=score)
    assert found
    return found


def screening(one: str, other: str = "dapo") -> Difference:
    """Two arms of the screening, pass@1; `relative` stands for dew(compare=relative)."""
    relative = "dew({}entropy_clip=(0.01,100.0),compare=relative)"
    names = {"relative": relative.format(""), "placebo": relative.format("placebo=True,")}
    return replication(names.get(one, one), names.get(other, other), job="screen-A-train")


@cache
def gsm8k(task: str, one: str, other: str = "", k: int = 1) -> Difference | float:
    """The first real-model runs: pass@k of one, or a difference paired by problem."""
    rows = list(csv.DictReader((RESULTS / "gsm8k-0.5b" / f"{task}.csv").open()))
    values = {name: {i: pass_at_k(8, int(r[name]), k) for i, r in enumerate(rows)} for name in (one, other) if name}
    if not other:
        return fmean(values[one].values())
    found = paired(values[one], values[other], arm=one, baseline=other, score=f"pass@{k}", unit="problems")
    assert found
    return found


def dpo(parts: str, arm: str = "0.25", base: str = "0.0", k: int = 1) -> Difference:
    """Weighted minus plain DPO (`arm`: its α, or `shuffled`), paired by seed, over one or several parts."""
    both = dpo_scores(parts, arm, k), dpo_scores(parts, base, k)
    found = paired(*both, arm=arm, baseline=base, score=f"pass@{k}")
    assert found
    return found


def mean_of(scores: dict[Any, float]) -> float:
    return fmean(scores.values())


def dpo_scores(parts: str, arm: str, k: int = 1) -> dict[Any, float]:
    found = {}
    for part in parts.split(" + "):
        runs = stored("preferences.json")[part]
        n = (stored("preferences.json")["setup"] if isinstance(runs, list) else runs["setup"])["evaluation"]["k"]
        for run in runs if isinstance(runs, list) else runs["runs"]:
            if arm == ("shuffled" if run.get("shuffled") else str(run["alpha"])):
                found[part, run["seed"]] = fmean(pass_at_k(n, c, k) for c in run["correct"])
    return found


def dpo_cut_off(alpha: float) -> list[float]:
    """The share of answers at the token limit, by seed."""
    return [run["truncated"] for run in stored("preferences.json")["gsm8k"]["runs"] if run["alpha"] == alpha]


# ── tables of the pages on results ────────────────────────────────────────────────────────────────────────


@cache
def tables() -> dict[str, str]:
    return {"lora": lora_table(), "first-run": first_run_table(), "dpo": dpo_table()}


def lora_table() -> str:
    content, rows = stored("lora-20-seeds.json"), []
    for name, row in content["table"].items():
        rows.append([name, *(f"{x[0]:+.3f} ± {x[1]:.3f}" if len(x) > 1 else f"{x[0]:.3f}" for x in row)])
    return markdown_table(["20 seeds", *content["scores"]], rows)


def first_run_table() -> str:
    columns = [(task, k) for task in ("gsm8k", "math500") for k in (1, 8)]
    head = [x for task, k in columns for x in (f"{task} pass@{k}", "− dapo")]
    rows = []
    for arm in ("start", "dapo", "gtpo", "grpo_s", "grpo"):
        cells = [arm]
        for task, k in columns:
            if (task, arm) == ("math500", "grpo_s"):  # was not evaluated
                cells += ["", ""]
            else:
                difference = "" if arm in ("start", "dapo") else signed(gsm8k(task, arm, "dapo", k))
                cells += [f"{gsm8k(task, arm, k=k):.3f}", difference]
        rows.append(cells)
    return markdown_table(["arm", *head], rows)


def dpo_table() -> str:
    small = "beta 0.1, first + beta 0.1, second + beta 0.1, sweep"
    parts = {
        "`tiny6`, β = 1, tuned for plain DPO": ("confirm", "0.25", 16),
        "`tiny6`, β = 0.1, all runs": (small, "0.25", 16),
        "the same, weights on random tokens": ("beta 0.1, second", "shuffled", 16),
        **{f"`tiny6`, sweep, β = {b}": (f"beta {b}, sweep", "0.25", 16) for b in ("0.03", "0.1", "0.3", "1", "3")},
        "Qwen2.5-Coder-0.5B-Instruct, β = 0.1": ("gsm8k", "0.25", 8),
    }
    rows = []
    for name, (part, arm, k) in parts.items():
        d = dpo(part, arm)
        means = [f"{mean_of(dpo_scores(part, x)):.3f}" for x in ("0.0", arm)]
        ahead = f"{sum(x > 0 for x in d.by_pair)} of {d.pairs}"
        rows.append([name, *means, signed(d), ahead, signed(dpo(part, arm, k=k))])
    head = ["model, β", "DPO, pass@1", "weighted", "difference", "seeds ahead", "in pass@16 (GSM8K: pass@8)"]
    return markdown_table(head, rows)


# ── benchmarks: the tables of their own pages ───────────────────────────────────────────────────────────────


def cell(page: Path, row: str, name: str, table: int = 1, of: str = "", column: int | None = None, n: int = 0) -> float:
    """The first number of a cell (or the n-th after it) in a table of a page (or of the benchmark's page `of`), by the
    beginning of its row and the name or the place of its column."""
    text = (ROOT / "benchmarks" / "results" / f"{of}.md" if of else page).read_text()
    lines = re.findall(r"(?:^\|.*\n)+", text, flags=re.M)[table - 1].splitlines()
    head, *rows = ([c.strip() for c in line[1:].split("|")] for line in (lines[0], *lines[2:]))
    (found,) = (cells for cells in rows if " | ".join(cells).startswith(row + " |"))
    numbers = re.findall(r"[+−-]?\d[\d,.]*(?:e-\d+)?", found[head.index(name) if column is None else column])
    return float(numbers[n].replace(",", "").replace("−", "-"))


def update_cost() -> list[float]:
    """Of a GTPO update with an extra pass at 0.5B and 1.5B: times TRL's GRPO."""
    return [cell(ROOT, "dew GTPO", "of the first", table, of="trainer_step-h200") for table in (3, 1)]


def update_memory() -> list[float]:
    """GiB that a GTPO update needs more than TRL's GRPO: with an extra pass, then with the entropy from sampling."""
    at = partial(cell, ROOT, name="peak, GiB", of="trainer_step-h200")
    more = [at("dew GTPO", table=n) - at("TRL GRPO", table=n) for n in (1, 3)]
    return more + [at("dew GTPO, entropy from sampling", table=n) - at("TRL GRPO", table=n) for n in (2, 4, 5, 6, 7, 8)]


def peak_to_estimate(row: str) -> list[float]:
    """The smallest and largest peak memory of an update, measured on the H200, relative to what preflight estimates."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    found, models = [], runpy.run_path(str(ROOT / "benchmarks" / "rollout.py"))
    for table, name, rows, tokens, saves, rank in (
        (1, "1.5B", 8, 1024, True, 0), (3, "0.5B", 8, 1024, True, 0), (4, "0.5B", 1, 16128, False, 0),
        (5, "0.5B", 4, 3840, False, 0), (7, "0.5B", 1, 16128, False, 16), (8, "1.5B", 1, 16128, True, 0),
    ):  # fmt: skip
        with torch.device("meta"):
            model = Qwen2ForCausalLM(Qwen2Config(**models["QWEN"], **models["SHAPES"][name]))
            model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear")) if rank else model
        args = SimpleNamespace(
            max_completion_length=tokens, per_device_train_batch_size=rows, bf16=True, optim="adamw_torch_fused",
            use_vllm=False, build_algorithm=partial(get_algorithm, "gtpo"),
        )  # fmt: skip
        counts = [sum(p.numel() for p in model.parameters() if p.requires_grad or any) for any in (True, False)]
        text, kept = model.config, 2 if rank else 4
        sizes = (*counts, text.num_hidden_layers, text.hidden_size, text.intermediate_size, None, kept)
        estimate = machine.estimate(machine.Model(*sizes), args, 256, 0, saves)
        own = ", entropy from sampling" * (row != "TRL GRPO" and table > 3)
        peak = cell(ROOT, row + own, "peak, GiB", table, of="trainer_step-h200")
        found.append(peak * 2**30 / sum(estimate.values()))
    return [min(found), max(found)]


def dew_to_vllm(limit: int, rows: int = 128, table: int = 3, model: str = "0.5B", calls: int = 2) -> list[float]:
    """Tokens per second of long answers, dew's to vLLM's, for each call of one with each of the other."""
    at = partial(cell, ROOT, name="tokens/s", table=table, of="long_answers-h200")
    tokens = {(2048, 128): 94_423, (2048, 512): 383_205, (8192, 128): 377_876}
    tokens |= {(4096, 128): 188_908, (4096, 512): 766_640, (16384, 128): 755_811}
    row = f"{model} | {limit} | {rows} | {tokens[limit, rows]:,}"
    ours, theirs = ([at(f"{row} | {x}", n=n) for n in range(calls)] for x in ("dew", "vLLM"))
    return [x / y for x in ours for y in theirs]


def kernels(low_memory: bool = False) -> list[float]:
    """Smallest and largest over three shapes: forward, both passes, GB kept, both passes with four products, each
    relative to the fastest peer; and the forward pass without the Hopper kernel relative to that with it."""
    at = partial(cell, ROOT, of="kernels-h200")
    all_logits = [] if low_memory else ["TRL full logits"]
    peers = [*all_logits, "TRL chunked", "verl Triton", "Liger SM90, split 1", "Liger SM90, split 2"]

    def spread(value: Callable[[int], float]) -> list[float]:
        return [f(value(shape) for shape in (1, 2, 3)) for f in (min, max)]

    def relative(row: str, name: str) -> list[float]:
        return spread(lambda shape: at(row, name, shape) / min(at(peer, name, shape) for peer in peers))

    four = relative("dew, four products", "f+b ms")
    if low_memory:
        return four
    kept = spread(lambda shape: at("dew", "MB", shape, column=4) / 1000)
    removed = [f(at(row, "ratio", 4) for row in ("SmolLM2", "7B", "32B")) for f in (min, max)]
    return [*relative("dew", "fwd ms"), *relative("dew", "f+b ms"), *kept, *four, *removed]


# ── pages ───────────────────────────────────────────────────────────────────────────────────────────────────


def blocks(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of the paragraphs and list items of a page that are not code, tables or headings."""
    fenced, start, place, after_blank = False, None, 0, True
    for line in [*text.splitlines(keepends=True), "\n"]:
        fence = line.startswith("```")
        code = fenced or fence or (after_blank and line.startswith("    "))
        skipped = code or bool(re.match(r"\||#|<!-- (?!=|check:)", line))
        if start is not None and (skipped or not line.strip() or re.match(r"\s*([-*]|\d+\.) ", line)):
            yield start, place
            start = None
        if start is None and line.strip() and not skipped:
            start = place
        after_blank = not line.strip() or (after_blank and skipped and not fence)
        fenced ^= fence
        place += len(line)


def problems(page: Path, text: str) -> Iterator[tuple[tuple[int, int], str, str]]:
    """Numbers of a page that are not what its comments compute: place, written, computed."""
    names = {**globals(), "cell": partial(cell, page)}
    for start, end in blocks(text):
        block = text[start:end]
        masked = IGNORED.sub(lambda found: " " * len(found.group()), block)
        written = [(found.span(), found.group()) for found in NUMBER.finditer(masked)]
        sources = re.findall(r"<!-- = (.*?) -->", block, flags=re.DOTALL)
        values = list(flat(eval(f"[{', '.join(sources)}]", names)))
        checks = re.findall(r"<!-- check: (.*?) -->", block, flags=re.DOTALL)
        if page in GUIDES and not sources and not checks:
            continue
        for check in checks:
            if not eval(check, names):
                yield (start, start), check, "false"
        if len(written) != len(values):
            where = f"{len(written)} numbers, {len(values)} sources"
            yield (start, start), " ".join(block.split())[:100], f"{where}: {[w for _, w in written]}"
            continue
        for ((a, b), number), value in zip(written, values, strict=True):
            if number != (right := shown(value, number)):
                yield (start + a, start + b), number, right


def flat(values: Any) -> Iterator[float]:
    for value in values:
        if isinstance(value, Difference | Interval):
            yield from (value.value, value.high - value.value)
        elif isinstance(value, list | tuple):
            yield from flat(value)
        else:
            yield value


def shown(value: float, like: str) -> str:
    """With the sign and the digits of a number as it is written."""
    percent = re.search(r" ?%$", like)
    digits = len(like.rstrip(" %").partition(".")[2])
    text = f"{value * (100 if percent else 1):{'+' if like[0] in '+−-' else ''},.{digits}f}"
    text = text if "," in like else text.replace(",", "")
    return text.replace("-", "−" if "−" in like else "-") + (percent.group() if percent else "")


def main() -> None:
    write, wrong = "--write" in sys.argv, 0
    for page in PAGES:
        text = page.read_text()
        new = study.with_tables(text, tables()) if write else text
        found = list(problems(page, new))
        for (start, _), written, right in found:
            print(f"{page.relative_to(ROOT)}:{new[:start].count(chr(10)) + 1}: {written} -> {right}")
        for (start, end), _, right in reversed(found):
            if write and start != end:
                new = new[:start] + right + new[end:]
            else:
                wrong += 1
        if new != text:
            page.write_text(new)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
