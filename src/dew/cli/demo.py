"""`dew demo`: a first run that learns, on a CPU, in minutes, with nothing to download."""

import os
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from dew.cli.app import app
from dew.cli.children import Child, Lock, cores, run_all
from dew.cli.console import err, hesitant, out
from dew.cli.recipes import find
from dew.cli.watch import clock, screen
from dew.config import Run, Scoring, read_run
from dew.errors import ConfigError

if TYPE_CHECKING:
    from dew.evaluate import Scores

RECIPE = "tiny/countdown"
ALGORITHMS = ("grpo", "gtpo")
OWN_FILES = {".lock", "report.html", "report.json", *ALGORITHMS, *(f"{name}.log" for name in ALGORITHMS)}
STEPS = 160
"""Fewer than the recipe has: enough to learn by, soon enough to wait for."""
LINES = 6
"""Lines that each run prints on the way where there is no terminal."""


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", "-o", help="Where the two runs and their report go.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = STEPS,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo in that folder.")] = False,
) -> None:
    """Train GRPO and GTPO side by side on a small task, on the CPU, and say what came of it."""
    began = time.monotonic()
    path = find(RECIPE)
    assert path is not None, f"the recipe {RECIPE} comes with dew"
    run = read_run(path)
    _claim(folder, overwrite)
    _announce(run, steps, folder)
    _baseline(run)
    with Lock(folder) as lock:
        _train(folder, path, steps, lock)
        _results(folder)
        page = _report(folder)
    _next(folder, page, time.monotonic() - began)


def _claim(folder: Path, overwrite: bool) -> None:
    if not folder.exists() or not (there := {p.name for p in folder.iterdir()} - {".lock"}):
        return
    if not overwrite:
        raise ConfigError(
            f"{folder} is not empty. Add --overwrite to replace an earlier demo, or choose another --out."
        )
    if not there <= OWN_FILES:
        others = ", ".join(sorted(there - OWN_FILES)[:3])
        raise ConfigError(f"{folder} holds more than a demo ({others}); it is not emptied. Choose another --out.")
    shutil.rmtree(folder)


# ── what will happen, and where ─────────────────────────────────────────────────────────────────────────────


def _head(text: str) -> None:
    out.print(Text(f"\n{text}", style="bold"))


def _announce(run: Run, steps: int, folder: Path) -> None:
    from importlib.metadata import version

    _head("What happens now")
    out.print(
        "A language model of 0.6 million parameters, which comes with dew, plays countdown: reach a target from four "
        "numbers.\nIt learns from nothing but right or wrong, twice: with GRPO, which credits all tokens of an answer "
        f"alike,\nand with GTPO, which credits them by the policy's entropy. {steps} steps each, side by side.\n"
        "With two idle cores it takes two to three minutes. Nothing is downloaded. Ctrl-C ends it.",
        soft_wrap=True,
    )
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    out.print(
        f"\nPython {platform.python_version()}, {packages}; {cores()} cores, one torch thread per run; into {folder}",
        soft_wrap=True,
    )


# ── before ──────────────────────────────────────────────────────────────────────────────────────────────────


def _baseline(run: Run) -> None:
    """What the model can do untrained, and how sure it is of what it writes."""
    from dew.evaluate import evaluate, token_entropy
    from dew.tasks import task

    assert run.task is not None
    scoring = run.scores or Scoring()
    model, tokenizer = _model(str(run.settings["model_name_or_path"]))
    problems = task(run.task, **run.task_settings)
    scores = evaluate(
        model,
        tokenizer,
        problems,
        n_problems=scoring.problems,
        k=scoring.k,
        temperature=scoring.temperature,
        max_new_tokens=scoring.max_new_tokens or int(run.settings["max_completion_length"]),
        seed=int(run.settings["seed"]),
    )
    _head("Before training")
    out.print(
        f"{len(scores.problems)} held-out problems, {scores.k} answers each: pass@1 {scores['pass@1']}, "
        f"pass@{scores.k} {scores[f'pass@{scores.k}']} (95 % intervals)",
        soft_wrap=True,
    )
    out.print("Three answers; the deeper the orange, the more the model hesitated there (entropy):\n")
    for prompt, answer, correct in three_answers(scores):
        tokens, entropy = token_entropy(model, tokenizer, prompt, answer)
        line = Text(f"  {'✓' if correct else '✗'} {prompt} ") + hesitant(tokens, entropy)
        out.print(line + Text(f"   most at {_most(tokens, entropy)}", style="dim"))


def _model(name: str) -> tuple[Any, Any]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from dew.tasks import model_folder

    logging.disable_progress_bar()
    folder = model_folder(name)
    model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, trust_remote_code=False)
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def three_answers(scores: "Scores") -> list[tuple[str, str, bool]]:
    """(prompt, answer, correct): a right one and two wrong ones, of three problems where there are such."""
    found: list[tuple[str, str, bool]] = []
    for wanted in (True, False, False):
        seen = {prompt for prompt, _, _ in found}
        for p in (p for p in scores.problems if p.prompt not in seen):
            match = [a.text for a, v in zip(p.answers, p.verdicts, strict=True) if v.correct is wanted and a.text]
            if match:
                found.append((p.prompt, match[0], wanted))
                break
    return found


def _most(tokens: Sequence[str], entropy: Sequence[float]) -> str:
    H, i, token = max((H, -i, token) for i, (token, H) in enumerate(zip(tokens, entropy, strict=True)))
    return f"token {1 - i} {token!r} with {H:.2f} nats"


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────


def _train(folder: Path, recipe: Path, steps: int, lock: int) -> None:
    _head("Training")
    children = [
        Child(name, [*_words(recipe, name, steps), "--output_dir", str(folder / name)], folder / name)
        for name in ALGORITHMS
    ]
    try:
        with _live(children, steps) as show:
            run_all(children, parallel=len(children), keep_open=[lock], tick=show)
    except KeyboardInterrupt:
        err.print(f"Interrupted; neither run goes on. From the beginning: dew demo --overwrite --out {folder}")
        raise typer.Exit(1) from None


def _words(recipe: Path, algorithm: str, steps: int) -> list[str]:
    return ["train", str(recipe), "--algorithm", algorithm, "--max_steps", str(steps)]


@contextmanager
def _live(children: Sequence[Child], steps: int) -> Iterator[Any]:
    """A table on a terminal; plain lines elsewhere."""
    views = [child.view for child in children]
    if out.is_terminal:
        from rich.live import Live

        shown = views[::-1]  # the view colours answers of the first run, and GTPO's credit is the one to see
        with Live(get_renderable=lambda: screen(shown), console=out, refresh_per_second=2):
            yield lambda running: None
        return
    told = dict.fromkeys(range(len(views)), 0)

    def show(_: Sequence[Child]) -> None:
        for number, view in enumerate(views):
            known = len(view.alarms)
            view.poll()
            if view.step * LINES // steps > told[number]:
                told[number] = view.step * LINES // steps
                out.print(view.line(), soft_wrap=True)
            for alarm in view.alarms[known:]:
                out.print(f"⚠ {view.label} step {alarm.get('step')}: {alarm.get('message')} {alarm.get('remedy')}")

    yield show


# ── after ───────────────────────────────────────────────────────────────────────────────────────────────────


def _results(folder: Path) -> None:
    from dew.evaluate import Scores

    before, after = (
        {name: Scores.read(folder / name / f"answers-{when}.json") for name in ALGORITHMS}
        for when in ("before", "after")
    )
    _head("After training")
    k = after[ALGORITHMS[0]].k
    grid = Table(show_edge=False, pad_edge=False)
    for column in ("", "before", "after"):
        grid.add_column(column)
    for name in ALGORITHMS:
        for score in ("pass@1", f"pass@{k}"):
            grid.add_row(f"{name.upper()} {score}", str(before[name][score]), str(after[name][score]))
    out.print(grid)
    out.print("95 % intervals over held-out problems.\n")
    for line in findings(before, after):
        out.print(line, soft_wrap=True)


def findings(before: dict[str, "Scores"], after: dict[str, "Scores"]) -> list[str]:
    """What the numbers allow to say: each run against its start, then the two against each other."""
    from dew.evaluate import compare

    lines = []
    for name in ALGORITHMS:
        changes = compare(before[name], after[name])
        for score in ("pass@1", f"pass@{after[name].k}"):
            line = f"{name.upper()}: {score} changed by {_signed(changes[score].difference)}"
            lines.append(f"{line}, which is within noise." if changes[score].within_noise else f"{line}.")
        if changes[score].difference.high < 0:
            lines[-1] += " The model grew surer of fewer ways to answer."
    first, second = ALGORITHMS
    return [*lines, "", _verdict(first.upper(), second.upper(), compare(after[first], after[second])["pass@1"])]


def _verdict(first: str, second: str, change: Any) -> str:
    gap = change.difference
    said = f"{second} − {first} in pass@1 after training, paired by problem: {_signed(gap)}."
    if change.within_noise:
        return f"{said} That is within noise: this run does not say which of the two is better."
    ahead = second if gap.value > 0 else first
    return f"{said} {ahead} is ahead here, in one run each: another seed may turn it round."


def _signed(interval: Any) -> str:
    return f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def _report(folder: Path) -> Path:
    from dew.report import build

    return build([folder / name for name in ALGORITHMS], folder / "report.html")


def _next(folder: Path, page: Path, seconds: float) -> None:
    _head(f"Done in {clock(seconds)} minutes")
    out.print(f"The report, to open in a browser: {page.resolve()}", soft_wrap=True)
    _head("What to type next")
    for words, what in (
        (f"dew explain {folder / 'gtpo'}", "one group's credit, token by token, with the formula"),
        (
            f"dew compare {RECIPE} --seeds 5",
            "is one of them better? Several seeds, paired (half an hour on two idle cores)",
        ),
        (f"dew recipes copy {RECIPE} my.yaml", "a file to change, then: dew train my.yaml"),
    ):
        out.print(f"  {words:40} {what}", soft_wrap=True)
