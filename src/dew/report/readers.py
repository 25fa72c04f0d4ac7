"""Read run folders of dew or plain TRL, or a file of token records, and group runs into arms."""

import os
import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import eq
from pathlib import Path
from typing import Any

from dew.compare.grid import read_grid
from dew.errors import ConfigError, DewError, Problem, RecordError, quoted
from dew.files import read_whole, stay_inside
from dew.run.config import flat, parse_yaml
from dew.run.folder import STATE, RunFolder, algorithm_of
from dew.run.records import MAX_FILE, GroupRecord, Json, SchemaError, read_records, sample_records, try_json

PAGE_TOKENS = 300_000
"""Maximum number of tokens in one page, about 6 MB of HTML. Above it, groups are sampled, and the page says so."""
READ_BYTES = 48 << 20
"""Maximum size of the compressed records that are read, over all runs, which takes a few seconds."""
TOKEN_BYTES = 80
"""Maximum size of one recorded token as JSON, to avoid parsing more than a page can hold."""
MAX_RECORDED = 32
"""Maximum number of runs whose token records are read. If there are more, evenly spaced ones are chosen."""


@dataclass(frozen=True)
class Run:
    """What could be read of a run. Readers fill in what their format has."""

    name: str
    kind: str
    """dew, trl or records."""
    facts: Json = field(default_factory=dict)
    """run.json, or the equivalent of another trainer."""
    config: str | None = None
    metrics: list[Json] = field(default_factory=list)
    alarms: list[Json] = field(default_factory=list)
    scores: list[Json] = field(default_factory=list)
    groups: list[GroupRecord] = field(default_factory=list)
    sample: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    """One sentence for each file that could not be read."""
    folder: Path | None = None

    @property
    def data(self) -> str:
        """The task or data set; runs on different ones are not compared."""
        return str(self.facts.get("data"))

    @property
    def start(self) -> str:
        """Digest of the policy that a run of the lab started from."""
        start = self.facts.get("warm_start")
        return str(start.get("digest")) if isinstance(start, dict) else ""


def runs_at(folder: Path) -> list[Path]:
    """Return the folder itself or, if it is not a run, the runs inside it, up to two levels down."""
    if not folder.is_dir() or _kind(folder):
        return [folder]
    found = [p for pattern in ("[!.]*", "[!.]*/*") for p in sorted(folder.glob(pattern)) if p.is_dir() and _kind(p)]
    return [p for p in found if p.parent not in found] or [folder]


def has_run(folder: Path) -> bool:
    return any(_kind(inner) for inner in runs_at(folder))


def _kind(folder: Path) -> str | None:
    """Return which trainer wrote this folder, or None if it is not a run."""
    if any((folder / name).exists() for name in ("run.json", "metrics.jsonl", "records")):
        return "dew"
    return "trl" if _trl_state(folder) else None


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs in `folders`, which share the token budget of a page and the time to read them."""
    recorded = [folder for folder in folders if (folder / "records").is_dir()]
    chosen = {recorded[i] for i in evenly(len(recorded), MAX_RECORDED)}
    return [read_run(folder, len(chosen) if folder in chosen else 0) for folder in folders]


def read_run(folder: Path, share: int = 1) -> Run:
    """Read the run in `folder`, one of `share` runs in a page; with 0, without its token records."""
    if folder.is_file():
        remedy = f"Give the folder of a run. For a file of token records: dew report --records {quoted(folder)}"
        raise ConfigError(Problem(f"{folder}: a file, not a folder.", remedy=remedy))
    if not folder.is_dir():
        raise ConfigError(Problem(f"{folder}: no such folder.", remedy="Give the folder of a run, such as runs/NAME."))
    stay_inside(folder)
    if kind := _kind(folder):
        return _dew_run(folder, share) if kind == "dew" else _trl_run(folder)
    if read_grid(folder):
        remedy = f"`dew view {quoted(folder)}` waits for one."
        raise ConfigError(Problem(f"{folder}: no run has finished yet.", remedy=remedy))
    what = f"{folder}: not the folder of a run."
    why = "It has no run.json or metrics.jsonl (dew), and no trainer_state.json (TRL)."
    remedy = "Give a folder such as runs/NAME. For other trainers (docs/records.md): dew report --records FILE.jsonl"
    raise ConfigError(Problem(what, why, remedy))


def read_records_file(path: Path) -> Run:
    groups = read_records(path)
    [((step, number), times)] = Counter((group.step, group.group) for group in groups).most_common(1)
    if times > 1:
        what = f"{path}: step {step} has more than one group {number}."
        remedy = "Number the groups of a step, or leave `group` out; write a file for each run."
        raise RecordError(Problem(what, remedy=remedy))
    kept = thin(groups, PAGE_TOKENS)
    sample = {"groups": len(kept), "of": len(groups), "files": 1, "files_of": 1}
    algorithms = sorted({group.algorithm for group in groups if group.algorithm})
    facts = {"algorithm": {"name": ", ".join(algorithms)}} if algorithms else {}
    return Run(name=path.name, kind="records", facts=facts, groups=kept, sample=sample)


# ── dew (docs/records.md) ───────────────────────────────────────────────────────────────────────────────────
MAX_CONFIG = 200_000


def _dew_run(folder: Path, share: int) -> Run:
    """Read a run of dew, which may still be training. Damaged files are reported and skipped."""
    run, config = RunFolder(folder), folder / "config.yaml"
    found: dict[str, Any] = {}
    notices: list[str] = []
    for name, read in (("facts", run.run), ("metrics", run.metrics), ("alarms", run.alarms), ("scores", run.scores)):
        try:
            found[name] = read()
        except SchemaError:
            raise
        except RecordError as error:
            notices.append(str(error))
    facts = found.setdefault("facts", {})
    if isinstance(start := facts.get("warm_start"), dict) and "model" in start:  # a run of the lab
        facts["model"] = start["model"]
    if facts.get("status") == "running" and "metrics" in found and not run.alive():
        facts["status"] = "killed"
    found["groups"], found["sample"], unread = read_sample(run.record_files(), share)
    if config.is_file():
        found["config"] = config.read_text(errors="replace")[:MAX_CONFIG]
    name = str(facts.get("name") or folder.resolve().name)
    return Run(name, "dew", notices=[*notices, *run.skipped.values(), *unread], folder=folder, **found)


# ── TRL: the curves in trainer_state.json ───────────────────────────────────────────────────────────────────
TRL_NAMES = {
    "completions/mean_length": "length/mean",
    "completions/max_length": "length/max",
    "completions/clipped_ratio": "length/truncated_share",
    "clip_ratio/low_mean": "clip/low",
    "clip_ratio/high_mean": "clip/high",
    "kl": "kl/ref",
}
"""TRL's name -> dew's name of a metric; others keep TRL's name."""


def _trl_state(folder: Path) -> Path | None:
    """Return trainer_state.json of the folder itself or of its last checkpoint."""
    return next((path for place in (folder, *RunFolder(folder).resumable()) if (path := place / STATE).exists()), None)


def _trl_run(folder: Path) -> Run:
    path = _trl_state(folder)
    state = try_json(read_whole(path, MAX_FILE)) if path else None
    if not isinstance(state, dict):
        what = f"{path}: not the JSON that TRL writes; it is truncated or damaged."
        raise RecordError(Problem(what, remedy="Copy it again."))
    facts = {"engine": "trl", "steps": state.get("global_step"), "train_batch_size": state.get("train_batch_size")}
    return Run(folder.resolve().name, "trl", facts, metrics=_trl_metrics(state.get("log_history")), folder=folder)


def _trl_name(name: str) -> str:
    if name.startswith("rewards/") and name.endswith("/mean"):
        return "reward/" + name.removeprefix("rewards/").removesuffix("/mean")
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else TRL_NAMES.get(name, name)


def _trl_metrics(history: Any) -> list[Json]:
    steps: dict[int, Json] = {}
    for line in history if isinstance(history, list) else []:
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            continue
        entry = steps.setdefault(line["step"], {"step": line["step"]})
        numbers = {k: v for k, v in line.items() if isinstance(v, int | float) and k not in ("step", "epoch")}
        entry.update({_trl_name(k): v for k, v in numbers.items()})
        if "frac_reward_zero_std" in numbers:
            entry["groups/mixed_share"] = 1 - numbers["frac_reward_zero_std"]
    return [steps[step] for step in sorted(steps)]


# ── a sample of the groups that fits into a page ────────────────────────────────────────────────────────────
def evenly(n: int, most: int) -> list[int]:
    """Return at most `most` of the indices 0..n−1, evenly spaced, including the first and the last."""
    if n <= most:
        return list(range(n))
    return [round(i * (n - 1) / (most - 1)) for i in range(most)] if most > 1 else [n - 1][:most]


def cost(group: GroupRecord) -> int:
    """Return the size of a group in the page, in tokens; at least one per four characters of text."""
    return max(group.size, sum(len(token) for answer in group.answers for token in answer.tokens) // 4)


def thin(groups: list[GroupRecord], tokens: int) -> list[GroupRecord]:
    """Keep as many evenly spaced groups as cost at most `tokens`, but at least the smallest one."""
    kept = groups
    while (total := sum(map(cost, kept))) > tokens:
        kept = [groups[i] for i in evenly(len(groups), len(kept) * tokens // total)]
    return kept or sorted(groups, key=cost)[:1]


def read_sample(files: Sequence[Path], share: int = 1) -> tuple[list[GroupRecord], dict[str, Any], list[str]]:
    """Return groups from evenly spaced files within the budget of a page, their counts, and what could not be read."""
    picked: list[Path] = []
    if share:
        mean = sum(map(_bytes, files)) / max(1, len(files))
        picked = [files[i] for i in evenly(len(files), max(2, int(READ_BYTES / share / max(1.0, mean))))]
    groups: list[GroupRecord] = []
    seen, notices = 0, []
    for path in picked:
        try:
            found, of = sample_records(path, PAGE_TOKENS / share / len(picked) * TOKEN_BYTES)
            groups, seen = groups + found, seen + of
        except RecordError as error:
            if path.exists():  # otherwise the running job has deleted it
                notices.append(str(error))
    kept = thin(groups, PAGE_TOKENS // max(1, share))
    return kept, {"groups": len(kept), "of": seen, "files": len(picked), "files_of": len(files)}, notices


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a running job may remove records
        return 0


# ── arms: runs that differ only in their seed ───────────────────────────────────────────────────────────────
NOT_COMPARED = {
    *("seed", "data_seed", "output_dir", "logging_dir", "run_name", "hub_model_id", "resume_from_checkpoint"),
    *("experiment_name", "data_loader_seed"),  # verl's
}
"""Settings that do not distinguish arms, by the last part of their dotted names."""
MAX_SETTINGS = 1000
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist = 3, 20


def arms_of(runs: Sequence[Run]) -> tuple[list[Json], list[Json]]:
    """Return the arms and the settings that differ.

    An arm is {label, runs (indices), algorithm, data, learning_rate, baseline (index of the arm to compare with, or its
    own)}, a setting {name, values (one per run)}.
    """
    pairs = [_settings(run) for run in runs]
    known = [settings for settings, _ in pairs]
    own = {name for _, names in pairs for name in names}
    several = len({settings.get("algorithm") for settings in known}) > 1
    called = [str(run.facts.get("arm") or x.get("algorithm") or "") for run, x in zip(runs, known, strict=True)]

    def differs(name: str) -> bool:
        has = [settings[name] for settings in known if name in settings]
        missing = len(has) < len(known) and not (several and name in own)  # other algorithms have other settings
        return missing or len(set(has)) > 1

    names = [name for name in dict.fromkeys(name for settings in known for name in settings) if differs(name)]
    named = all("arm" in run.facts for run in runs)  # if so, an arm's name implies the settings of its algorithm
    ignored = NOT_COMPARED | (own - {"source"} if named else set())  # but not the code of a user's rule
    compared = [name for name in names if name.rsplit(".", 1)[-1] not in ignored]
    members: dict[tuple[Any, ...], list[int]] = {}
    for i, settings in enumerate(known):
        key = (called[i], *(settings.get(name) for name in compared)) if called[i] else (i,)
        members.setdefault(key, []).append(i)
    for name in {"model", "model_name_or_path", "data"}.intersection(names):  # shown without the folder of all paths
        paths = {settings[name] for settings in known if settings.get(name, "").startswith("/")}
        for settings in (settings for settings in known if settings.get(name) in paths):
            settings[name] = os.path.relpath(settings[name], os.path.commonpath([Path(path).parent for path in paths]))
    rates = len({settings.get("learning_rate") for settings in known}) > 1

    def label(first: int) -> str:
        """Return the arm's name and what distinguishes it from others with the same name, or the run's name."""
        mine, name = known[first], called[first]
        if not name or len(runs) == 1:
            return runs[first].name
        rate = f" @ {mine.get('learning_rate')}" if rates and "arm" in runs[first].facts else ""
        others = [known[i] for i, *_ in members.values() if i != first and called[i] == name]
        apart = [n for n in compared if any(x.get(n) != mine.get(n) for x in others)]
        apart = [n for n in apart if not (rate and n == "learning_rate")]
        apart = list({tuple(x.get(n) for x in known): n for n in apart}.values())  # one of equal settings
        return " ".join([name + rate, *(f"{n.rsplit('.', 1)[-1]}={mine.get(n, '–')}" for n in apart[:3])])

    arms: list[Json] = [
        {"label": label(i), "runs": [i, *more], "algorithm": called[i]}
        | {name: known[i].get(name) for name in ("data", "learning_rate")}
        for i, *more in members.values()
    ]

    def alike(arm: Json) -> list[str | None]:
        names = ("model", "learning_rate", *(name for name in compared if name not in own))
        return [known[arm["runs"][0]].get(name) for name in names]

    def baseline(arm: Json) -> int:
        """Return the arm of the first one's algorithm on the same data whose settings are most alike."""
        same = [a for a in arms if a["data"] == arm["data"]]
        earlier = takewhile(lambda a: a is not arm, (a for a in same if a["algorithm"] == same[0]["algorithm"]))
        return arms.index(max(earlier, key=lambda a: list(map(eq, alike(a), alike(arm))), default=arm))

    for arm in arms:
        arm["baseline"] = baseline(arm)
    return arms, [{"name": n, "values": [settings.get(n) for settings in known]} for n in names if n != "output_dir"]


def _settings(run: Run) -> tuple[dict[str, str], set[str]]:
    """Return every setting of a run by its dotted name, as text, and the names of those of the algorithm."""
    try:
        config = parse_yaml(run.config or "{}", run.name)
    except DewError:
        config = {}
    name, own = algorithm_of(run.facts)
    known = ["engine", "model", "data", "learning_rate", "source", *(() if run.config else ("rewards", "batches"))]
    facts = {key: run.facts.get(key) for key in known} | {"algorithm": name, "start": run.start or None}
    lab = _texts(run.facts.get("settings"))  # whose runs have no config
    every = _texts(config) | lab | _texts({k: v for k, v in facts.items() if v is not None}) | _texts(own)
    if folder := every.get("algorithm.dew_run.folder"):  # verl's data and checkpoints are in the run folder
        every = {name: value.replace(folder, ".") for name, value in every.items()}
    return every, {"source", *_texts(own)}


def _texts(x: Any) -> dict[str, str]:
    some = islice(flat(x).items(), MAX_SETTINGS) if isinstance(x, dict) else ()
    return {name: value[:200] if isinstance(value, str) else _SHORT.repr(value) for name, value in some}
