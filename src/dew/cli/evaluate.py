"""`dew eval`: mean@k, pass@k and maj@k of a model, or of two side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dew.cli.app import app
from dew.cli.console import out, print_json
from dew.config import parse_yaml
from dew.errors import ConfigError

if TYPE_CHECKING:
    from dew.evaluate import Scores

ENGINES = ("transformers", "vllm")


@app.command("eval")
def evaluate_(
    model: Annotated[str, typer.Argument(help="A model folder, a run's folder, a hub name, `tiny`, or --keep's file.")],
    task: Annotated[str, typer.Option(help="countdown, chain, a named data set or a .jsonl file.")] = "countdown",
    settings: Annotated[str, typer.Option(help="Settings of the task, e.g. '{numbers: 3}'.")] = "{}",
    verifier: Annotated[str | None, typer.Option(help="What judges answers, if not the task's own.")] = None,
    k: Annotated[int | None, typer.Option("-k", help="Answers to each problem; 16.")] = None,
    problems: Annotated[int | None, typer.Option("-n", "--problems", help="Held-out problems; 256.")] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; 1 keeps every token.")] = 1.0,
    max_new_tokens: Annotated[int | None, typer.Option(help="Length of an answer at most; 128.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Answers at a time; 256, on a GPU 1,024.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="The likeliest answer, once.")] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    engine: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
    float32: Annotated[
        bool, typer.Option("--float32", help="Keep float32 weights on a GPU; else they sample in bfloat16.")
    ] = False,
    vs: Annotated[str | None, typer.Option(help="A second one, on the same problems: paired differences.")] = None,
    suite: Annotated[
        str | None, typer.Option(help="A paper's sets and settings: paper. -n, -k, --max-new-tokens change it.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Write every answer to this JSON file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Scores as JSON.")] = False,
) -> None:
    """Score a model on held-out problems, with intervals clustered by problem."""
    if engine not in ENGINES:
        raise ConfigError(f"engine: {engine!r} is not known. Choose one of: {', '.join(ENGINES)}.")
    own = parse_yaml(f"settings: {settings}", "--settings")["settings"] or {}
    if suite is not None:
        changes = {"k": k, "max_new_tokens": max_new_tokens, "batch_size": batch_size, "seed": seed}
        _run_suite(load_model(model, engine, float32), model, suite, own, changes, problems, keep, json)
        return
    sampling = {
        "k": k or 16,
        "temperature": temperature,
        "top_p": top_p,
        "max_new_tokens": max_new_tokens or 128,
        "batch_size": batch_size,
        "greedy": greedy,
        "seed": seed,
    }
    names = [name for name in (model, vs) if name is not None]
    kept = [_kept(name) for name in names]
    if all(kept):
        typed = {"-k": k, "-n": problems, "--max-new-tokens": max_new_tokens, "--verifier": verifier}
        _refuse([flag for flag, value in typed.items() if value is not None])
    scores = [
        found or _scores(load_model(name, engine, float32), task, own, verifier, problems, sampling)
        for name, found in zip(names, kept, strict=True)
    ]
    if keep is not None:
        for number, score in enumerate(scores):
            score.write(keep if number == 0 else keep.with_stem(f"{keep.stem}-vs"))
    if json:
        print_json(_as_json(scores))
    else:
        _show(scores, names)


def _kept(name: str) -> "Scores | None":
    """The answers of an earlier evaluation, where `name` is such a file. They are scored as they were sampled."""
    from dew.evaluate import Scores

    return Scores.read(name) if name.endswith(".json") and Path(name).is_file() else None


def _refuse(typed: list[str]) -> None:
    if typed:
        raise ConfigError(f"{', '.join(typed)}: kept answers are scored as they were sampled and judged. Leave it out.")


def _scores(
    loaded: tuple[Any, Any],
    task: str,
    settings: dict[str, Any],
    judge: str | None,
    problems: int | None,
    sampling: dict[str, Any],
) -> "Scores":
    from dew import evaluate as ev
    from dew import rewards, tasks

    source = tasks.task(task, **settings)
    return ev.evaluate(*loaded, source, rewards.verifier(judge) if judge else None, n_problems=problems, **sampling)


def _run_suite(
    loaded: tuple[Any, Any],
    model: str,
    name: str,
    own: dict[str, Any],
    changes: dict[str, Any],
    problems: int | None,
    keep: Path | None,
    as_json: bool,
) -> None:
    """Every set of a suite, and a table beside the published one."""
    from rich.table import Table

    from dew.evaluate.suites import suite

    chosen = suite(name)
    sampling = {**chosen.sampling, **{key: value for key, value in changes.items() if value is not None}}
    scores = {
        task: _scores(loaded, task, own, None, min(problems or count, count), sampling)
        for task, count in chosen.tasks.items()
    }
    if keep is not None:
        for task, score in scores.items():
            score.write(keep.with_stem(f"{keep.stem}-{task}"))
    if as_json:
        print_json({"suite": name, **{task: score.summary() for task, score in scores.items()}})
        return
    heading, *rows = chosen.table(model, scores)
    table = Table(title=f"suite {name}, percent; 95 % intervals by problem; published rows have none", show_lines=False)
    for column in heading:
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        table.add_row(*row, end_section=row is rows[-2])
    out.print(table)
    for task, score in scores.items():
        out.print(f"{task}: {len(score.problems)} problems x {score.k} answers, {score.truncated_share:.1%} cut off")


def load_model(name: str, engine: str = "transformers", float32: bool = False) -> tuple[Any, Any]:
    """Model and tokenizer of a model folder, of a run's folder (its final model) or of the hub.

    Training in mixed precision keeps weights in float32 and samples in bfloat16; so does this on a GPU, and vLLM.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from dew import tasks
    from dew.decoding import SamplingCopy
    from dew.evaluate import load_vllm

    disable_progress_bar()

    folder = tasks.model_folder(name)
    if (Path(folder) / "model" / "config.json").is_file():
        folder = str(Path(folder) / "model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if engine == "vllm":
            return load_vllm(folder), tokenizer
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise ConfigError(
            f"{name}: no model can be loaded from there ({reason}). Give a folder with config.json, a finished run's "
            "folder, or `tiny`."
        ) from None
    if not torch.cuda.is_available():
        return model, tokenizer
    cast = model.dtype == torch.float32 and not float32
    return SamplingCopy(model.to("cuda"), torch.bfloat16 if cast else None).model, tokenizer


def _as_json(scores: list["Scores"]) -> Any:
    from dataclasses import asdict

    from dew.evaluate import compare

    if len(scores) == 1:
        return scores[0].summary()
    differences = {
        name: asdict(d) | {"within_noise": d.within_noise} for name, d in compare(scores[0], scores[1]).items()
    }
    return {"model": scores[0].summary(), "vs": scores[1].summary(), "differences": differences}


def _show(scores: list["Scores"], names: list[str]) -> None:
    from rich.table import Table

    from dew.evaluate import compare

    first = scores[0]
    title = f"{first.task}: {len(first.problems)} held-out problems, {first.k} answers each, 95 % intervals by problem"
    table = Table(title=title, title_justify="left")
    table.add_column("score")
    for name in names:
        table.add_column(name, justify="right")
    differences = compare(*scores) if len(scores) == 2 else {}
    if differences:
        table.add_column("difference, paired", justify="right")
    for name in first.scores:
        verdict = []
        if name in differences:
            noise = " (noise)" if differences[name].within_noise else ""
            verdict = [f"{differences[name].difference}{noise}"]
        table.add_row(name, *(str(score.scores.get(name, "")) for score in scores), *verdict)
    out.print(table)
    for name, score in zip(names, scores, strict=True):
        counts = ", ".join(f"{count} {status}" for status, count in score.statuses.items())
        out.print(f"{name}: {counts}; {score.truncated_share:.1%} cut off; {score.tokens_per_second:,.0f} tokens/s")
    if differences and all(d.within_noise for d in differences.values()):
        out.print("Every difference is within noise: these problems do not tell the two models apart.")
