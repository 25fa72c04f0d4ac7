"""Translate a `Run` into the command that trains it on verl.

A run uses TRL's names. Settings that both engines have (`dew.run.settings`) are translated to verl's keys. Other keys
of verl go under `verl:` in the file (nested or dotted) or as `key=value` on the command line, and take precedence.
Settings that verl does not use are listed in one note.
"""

import math
import re
import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from os import environ
from pathlib import Path
from typing import Any

from dew.algorithms import DEFAULT_ALGORITHM, Algorithm, algorithm_classes, get_algorithm, split_algorithm
from dew.engines.verl.config import (
    DEW_LOSS,
    EXTERNAL,
    FSDP,
    LOSS_MODE,
    SET_BY_VERL,
    check,
    dew_estimators,
    import_modules,
    only_on_trl,
    reduction,
    runs_on_verl,
    stock_estimator,
)
from dew.errors import ConfigError, DewError, Problem
from dew.run.config import RENAMED, Run, flat, merged
from dew.run.settings import ACTOR, ALGORITHM_NAMES, CHOOSE_ALGORITHM, MODEL, ROLLOUT, SAME, SETTINGS, Batches, Setting
from dew.tasks import Task, model_folder, task

Overrides = dict[str, Any]
"""verl's key -> value; a leading + adds a key that verl's configuration does not have."""

OWN_REWARD = SETTINGS["reward_funcs"].verl
DEFAULTS: Overrides = {
    f"{ACTOR}.strategy": "fsdp2",
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{FSDP}.model_dtype": "fp32",
    f"{ACTOR}.optim.weight_decay": 0.0,
    f"{ACTOR}.entropy_from_logits_with_chunking": True,  # in float32; otherwise it is mostly rounding
    f"{ACTOR}.entropy_checkpointing": True,  # else an update with entropy keeps float32 copies of the logits
    f"{ROLLOUT}.name": "vllm",
    "algorithm.filter_groups.metric": "acc",
    # As TRL does by default: sequences whose importance weight against the sampler is above 3 do not train.
    "algorithm.rollout_correction.rollout_is": "sequence",
    "algorithm.rollout_correction.rollout_is_threshold": "1e-09_3.0",
    OWN_REWARD: "pkg://dew.engines.verl.data",
    "data.max_prompt_length": 2048,  # dew drops longer prompts when it writes the data, and reports how many
    "trainer.v1.trainer_mode": "dew_sync",
    "trainer.project_name": "dew",
    "trainer.logger": ["console"],
    "trainer.val_before_train": False,
}
"""Keys whose default in verl differs from TRL's or from what dew needs; tests/verl/test_compat.py checks the others."""
PROMPTS, MINI_BATCH = "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"
NODES, GPUS_PER_NODE = "trainer.nnodes", "trainer.n_gpus_per_node"
SAMPLER_GPUS = f"{ROLLOUT}.tensor_model_parallel_size"
SEQUENCE_GPUS = f"{ACTOR}.ulysses_sequence_parallel_size"
MICRO_BATCH = f"{ACTOR}.ppo_max_token_len_per_gpu"
NO_DUAL_CLIP = 1e9
"""Turns off the dual clip of verl's vanilla loss (a bound on wrong answers): the largest ratio is exp(20)."""
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""A chat template that adds nothing, for prompts that are already formatted."""


@dataclass(frozen=True)
class Launch:
    run: Run
    overrides: Overrides
    batches: Batches
    algorithm: Algorithm
    notes: list[str]
    """Differences from a run on TRL."""

    def __getitem__(self, key: str) -> Any:
        """Return the value of verl's key, with or without a leading +, or None if it is not set."""
        return next((value for name, value in self.overrides.items() if name.lstrip("+") == key), None)

    @property
    def own_reward(self) -> bool:
        return bool(self[OWN_REWARD] != DEFAULTS[OWN_REWARD])


def prepare(run: Run, *, resume: bool = False) -> Launch:
    """Translate the run, or raise one error with every problem."""
    translation = Translation(run)
    algorithm, (batches, found) = translation.algorithm(), translation.batches()
    found = {
        **DEFAULTS,
        **translation.copied(resume),
        **found,
        **translation.schedule(max(1, int(batches.optimizer_steps))),
        **(translation.objective(algorithm) if algorithm is not None else {}),
    }
    overrides = merged(found, flat(run.verl))
    if translation.problems or algorithm is None:
        raise ConfigError(dict.fromkeys(translation.problems), source=f"{run.source or 'configuration'} on verl")
    unused = [f"not used on verl: {', '.join(translation.unused)}"] if translation.unused else []
    return Launch(run, overrides, batches, algorithm, unused + translation.notes)


class Translation:
    def __init__(self, run: Run) -> None:
        self.run, self.given = run, {SAME.get(key, key): value for key, value in run.settings.items()}
        self.own = {key.lstrip("+"): value for key, value in flat(run.verl).items()}
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.unused = [key for key in self.given if key not in (*SETTINGS, *ALGORITHM_NAMES)]
        for key in self.unused:
            if "." in key:
                self.problem(f"{key} is a key of verl, not a setting.", f"Write {key}=VALUE, or put it under `verl:`.")
            elif key in RENAMED:
                self.problem(f"{key} is not a setting.", RENAMED[key])
            elif any(key in cls.__dataclass_fields__ for cls in algorithm_classes().values()):
                self.problem(f"{key} is a setting of the algorithm.", f"Write algorithm_kwargs: {{{key}: ...}}.")
            elif key in CHOOSE_ALGORITHM and self.given[key] is not None and not self.given.get("algorithm"):
                self.problem(f"{key}={self.given[key]}, but no algorithm is named.", "Name it with `algorithm:`.")
        for name, setting in SETTINGS.items():
            value, key = self.given.get(name), setting.verl
            if setting.same is not None and value not in (None, *setting.same) and key not in self.own:
                remedy = f"Write verl: {{{key}: ...}} as well." if key else "Remove it, or train on TRL."
                self.problem(f"{name}={value!r} is not translated to verl.", remedy)
        self.max_tokens = self.count("data.max_response_length", self.count("max_completion_length"))

    def problem(self, what: str, remedy: str = "") -> None:
        self.problems.append(Problem(what, remedy=remedy))

    def get(self, name: str, default: Any = None, limits: Setting | None = None) -> Any:
        """Return a setting, or one of verl's keys if the name has a dot. It must have the type of the default."""
        value, setting = (self.own if "." in name else self.given).get(name), SETTINGS.get(name, Setting())
        default = default if setting.default is None else setting.default
        if value is None:
            return default
        kinds = (int, float) if isinstance(default, float) else (type(default),)
        if default is not None and type(value) not in kinds:
            self.problem(f"{name}={value!r}: expected {' or '.join(kind.__name__ for kind in kinds)}.")
            return default
        if problem := (limits or setting).problem(name, value):
            self.problems.append(problem)
            return default
        return value

    def count(self, name: str, default: int = 1) -> int:
        return int(self.get(name, default, Setting(least=1)))

    def algorithm(self) -> Algorithm | None:
        found = {ours: x for theirs, ours in ALGORITHM_NAMES.items() if (x := self.given.get(theirs)) is not None}
        if "clip_low" in found:
            found.setdefault("clip_high", found["clip_low"])  # as in TRL
        try:
            text = str(self.given.get("algorithm") or DEFAULT_ALGORITHM)
            name, settings = split_algorithm(text, self.run.algorithm_settings)
            self.threshold_given = "threshold" in settings
            settings = {"max_tokens": self.max_tokens, **found, **settings}
            if name not in algorithm_classes():
                import_modules(self.own.get(f"{MODEL}.external_lib"))
                import_modules(environ.get(EXTERNAL, "").split(","))
            algorithm = get_algorithm(name, **settings)
            if runs_on_verl(type(algorithm)) and ":" not in name:
                return algorithm
            own = f"Register the class, and name its module in `verl: {{{MODEL}.external_lib: ...}}`."
            problem = only_on_trl(name)
            self.problems.append(replace(problem, remedy=own) if ":" in name else problem)
        except DewError as error:
            self.problems += error.problems
        return None

    def batches(self) -> tuple[Batches, Overrides]:
        """Return the batch sizes: verl's own keys if given, else computed as in TRL, with one process per GPU."""
        nodes, per_node = self.count(NODES), self.count(GPUS_PER_NODE)
        G, gpus = self.count(f"{ROLLOUT}.n", self.count("num_generations")), nodes * per_node
        accumulation = self.count("gradient_accumulation_steps")
        generation = self.count("steps_per_generation", accumulation)
        answers = self.count("per_device_train_batch_size") * gpus * generation
        prompts = self.count(PROMPTS, max(1, answers // G))
        mini = self.count(MINI_BATCH, max(1, prompts * min(accumulation, generation) // generation))
        passes = self.count(f"{ACTOR}.ppo_epochs", self.count("num_iterations"))
        sampler = self.count(SAMPLER_GPUS, self.count("vllm_tensor_parallel_size"))
        sequence = self.count(SEQUENCE_GPUS)
        batches = Batches(prompts * G, mini * G, G, passes=passes, processes=gpus)
        if G < 2:
            self.problem(f"num_generations={G}: answers to the same prompt are compared.", "Use at least 2.")
        if generation < accumulation and MINI_BATCH not in self.own:
            what = f"steps_per_generation={generation}: on verl an optimizer step cannot use several generations."
            self.problem(what, f"Use at least {accumulation}, or lower gradient_accumulation_steps.")
        if answers % G and PROMPTS not in self.own:
            what = f"{answers} answers per generation are not a whole number of groups of {G}."
            self.problem(what, f"Write verl: {{data.train_batch_size: {prompts}}}, the prompts per step.")
        for key, size in ((SAMPLER_GPUS, sampler), (SEQUENCE_GPUS, sequence)):
            if gpus % size:
                self.problem(f"{gpus} GPUs are not divisible by {key}={size}.", "Set it to a divisor.")
        if problem := batches.misaligned(PROMPTS, G):  # verl would pad the last optimizer step with empty rows
            self.problems.append(problem)
        shares = max(1, gpus // sequence)
        if batches.trained % shares:
            fitting = next(m for m in range(mini, mini + shares + 1) if m * G % shares == 0)
            key = PROMPTS if mini == prompts else MINI_BATCH
            what = f"{mini} prompts x {G} answers = {batches.trained} rows per optimizer step"
            self.problem(f"{what} cannot be divided evenly among {shares} GPUs.", f"Next larger: {key}={fitting}.")
        longest = self.count("data.max_prompt_length", DEFAULTS["data.max_prompt_length"]) + self.max_tokens
        micro = self.count(MICRO_BATCH, max(16384, longest))
        if micro * sequence < longest:
            self.problem(f"{MICRO_BATCH}={micro}: {longest} tokens must fit in one micro-batch.", "Raise it.")
        return batches, {
            PROMPTS: prompts, MINI_BATCH: mini, f"{ROLLOUT}.n": G, f"{ACTOR}.ppo_epochs": passes, NODES: nodes,
            GPUS_PER_NODE: per_node, SAMPLER_GPUS: sampler, SEQUENCE_GPUS: sequence, MICRO_BATCH: micro,
        }  # fmt: skip

    def copied(self, resume: bool) -> Overrides:
        """Return the settings that map to one key of verl, the model, its chat template, and the run's folder."""
        plain = {name: setting.verl for name, setting in SETTINGS.items() if setting.verl and setting.same is None}
        found = {key: self.get(name) for name, key in plain.items() if not SETTINGS[name].steps}
        seeds, top_k = (f"{ROLLOUT}.seed", f"{ACTOR}.data_loader_seed", f"{FSDP}.seed"), self.get("top_k")
        found |= {**dict.fromkeys(seeds, found["data.seed"]), f"{ROLLOUT}.top_k": top_k if top_k > 0 else -1}
        if not self.given.get("model_name_or_path"):
            self.problem("model_name_or_path is missing.", "Name a model folder, a hub model, or tiny.")
        if self.run.task is None:
            self.problem("task is missing: verl reads problems that dew prepares.", "Write e.g. task: dapo17k.")
        if files := [key for key in ("data.train_files", "data.val_files") if key in self.own]:
            self.problem(f"{files[0]}: dew writes the data itself.", "Give your file as `task:`, or run verl yourself.")
        try:
            if self.run.task and not has_messages(task(self.run.task, **self.run.task_settings)):
                found[f"{MODEL}.custom_chat_template"] = PLAIN_TEMPLATE
        except DewError as error:  # data that cannot be read
            self.problems += error.problems
        folder = Path(self.get("output_dir")).absolute()
        return {key: value for key, value in found.items() if value is not None} | {
            f"{MODEL}.path": model_folder(self.given.get("model_name_or_path") or ""),
            "data.train_files": str(folder / "data" / "train.parquet"),
            "data.val_files": str(folder / "data" / "val.parquet"),
            "+algorithm.dew_run.folder": str(folder),
            "trainer.default_local_dir": str(folder / "checkpoints"),
            "trainer.resume_mode": "auto" if resume else "disable",
            "trainer.experiment_name": folder.name,
            "hydra.run.dir": str(folder / "hydra"),
        }

    def schedule(self, per_step: int) -> Overrides:
        """Return how long to train and when to save and validate. A step of verl has `per_step` optimizer steps."""
        found: Overrides = {}
        if isinstance(share := self.given.get("warmup_steps"), float) and 0 < share < 1:
            found[f"{ACTOR}.optim.lr_warmup_steps_ratio"] = self.given.pop("warmup_steps")
        for name, setting in SETTINGS.items():
            if setting.steps and (value := self.get(name)) > 0:
                steps = found[setting.verl] = math.ceil(value / per_step)
                if value % per_step:
                    self.notes.append(f"{name}={value} optimizer steps become {steps} steps of {per_step} each")
        if self.given.get(name := "mask_truncated_completions"):
            self.unused.remove(name)
            self.notes.append(f"{name}: verl also trains on truncated answers; the algorithm's overlong penalizes them")
        if not self.given.get(name := "lr_scheduler_type") and SETTINGS[name].verl not in self.own:
            self.notes.append(f"the learning rate is constant; TRL's default for {name} is linear")
        total = self.own.get("trainer.total_training_steps") or found.get("trainer.total_training_steps")
        found["trainer.total_epochs"] = total or self.count("num_train_epochs")  # an epoch has at least one step
        if scoring := self.run.scores:
            if scoring.max_new_tokens not in (None, self.count("max_completion_length")):
                self.unused.append("scores.max_new_tokens")  # verl validates with the same limit
            found.setdefault("trainer.test_freq", total or found.get("trainer.save_freq", -1))
            draw = {"n": scoring.k, "do_sample": scoring.temperature > 0, "temperature": scoring.temperature}
            found |= {f"{ROLLOUT}.val_kwargs.{name}": value for name, value in draw.items()}
            found["trainer.val_before_train"] = True
        return found

    def objective(self, algorithm: Algorithm) -> Overrides:
        """Return estimator, loss and filter: dew's, or verl's own if the class declares that they are equivalent."""
        stock, own = stock_estimator(type(algorithm)), self.own.get("algorithm.adv_estimator", algorithm.name)
        if own != algorithm.name and (stock is None or own in dew_estimators()):
            what = f"algorithm.adv_estimator={own}, but the algorithm is {algorithm.name}."
            verls = next(name for name, cls in algorithm_classes().items() if stock_estimator(cls))
            instead = f"Write `algorithm: {verls}` to use verl's estimators."
            self.problem(what, f"Write `algorithm: {own}` instead." if own in dew_estimators() else instead)
        found: Overrides = {
            "algorithm.adv_estimator": stock or algorithm.name,
            LOSS_MODE: "vanilla" if stock else DEW_LOSS,
            **reduction(algorithm),
            f"{ACTOR}.clip_ratio_low": algorithm.clip_low,
            f"{ACTOR}.clip_ratio_high": algorithm.clip_high,
            f"{ACTOR}.use_kl_loss": algorithm.kl_coef > 0,
            # In the update. verl's backward pass goes through it even if its coefficient is 0.
            f"{ACTOR}.calculate_entropy": algorithm.needs_entropy == "current",
            "algorithm.filter_groups.enable": algorithm.dynamic_sampling,
        }
        if algorithm.kl_coef > 0:
            found |= {f"{ACTOR}.kl_loss_coef": algorithm.kl_coef, f"{ACTOR}.kl_loss_type": "low_var_kl"}
        changed = {f.name: x for f in fields(algorithm) if (x := getattr(algorithm, f.name)) != f.default}
        changed |= {"threshold": algorithm.threshold} if self.threshold_given and not stock else {}
        self.unused += [f"algorithm_kwargs.{name}" for name in ("max_rounds", "oversample") if name in changed]
        other = {name: value for name, value in changed.items() if name not in SET_BY_VERL}
        if not stock:
            return found | {f"+algorithm.dew.{name}": value for name, value in other.items()}
        for name, value in other.items():
            self.problem(f"{name}={value!r}: verl's own {algorithm.name} has no such setting.", "Remove it.")
        return {**found, f"{ACTOR}.clip_ratio_c": NO_DUAL_CLIP}


def has_messages(source: Task) -> bool:
    """Whether the prompts are chat messages, which the model's own template formats."""
    template = getattr(source, "template", "plain")
    return template == "chat" or (template is None and not isinstance(source.rows(1)[0]["prompt"], str))


MAIN = ("-m", "dew.engines.verl.main")
BARE = re.compile(r"[A-Za-z_/.~][\w/.:~@%+-]*", re.ASCII)
"""Text that hydra reads without quotes."""


def hydra_words(launch: Launch) -> list[str]:
    return [f"{key}={hydra_text(value)}" for key, value in launch.overrides.items()]


def hydra_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{hydra_text(str(k))}:{hydra_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra_text, value)) + "]"
    if not isinstance(value, str):
        return str(value)
    if BARE.fullmatch(value) and value.lower() not in ("null", "true", "false", "nan", "inf"):
        return value
    return '"' + re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + m[2].replace('"', '\\"'), value) + '"'


def command(launch: Launch, python: str = sys.executable) -> list[str]:
    return [python, *MAIN, *hydra_words(launch)]


def shell_text(words: list[str]) -> str:
    head, rest = words[: 1 + len(MAIN)], words[1 + len(MAIN) :]
    return " \\\n  ".join([shlex.join(head), *map(shlex.quote, rest)])


def check_with_verl(launch: Launch) -> Algorithm | None:
    """Check verl's configuration with the overrides, as a run does at its start, and return the algorithm with the
    settings in verl's keys; None if verl is not installed."""
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        return None
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    folder = Path(spec.origin).parent / "trainer" / "config"  # importing verl takes seconds
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        try:
            config = compose("ppo_trainer", overrides=hydra_words(launch))
        except HydraException as error:
            what = f"verl rejects the configuration: {' '.join(str(error).split())}"
            advice = "Check its spelling; a key that verl does not have needs a leading +."
            raise ConfigError(Problem(what, remedy=advice)) from None
    known: Collection[str] = ()
    if config.algorithm.adv_estimator not in (*dew_estimators(), stock_estimator(type(launch.algorithm))):
        from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

        import_modules(launch[f"{MODEL}.external_lib"])  # may register an estimator
        known = ADV_ESTIMATOR_REGISTRY
    algorithm = check(config, estimators=known)
    return algorithm if algorithm.name in dew_estimators() else launch.algorithm
