"""`dew eval`: mean@k, pass@k and maj@k of one model or two. `dew pairs`: preference pairs from a model's answers."""

import json as json_
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dew import rewards, tasks
from dew.cli.app import app
from dew.cli.console import out, print_json
from dew.cli.flags import mapping
from dew.cli.runs import no_model
from dew.config import Run, read_run
from dew.errors import ConfigError, Problem, not_loaded
from dew.files import is_plain, try_writing, write_atomically
from dew.records import MODEL_FILES, RunFolder
from dew.rewards.verifiers import VERIFIERS

if TYPE_CHECKING:
    from dew.evaluate import Scores
    from dew.evaluate.suites import Suite

ENGINES = ("transformers", "vllm")


@app.command("eval")
def evaluate_(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model folder, run folder, hub name, `tiny`, or a file from --keep.")],
    task: Annotated[str | None, typer.Option(help="Game, data set or file (default: the run's, or countdown).")] = None,
    settings: Annotated[str | None, typer.Option(help="Settings of the task, e.g. '{numbers: 3}'.")] = None,
    verifier: Annotated[str | None, typer.Option(help="Verifier (default: the task's own).")] = None,
    reward: Annotated[str | None, typer.Option(help="Your own reward function instead: file.py:function.")] = None,
    threshold: Annotated[float, typer.Option(help="Answers with a --reward above this count as correct.")] = 0.5,
    k: Annotated[int, typer.Option("-k", help="Answers per problem.")] = 16,
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
    typed = _typed(context)
    if len(typed.keys() & {"reward", "verifier", "suite"}) > 1:
        what = "More than one of --reward, --verifier and --suite:"
        raise ConfigError(Problem(what, "each decides how answers are scored.", "Give one."))
    if keep is not None:
        _check_writable(keep)
    if greedy:
        _refuse(typed.keys() & {"k", "temperature", "top_p", "seed"}, "no effect with --greedy")
    if reward is None:
        _refuse(typed.keys() & {"threshold"}, "no effect without --reward")
    from dew import evaluate as ev
    from dew.evaluate import suites

    sampling = {field.name: typed[field.name] for field in fields(ev.Sampling) if field.name in typed}
    if suite is not None:
        _refuse(typed.keys() & {"task", "vs"}, "--suite evaluates one model on its own data sets")
        chosen = suites.suite(suite)
        sources = {name: tasks.task(name, **mapping(settings)) for name in chosen.tasks}
        loaded, by_task = load_model(model, engine, float32), {}
        for name, n in chosen.tasks.items():
            count = n if problems is None else min(problems, n)
            by_task[name] = ev.evaluate(*loaded, sources[name], n_problems=count, **{**chosen.sampling, **sampling})
        _show_suite(suite, chosen, model, by_task, keep, json)
        return

    names = [name for name in (model, vs) if name is not None]
    kept = [ev.Scores.read(name) if name.endswith(".json") and Path(name).is_file() else None for name in names]
    if all(kept):
        _refuse(typed.keys() - {"model", "vs", "keep", "json"}, "no effect on answers read from a file")
    task, source, own_verifier = _problems(model, task, settings)
    scorer: Any = None
    if reward:
        scorer = rewards.load_reward(reward)
    elif chosen_verifier := verifier or own_verifier:
        scorer = rewards.verifier(chosen_verifier)
    sampling = {"max_new_tokens": _max_length(model), **sampling}
    if vs is not None and kept[1] is None:
        load_tokenizer(vs, engine)  # if there is no such model, fail before the first one is sampled from

    def score(name: str) -> "Scores":
        loaded = load_model(name, engine, float32)
        return ev.evaluate(*loaded, source, scorer, n_problems=problems, threshold=threshold, **sampling)

    scores = [found or score(name) for name, found in zip(names, kept, strict=True)]
    if keep is not None:
        for scored, path in zip(scores, (keep, keep.with_stem(f"{keep.stem}-vs")), strict=False):
            scored.write(path)
    _show(scores, names, not scores[0].of_train or all(_trained_on(task, name) for name in names), json)


def _typed(context: typer.Context) -> dict[str, Any]:
    """The arguments and options that were given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name: context.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def _check_writable(file: Path) -> None:
    """Before sampling, which may take hours."""
    try:
        try_writing(file.parent)
        why = "" if is_plain(file) else "it is a folder, a pipe or a device"
    except OSError as error:
        why = str(error.strerror)
    if why:
        remedy = "Name a file in a folder that you can write to."
        raise ConfigError(Problem(f"{file} cannot be written: {why}.", remedy=remedy))


def _refuse(flags: Iterable[str], why: str) -> None:
    """Raise an error if flags were given that would be ignored."""
    if unused := ", ".join("-k" if name == "k" else f"--{name.replace('_', '-')}" for name in sorted(flags)):
        raise ConfigError(Problem(f"{unused}: {why}.", remedy="Leave it out."))


def _problems(model: str, task: str | None, settings: str | None) -> tuple[str, tasks.Task, str | None]:
    """(the task's name, the task, the verifier that the run of this model uses for it).

    As typed, else that of the run, else countdown.
    """
    run = _run_of(model)
    if not (task or run.task) and (data := run.settings.get("dataset_name")):
        remedy = "Name the problems with --task; for your own data, --reward names the function that scores answers."
        raise ConfigError(Problem(f"{model}: trained on {data}, which is not a task.", remedy=remedy))
    of_the_run = task is None or _trained_on(task, model)
    chosen, own = task or run.task or "countdown", mapping(settings) or (run.task_settings if of_the_run else {})
    return chosen, tasks.task(chosen, **own), run.verifier if of_the_run else None


def _run_of(model: str) -> Run:
    """The config of the run in this folder, or of the run that it is a checkpoint or the final model of; else none."""
    folder = Path(model)
    home = next((place for place in (folder, folder.parent) if (place / "run.json").is_file()), None)
    if home is None or not folder.is_dir():
        return Run()
    file = home / ("verl.yaml" if RunFolder(home).run().get("engine") == "verl" else "config.yaml")
    return read_run(file) if file.is_file() else Run()


def _max_length(model: str) -> int:
    return _run_of(model).settings.get("max_completion_length") or 128


def _trained_on(task: str, model: str) -> bool:
    """Whether the model is of a run with this task, which trained on none of the task's held-out problems."""
    trained = _run_of(model).task
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
    task: Annotated[str | None, typer.Option(help="Game, data set or file (default: the run's, or countdown).")] = None,
    settings: Annotated[str | None, typer.Option(help="Settings of the task, e.g. '{numbers: 3}'.")] = None,
    verifier: Annotated[str | None, typer.Option(help="Verifier (default: the task's own).")] = None,
    k: Annotated[int, typer.Option("-k", min=2, help="Answers to sample per problem.")] = 8,
    problems: Annotated[int, typer.Option("-n", "--problems", min=1, help="Training problems.")] = 1024,
    per_problem: Annotated[int, typer.Option(help="Maximum number of pairs per problem.", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    max_new_tokens: Annotated[int | None, typer.Option(help="Maximum length (default: the run's, or 128).")] = None,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    engine: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
) -> None:
    """Make preference pairs for `trainer: dpo`. Each pairs a correct and a wrong answer to one training problem."""
    if to.exists() or to.suffix != ".jsonl":
        wrong = "already exists" if to.exists() else "does not end in .jsonl"
        raise ConfigError(Problem(f"{to} {wrong}.", remedy="Name a new .jsonl file."))
    _check_writable(to)
    from dew import evaluate as ev

    _, source, own_verifier = _problems(model, task, settings)
    chosen = verifier or own_verifier or source.name
    if not verifier and chosen not in VERIFIERS:
        raise ConfigError(Problem(f"The task {source.name} has no verifier of its own.", remedy="Add --verifier math."))
    scorer, rows = rewards.verifier(chosen), source.rows(problems)
    length = _max_length(model) if max_new_tokens is None else max_new_tokens
    sampling: dict[str, Any] = {"k": k, "temperature": temperature, "max_new_tokens": length, "seed": seed}
    scores = ev.evaluate(*load_model(model, engine), rows, scorer, name=source.name, **sampling)
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
    path, tokenizer = load_tokenizer(name, engine)
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from dew.decoding import SamplingCopy
    from dew.evaluate import load_vllm

    try:
        if engine == "vllm":
            return load_vllm(str(path)), tokenizer
        lora = (path / "adapter_config.json").is_file()
        model = load_lora(path) if lora else load_weights(AutoModelForCausalLM, path, dtype="auto")
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(not_loaded("model", name, error)) from None
    if not torch.cuda.is_available():
        return model, tokenizer
    cast = model.dtype == torch.float32 and not float32
    return SamplingCopy(model.to("cuda"), torch.bfloat16 if cast else None).model, tokenizer


def load_tokenizer(name: str, engine: str) -> tuple[Path, Any]:
    """(where the model is: a folder or a hub name, its tokenizer)."""
    if engine not in ENGINES:
        raise ConfigError(Problem(f"engine: {engine!r} is unknown.", remedy=f"Choose one of: {', '.join(ENGINES)}."))
    from transformers import AutoTokenizer

    path = Path(tasks.model_folder(name))
    path = RunFolder(path).model() or path
    if path.exists() and not any((path / file).is_file() for file in MODEL_FILES):
        if (path / "run.json").is_file():
            raise ConfigError(no_model(path))
        raise ConfigError(Problem(f"{name} is not a model folder.", "It has no config.json.", "Give another folder."))
    if engine == "vllm" and (path / "adapter_config.json").is_file():
        what = f"{name}: LoRA weights, which have to be merged for vLLM."
        raise ConfigError(Problem(what, remedy=f"Write `dew export {name} FOLDER`, then evaluate FOLDER."))
    try:
        return path, AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(not_loaded("model", name, error)) from None


def load_lora(folder: Path) -> Any:
    """The base model with the LoRA weights of this folder merged into it."""
    from peft import AutoPeftModelForCausalLM

    return load_weights(AutoPeftModelForCausalLM, folder).merge_and_unload()


def load_weights(cls: Any, folder: Path, **settings: Any) -> Any:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return cls.from_pretrained(str(folder), trust_remote_code=False, use_safetensors=True, **settings)


def _show(scores: list["Scores"], names: list[str], held_out: bool, as_json: bool) -> None:
    """The scores of one model, or of two with their differences."""
    from dew.evaluate import compare

    differences = compare(*scores) if len(scores) == 2 else {}
    if as_json:
        both = {key: scored.summary() for key, scored in zip(("model", "vs"), scores, strict=False)}
        found = {name: asdict(d) | {"within_noise": d.within_noise} for name, d in differences.items()}
        print_json({**both, "differences": found} if differences else both["model"])
        return
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
