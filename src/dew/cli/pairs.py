"""`dew pairs`: preference pairs from a model's own verified answers."""

import json as json_
from pathlib import Path
from typing import Annotated, Any

import typer

from dew.cli.app import app
from dew.cli.console import out
from dew.cli.evaluate import load_model
from dew.cli.flags import mapping
from dew.errors import ConfigError, Problem


@app.command()
def pairs(
    model: Annotated[str, typer.Argument(help="A model folder, run folder, hub name, or `tiny`.")],
    to: Annotated[Path, typer.Argument(help="A new .jsonl file.")],
    task: Annotated[str, typer.Option(help="countdown, chain, a named data set, a file or a folder.")] = "countdown",
    settings: Annotated[str, typer.Option(help="Settings of the task, e.g. '{numbers: 3}'.")] = "{}",
    verifier: Annotated[str | None, typer.Option(help="Verifier (default: the task's own).")] = None,
    k: Annotated[int, typer.Option("-k", help="Answers to sample per problem.")] = 8,
    problems: Annotated[int, typer.Option("-n", "--problems", help="Training problems.")] = 1024,
    per_problem: Annotated[int, typer.Option(help="Maximum number of pairs of one problem.", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum new tokens per answer.")] = 128,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    engine: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
) -> None:
    """Make preference pairs for `trainer: dpo`. A correct answer against a wrong one of the same training problem."""
    if to.exists() or to.suffix != ".jsonl":
        raise ConfigError(
            Problem(f"{to} {'exists' if to.exists() else 'is not a .jsonl file'}.", remedy="Name a new one.")
        )
    from dew import evaluate as ev
    from dew import rewards, tasks
    from dew.files import write_atomically

    source = tasks.task(task, **mapping(settings))
    sampling: dict[str, Any] = {"k": k, "temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed}
    loaded, scorer = load_model(model, engine), rewards.verifier(verifier or source.name)
    scores = ev.evaluate(*loaded, source.rows(problems), scorer, name=source.name, **sampling)
    found = ev.preference_pairs(scores, per_problem=per_problem, seed=seed)
    share = f"{scores['pass@1'].value:.1%} of {len(scores.problems)} x {k} answers are correct"
    if not found:
        remedy = "Sample more answers (-k), or choose problems that the model solves sometimes."
        raise ConfigError(Problem(f"No problem has a correct and a wrong answer: {share}.", remedy=remedy))
    write_atomically(to, "".join(json_.dumps(row, ensure_ascii=False) + "\n" for row in found).encode("utf-8"))
    out.print(f"{to}: {len(found)} pairs; {share}, {scores.truncated_share:.1%} truncated", soft_wrap=True)
