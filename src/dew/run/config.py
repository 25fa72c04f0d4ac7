"""The config of a run: a flat YAML file with dew's own keys (the fields of `Run`) and the engine's, and the model,
problems and verifier that it names. Any GRPO config file of TRL works.
"""

import logging
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.representer import SafeRepresenter

from dew.errors import ConfigError, Problem, did_you_mean, loading, quoted, unreadable, wrong_types
from dew.files import read_whole
from dew.rewards import Verifier, verifier
from dew.rewards.verifiers import has_verifier
from dew.run.folder import MODEL_FILES, is_main_process
from dew.run.models import check_model
from dew.run.settings import algorithm_settings, misspelled
from dew.tasks import Row, Task, model_folder, task

Settings = dict[str, Any]
logger = logging.getLogger("dew")
ENGINES = ("trl", "verl")


@dataclass(frozen=True)
class Scoring:
    """How a run is evaluated before and after training, on held-out problems."""

    problems: int = 128
    k: int = 16
    temperature: float = 1.0
    max_new_tokens: int | None = None
    """Maximum new tokens per answer; None: the run's max_completion_length."""


@dataclass(frozen=True)
class Run:
    """The config of a run. `settings` holds the engine's keys under TRL's names, `verl` the keys only verl has."""

    engine: str = "trl"
    task: str | None = None
    """A built-in task, a named data set, or a file of problems; None if `dataset_name` is used instead."""
    task_settings: Settings = field(default_factory=dict)
    problems: int = 4096
    verifier: str | None = None
    """Name of the verifier; None: the task's own."""
    scores: Scoring | None = None
    """Evaluate before and after training: true, false, or {problems, k, max_new_tokens, temperature}."""
    verl: Settings = field(default_factory=dict)
    """Keys that only verl has, nested or dotted, e.g. {trainer.nnodes: 8}; ignored on TRL."""
    env: Settings = field(default_factory=dict)
    """Environment variables to set before training, as in TRL's files."""
    settings: Settings = field(default_factory=dict)
    source: str | None = None
    """The file that the config was read from, for error messages."""

    def set_environment(self) -> None:
        for name, value in self.env.items():
            try:
                os.environ[name] = str(value)
            except (OSError, ValueError) as error:  # an empty name, "=" in a name, a null character
                problem = Problem(f"env: {name!r}: {error}.", remedy="Write NAME: value, as in a shell.")
                raise ConfigError(problem, source=self.source) from None

    @property
    def algorithm_settings(self) -> Settings:
        return algorithm_settings(self.settings.get("algorithm_kwargs"))

    def to_dict(self) -> Settings:
        """Return the keys and values of a config file."""
        own = {key: value for key, value in asdict(self).items() if key in OWN_KEYS and value not in (None, {})}
        if self.task is None:
            del own["problems"]
        return {**own, **self.settings}


MAX_PROBLEMS = 10_000_000
"""Catches typos, because a game can generate any number of problems."""
TYPES: dict[str, type] = {"engine": str, "task": str, "problems": int, "verifier": str}
TYPES |= dict.fromkeys(("task_settings", "verl", "env"), dict)
OWN_KEYS = tuple(f.name for f in fields(Run) if f.name not in ("settings", "source"))


def flat(nested: Mapping[str, Any], above: str = "") -> Settings:
    """{"trainer": {"nnodes": 2}} and {"trainer.nnodes": 2} -> {"trainer.nnodes": 2}. Empty mappings are values."""
    found: Settings = {}
    for key, value in nested.items():
        name = f"{above}{key}"
        found.update(flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value})
    return found


def merged(overrides: Settings, own: Settings) -> Settings:
    """Replace verl's keys by those in `own`, whether or not either has a leading +."""
    given = {key.lstrip("+") for key in own}
    return {**{key: value for key, value in overrides.items() if key.lstrip("+") not in given}, **own}


def read_run(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Run:
    """Read a run from a YAML file, with some keys replaced."""
    return make_run({**read_yaml(path), **(overrides or {})}, source=str(path))


def make_run(keys: Mapping[str, Any], *, source: str | None = None) -> Run:
    """Split the keys of a flat file into dew's own and the engine's."""
    own = {k: v for k, v in keys.items() if k in OWN_KEYS and v is not None}
    problems = [
        Problem(f"{key}: expected {kind.__name__}, got {own[key]!r:.80}.")
        for key, kind in TYPES.items()
        if key in own and (not isinstance(own[key], kind) or isinstance(own[key], bool))
    ]
    problems += misspelled(key for key in keys if key not in OWN_KEYS)
    if "hub_token" in keys:
        why = "Settings are saved in the run's folder and its report, so they must not contain secrets."
        remedy = "Set HF_TOKEN in the environment, or run `hf auth login`."
        problems.append(Problem("hub_token:", why, remedy))
    if own.get("engine", "trl") not in ENGINES:
        problems.append(Problem(f"engine: {own['engine']!r} is unknown.", remedy=f"Use {' or '.join(ENGINES)}."))
    if not problems and not 1 <= own.get("problems", 1) <= MAX_PROBLEMS:
        problems.append(Problem(f"problems: {own['problems']}.", remedy=f"Give a number from 1 to {MAX_PROBLEMS:,}."))
    for other, off in {"dataset_name": "null", "datasets": "[]"}.items():
        if own.get("task") and keys.get(other):
            what = f"task: {own['task']} and {other}: {keys[other]}: a run trains on one of them."
            problems.append(Problem(what, remedy=f"Remove one; on the command line, --{other} {off} or --task null."))
    try:
        own["scores"] = _scoring(own.get("scores"))
    except ConfigError as error:
        problems += error.problems
    if own.get("scores") and not own.get("task"):
        why = "Scores are measured on the held-out problems of a task; dataset_name has none."
        remedy = "Give your data as `task: FILE_OR_FOLDER`, or remove scores; `dew eval` scores the model afterwards."
        problems.append(Problem("scores without a task.", why, remedy))
    if problems:
        raise ConfigError(problems, source=source)
    return Run(**own, settings={k: v for k, v in keys.items() if k not in OWN_KEYS}, source=source)


def _scoring(value: Any) -> Scoring | None:
    if value is None or isinstance(value, bool):
        return Scoring() if value else None
    if not isinstance(value, Mapping):
        example = "Write true, false or settings such as {problems: 128, k: 16}."
        raise ConfigError(Problem(f"scores: {value!r} is not understood.", remedy=example))
    check_keys([f"scores.{key}" for key in value], [f"scores.{f.name}" for f in fields(Scoring)])
    found = Scoring(**value)
    low = [f"{key}={x}: must be above 0." for key, x in vars(found).items() if isinstance(x, int | float) and not x > 0]
    if wrong := wrong_types(found) + low:
        raise ConfigError([f"scores.{what}" for what in wrong])
    return found


RENAMED = {
    "torch_dtype": "Write dtype.",
    "max_prompt_length": "TRL no longer truncates prompts: remove it, and remove overlong prompts from the data.",
    "evaluation_strategy": "Write eval_strategy.",
    "no_cuda": "Write use_cpu.",
    "warmup_ratio": "Write warmup_steps: a value below 1 is a share of all steps.",
}
"""Settings of older releases of TRL and transformers."""


def check_keys(keys: Iterable[str], known: Iterable[str], *, source: str | None = None) -> None:
    """Raise an error that lists every unknown key with the closest known one."""
    known = [*known, *OWN_KEYS]
    advice = "`dew train --keys` lists all settings; those of the algorithm belong in algorithm_kwargs: {alpha2: 0.2}."
    unknown = [key for key in keys if key not in known]
    problems = {key: RENAMED.get(key) or did_you_mean(key, known, cutoff=0.8) or advice for key in unknown}
    if problems:
        raise ConfigError([Problem(f"{k} is not a setting.", remedy=r) for k, r in problems.items()], source=source)


# ── model, problems and verifier of a config ────────────────────────────────────────────────────────────────
HELD_OUT = 64
"""Number of held-out problems if the run has no `scores`."""


def find_model(name: str, setting: str = "model_name_or_path", revision: str | None = None) -> str:
    """Return the argument for `from_pretrained`: the folder of a bundled model, another model folder, or a hub name.

    Raises a ConfigError if it cannot be loaded safely (models.py).
    """
    path = Path(model_folder(name)).expanduser()
    looks_like_a_path = name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    if looks_like_a_path and not path.exists():
        raise ConfigError(f"{setting}: there is no folder {name!r}.")
    if path.exists() and not any((path / file).is_file() for file in MODEL_FILES):
        what = f"{setting}: {name!r} is not a model folder. It has no config.json."
        raise ConfigError(Problem(what, remedy="Give a model's own folder; that of a run is RUN/model."))
    found = str(path) if path.exists() else name
    if is_main_process:
        check_model(name, found, revision)
    return found


def loadable_model(name: str, setting: str, revision: str | None = None) -> str:
    """Like `find_model`, but load its config too: later errors would not say which model failed."""
    from transformers import AutoConfig

    found = find_model(name, setting, revision)
    if Path(found, "adapter_config.json").is_file() and not Path(found, "config.json").is_file():
        remedy = f"Merge it with its model (`dew export {quoted(name)} TO`) and train TO. In Python, pass "
        remedy += f"PeftModel.from_pretrained(BASE, {name!r}, is_trainable=True)."
        raise ConfigError(Problem(f"{setting}: {name} is an adapter, not a whole model.", remedy=remedy))
    # A ValueError: the model needs its own code, which TRL may be allowed to run.
    with loading(setting, name, (OSError,)), suppress(ValueError):
        AutoConfig.from_pretrained(found, revision=revision, trust_remote_code=False)
    return found


def training_rows(run: Run) -> tuple[Task, list[Row]]:
    """Return the task and its training problems, without those whose gold answer the verifier does not accept."""
    from dew.rewards.math import MathVerifier, usable_rows

    assert run.task is not None
    source = task(run.task, **run.task_settings)
    rows = source.rows(run.problems)
    if not isinstance(verifier_of(run), MathVerifier) or "answer" not in rows[0]:
        return source, rows
    usable, bad = usable_rows(rows)
    what = f"{len(bad)} of {len(rows)} gold answers cannot be matched by any answer"
    what += f", e.g. {', '.join(repr(str(row['answer'])[:40]) for row in bad[:3])}."
    if not usable:
        remedy = "Name the column of the final answers (task_settings {answer: ...}), or use another verifier."
        raise ConfigError(Problem(f"{run.task}: {what}", remedy=remedy))
    if bad:
        logger.warning("%s These problems are skipped.", what)
    return source, [dict(row) for row in usable]


def held_out_rows(run: Run, source: Task) -> list[Row]:
    return source.rows(run.scores.problems if run.scores else HELD_OUT, split="held_out")


def verifier_of(run: Run) -> Verifier | None:
    """Return the verifier that the run names, or that of its task, or None."""
    name = run.verifier or run.task
    return verifier(name) if name and (run.verifier or has_verifier(name)) else None


# ── YAML 1.2 ────────────────────────────────────────────────────────────────────────────────────────────────
MAX_SIZE = 200_000
"""Maximum size of a file in bytes: parsing many keys is slow."""


class _Constructor(SafeConstructor):
    """Constructs plain values only; dates and `=` stay text."""


for _tag in ("timestamp", "value"):
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_tag}", SafeConstructor.construct_yaml_str)


def read_yaml(path: str | Path) -> Settings:
    path = Path(path)
    try:
        text = read_whole(path, MAX_SIZE).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text.") from None
    except OSError as error:
        raise ConfigError(unreadable(path, error)) from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str = "config") -> Settings:
    """Parse a YAML mapping. `1e-6` is a number, `no` is text, and duplicate keys are an error."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        for event in yaml.parse(text):
            if isinstance(event, AliasEvent):  # a few aliases can expand to gigabytes
                raise ValueError("aliases such as *name are not supported; write each value once")
            if "\0" in str(getattr(event, "value", "")):  # in a file name, it would fail later
                raise ValueError(r"the character \0 is not allowed")
        value = yaml.load(text)
    except (YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(f"{source}: invalid YAML{line} ({reason}).") from None
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
        remedy = "Write lines such as `learning_rate: 1e-6`."
        raise ConfigError(Problem(f"{source}: expected `key: value` lines.", remedy=remedy))
    return value


class _Representer(SafeRepresenter):
    """Quotes text that YAML 1.1 or 1.2 would read as another type, and writes floats that are floats in both."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        style = None if PLAIN.fullmatch(data) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def represent_float(self, data: float) -> Any:
        text = super().represent_float(data).value
        return self.represent_scalar("tag:yaml.org,2002:float", re.sub(r"^(-?\d+)e", r"\1.0e", text))


PLAIN = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z][\w./-]*", re.ASCII | re.IGNORECASE)
_Representer.add_representer(str, _Representer.represent_str)
_Representer.add_representer(float, _Representer.represent_float)


def to_yaml(run: Run, header: Iterable[str] = ()) -> str:
    """Return the text of a config file for this run, with `header` lines as comments."""
    yaml, stream = YAML(typ="safe", pure=True), StringIO()
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.width = MAX_SIZE  # a line that ruamel wraps may read back differently
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.dump(run.to_dict(), stream)
    return "".join(f"# {line}\n" for line in header) + stream.getvalue()
