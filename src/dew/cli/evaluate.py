"""`dew eval`: mean@k, pass@k and maj@k of one or two models. `dew export`: save a run's model for other tools."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

import typer

from dew import rewards, tasks
from dew.cli.app import app
from dew.cli.console import err, out, print_json, show_markdown
from dew.cli.flags import mapping
from dew.cli.train import merge_command
from dew.errors import ConfigError, Problem, loading, quoted, unknown
from dew.files import stay_inside, try_writing
from dew.rewards.user_function import is_user_function
from dew.rewards.verifiers import FORMATS, has_verifier
from dew.run.config import Run, find_model, flat, make_run, read_run, read_yaml
from dew.run.folder import RunFolder, make_folder
from dew.run.models import check_model
from dew.tasks.games import PLAYS
from dew.tasks.rows import first_columns

if TYPE_CHECKING:
    from dew.compare import Scores


@app.command("eval")
def evaluate_(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model folder, run folder, hub name, `tiny`, or a file from --keep.")],
    task: Annotated[str | None, typer.Option(help="Game, data set or file (default: the run's).")] = None,
    settings: Annotated[str | None, typer.Option(help="Settings of the task, e.g. '{numbers: 3}'.")] = None,
    reward: Annotated[str | None, typer.Option(help="Verifier or file.py:function (default: the task's).")] = None,
    k: Annotated[int, typer.Option("-k", help="Answers per problem.")] = 16,
    problems: Annotated[int | None, typer.Option("-n", "--problems", help="Held-out problems (default 256).")] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    max_new_tokens: Annotated[int | None, typer.Option(help="Maximum length (default: the run's, or 128).")] = None,
    options: Annotated[
        str | None, typer.Option(help="top_p, greedy, seed, batch_size, threshold of a reward, e.g. '{top_p: 0.9}'.")
    ] = None,
    engine: Annotated[Literal["transformers", "vllm"], typer.Option(help="Sampler.")] = "transformers",
    vs: Annotated[str | None, typer.Option(help="A second model or file to compare on the same problems.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Write all answers to this new JSON file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a model on held-out problems. Scores have 95% intervals over problems."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name: context.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    from dew import compare as ev
    from dew.compare.scores import read_unscored

    sampling, threshold = _sampling(given, options)
    names = [name for name in (model, vs) if name is not None]
    kept = {name: ev.Scores.read(name) for name in names if name.endswith(".json") or Path(name).is_file()}
    models = [name for name in names if name not in kept]
    left_out, how = False, dict[str, Any]()
    if models:
        like = next(iter(kept.values()), None)
        left_out, how = _plan(models, task, settings, reward, threshold, problems, sampling, like)
    elif unused := sorted(given.keys() - {"model", "vs", "as_json"}):
        flags = ", ".join("-k" if name == "k" else f"--{name.replace('_', '-')}" for name in unused)
        raise ConfigError(Problem(f"{flags}: no effect on answers read from a file.", remedy="Remove it."))
    first = keep or Path(gettempdir(), f"dew-eval-{uuid4().hex[:8]}.json")
    files = [first, Path(f"{first.parent / first.stem}-vs{first.suffix}")][: len(names)]
    for file in files:  # before sampling, which may take hours
        try_writing(file.parent)
        read_unscored(file)
    for name in models[1:]:
        load_tokenizer(name, engine)  # if there is no such model, fail before the first one is sampled from
    both = list(zip(names, files, strict=True))
    try:
        scores = [kept.get(name) or ev.evaluate(*load_model(name, engine), keep=file, **how) for name, file in both]
    except BaseException:  # also Ctrl-C
        if sampled := [str(file) for file in files if file.exists()]:
            again = f"the same command with --keep {quoted(first)} does not sample them again"
            err.print(f"The sampled answers are in {' and '.join(sampled)}: {again}.")
        raise
    for scored, file in zip(scores, files, strict=True):
        if keep:
            scored.write(file)
        else:
            file.unlink(missing_ok=True)
    _show(scores, names, left_out or not scores[0].of_train, as_json)


def _sampling(given: Mapping[str, Any], options: str | None) -> tuple[dict[str, Any], float | None]:
    """Return the settings of `Sampling` given as flags or in --options, and the threshold of a reward if given."""
    from dew.compare import Sampling

    known = [field.name for field in fields(Sampling)]
    more = mapping(options, "--options", "{top_p: 0.9}")
    for name in more.keys() - {*known, "threshold"}:
        raise ConfigError(unknown(f"--options: {name!r} is not known.", name, [*known, "threshold"]))
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in more.values()):
        raise ConfigError(f"--options {options}: every value must be a number, or true or false for greedy.")
    sampling = {name: value for name, value in {**given, **more}.items() if name in known}
    Sampling(**sampling)
    return sampling, more.get("threshold")


def _plan(
    models: Sequence[str], task: str | None, settings: str | None, reward: str | None, threshold: float | None,
    problems: int | None, sampling: dict[str, Any], like: "Scores | None",
) -> tuple[bool, dict[str, Any]]:  # fmt: skip
    """Return whether all models are from runs that held these problems out, and the arguments of `evaluate`.

    Defaults come from the file to compare with (`like`), or from the runs.
    """
    from dew.compare.scores import check_comparable, judge_name, problem_keys

    runs = {name: _run_of(name) for name in models}
    run = _run_on(task, runs)
    chosen = task or run.task or (like.task if like else None)
    if chosen is None:
        if unknown_task := [name for name in models if tasks.model_folder(name) == name]:
            if not (Path(unknown_task[0]) / "run.json").is_file():
                find_model(unknown_task[0], "model")
            what = f"{unknown_task[0]}: no task to evaluate it on."
            raise ConfigError(Problem(what, remedy="Add --task: a file, a data set such as gsm8k, or countdown."))
        chosen = "countdown"
    learned = PLAYS.get(models[0], {}) if chosen == "countdown" and not run.task else {}
    given = mapping(settings) or run.task_settings or learned
    own = reward is not None and is_user_function(reward)
    if own and Path(chosen).exists() and "answer" not in {*given, *first_columns(chosen)}:
        given = {**given, "answer": ""}  # the reward does not need gold answers
    source = tasks.task(chosen, **given)
    judge = _judge(chosen, run, reward)
    if threshold is not None and isinstance(judge, rewards.Verifier):
        what = f"threshold: no effect on the verifier {judge.name}, which decides itself whether an answer is correct."
        raise ConfigError(Problem(what, remedy="Remove it. It is for a reward function (--reward file.py:function)."))
    threshold = 0.5 if threshold is None else threshold
    length = max(run.settings.get("max_completion_length") or 0 for run in runs.values()) or 128
    sampling = {"max_new_tokens": length, **(asdict(like.sampling) if like else {}), **sampling}
    if like is not None:
        problems = len(like.problems) if problems is None else problems
        rows = source.rows(problems, split="held_out")
        keys = problem_keys((row["prompt"], row.get("answer")) for row in rows)
        check_comparable(like, source.name, judge_name(judge, threshold), keys)
    left_out = like is None and all(_same_task(chosen, run.task) for run in runs.values())
    return left_out, {"problems": source, "verifier": judge, "n_problems": problems, "threshold": threshold, **sampling}


def _run_on(task: str | None, runs: Mapping[str, Run]) -> Run:
    """Return the first run that trained on this task; without a task, all runs must have trained on the same one."""
    for name, run in runs.items():
        data = run.settings.get("dataset_name") or "several data sets" * ("datasets" in run.settings)
        if data and not task:
            what = f"{name}: trained on {data}, not on a `task` with held-out problems."
            remedy = "Add --task: a file, a folder with a test split, or a data set such as gsm8k."
            raise ConfigError(Problem(what, remedy=remedy))
    trained = {name: run for name, run in runs.items() if run.task}
    if not task and len({(str(run.task), str(run.task_settings)) for run in trained.values()}) > 1:
        each = [f"{name} on {run.task} {run.task_settings or ''}".rstrip() for name, run in trained.items()]
        raise ConfigError(Problem(f"Trained on different problems: {', '.join(each)}.", remedy="Choose with --task."))
    return next((run for run in trained.values() if not task or _same_task(task, run.task)), Run())


def _same_task(task: str, other: Any) -> bool:
    return bool(other) and Path(task).resolve() == Path(str(other)).resolve()


def _run_of(model: str) -> Run:
    """Return the config of the run in this folder, or of the run that this checkpoint or final model belongs to."""
    folder = Path(model)
    homes = [place for place in (folder, folder.parent) if folder.is_dir() and (place / "run.json").is_file()]
    files = [home / name for home in homes[:1] for name in ("verl.yaml", "config.yaml") if (home / name).is_file()]
    if files or not homes:
        return read_run(files[0]) if files else Run()
    facts = RunFolder(homes[0]).run()
    keys, limit = {"chat_template_kwargs": facts.get("chat_template_kwargs")}, facts.get("max_completion_length")
    used = facts.get("settings")
    if facts.get("engine") == "lab" and isinstance(used, dict) and used.get("model"):
        reward, limit = str(used.get("reward") or ""), used.get("max_new_tokens")
        keys = {"task": facts.get("data"), "task_settings": used.get("task")}
        keys |= {"verifier": reward} if has_verifier(reward) else {"reward_funcs": reward}
    keys["max_completion_length"] = limit if isinstance(limit, int) else None
    return make_run({key: value for key, value in keys.items() if value}, source=str(homes[0] / "run.json"))


def _judge(task: str, run: Run, reward: str | None) -> Any:
    """Return what decides correctness: `reward` if given, else the run's verifier, else the task's.

    A run's folder may be from someone else, so code that its config names only runs if it is given as `reward`.
    """
    if reward:
        return rewards.load_reward(reward) if is_user_function(reward) else rewards.reward(reward)
    names, wanted = run.settings.get("reward_funcs") or [], run.settings.get("outcome_reward")
    names = [str(name) for name in (names if isinstance(names, list) else [names])]
    used = next((name for name in names if wanted in (None, re.split("[:.]", name)[-1])), "")
    if verifier := next((name for name in (run.verifier, task, used) if has_verifier(name)), None):
        return rewards.verifier(verifier)
    remedy = "Name a verifier (--reward math) or your own reward function (--reward file.py:function)."
    if used:
        path = used if is_user_function(used) or used in FORMATS else f"trl.rewards:{used}"
        threshold = run.algorithm_settings.get("threshold", 0.5)
        more = f" --options '{{threshold: {threshold}}}'" if threshold != 0.5 else ""
        remedy = f"To score as in the run, add --reward {quoted(path)}{more}, which runs that code."
    raise ConfigError(Problem(f"The task {task} has no verifier.", remedy=remedy))


def _show(scores: Sequence["Scores"], names: Sequence[str], held_out: bool, as_json: bool) -> None:
    from dew.compare import compare_scores, verdicts
    from dew.compare.grid import main_scores
    from dew.compare.verdicts import markdown_table, signed

    first, last = scores[0], scores[-1]
    differences = compare_scores(last, first, arm=names[-1], baseline=names[0]) if len(scores) > 1 else {}
    if as_json:
        both = {key: scored.summary() for key, scored in zip(("model", "vs"), scores, strict=False)}
        found = {name: d.to_json() for name, d in differences.items()}
        print_json({**both, "differences": found} if differences else both["model"])
        return
    kind = f"{len(first.problems)} {'held-out ' * held_out}problems"
    k = " and ".join(dict.fromkeys(str(score.k) for score in scores))
    out.print(f"{first.task}: {kind}, {k} answer{'s' * (k != '1')} each, 95% intervals by problem\n")
    every = dict.fromkeys(name for score in scores for name in score.scores)
    rows = [[name, *(str(score.scores.get(name, "")) for score in scores)] for name in every]
    if differences:
        rows = [[*row, signed(differences[row[0]]) if row[0] in differences else ""] for row in rows]
    show_markdown(markdown_table(["score", *names, *["second − first, paired"] * bool(differences)], rows))
    for name, score in zip(names, scores, strict=True):
        counts = ", ".join(f"{count} {status}" for status, count in score.statuses.items())
        out.print(f"{name}: {counts}; {score.truncated_share:.1%} truncated; {score.tokens_per_second:,.0f} tokens/s")
    one, other = asdict(first.sampling), asdict(last.sampling)
    if changed := [key for key in one if one[key] != other[key] and key not in ("seed", "batch_size")]:
        values = ", ".join(f"{key} {one[key]} and {other[key]}" for key in changed)
        out.print(f"The answers were sampled with different settings: {values}.")
    if not held_out:
        what = f"{first.task} has no test split: these problems are an eighth of its training data."
        out.print(f"{what} Only `dew train` on this task leaves them out of training.")
    out.print("\n".join(verdicts([differences[name] for name in main_scores(differences)])))


# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────
@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    to: Annotated[Path, typer.Argument(help="A new or empty folder.")],
) -> None:
    """Export a run's final model, or its newest checkpoint.

    The folder loads with `from_pretrained`; LoRA weights are merged.
    """
    source = RunFolder(run).model()
    if source is None:
        raise ConfigError(no_model(run))
    stay_inside(source)
    make_folder(to)
    if any(to.iterdir()):
        raise ConfigError(Problem(f"{to} is not empty.", remedy="Choose a new folder."))
    with noticing_deletion(source):
        parts = load_tokenizer(str(source))[1], load_weights(source)
    for part in parts:
        part.save_pretrained(str(to))
    out.print(f"Model: {to}")


def load_model(name: str, engine: str = "transformers") -> tuple[Any, Any]:
    """Load model and tokenizer from a model folder, a run folder (its final model) or the hub. LoRA weights are merged.

    On a GPU, float32 weights are sampled in bfloat16, as in mixed-precision training. On a CPU, sampling is in float32.
    """
    with noticing_deletion(RunFolder(tasks.model_folder(name)).model()):
        path, tokenizer = load_tokenizer(name, engine)
        import torch

        from dew.compare import load_vllm
        from dew.compare.sampling import with_template_settings
        from dew.decoding import SamplingCopy

        tokenizer = with_template_settings(tokenizer, _run_of(name).settings.get("chat_template_kwargs"))
        cpu = not torch.cuda.is_available()  # few CPUs support bfloat16
        if engine == "vllm":
            return load_vllm(str(path), dtype="float32" if cpu else "auto"), tokenizer
        model = load_weights(path).requires_grad_(False)
    if cpu:
        return model.float(), tokenizer
    cast = torch.bfloat16 if model.dtype == torch.float32 else None
    return SamplingCopy(model.to("cuda"), cast).model, tokenizer


@contextmanager
def noticing_deletion(folder: Path | None) -> Iterator[None]:
    """Say so if files of this model were deleted while it was loaded: training keeps only the newest checkpoints."""
    files = [] if folder is None else [*folder.iterdir()]
    try:
        yield
    except Exception:
        if all(file.exists() for file in files):
            raise
        why, remedy = "Training keeps only the newest checkpoints.", "Repeat the command with the run's folder."
        raise ConfigError(Problem(f"{folder} was deleted while it was loaded.", why, remedy)) from None


def load_tokenizer(name: str, engine: str = "transformers") -> tuple[Path, Any]:
    """Return the model's folder or hub name, and its tokenizer (for adapters of the lab, that of the base model)."""
    from transformers import AutoTokenizer

    found = RunFolder(tasks.model_folder(name)).model()
    if found is None and Path(name, "run.json").is_file():
        raise ConfigError(no_model(Path(name)))
    path = found or Path(find_model(name, "model"))
    if found:
        check_model(name, found)
    adapter, source = path / "adapter_config.json", str(path)
    if engine == "vllm" and adapter.is_file():
        what = f"{name}: LoRA weights must be merged for vLLM."
        raise ConfigError(Problem(what, remedy=f"Run `dew export {quoted(name)} FOLDER`, then evaluate FOLDER."))
    with loading("model", name, (OSError, ValueError, LookupError, TypeError)):
        if adapter.is_file() and not any(path.glob("tokenizer*")):
            source = find_model(str(json.loads(adapter.read_bytes())["base_model_name_or_path"]), str(adapter))
        return path, AutoTokenizer.from_pretrained(source, trust_remote_code=False)


def load_weights(folder: Path) -> Any:
    """Load a model in the precision of its weights. LoRA weights are merged."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with loading("model", str(folder), (OSError, ValueError, SafetensorError)):
        if (folder / "adapter_config.json").is_file():
            from peft import AutoPeftModelForCausalLM as Peft

            adapted = Peft.from_pretrained(str(folder), trust_remote_code=False, use_safetensors=True)
            adapted.config._name_or_path = str(folder)  # it is that of the base model
            return adapted.merge_and_unload()
        return AutoModelForCausalLM.from_pretrained(
            str(folder), trust_remote_code=False, use_safetensors=True, dtype="auto"
        )


def no_model(folder: Path) -> Problem:
    if RunFolder(folder).run().get("engine") == "verl":
        saved, config = folder / "checkpoints", folder / "config.yaml"
        if not saved.is_dir() and config.is_file():  # started with verl's command: verl's own folder
            saved = Path(str(flat(read_yaml(config)).get("trainer.default_local_dir")))
        if saved.is_dir():
            remedy = f"Merge its checkpoint first: {merge_command(saved, folder)}"
            return Problem(f"{folder}: verl saved its model in parts.", remedy=remedy)
    remedy = "Give the folder of a run with a model. `dew resume` finishes a run; in Python: trainer.save_model()."
    lacks = "holds no final model and no checkpoint" if folder.is_dir() else "does not exist"
    return Problem(f"{folder} {lacks}.", remedy=remedy)
