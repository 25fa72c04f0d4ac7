"""From a Run to a trained model: TRL's own parser, dew's tasks and rewards, one folder."""

import logging
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import TrainerState

from dew.config import Run, Scoring, check_keys, to_yaml
from dew.engines.permission import check_permission
from dew.engines.problems import judge_of, training_rows
from dew.engines.trl.checkpoints import STATE
from dew.engines.trl.config import DewConfig
from dew.errors import ConfigError
from dew.files import sweep, sync, write_atomically
from dew.records import RunFolder
from dew.tasks import model_folder, task

Say = Callable[[str], None]
logger = logging.getLogger("dew")
TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""TRL's own reward functions."""


@dataclass(frozen=True)
class Parsed:
    """A Run as TRL sees it."""

    run: Run
    script: Any
    args: DewConfig
    model: Any


def parse(run: Run, flags: Sequence[str] = (), *, dry: bool = False, allowed: Collection[str] = ()) -> Parsed:
    """TRL's parser over the run's settings and further command-line flags (`--learning_rate 1e-5`).

    A dry parse understands a run for a GPU on a machine that has none. `allowed` names what a file may bring about
    beyond training (permission.py).
    """
    import torch
    from trl import ModelConfig, TrlParser
    from trl.scripts.grpo import GRPOScriptArguments

    kinds = (GRPOScriptArguments, DewConfig, ModelConfig)
    known = [f.name for kind in kinds for f in fields(kind) if f.init]
    check_keys(run.settings, known, source=run.source)
    given = [flag[2:].split("=")[0].replace("-", "_") for flag in flags if flag.startswith("--")]
    check_keys(given, [*known, *(f"no_{name}" for name in known)], source="command line")

    check_permission(run, given, allowed)
    parser = TrlParser(kinds)
    parser.error = _refuse
    parser.set_defaults_with_config(**run.settings)
    if dry and not torch.cuda.is_available():
        parser.set_defaults(use_cpu=True)
    try:
        script, args, model = parser.parse_args_into_dataclasses(args=list(flags))
    except Exception as error:  # of a dozen kinds, from TRL, transformers, accelerate and what they ask for
        if isinstance(error, ConfigError):
            raise
        kind = "" if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: "
        raise ConfigError(f"{run.source or 'configuration'}: {kind}{error}") from error
    settings = {**run.settings, **{name: _value_of(name, script, args, model) for name in given}}
    _check_model(model, run)
    return Parsed(Run(**{**vars(run), "settings": settings}), script, args, model)


def _refuse(message: str) -> None:
    raise ConfigError(f"command line: {message}. `dew train --keys` lists the settings with their types.")


def _value_of(name: str, *parsed: Any) -> Any:
    return next((getattr(part, name) for part in parsed if hasattr(part, name)), None)


def _check_model(model: Any, run: Run) -> None:
    if not model.model_name_or_path:
        raise ConfigError(
            f"{run.source or 'configuration'}: model_name_or_path is missing. Name a model folder, a hub model, or "
            "`tiny`, the model that comes with dew."
        )


# ── data and rewards ────────────────────────────────────────────────────────────────────────────────────────


def data_of(parsed: Parsed) -> tuple[Any, Any]:
    """(training data, evaluation data or None), as TRL takes them."""
    from datasets import Dataset, load_dataset

    run, script = parsed.run, parsed.script
    if run.task is not None:
        source, rows = training_rows(run)
        if parsed.args.eval_strategy == "no":
            return Dataset.from_list(rows), None
        held_out = source.rows(run.scores.problems if run.scores else 64, split="held_out")
        return Dataset.from_list(rows), Dataset.from_list(held_out)
    if not script.dataset_name:
        raise ConfigError(
            f"{run.source or 'configuration'}: nothing to train on. Write `task: countdown` (or chain, or a .jsonl "
            "file of problems), or `dataset_name:` as TRL has it."
        )
    try:
        data = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
    except Exception as error:  # the hub's many kinds of "not there"
        reason = str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(f"dataset_name: {script.dataset_name!r} cannot be loaded ({reason}).") from None
    evaluation = data[script.dataset_test_split] if parsed.args.eval_strategy != "no" else None
    return data[script.dataset_train_split], evaluation


def rewards_of(parsed: Parsed) -> list[Any]:
    """The reward functions: the verifier first, then those that the file names in TRL's way."""
    judge = judge_of(parsed.run)
    functions: list[Any] = [judge] if judge is not None else []
    functions += [_reward(name, parsed.args) for name in parsed.script.reward_funcs or []]
    if parsed.script.reward_model_name_or_path:
        functions.append(parsed.script.reward_model_name_or_path)
    if not functions:
        raise ConfigError(
            f"{parsed.run.source or 'configuration'}: no reward. Write `verifier: math` (or countdown, chain), "
            "`reward_funcs: [accuracy_reward]` as TRL has it, or your own as `[file.py:function]`."
        )
    return functions


def _reward(name: str, args: DewConfig) -> Any:
    """TRL's by name, one of dew's by name, or one's own: module:function, file.py:function, TRL's module.function."""
    from trl import rewards as trl_rewards

    from dew.rewards.compose import reward
    from dew.rewards.user_function import is_user_function, load_reward

    if name in TRL_REWARDS:
        return getattr(trl_rewards, name)
    if name == "get_soft_overlong_punishment":  # with the settings of TRL's own script
        return trl_rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)
    if not is_user_function(name):
        return reward(name)
    memory = None if args.reward_memory is None else args.reward_memory * 2**30
    return load_reward(name, args.reward_timeout, memory, args.seed)


# ── a run ───────────────────────────────────────────────────────────────────────────────────────────────────


def build_trainer(parsed: Parsed, callbacks: Sequence[Any] = ()) -> Any:
    """The DewTrainer of a run, ready to train."""
    from trl import get_peft_config, get_quantization_config

    from dew.engines.trl.trainer import DewTrainer

    args, model = parsed.args, parsed.model
    init = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
    init["use_safetensors"] = True  # weights in any other form are pickles
    args.model_init_kwargs = {**init, **(args.model_init_kwargs or {})}
    train, evaluation = data_of(parsed)
    judge = judge_of(parsed.run)
    if judge is not None and args.outcome_reward is None:
        args.outcome_reward = judge.name
    return DewTrainer(
        local_model(model.model_name_or_path),
        rewards_of(parsed),
        args,
        train,
        evaluation,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        callbacks=list(callbacks),
    )


def local_model(name: str) -> str:
    folder = model_folder(name)
    looks_like_a_path = folder.startswith((".", "/", "~")) or folder.count("/") > 1
    if looks_like_a_path and not Path(folder).expanduser().is_dir():
        raise ConfigError(f"model_name_or_path: there is no folder {name!r}.")
    return folder


def launch(parsed: Parsed, *, callbacks: Sequence[Any] = (), resume: bool = False, say: Say = print) -> str:
    """Train. Leaves config.yaml, scores.json and model/ in the run's folder; returns "done" or "stopped".

    Ctrl-C and SIGTERM end the run after the step at hand, with a checkpoint to go on from.
    """
    from transformers import PrinterCallback

    from dew.engines.trl.stopping import StopAtSignal
    from dew.rewards.math import MathVerifier, versions

    folder = Path(parsed.args.output_dir)
    trainer = build_trainer(parsed, [StopAtSignal(), *callbacks])
    trainer.remove_callback(PrinterCallback)
    main = trainer.accelerator.is_main_process
    if main:
        sweep(folder)
    if main and not resume:
        write_atomically(folder / "config.yaml", to_yaml(parsed.run, _header()).encode())
    if main and isinstance(judge_of(parsed.run), MathVerifier):
        RunFolder(folder).write_run({"verifier": versions()})
    scoring = parsed.run.scores
    if scoring is not None and main and not (resume and RunFolder(folder).scores()):
        _score(trainer, parsed, scoring, "before", say)
    trainer.accelerator.wait_for_everyone()
    _train(trainer, folder, resume)
    if trainer.state.global_step < trainer.state.max_steps:
        if main:
            RunFolder(folder).write_run({"status": "stopped"})
        return "stopped"
    _save_model(trainer, folder / "model")
    if main and scoring is not None:
        _score(trainer, parsed, scoring, "after", say)
    return "done"


def finished(run: Run, folder: Path) -> bool:
    """True if a run came to its end: trained, its model written and, where that was asked for, scored."""
    files = RunFolder(folder)
    scored = run.scores is None or any(entry.get("when") == "after" for entry in files.scores())
    return files.run().get("status") == "done" and (folder / "model").is_dir() and scored


def _save_model(trainer: Any, folder: Path) -> None:
    """The whole model or none: `model/` appears when all of it is on the disk."""
    part = folder.with_name(f".{folder.name}.part")
    if trainer.accelerator.is_main_process:
        shutil.rmtree(part, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(part))
    if trainer.accelerator.is_main_process:
        trainer.processing_class.save_pretrained(str(part))
        for path in [*part.rglob("*"), part]:
            sync(path)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        sync(folder.parent)


def _train(trainer: Any, folder: Path, resume: bool) -> None:
    """Train, or go on; a run that was killed before its first checkpoint begins again, after its last step it only
    needs its weights."""
    checkpoint = trainer.last_good_checkpoint() if resume else None
    if checkpoint is None:
        if resume:
            logger.warning("%s holds no complete checkpoint: the run begins again.", folder)
        trainer.train()
        return
    state = TrainerState.load_from_json(str(Path(checkpoint) / STATE))
    if state.global_step < state.max_steps:
        trainer.train(resume_from_checkpoint=checkpoint)
        return
    trainer._load_from_checkpoint(checkpoint)
    trainer.state = state
    if trainer.accelerator.is_main_process:
        RunFolder(folder).write_run({"status": "done"})


def _score(trainer: Any, parsed: Parsed, scoring: Scoring, when: str, say: Say) -> None:
    """pass@k and mean@k on held-out problems, into scores.json."""
    from dew.evaluate import evaluate

    run = parsed.run
    if run.task is None:
        raise ConfigError("scores: needs `task:`, whose held-out problems it takes. Use `dew eval` for other data.")
    scores = evaluate(
        trainer.sampling_model(),
        trainer.processing_class,
        task(run.task, **run.task_settings),
        judge_of(run),
        n_problems=scoring.problems,
        k=scoring.k,
        temperature=scoring.temperature,
        max_new_tokens=scoring.max_new_tokens or parsed.args.max_completion_length,
        seed=parsed.args.seed,
    )
    folder = RunFolder(parsed.args.output_dir)
    scores.write(folder.path / f"answers-{when}.json")
    others = [entry for entry in folder.scores() if entry.get("when") != when]
    folder.write_scores([*others, {"when": when, **scores.summary()}])
    shown = ", ".join(f"{name} {interval}" for name, interval in scores.scores.items() if name.startswith("pass@"))
    say(f"{when} training: {shown}")


def _header() -> list[str]:
    from importlib.metadata import version

    from dew import __version__
    from dew.engines.trl.recording import git_commit

    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "accelerate"))
    lines = ["Run it again: dew train THIS_FILE --output_dir NEW_FOLDER", f"dew {__version__}, {packages}"]
    commit = git_commit()
    return [*lines, f"git commit {commit}"] if commit else lines


def quiet() -> None:
    """Progress bars and telemetry of the libraries below are not for a command's output."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
