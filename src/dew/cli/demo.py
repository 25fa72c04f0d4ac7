"""`dew demo`: a first run that learns, on a CPU, in minutes, without downloads."""

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from dew.cli.app import app
from dew.cli.console import by_credit, out
from dew.cli.recipes import get
from dew.cli.runs import Child, claim, clock, live, lock, run_all
from dew.config import Run, Scoring, read_run
from dew.rewards.process import cores

if TYPE_CHECKING:
    from dew.evaluate import Scores

RECIPE = "tiny/countdown"
ALGORITHMS = ("grpo", "gtpo")


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", "-o", help="Folder for runs and report.")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps per run.")] = 160,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo in that folder.")] = False,
) -> None:
    """Train GRPO and GTPO side by side on a CPU. Takes minutes, downloads nothing, and compares the results."""
    from dew.report import build

    began = time.monotonic()
    claim(folder, overwrite, demo=True)
    _announce(steps, folder)
    _evaluate_untrained(read_run(get(RECIPE)))
    with lock(folder) as held:
        _train(folder, steps, held)
        _results(folder)
        page = build([folder])
    _heading(f"Done in {clock(time.monotonic() - began)} minutes")
    out.print(f"Report (open in a browser): {page.resolve()}", soft_wrap=True)
    _heading("Next")
    for words, what in (
        (f"dew explain {folder / 'gtpo'}", "the credit of one group, token by token, with the formula"),
        (f"dew compare {RECIPE} --seeds 5", "is one better? Several seeds, paired (30 minutes on two idle cores)"),
        (f"dew recipes copy {RECIPE} my.yaml", "a config to edit, then: dew train my.yaml"),
    ):
        out.print(f"  {words:40} {what}", soft_wrap=True)


def _heading(text: str) -> None:
    out.print(Text(f"\n{text}", style="bold"))


def _announce(steps: int, folder: Path) -> None:
    from importlib.metadata import version

    _heading("What this does")
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    out.print(
        "A language model with 0.6 million parameters, which comes with dew, plays countdown: reach a target from four "
        "numbers.\nIt learns only from right or wrong, twice: with GRPO, which gives all tokens of an answer the same "
        f"credit,\nand with GTPO, which weights them by the policy's entropy. {steps} steps each, side by side.\n"
        "On two idle cores this takes two to three minutes. Nothing is downloaded. Ctrl-C stops it.\n\n"
        f"Python {platform.python_version()}, {packages}; {cores()} cores, one torch thread per run; into {folder}",
        soft_wrap=True,
    )


def _evaluate_untrained(run: Run) -> None:
    """Show the model's accuracy before training, and where it is uncertain."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, as is the other
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from dew.cli.evaluate import load_model
    from dew.evaluate import evaluate, token_entropy
    from dew.tasks import task

    scoring, settings = run.scores or Scoring(), run.settings
    model, tokenizer = load_model(settings["model_name_or_path"])
    scores = evaluate(
        model,
        tokenizer,
        task(run.task or "countdown", **run.task_settings),
        n_problems=scoring.problems,
        k=scoring.k,
        temperature=scoring.temperature,
        max_new_tokens=scoring.max_new_tokens or settings["max_completion_length"],
        seed=settings["seed"],
    )
    _heading("Before training")
    out.print(
        f"{len(scores.problems)} held-out problems, {scores.k} answers each: pass@1 {scores['pass@1']}, "
        f"pass@{scores.k} {scores[f'pass@{scores.k}']} (95 % intervals)\n"
        "Three answers; the deeper the orange, the higher the entropy:\n",
        soft_wrap=True,
    )
    for prompt, answer, correct in three_answers(scores):
        tokens, entropy = token_entropy(model, tokenizer, prompt, answer)
        i = max(range(len(tokens)), key=entropy.__getitem__)
        highest = f"   highest at token {i + 1} {tokens[i]!r} with {entropy[i]:.2f} nats"
        line = Text(f"  {'✓' if correct else '✗'} {prompt} ") + by_credit(tokens, [-H for H in entropy])
        out.print(line + Text(highest, style="dim"))


def three_answers(scores: "Scores") -> list[tuple[str, str, bool]]:
    """(prompt, answer, correct): a right one and two wrong ones, from three problems where there are such."""
    found: dict[str, tuple[str, str, bool]] = {}
    for wanted in (True, False, False):
        for p in (p for p in scores.problems if p.prompt not in found):
            match = [a.text for a, v in zip(p.answers, p.verdicts, strict=True) if v.correct is wanted and a.text]
            if match:
                found[p.prompt] = (p.prompt, match[0], wanted)
                break
    return list(found.values())


def _train(folder: Path, steps: int, held: int) -> None:
    _heading("Training")
    children = []
    for name in ALGORITHMS:
        flags = ["--algorithm", name, "--max_steps", str(steps), "--output_dir", str(folder / name)]
        children.append(Child(["train", str(get(RECIPE)), *flags], folder / name))
    views = [child.view for child in children][::-1]  # the screen shows answers of the first: GTPO's
    with live(lambda: views, every=max(steps // 6, 1)):
        advice = f"To start again: dew demo --overwrite --out {folder}"
        run_all(children, parallel=len(children), keep_open=[held], advice=advice)


def _results(folder: Path) -> None:
    from dew.evaluate import Scores

    before, after = (
        {name: Scores.read(folder / name / f"answers-{when}.json") for name in ALGORITHMS}
        for when in ("before", "after")
    )
    _heading("After training")
    grid = Table("", "before", "after", show_edge=False, pad_edge=False)
    for name in ALGORITHMS:
        for score in ("pass@1", f"pass@{after[name].k}"):
            grid.add_row(f"{name.upper()} {score}", str(before[name][score]), str(after[name][score]))
    out.print(grid)
    out.print("95 % intervals over held-out problems.\n")
    out.print("\n".join(findings(before, after)), soft_wrap=True)


def findings(before: dict[str, "Scores"], after: dict[str, "Scores"]) -> list[str]:
    """What the numbers show: each run against its start, then one run against the other."""
    from dew.evaluate import compare
    from dew.report.findings import change_sentence, single_verdict

    lines = []
    for name in ALGORITHMS:
        changes = compare(before[name], after[name])
        for score in ("pass@1", f"pass@{after[name].k}"):
            lines.append(change_sentence(name, score, changes[score].difference))
    return [
        *lines,
        "",
        single_verdict("grpo", "gtpo", "pass@1", compare(after["grpo"], after["gtpo"])["pass@1"].difference),
    ]
