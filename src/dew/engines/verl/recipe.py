"""A recipe's settings in verl's keys: the settings that both engines have, by the tables of `defaults.yaml`.

TRL counts completions and optimizer steps, verl counts prompts and generations, so batches and steps are converted.
Settings that verl does not use are listed in one note.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from os import environ
from pathlib import Path
from typing import Any

from dew.algorithms import DEFAULT_ALGORITHM, Algorithm, algorithm_classes, get_algorithm
from dew.engines.verl.settings import (
    ACTOR,
    DEW_LOSS,
    EXTERNAL,
    FSDP,
    MODEL,
    REDUCTIONS,
    ROLLOUT,
    SET_BY_VERL,
    dew_estimators,
    stock_estimator,
)
from dew.errors import ConfigError, DewError, Problem, did_you_mean
from dew.run.config import OWN_KEYS, Run, read_yaml
from dew.tasks import Task, model_folder, task

Overrides = dict[str, Any]
"""verl's key -> value; a leading + where verl's configuration has no such key."""

TABLES = read_yaml(Path(__file__).with_name("defaults.yaml"))
COPIED, STEPS, BATCHES, IN_VERLS_KEYS = (TABLES[name] for name in ("copied", "steps", "batches", "in_verls_keys"))
SHARED = (*COPIED, *STEPS, *IN_VERLS_KEYS, *TABLES["algorithm"], *TABLES["converted"])
"""Every setting that is read here."""
RUN_FOLDER = "algorithm.dew_run.folder"
OWN_REWARD = IN_VERLS_KEYS["reward_funcs"][0]
STOCK_LOSSES = {"token": "vanilla", "sequence_geometric": "gspo"}
"""verl's own losses, by the ratio that they use."""
NO_DUAL_CLIP = 1e9
"""verl's vanilla loss also bounds the loss of wrong answers (dual clip): off above exp(20), its largest ratio."""
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""A chat template that adds nothing, for prompts that are already formatted."""


def flat(nested: Mapping[str, Any], above: str = "") -> Overrides:
    """{"trainer": {"nnodes": 2}} and {"trainer.nnodes": 2} -> {"trainer.nnodes": 2}; an empty mapping is a value."""
    found: Overrides = {}
    for key, value in nested.items():
        name = f"{above}{key}"
        found.update(flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value})
    return found


def merged(overrides: Overrides, own: Overrides) -> Overrides:
    """The user's values replace ours, whether or not either key has a +."""
    given = {key.lstrip("+") for key in own}
    return {**{key: value for key, value in overrides.items() if key.lstrip("+") not in given}, **own}


DEFAULTS = flat(TABLES["always"])


@dataclass(frozen=True)
class Batches:
    """How many prompts and answers a step has, and the GPUs that share them."""

    prompts: int
    """Prompts of one generation, which is one step in verl."""
    mini: int
    """Prompts of one optimizer step."""
    answers: int
    """G, the group size."""
    passes: int = 1
    """How often a generation is trained on."""
    nodes: int = 1
    gpus_per_node: int = 1
    tensor_parallel: int = 1
    """GPUs per sampler."""
    sequence_parallel: int = 1
    """GPUs that share one sequence while training."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per step of verl."""
        return max(1, self.prompts // self.mini) * self.passes

    def problems(self) -> list[Problem]:
        """What verl would refuse, or silently pad."""
        found = [
            Problem(f"{self.gpus} GPUs are not divisible by {BATCHES[name]}={size}.", remedy="Set it to a divisor.")
            for name in ("tensor_parallel", "sequence_parallel")
            if self.gpus % (size := getattr(self, name))
        ]
        if self.prompts % self.mini:
            low = self.prompts // self.mini * self.mini
            near = f"{low} or {low + self.mini}" if low else str(self.mini)
            what = f"{self.prompts} prompts per step are not a multiple of the {self.mini} per optimizer step."
            why = "verl would pad the last one with empty rows."
            found.append(Problem(what, why, f"Nearest: data.train_batch_size={near}."))
        rows, shares = self.mini * self.answers, max(1, self.gpus // self.sequence_parallel)
        if rows % shares:
            fitting = next(m for m in range(self.mini, self.mini + shares + 1) if m * self.answers % shares == 0)
            key = BATCHES["prompts" if self.mini == self.prompts else "mini"]
            what = f"{self.mini} prompts x {self.answers} answers = {rows} rows per optimizer step"
            remedy = f"Next larger: {key}={fitting}."
            found.append(Problem(f"{what} cannot be divided evenly among {shares} GPUs.", remedy=remedy))
        return found

    def __str__(self) -> str:
        steps = self.optimizer_steps
        return (
            f"{self.prompts} prompts x {self.answers} answers = {self.prompts * self.answers} completions per step on "
            f"{self.gpus} GPU{'s' * (self.gpus > 1)} ({self.nodes} x {self.gpus_per_node}); {self.mini * self.answers} "
            f"completions per optimizer step, {steps} optimizer step{'s' * (steps > 1)} per step"
        )


class Recipe:
    """Reads a recipe part by part and collects all problems and notes."""

    def __init__(self, run: Run) -> None:
        self.run, self.given = run, run.settings
        self.own = {key.lstrip("+"): value for key, value in flat(run.verl).items()}
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.unused = [key for key in self.given if key not in SHARED]
        for key in self.unused:
            value = self.given[key]
            if "." in key:
                self.problem(f"{key} is a key of verl, not a setting.", f"Write {key}=VALUE, or put it under `verl:`.")
            elif guess := did_you_mean(key, (*SHARED, *OWN_KEYS), cutoff=0.92):  # no two TRL settings are this close
                self.problem(f"{key} is not a setting.", guess)
            elif any(key in cls.__dataclass_fields__ for cls in algorithm_classes().values()):
                self.problem(f"{key} is a setting of the algorithm.", f"Write algorithm_kwargs: {{{key}: ...}}.")
            elif key in TABLES["choose_algorithm"] and value is not None and not self.given.get("algorithm"):
                remedy = "Name it with `algorithm:`; only the TRL engine chooses one by this setting."
                self.problem(f"{key}={value}, but no algorithm is named.", remedy)
        if RUN_FOLDER in self.own:
            self.problem(f"{RUN_FOLDER}: data, checkpoints and records of a run share one folder.", "Set output_dir.")
        for name, (key, *as_in_defaults) in IN_VERLS_KEYS.items():
            value = self.given.get(name)
            if value and value not in as_in_defaults and key not in self.own:
                self.problem(f"{name}={value!r} is not translated to verl.", f"Write verl: {{{key}: ...}} as well.")

    def problem(self, what: str, remedy: str = "") -> None:
        self.problems.append(Problem(what, remedy=remedy))

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, or the default; a type other than the default's is a problem."""
        value = self.given.get(name)
        if value is None:
            return default
        kinds = (int, float) if isinstance(default, float) else (type(default),)
        if default is None or type(value) in kinds:
            return value
        self.problem(f"{name}={value!r}: expected {' or '.join(kind.__name__ for kind in kinds)}.")
        return default

    def count(self, name: str, default: int) -> int:
        """A whole number of at least 1: one of verl's keys if the name has a dot, else a setting."""
        value = self.own.get(name, default) if "." in name else self.get(name, default)
        if type(value) is int and value >= 1:  # True is an int too, but not a count
            return value
        self.problem(f"{name}={value!r}: expected a whole number of at least 1.")
        return default

    def algorithm(self) -> Algorithm | None:
        name, settings = self.get("algorithm", DEFAULT_ALGORITHM), self.given.get("algorithm_kwargs") or {}
        try:
            settings = json.loads(settings) if isinstance(settings, str) else dict(settings)
            if name not in algorithm_classes():
                import_modules(self.own.get(f"{MODEL}.external_lib"))
                import_modules(environ.get(EXTERNAL, "").split(","))
            algorithm = get_algorithm(name, **{**self.trl_names(), **settings})
            if not algorithm.engine_loss and ":" not in name:
                return algorithm
            own = f"Register the class, and name its module in `verl: {{{MODEL}.external_lib: ...}}`."
            self.problem(f"algorithm: {name} works only on TRL.", own if ":" in name else "Choose another algorithm.")
        except DewError as error:
            self.problems += error.problems
        except (ValueError, TypeError):
            self.problem("algorithm_kwargs: expected settings such as {clip_high: 0.3}.")
        return None

    def trl_names(self) -> dict[str, Any]:
        """Settings of the algorithm that the recipe has under TRL's names."""
        names = TABLES["algorithm"]
        found = {ours: self.given[theirs] for theirs, ours in names.items() if self.given.get(theirs) is not None}
        if "clip_low" in found:
            found.setdefault("clip_high", found["clip_low"])  # as in TRL
        limit = self.count("data.max_response_length", self.get("max_completion_length", 512))
        return {"max_tokens": limit, **found}

    def batches(self) -> Batches:
        """Prompts per step: verl's own number if `verl:` has it, else TRL's arithmetic with one process per GPU."""

        def own(name: str, otherwise: int) -> int:
            return self.count(BATCHES[name], otherwise)

        nodes, per_node, G = own("nodes", 1), own("gpus_per_node", 1), own("answers", self.count("num_generations", 8))
        accumulation = self.count("gradient_accumulation_steps", 1)
        generation = self.count("steps_per_generation", accumulation)
        completions = self.count("per_device_train_batch_size", 8) * nodes * per_node * generation
        prompts = own("prompts", max(1, completions // G))
        if G < 2:
            self.problem(f"num_generations={G}: credit compares the answers to one prompt.", "Use at least 2.")
        if completions % G and BATCHES["prompts"] not in self.own:
            what = f"{completions} completions per generation are not a whole number of groups of {G}."
            self.problem(what, f"Write verl: {{data.train_batch_size: {prompts}}}, the prompts per step.")
        return Batches(
            prompts=prompts,
            mini=own("mini", max(1, prompts * accumulation // max(generation, accumulation))),
            answers=G,
            passes=own("passes", self.count("num_iterations", 1)),
            nodes=nodes,
            gpus_per_node=per_node,
            tensor_parallel=own("tensor_parallel", self.count("vllm_tensor_parallel_size", 1)),
            sequence_parallel=own("sequence_parallel", 1),
        )

    def overrides(self, algorithm: Algorithm | None, batches: Batches, resume: bool) -> Overrides:
        """The whole run, without the user's `verl:` section."""
        folder = Path(self.get("output_dir", "trainer_output")).absolute()
        top_k, seeds = self.get("top_k", 0), (f"{ROLLOUT}.seed", f"{ACTOR}.data_loader_seed", f"{FSDP}.seed")
        found = {
            **DEFAULTS,
            **{key: value for name, (key, default) in COPIED.items() if (value := self.get(name, default)) is not None},
            **dict.fromkeys(seeds, self.get("seed", 42)),
            **self.model(),
            **self.schedule(batches.optimizer_steps),
            **(self.objective(algorithm) if algorithm is not None else {}),
            f"{ROLLOUT}.top_k": top_k if top_k > 0 else -1,
            **{key: getattr(batches, name) for name, key in BATCHES.items()},
            "data.train_files": str(folder / "data" / "train.parquet"),
            "data.val_files": str(folder / "data" / "val.parquet"),
            f"+{RUN_FOLDER}": str(folder),
            "trainer.default_local_dir": str(folder / "checkpoints"),
            "trainer.resume_mode": "auto" if resume else "disable",
            "trainer.experiment_name": folder.name,
            "hydra.run.dir": str(folder / "hydra"),
        }
        prompt, answer = (self.count(key, found[key]) for key in ("data.max_prompt_length", "data.max_response_length"))
        key = f"{ACTOR}.ppo_max_token_len_per_gpu"
        found[key] = max(16384, prompt + answer)
        if (room := self.count(key, found[key]) * batches.sequence_parallel) < prompt + answer:
            what = f"{key}={room}: a prompt and its answer may have {prompt + answer} tokens."
            self.problem(f"{what} Both must fit in one micro-batch.", "Raise it, or shorten them.")
        return found

    def model(self) -> Overrides:
        """The model, and how its prompts are formatted."""
        if not self.given.get("model_name_or_path"):
            self.problem("model_name_or_path is missing.", "Name a model folder, a hub model, or tiny.")
        if self.run.task is None:
            self.problem("task is missing: verl reads problems that dew prepares.", "Write e.g. task: dapo17k.")
        found: Overrides = {f"{MODEL}.path": model_folder(self.get("model_name_or_path", ""))}
        try:
            if self.run.task and not has_messages(task(self.run.task, **self.run.task_settings)):
                found[f"{MODEL}.custom_chat_template"] = PLAIN_TEMPLATE
        except DewError as error:  # data that cannot be read
            self.problems += error.problems
        return found

    def schedule(self, per_step: int) -> Overrides:
        """How long to train, when to save and validate. A step of verl has `per_step` optimizer steps."""
        found: Overrides = {}
        for name, (key, default) in STEPS.items():
            value = self.get(name, default)
            if value > 0:
                found[key] = math.ceil(value / per_step)
                if value % per_step:
                    self.notes.append(f"{name}={value} optimizer steps become {found[key]} steps of {per_step} each")
        total = found.get("trainer.total_training_steps")
        # An epoch has at least one step, so that many epochs never end the run early.
        epochs = self.own.get("trainer.total_training_steps") or total or self.count("num_train_epochs", 3)
        found["trainer.total_epochs"] = epochs
        if scoring := self.run.scores:
            if scoring.max_new_tokens not in (None, self.get("max_completion_length", 512)):
                self.unused.append("scores.max_new_tokens")  # verl validates with the same limit
            found.setdefault("trainer.test_freq", total or found.get("trainer.save_freq", -1))
            found["trainer.val_before_train"] = True
            found[f"{ROLLOUT}.val_kwargs.n"] = scoring.k
            found[f"{ROLLOUT}.val_kwargs.do_sample"] = scoring.temperature > 0
            found[f"{ROLLOUT}.val_kwargs.temperature"] = scoring.temperature
        return found

    def objective(self, algorithm: Algorithm) -> Overrides:
        """Estimator, loss and filter: dew's, or verl's own where the class declares that they train the same."""
        stock, own = stock_estimator(type(algorithm)), self.own.get("algorithm.adv_estimator", algorithm.name)
        if own != algorithm.name and own in dew_estimators():
            what = f"algorithm.adv_estimator={own}, but the algorithm is {algorithm.name}."
            self.problem(what, f"Write `algorithm: {own}` instead.")
        found: Overrides = {
            "algorithm.adv_estimator": stock or algorithm.name,
            f"{ACTOR}.policy_loss.loss_mode": STOCK_LOSSES[algorithm.ratio] if stock else DEW_LOSS,
            f"{ACTOR}.loss_agg_mode": REDUCTIONS[algorithm.reduce],
            f"{ACTOR}.clip_ratio_low": algorithm.clip_low,
            f"{ACTOR}.clip_ratio_high": algorithm.clip_high,
            f"{ACTOR}.use_kl_loss": algorithm.kl_coef > 0,
            # In the update; with a coefficient of 0, too, verl's backward pass goes through it.
            f"{ACTOR}.calculate_entropy": algorithm.needs_entropy == "current",
            "algorithm.filter_groups.enable": algorithm.dynamic_sampling,
        }
        if algorithm.kl_coef > 0:
            found |= {f"{ACTOR}.kl_loss_coef": algorithm.kl_coef, f"{ACTOR}.kl_loss_type": "low_var_kl"}
        changed = {f.name: x for f in fields(algorithm) if (x := getattr(algorithm, f.name)) != f.default}
        self.unused += [f"algorithm_kwargs.{name}" for name in ("max_rounds", "oversample") if name in changed]
        other = {name: value for name, value in changed.items() if name not in SET_BY_VERL}
        return found | (self.stock(algorithm, other) if stock else {f"+algorithm.dew.{k}": v for k, v in other.items()})

    def stock(self, algorithm: Algorithm, own: dict[str, Any]) -> Overrides:
        """Further keys of verl's own estimator and loss. Its reward manager has the soft overlong penalty."""
        found: Overrides = {f"{ACTOR}.clip_ratio_c": NO_DUAL_CLIP} if algorithm.ratio == "token" else {}
        if not algorithm.scale:
            found["algorithm.norm_adv_by_std_in_grpo"] = False
        if algorithm.reduce == "tokens" and algorithm.divisor(1, 1) != 1:  # a fixed divisor per answer
            found[f"{ACTOR}.loss_agg_mode"] = "seq-mean-token-sum-norm"
            found[f"{ACTOR}.loss_scale_factor"] = algorithm.max_tokens
        if own.get("overlong") == "soft":
            buffer = {"enable": True, "len": own["overlong_buffer"], "penalty_factor": 1.0, "log": False}
            found |= {f"+reward.reward_kwargs.overlong_buffer_cfg.{name}": value for name, value in buffer.items()}
            found |= {"reward.reward_manager.name": "dapo", "+reward.reward_kwargs.max_resp_len": algorithm.max_tokens}
            own = {name: value for name, value in own.items() if name not in ("overlong", "overlong_buffer")}
        for name, value in own.items():
            self.problem(f"{name}={value!r}: verl's own {algorithm.name} has no such setting.", "Leave it out.")
        return found


def has_messages(source: Task) -> bool:
    """Whether its prompts are chat messages, which the model's own template formats. Without a template of the task,
    its first prompt decides."""
    template = getattr(source, "template", "plain")
    if template is None:
        return any(not isinstance(row["prompt"], str) for row in source.rows(1))
    return bool(template == "chat")


def import_modules(names: str | list[str] | None) -> None:
    """Import the user's modules, which register algorithms: verl's `external_lib`, a name or a list of names."""
    for name in filter(None, names if isinstance(names, list) else [names]):
        try:
            import_module(str(name))
        except Exception as error:  # the user's code may raise anything
            what = f"{name} cannot be imported ({type(error).__name__}: {error})."
            remedy = "Correct the module, or install it or put its folder on PYTHONPATH, on every node."
            raise ConfigError(Problem(what, remedy=remedy)) from None
