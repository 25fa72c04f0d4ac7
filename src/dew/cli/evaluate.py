"""`dew eval`: mean@k, pass@k and maj@k of one model or two."""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dew import rewards, tasks
from dew.cli.app import app
from dew.cli.console import out, print_json
from dew.cli.flags import mapping
from dew.cli.models import load_model, load_tokenizer
from dew.errors import ConfigError, Problem, unknown
from dew.files import is_plain, try_writing
from dew.rewards.user_function import is_user_function
from dew.rewards.verifiers import FORMATS, VERIFIERS
from dew.run.config import Run, read_run
from dew.run.folder import RunFolder

if TYPE_CHECKING:
    from dew.compare import Scores

OPTIONS = {"top_p": float, "greedy": bool, "seed": int, "batch_size": int, "threshold": float, "float32": bool}
"""What --options takes: rarely needed settings, and their types."""
MORE = f"More settings, e.g. '{{greedy: true}}': {', '.join(OPTIONS)}."


@app.command("eval")
def evaluate_(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model folder, run folder, hub name, `tiny`, or a file from --keep.")],
    task: Annotated[
        str | None, typer.Option(help="Game, data set, file, or the suite `paper` (default: the run's, or countdown).")
    ] = None,
    settings: Annotated[str | None, typer.Option(help="Settings of the task, e.g. '{numbers: 3}'.")] = None,
    reward: Annotated[
        str | None, typer.Option(help="Verifier or file.py:function (default: the task's verifier).")
    ] = None,
    k: Annotated[int, typer.Option("-k", help="Answers per problem.")] = 16,
    problems: Annotated[int | None, typer.Option("-n", "--problems", help="Held-out problems (default 256).")] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    max_new_tokens: Annotated[int | None, typer.Option(help="Maximum length (default: the run's, or 128).")] = None,
    engine: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
    options: Annotated[str | None, typer.Option(help=MORE)] = None,
    vs: Annotated[str | None, typer.Option(help="A second model, or file, to compare on the same problems.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Write all answers to this new JSON file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a model on held-out problems, with 95% intervals over problems."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name: context.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    more = _options(options)
    _check_flags(given, more)
    from dew import compare as ev
    from dew.compare.suites import SUITES

    sampling = {field.name: x for field in fields(ev.Sampling) if (x := {**given, **more}.get(field.name)) is not None}
    load = partial(load_model, engine=engine, float32=more.get("float32", False))
    if task in SUITES:
        _refuse(given.keys() & {"reward", "vs"}, f"no effect with the suite {task}, which has its own data sets")
        _evaluate_suite(task, model, load, settings, problems, sampling, keep, json)
        return
    names = [name for name in (model, vs) if name is not None]
    kept = {name: ev.Scores.read(name) for name in names if name.endswith(".json") or Path(name).is_file()}
    models = [name for name in names if name not in kept]
    left_out, how = False, dict[str, Any]()
    if models:
        like = next(iter(kept.values()), None)
        left_out, how = _plan(models, task, settings, reward, more.get("threshold", 0.5), problems, sampling, like)
    else:
        _refuse(given.keys() - {"model", "vs", "json"}, "no effect on answers read from a file")
    files = _new_files(keep, ("", "-vs")[: len(names)])
    for name in models[1:]:
        load_tokenizer(name, engine)  # if there is no such model, fail before the first one is sampled from
    scores = [kept.get(name) or ev.evaluate(*load(name), **how) for name in names]
    for scored, file in zip(scores, files, strict=False):
        scored.write(file)
    _show(scores, names, left_out or not scores[0].of_train, json)


def _options(text: str | None) -> dict[str, Any]:
    """The settings in --options, checked."""
    given, problems = mapping(text, "--options", "{greedy: true}"), []
    for name, value in given.items():
        kind = OPTIONS.get(name)
        if kind is None:
            problems.append(unknown(f"--options: {name!r} is not known.", name, OPTIONS))
        elif not isinstance(value, int | float if kind is float else kind) or (
            isinstance(value, bool) != (kind is bool)
        ):
            problems.append(Problem(f"--options: {name}={value!r}.", remedy=f"Give a value of type {kind.__name__}."))
    if problems:
        raise ConfigError(problems)
    return given


def _check_flags(given: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Refuse flags that would be ignored."""
    if more.get("greedy"):
        _refuse({*given, *more} & {"k", "temperature", "top_p", "seed"}, "no effect with greedy decoding")
    if "reward" not in given:
        _refuse(more.keys() & {"threshold"}, "no effect without --reward")


def _refuse(flags: Iterable[str], why: str) -> None:
    """Raise an error if flags were given that would be ignored."""
    shown = {"k": "-k", **{name: name for name in OPTIONS}}
    if unused := ", ".join(shown.get(name, f"--{name.replace('_', '-')}") for name in sorted(flags)):
        raise ConfigError(Problem(f"{unused}: {why}.", remedy="Leave it out."))


def _new_files(keep: Path | None, endings: Iterable[str]) -> list[Path]:
    """The files for the answers, which can be written. Checked before sampling, which may take hours."""
    files = [] if keep is None else [Path(f"{keep.parent / keep.stem}{ending}{keep.suffix}") for ending in endings]
    for file in files:
        try:
            try_writing(file.parent)
            why = "it already exists" if file.is_file() else "it is a folder, a pipe or a device" * (not is_plain(file))
        except OSError as error:
            why = str(error.strerror)
        if why:
            remedy = "Name a new file in a folder that you can write to."
            raise ConfigError(Problem(f"{file} cannot be written: {why}.", remedy=remedy))
    return files


def _plan(
    models: Sequence[str], task: str | None, settings: str | None, reward: str | None, threshold: float,
    problems: int | None, sampling: dict[str, Any], like: "Scores | None",
) -> tuple[bool, dict[str, Any]]:  # fmt: skip
    """(whether all models are of runs that left these problems out, the arguments of `evaluate`).

    What was not typed is as in the file to compare with (`like`), or as in the runs.
    """
    from dew.compare.scores import check_comparable, judge_name, problem_key

    chosen, source, run = _problems(models, task, settings, like.task if like else "countdown")
    judge = _judge(source, run, reward)
    sampling = {"max_new_tokens": _max_length(models), **(asdict(like.sampling) if like else {}), **sampling}
    if like is not None:
        problems = len(like.problems) if problems is None else problems
        keys = [problem_key(row["prompt"], row.get("answer")) for row in source.rows(problems, split="held_out")]
        check_comparable(like, source.name, judge_name(judge, threshold), keys)
    left_out = like is None and all(_same(chosen, _run_of(name).task) for name in models)
    return left_out, {"problems": source, "verifier": judge, "n_problems": problems, "threshold": threshold, **sampling}


def _problems(
    models: Sequence[str], task: str | None, settings: str | None, default: str
) -> tuple[str, tasks.Task, Run]:
    """(the task's name, the task, the run that trained on it): as typed, else those of the runs, else the default."""
    name, run = _run_on(task, models)
    chosen = task or run.task
    if not chosen and (data := _data(run)):
        flags = _words({"--task": data, "--settings": "{prompt: prompt}", **_judge_flags(run)})
        remedy = f"Add {flags}." if data == run.settings.get("dataset_name") else "Name a task with --task."
        raise ConfigError(Problem(f"{name}: trained on {data}, which is not a task.", remedy=remedy))
    if not chosen and default not in VERIFIERS:
        what = f"The file to compare with holds answers to {default!r}, which is not a built-in task."
        raise ConfigError(Problem(what, remedy="Name the same data with --task."))
    chosen = chosen or default
    return chosen, tasks.task(chosen, **(mapping(settings) or run.task_settings)), run


def _run_on(task: str | None, models: Sequence[str]) -> tuple[str, Run]:
    """The first model whose run trained on this task, and its run; without a task, all runs must have the same."""
    runs = {name: run for name in models if _data(run := _run_of(name)) and (not task or _same(task, _data(run)))}
    if not task and len({repr((Path(_data(run)).resolve(), run.task_settings)) for run in runs.values()}) > 1:
        each = [f"{name} on {_data(run)} {run.task_settings or ''}".rstrip() for name, run in runs.items()]
        raise ConfigError(Problem(f"Trained on different problems: {', '.join(each)}.", remedy="Choose with --task."))
    return next(iter(runs.items()), ("", Run()))


def _data(run: Run) -> str:
    """What the run trained on."""
    mixture = "several data sets" if run.settings.get("datasets") else ""
    return str(run.task or run.settings.get("dataset_name") or mixture)


def _same(task: str, other: str | None) -> bool:
    return bool(other) and Path(task).resolve() == Path(str(other)).resolve()


def _run_of(model: str) -> Run:
    """The config of the run in this folder, or of the run that it is a checkpoint or the final model of; else none."""
    folder = Path(model)
    home = next((place for place in (folder, folder.parent) if (place / "run.json").is_file()), None)
    if home is None or not folder.is_dir():
        return Run()
    file = home / ("verl.yaml" if RunFolder(home).run().get("engine") == "verl" else "config.yaml")
    return read_run(file) if file.is_file() else Run()


def _max_length(models: Iterable[str]) -> int:
    return max(_run_of(model).settings.get("max_completion_length") or 0 for model in models) or 128


def _judge(source: tasks.Task, run: Run, reward: str | None) -> Any:
    """What decides which answers are correct: as typed, else the run's verifier, else the task's own.

    A run's folder may be somebody else's, so code that its config names only runs if it is typed.
    """
    if reward:
        return rewards.load_reward(reward) if is_user_function(reward) else rewards.reward(reward)
    flags = _judge_flags(run)
    own = flags.get("--reward") if flags.get("--reward") in VERIFIERS else None
    if name := run.verifier or (source.name if source.name in VERIFIERS else own):
        return rewards.verifier(name)
    remedy = "Name a verifier (--reward math) or your own reward function (--reward file.py:function)."
    if flags:
        remedy = f"To score as in the run, add {_words(flags)}, which runs that code."
    raise ConfigError(Problem(f"The task {source.name} has no verifier of its own.", remedy=remedy))


def _judge_flags(run: Run) -> dict[str, str]:
    """The flags for the verifier or reward function that decides in this run which answers are correct."""
    names, wanted = run.settings.get("reward_funcs") or [], run.settings.get("outcome_reward")
    names = [str(name) for name in (names if isinstance(names, list) else [names])]
    name = run.verifier or next((name for name in names if wanted in (None, re.split("[:.]", name)[-1])), None)
    if name is None or name in VERIFIERS:
        return {"--reward": name} if name else {}
    path = name if is_user_function(name) or name in FORMATS else f"trl.rewards:{name}"
    threshold = run.algorithm_settings.get("threshold", 0.5)
    return {"--reward": path, **({"--options": f"{{threshold: {threshold}}}"} if threshold != 0.5 else {})}


def _words(flags: Mapping[str, str]) -> str:
    return shlex.join(word for flag in flags.items() for word in flag)


def _evaluate_suite(
    name: str, model: str, load: Callable[[str], tuple[Any, Any]], settings: str | None, problems: int | None,
    sampling: dict[str, Any], keep: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Every data set of a suite, in a table with the published results."""
    from dew import compare as ev
    from dew.compare import suites

    chosen, scores = suites.suite(name), {}
    sources = {task: tasks.task(task, **mapping(settings)) for task in chosen.tasks}
    files = _new_files(keep, [f"-{task}" for task in sources])
    loaded = load(model)
    for task, source in sources.items():
        count = min(chosen.tasks[task] if problems is None else problems, chosen.tasks[task])
        scores[task] = ev.evaluate(*loaded, source, n_problems=count, **{**chosen.sampling, **sampling})
    for scored, file in zip(scores.values(), files, strict=False):
        scored.write(file)
    if as_json:
        print_json({"suite": name, **{task: found.summary() for task, found in scores.items()}})
        return
    heading, *rows = chosen.table(model, scores)
    table = Table(title=f"suite {name}, percent; 95% intervals by problem, none for published rows")
    for column in heading:
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(*row, end_section=row is rows[-2])
    out.print(table)
    for task, found in scores.items():
        out.print(f"{task}: {len(found.problems)} problems x {found.k} answers, {found.truncated_share:.1%} truncated")


def _show(scores: list["Scores"], names: list[str], held_out: bool, as_json: bool) -> None:
    """The scores of one model, or of two with their differences."""
    from dew.compare import compare_scores, verdicts
    from dew.compare.verdicts import signed

    arms = {"arm": names[-1], "baseline": names[0]}
    differences = compare_scores(scores[1], scores[0], **arms) if len(scores) == 2 else {}
    if as_json:
        both = {key: scored.summary() for key, scored in zip(("model", "vs"), scores, strict=False)}
        found = {name: d.to_json() for name, d in differences.items()}
        print_json({**both, "differences": found} if differences else both["model"])
        return
    first, kind = scores[0], "held-out problems" if held_out else "problems"
    title = f"{first.task}: {len(first.problems)} {kind}, {first.k} answers each, 95% intervals by problem"
    out.print(f"{title}\n")
    table = Table("score")
    for column in [*names, "second − first, paired"] if differences else names:
        table.add_column(column, justify="right")
    for name in first.scores:
        cells = [str(score.scores.get(name, "")) for score in scores]
        if name in differences:
            cells.append(f"{signed(differences[name])}{' (noise)' * differences[name].within_noise}")
        table.add_row(name, *cells)
    out.print(table)
    for name, score in zip(names, scores, strict=True):
        counts = ", ".join(f"{count} {status}" for status, count in score.statuses.items())
        out.print(f"{name}: {counts}; {score.truncated_share:.1%} truncated; {score.tokens_per_second:,.0f} tokens/s")
    one, other = asdict(first.sampling), asdict(scores[-1].sampling)
    if changed := [key for key in one if one[key] != other[key] and key not in ("seed", "batch_size")]:
        values = ", ".join(f"{key} {one[key]} and {other[key]}" for key in changed)
        out.print(f"The answers were sampled with different settings: {values}.")
    if not held_out:
        what = f"{first.task} has no test split: these problems are an eighth of its training data."
        out.print(f"{what} Only runs of `dew train` on this task leave them out of training.")
    from dew.compare.results import main_scores

    for text in verdicts([differences[name] for name in main_scores(differences)]):
        out.print(text)
