"""Train a `Run` on TRL: `parse` its settings, `build_trainer`, `launch`."""

import argparse
import logging
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import Field, dataclass, fields, replace
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset, DatasetInfo, disable_progress_bars, load_dataset
from safetensors import SafetensorError
from torch.nn import Module
from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import DatasetMixtureConfig, ModelConfig, TrlParser, get_dataset, get_peft_config, get_quantization_config
from trl import rewards as trl_rewards
from trl.scripts.grpo import GRPOScriptArguments

from dew.compare import evaluate
from dew.compare.sampling import with_template_settings
from dew.engines.trl.checkpoints import last_good
from dew.engines.trl.config import DewConfig
from dew.engines.trl.trainer import DewTrainer
from dew.errors import ConfigError, Problem, did_you_mean, loading
from dew.files import sweep, sync, write_atomically
from dew.rewards import load_reward, reward
from dew.rewards.user_function import is_user_function
from dew.run.config import Run, check_keys, held_out_rows, loadable_model, to_yaml, training_rows, verifier_of
from dew.run.folder import RUN_AGAIN, RunFolder
from dew.run.permission import check_permission
from dew.tasks import task
from dew.tasks.rows import SUFFIXES

Say = Callable[[str], None]
logger = logging.getLogger("dew")


@dataclass(frozen=True)
class Parsed:
    run: Run
    script: Any
    args: DewConfig
    model: Any
    mixture: Any
    """TRL's `datasets:`, a list of data sets to mix."""

    @property
    def data(self) -> str:
        mixed = ", ".join(source.path for source in self.mixture.datasets)
        return self.run.task or mixed or self.script.dataset_name or ""

    @property
    def data_key(self) -> str:
        return "task" if self.run.task else "datasets" if self.mixture.datasets else "dataset_name"


TRL_REWARDS = {
    name: f"trl.rewards:{name}"
    for name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")
}
CLASSES = (GRPOScriptArguments, DewConfig, ModelConfig, DatasetMixtureConfig)


def setting_fields() -> list[Field[Any]]:
    return [f for kind in CLASSES for f in fields(kind) if f.init]


def parse(run: Run, typed: Mapping[str, str] | None = None, *, dry: bool = False, untrusted: bool = False) -> Parsed:
    """Parse a run for TRL. `typed`: command-line settings, as text. `dry`: accept a GPU config without a GPU."""
    typed, file = typed or {}, run.source or "config"
    known = [f.name for f in setting_fields()]
    check_keys([name for name in run.settings if name in typed], known, source="command line")
    check_keys(run.settings, known, source=file)
    both = f"{file} with the command line" if typed else file
    check_permission(run, typed, untrusted)
    run.set_environment()
    parser = TrlParser(CLASSES, exit_on_error=False)
    actions = {action.dest: action for action in reversed(parser._actions)}  # --x, not its --no_x
    settings, problems, wrong = {}, [], set()
    for name, value in run.settings.items():
        try:
            settings[name] = _convert(parser, actions[name], value, typed.get(name))
        except argparse.ArgumentError as error:
            bare = f"Write --{name} VALUE." if typed.get(name) == "true" else ""
            advice = did_you_mean(str(value), map(str, actions[name].choices or ())) or bare
            problems.append(Problem(f"{name}: {error.message}.", remedy=advice))
            wrong.add("command line" if name in typed else file)
    if problems:
        raise ConfigError(problems, source=wrong.pop() if len(wrong) == 1 else both)
    parser.set_defaults_with_config(**deepcopy(settings))  # TRL changes `datasets` in place
    if dry and not torch.cuda.is_available():
        parser.set_defaults_with_config(use_cpu=True)
    try:
        script, args, model, mixture = parser.parse_args_into_dataclasses(args=[], look_for_args_file=False)
    except ConfigError as error:
        raise ConfigError(error.problems, source=both) from None
    except Exception as error:  # of a dozen kinds, from TRL, transformers, accelerate and their dependencies
        kind = "" if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: "
        raise ConfigError(f"{kind}{error}", source=both) from error
    parsed = Parsed(replace(run, settings=settings), script, args, model, mixture)
    if not model.model_name_or_path:
        problems.append(Problem("model_name_or_path is missing.", remedy="Name a folder, a hub model, or `tiny`."))
    if not parsed.data:
        problems.append(Problem("no training data.", remedy="Set `task:` or TRL's `dataset_name:`."))
    if run.task is None and Path(parsed.data).is_file() and parsed.data.endswith(SUFFIXES):
        what = f"{parsed.data_key}: {parsed.data!r} is a file; TRL reads folders and data sets of the hub."
        problems.append(Problem(what, remedy=f"Write `task: {parsed.data}`."))
    if not (verifier_of(run) or script.reward_funcs or script.reward_model_name_or_path):
        remedy = "Write `verifier: math` or `reward_funcs: [file.py:function]`."
        problems.append(Problem("no reward.", remedy=remedy))
    if problems:
        raise ConfigError(problems, source=file)
    return parsed


def _convert(parser: Any, action: Any, value: Any, text: str | None) -> Any:
    """Convert a value to its type. `text` is the value as typed, if any. Mappings and unusual types are left to TRL."""
    kind = action.type.__name__  # TRL wraps some types
    simple = action.choices or kind in ("int", "float", "str", "string_to_bool")
    if value is None or isinstance(value, Mapping) or not simple:
        return value
    if action.nargs == "+":
        return parser._get_values(action, [str(x) for x in (value if isinstance(value, list) else [value])])
    if kind == "str" and not action.choices:
        return value if isinstance(value, str | bool | list) else text or str(value)  # --run_name 1.10 is text
    if kind == "int" and isinstance(value, float) and value.is_integer():
        return int(value)
    return parser._get_values(action, [str(value)])


def data_of(parsed: Parsed) -> tuple[Any, Any]:
    run, script, evaluates = parsed.run, parsed.script, parsed.args.eval_strategy != "no"
    if run.task is not None:
        source, rows = training_rows(run)
        train = Dataset.from_list(rows, info=DatasetInfo(dataset_name=run.task))
        return train, Dataset.from_list(held_out_rows(run, source)) if evaluates else None
    with loading(parsed.data_key, parsed.data):
        if parsed.mixture.datasets:
            data = get_dataset(parsed.mixture)
        else:
            data = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
    train, test = script.dataset_train_split, script.dataset_test_split if evaluates else None
    if absent := [split for split in (train, test) if split is not None and split not in data]:
        what = f"{parsed.data}: no split {absent[0]!r}; there are {', '.join(data)}."
        remedy = "Set dataset_train_split or dataset_test_split; `datasets:` also takes test_split_size."
        raise ConfigError(Problem(what, remedy=remedy))
    return data[train], data[test] if test is not None else None


def rewards_of(parsed: Parsed) -> list[Any]:
    """Return the verifier, then TRL's rewards in its order, that of `reward_weights`: reward model, functions."""
    verifier = verifier_of(parsed.run)
    if verifier is not None and parsed.args.outcome_reward is None:
        parsed.args.outcome_reward = verifier.name
    functions: list[Any] = [verifier] if verifier is not None else []
    if name := parsed.script.reward_model_name_or_path:
        functions.append(loadable_model(name, "reward_model_name_or_path"))
    return functions + [_reward(name, parsed) for name in parsed.script.reward_funcs or []]


def _reward(name: str, parsed: Parsed) -> Any:
    """Return a reward of TRL or dew by name, or your own (module:function, file.py:function, TRL's module.function)."""
    if name == "get_soft_overlong_punishment":  # with the settings of TRL's own script
        return trl_rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)
    if not is_user_function(name):
        return reward(name, TRL_REWARDS)
    args, folders = parsed.args, [Path(parsed.run.source).parent] if parsed.run.source else []
    memory = None if args.reward_memory is None else args.reward_memory * 2**30
    return load_reward(name, args.reward_timeout, memory, args.seed, folders)


def build_trainer(parsed: Parsed) -> Any:
    args, model = parsed.args, parsed.model
    init = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
    init["use_safetensors"] = True  # other formats are pickles, which can run code
    args.model_init_kwargs = {**init, **(args.model_init_kwargs or {})}
    folder = loadable_model(model.model_name_or_path, "model_name_or_path", model.model_revision)
    train, evaluation = data_of(parsed)
    others = {"quantization_config": get_quantization_config(model), "peft_config": get_peft_config(model)}
    others |= {"args": args, "train_dataset": train, "eval_dataset": evaluation}
    rewards = rewards_of(parsed)
    with loading("model_name_or_path", model.model_name_or_path, (SafetensorError, JSONDecodeError)):
        return DewTrainer(folder, rewards, **others)


def launch(parsed: Parsed, trainer: Any, *, resume: bool = False, say: Say = print) -> str:
    """Train, and write config.yaml, scores.json and model/ to the run's folder. Return "done" or "stopped"."""
    folder, stop = Path(parsed.args.output_dir), StopAtSignal()
    trainer.remove_callback(PrinterCallback)
    scored = parsed.run.scores is not None
    if scored and not (resume and RunFolder(folder).scores()):
        trainer.add_callback(ScoreBefore(partial(_score, trainer, parsed, "before", say)))
    trainer.add_callback(stop)
    if trainer.accelerator.is_main_process:
        sweep(folder)
        write_atomically(folder / "config.yaml", to_yaml(parsed.run, [RUN_AGAIN]).encode())
    trainer.accelerator.wait_for_everyone()
    checkpoint = last_good(parsed.args.output_dir, trainer.accelerator) if resume else None
    if resume and checkpoint is None:
        logger.warning("%s has no complete checkpoint: starting the run again.", folder)
        if trainer.accelerator.is_main_process:
            RunFolder(folder).clear(whole=False)
        trainer.accelerator.wait_for_everyone()
    try:
        trainer.train(resume_from_checkpoint=checkpoint or parsed.args.resume_from_checkpoint)
    finally:
        stop.restore_handlers()
    if trainer.state.global_step < trainer.state.max_steps:
        trainer._recorder.end("stopped")
        return "stopped"
    _save_model(trainer, folder / "model")
    if scored:
        _score(trainer, parsed, "after", say)
    return "done"


class ScoreBefore(TrainerCallback):  # type: ignore[misc]
    """Evaluates before the first step, once the (possibly sharded) weights are on their devices."""

    def __init__(self, score: Callable[[], None]) -> None:
        self._score = score

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self._score()


class StopAtSignal(TrainerCallback):  # type: ignore[misc]
    """On Ctrl-C or SIGTERM, saves a checkpoint after the current step and stops. A second Ctrl-C stops immediately."""

    def __init__(self) -> None:
        self._requested = False
        self._previous: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._previous = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A signal may reach only one process, or two of them at different steps, but all must stop together.
        if any(gather_object([self._requested])):
            control.should_save = control.should_training_stop = True

    def restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: Any) -> None:
        if self._requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested = True


def _save_model(trainer: DewTrainer, folder: Path) -> None:
    """Save the model atomically: `model/` appears once every file is on disk."""
    part = folder.with_name(f".{folder.name}.part")
    if trainer.is_fsdp_enabled:  # FSDP2's default is shards, which transformers writes in checkpoints only
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    if trainer.accelerator.is_main_process:
        shutil.rmtree(part, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(part))
    if trainer.accelerator.is_main_process:
        for path in [*part.rglob("*"), part]:
            sync(path)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        sync(folder.parent)


def _score(trainer: Any, parsed: Parsed, when: str, say: Say) -> None:
    """Evaluate on held-out problems and write scores.json. All processes sample if weights are sharded, else one."""
    main = trainer.accelerator.is_main_process
    if not main and not trainer.sharded:
        return
    run, args, folder, how = parsed.run, parsed.args, RunFolder(parsed.args.output_dir), parsed.run.scores
    judge = verifier_of(run) or trainer.reward_funcs[trainer.outcome_index]
    if isinstance(judge, Module):
        what = "scores: a reward model cannot decide which held-out answers are correct."
        raise ConfigError(Problem(what, remedy="Write e.g. `verifier: math`, or remove scores."), source=run.source)
    assert run.task is not None and how is not None
    tokenizer = with_template_settings(trainer.processing_class, args.chat_template_kwargs)
    scores = evaluate(
        trainer.sampling_model(), tokenizer, task(run.task, **run.task_settings), judge,
        n_problems=how.problems, threshold=trainer.algorithm.threshold, k=how.k, temperature=how.temperature,
        max_new_tokens=how.max_new_tokens or args.max_completion_length, seed=args.seed,
    )  # fmt: skip
    if not main:
        return
    scores.write(folder.path / f"answers-{when}.json")
    others = [entry for entry in folder.scores() if entry.get("when") != when]
    folder.write_scores([*others, {"when": when, **scores.summary()}])
    shown = ", ".join(f"{name} {interval}" for name, interval in scores.scores.items() if name.startswith("pass@"))
    say(f"{when} training: {shown}")


def quiet() -> None:
    for name in ("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    disable_progress_bar()
    disable_progress_bars()
