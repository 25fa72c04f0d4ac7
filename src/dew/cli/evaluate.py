"""`dew eval`: mean@k, pass@k and maj@k of one model or two. `dew pairs`: preference pairs from a model's answers."""

import json as json_
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dew import rewards, tasks
from dew.cli.app import app
from dew.cli.console import out, print_json
from dew.cli.flags import mapping
from dew.config import Run, read_run
from dew.errors import ConfigError, Problem, not_loaded
from dew.files import write_atomically
from dew.records import MODEL_FILES, RunFolder

if TYPE_CHECKING:
    from dew.evaluate import Scores
    from dew.evaluate.scores import Difference
    from dew.evaluate.suites import Suite

ENGINES = ("transformers", "vllm")


@app.command("eval")
def evaluate_(
    model: Annotated[str, typer.Argument(help="A model folder, run folder, hub name, `tiny`, or a file from --keep.")],
    task: Annotated[str | None, typer.Option(help="Game, data set or file (default: the run's, or countdown).")] = None,
    settings: Annotated[str | None, typer.Option(help="Settings of the task, e.g. '{numbers: 3}'.")] = None,
    verifier: Annotated[str | None, typer.Option(help="Verifier (default: the task's own).")] = None,
    reward: Annotated[str | None, typer.Option(help="Your own reward function instead: file.py:function.")] = None,
    threshold: Annotated[float, typer.Option(help="Answers with a --reward above this count as correct.")] = 0.5,
    k: Annotated[int | None, typer.Option("-k", help="Answers per problem (default 16).")] = None,
    problems: Annotated[int | None, typer.Option("-n", "--problems", help="Held-out problems (default 256).")] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 keeps every token.")] = 1.0,
    max_new_tokens: Annotated[int | None, typer.Option(help="Maximum length (default: the run's, or 128).")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Answers per batch (default 256; on a GPU 1,024).")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Greedy decoding, one answer per problem.")] = False,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    engine: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
    float32: Annotated[bool, typer.Option("--float32", help="On a GPU, sample in float32, not bfloat16.")] = False,
    vs: Annotated[str | None, typer.Option(help="A second model to compare on the same problems.")] = None,
    suite: Annotated[str | None, typer.Option(help="A paper's data sets and settings; choose: paper.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Write all answers to this JSON file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a model on held-out problems. Confidence intervals are clustered by problem."""
    if sum(given is not None for given in (reward, verifier, suite)) > 1:
        what = "More than one of --reward, --verifier and --suite:"
        raise ConfigError(Problem(what, "each decides how answers are scored.", "Give one."))
    if keep is not None and keep.is_dir():
        raise ConfigError(Problem(f"--keep {keep} is a folder.", remedy="Name a JSON file to write."))
    from dew import evaluate as ev
    from dew.evaluate import suites

    run = _run_in(model)
    if not (task or run.task or suite) and (data := run.settings.get("dataset_name")):
        remedy = "Name problems to evaluate it on with --task, and with --reward how to score your own data."
        raise ConfigError(Problem(f"{model}: trained on {data}, which is not a task.", remedy=remedy))
    of_the_run = not suite and (task is None or _trained_on(task, model))
    own = mapping(settings) or (run.task_settings if of_the_run else {})
    if of_the_run and not reward:
        verifier = verifier or run.verifier
    task, limit = task or run.task or "countdown", run.settings.get("max_completion_length") or 128
    scorer = rewards.load_reward(reward) if reward else rewards.verifier(verifier) if verifier else None
    given = {"k": k, "max_new_tokens": max_new_tokens, "batch_size": batch_size, "seed": seed, "threshold": threshold}
    given = {name: value for name, value in given.items() if value is not None}

    def score(loaded: tuple[Any, Any], name: str, n: int | None, **sampling: Any) -> "Scores":
        return ev.evaluate(*loaded, tasks.task(name, **own), scorer, n_problems=n, **{**sampling, **given})

    if suite is not None:
        chosen, loaded = suites.suite(suite), load_model(model, engine, float32)
        counts = {name: min(problems or n, n) for name, n in chosen.tasks.items()}
        by_task = {name: score(loaded, name, n, **chosen.sampling) for name, n in counts.items()}
        _show_suite(suite, chosen, model, by_task, keep, json)
        return
    typed = {"-k": k, "-n": problems, "--max-new-tokens": max_new_tokens, "--verifier": verifier, "--reward": reward}
    names = [name for name in (model, vs) if name is not None]
    kept = [ev.Scores.read(n) if n.endswith(".json") and Path(n).is_file() else None for n in names]
    if all(kept) and (unused := ", ".join(flag for flag, value in typed.items() if value is not None)):
        raise ConfigError(Problem(f"{unused}: no effect on answers read from a file.", remedy="Leave it out."))
    sampling = {"k": 16, "max_new_tokens": limit, "temperature": temperature, "top_p": top_p, "greedy": greedy}
    scores = [
        scored or score(load_model(name, engine, float32), task, problems, **sampling)
        for name, scored in zip(names, kept, strict=True)
    ]
    if keep is not None:
        for scored, path in zip(scores, (keep, keep.with_stem(f"{keep.stem}-vs")), strict=False):
            scored.write(path)
    differences = ev.compare(*scores) if len(scores) == 2 else {}
    if json:
        first, *others = [scored.summary() for scored in scores]
        found = {name: asdict(d) | {"within_noise": d.within_noise} for name, d in differences.items()}
        print_json({"model": first, "vs": others[0], "differences": found} if others else first)
    else:
        _show(scores, names, differences, not scores[0].of_train or all(_trained_on(task, name) for name in names))


def _run_in(model: str) -> Run:
    """The config of a run's folder; an empty one for any other model."""
    file = Path(model) / "config.yaml"
    return read_run(file) if file.is_file() else Run()


def _trained_on(task: str, model: str) -> bool:
    """Whether this is the folder of a run with this task, which trained on none of the task's held-out problems."""
    trained = _run_in(model).task
    return trained is not None and Path(trained).resolve() == Path(task).resolve()


def _show_suite(
    name: str, chosen: "Suite", model: str, scores: dict[str, "Scores"], keep: Path | None, as_json: bool
) -> None:
    """Every data set of a suite, in a table with the published results."""
    for task, found in scores.items():
        if keep is not None:
            found.write(keep.with_stem(f"{keep.stem}-{task}"))
    if as_json:
        print_json({"suite": name, **{task: found.summary() for task, found in scores.items()}})
        return
    heading, *rows = chosen.table(model, scores)
    table = Table(title=f"suite {name}, percent; 95 % intervals by problem, none for published rows")
    for column in heading:
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(*row, end_section=row is rows[-2])
    out.print(table)
    for task, found in scores.items():
        out.print(f"{task}: {len(found.problems)} problems x {found.k} answers, {found.truncated_share:.1%} truncated")


@app.command()
def pairs(
    model: Annotated[str, typer.Argument(help="A model folder, run folder, hub name, or `tiny`.")],
    to: Annotated[Path, typer.Argument(help="A new .jsonl file.")],
    task: Annotated[str, typer.Option(help="countdown, chain, a named data set, a file or a folder.")] = "countdown",
    settings: Annotated[str | None, typer.Option(help="Settings of the task, e.g. '{numbers: 3}'.")] = None,
    verifier: Annotated[str | None, typer.Option(help="Verifier (default: the task's own).")] = None,
    k: Annotated[int, typer.Option("-k", min=2, help="Answers to sample per problem.")] = 8,
    problems: Annotated[int, typer.Option("-n", "--problems", min=1, help="Training problems.")] = 1024,
    per_problem: Annotated[int, typer.Option(help="Maximum number of pairs per problem.", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum new tokens per answer.")] = 128,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    engine: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
) -> None:
    """Make preference pairs for `trainer: dpo`. Each pairs a correct and a wrong answer to one training problem."""
    if to.exists() or to.suffix != ".jsonl":
        wrong = "already exists" if to.exists() else "does not end in .jsonl"
        raise ConfigError(Problem(f"{to} {wrong}.", remedy="Name a new .jsonl file."))
    from dew import evaluate as ev

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
    out.print(f"{to}: {len(found)} pairs; {share}, {scores.truncated_share:.1%} truncated")


def load_model(name: str, engine: str = "transformers", float32: bool = False) -> tuple[Any, Any]:
    """Model and tokenizer from a model folder, a run folder (its final model) or the hub. LoRA weights are merged.

    Mixed-precision training keeps weights in float32 and samples in bfloat16; so does this on a GPU, and vLLM.
    """
    if engine not in ENGINES:
        raise ConfigError(Problem(f"engine: {engine!r} is unknown.", remedy=f"Choose one of: {', '.join(ENGINES)}."))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dew.decoding import SamplingCopy
    from dew.evaluate import load_vllm

    path = Path(tasks.model_folder(name))
    path = RunFolder(path).model() or path
    if path.exists() and not any((path / file).is_file() for file in MODEL_FILES):
        if (path / "run.json").is_file():
            what = f"{name}: this run has saved no model and no checkpoint."
            raise ConfigError(Problem(what, remedy="Finish the run, or save one: trainer.save_model()."))
        raise ConfigError(Problem(f"{name} is not a model folder.", "It has no config.json.", "Give another folder."))
    lora = (path / "adapter_config.json").is_file()
    if lora and engine == "vllm":
        what = f"{name}: LoRA weights, which have to be merged for vLLM."
        raise ConfigError(Problem(what, remedy=f"Write `dew export {name} FOLDER`, then evaluate FOLDER."))
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
        if engine == "vllm":
            return load_vllm(str(path)), tokenizer
        model = load_lora(path) if lora else load_weights(AutoModelForCausalLM, path, dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigError(not_loaded("model", name, error)) from None
    if not torch.cuda.is_available():
        return model, tokenizer
    cast = model.dtype == torch.float32 and not float32
    return SamplingCopy(model.to("cuda"), torch.bfloat16 if cast else None).model, tokenizer


def load_lora(folder: Path) -> Any:
    """The base model with the LoRA weights of this folder merged into it."""
    from peft import AutoPeftModelForCausalLM

    return load_weights(AutoPeftModelForCausalLM, folder).merge_and_unload()


def load_weights(cls: Any, folder: Path, **settings: Any) -> Any:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return cls.from_pretrained(str(folder), trust_remote_code=False, use_safetensors=True, **settings)


def _show(scores: list["Scores"], names: list[str], differences: dict[str, "Difference"], held_out: bool) -> None:
    first, kind = scores[0], "held-out problems" if held_out else "problems"
    title = f"{first.task}: {len(first.problems)} {kind}, {first.k} answers each, 95 % intervals by problem"
    out.print(f"{title}\n")
    table = Table("score")
    for column in [*names, "second − first, paired"] if differences else names:
        table.add_column(column, justify="right")
    for name in first.scores:
        cells = [str(score.scores.get(name, "")) for score in scores]
        if name in differences:
            cells.append(f"{differences[name].difference}{' (noise)' * differences[name].within_noise}")
        table.add_row(name, *cells)
    out.print(table)
    for name, score in zip(names, scores, strict=True):
        counts = ", ".join(f"{count} {status}" for status, count in score.statuses.items())
        out.print(f"{name}: {counts}; {score.truncated_share:.1%} truncated; {score.tokens_per_second:,.0f} tokens/s")
    if not held_out:
        what = f"{first.task} has no test split: these problems are an eighth of its training data."
        out.print(f"{what} Only runs of `dew train` on this task leave them out of training.")
    if differences and all(d.within_noise for d in differences.values()):
        out.print("Every difference is within noise: these problems do not show which model is better.")
