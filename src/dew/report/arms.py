"""Runs that differ only in their seed form an arm; which settings differ between runs."""

import reprlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from dew.errors import DewError
from dew.report.readers import Run
from dew.run.config import parse_yaml
from dew.run.records import Json

NOT_COMPARED = {
    *("seed", "data_seed", "output_dir", "logging_dir", "run_name", "hub_model_id", "resume_from_checkpoint"),
    *("experiment_name", "data_loader_seed"),  # verl's
}
"""Settings that do not tell arms apart, by the last part of their dotted names."""
MAX_SETTINGS = 1000
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist = 3, 20


def settings_of(run: Run) -> tuple[dict[str, str], set[str]]:
    """Every setting of a run by its dotted name, as text, and which of them belong to the algorithm."""
    try:
        config = parse_yaml(run.config or "{}", run.name)
    except DewError:
        config = {}
    algorithm = run.facts.get("algorithm")
    name, own = (algorithm.get("name"), algorithm.get("settings")) if isinstance(algorithm, dict) else (algorithm, {})
    facts = {key: run.facts.get(key) for key in ("engine", "model", "data", "learning_rate")} | {"algorithm": name}
    flat = _flatten(config) | _flatten({k: v for k, v in facts.items() if v is not None}) | _flatten(own)
    if folder := flat.get("algorithm.dew_run.folder"):  # verl's data and checkpoints are in the run folder
        flat = {name: value.replace(folder, ".") for name, value in flat.items()}
    return flat, set(_flatten(own))


def _flatten(x: Any) -> dict[str, str]:
    return {name: _text(value) for name, value in islice(_entries(x, ""), MAX_SETTINGS)}


def _entries(x: Any, prefix: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, value in x.items() if isinstance(x, dict) else ():
        if isinstance(value, dict) and value and depth < 4:
            yield from _entries(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value


def _text(x: Any) -> str:
    return x[:200] if isinstance(x, str) else _SHORT.repr(x)


def arms_of(runs: Sequence[Run]) -> tuple[list[Json], list[Json]]:
    """The arms and the settings that differ.

    An arm is {label, runs (indices), algorithm, data, learning_rate}, a setting {name, values (one per run)}.
    """
    pairs = [settings_of(run) for run in runs]
    known = [settings for settings, _ in pairs]
    own = {name for _, names in pairs for name in names}
    several = len({settings.get("algorithm") for settings in known}) > 1

    def differs(name: str) -> bool:
        has = [settings[name] for settings in known if name in settings]
        missing = len(has) < len(known) and not (several and name in own)  # other algorithms have other settings
        return missing or len(set(has)) > 1

    names = [name for name in dict.fromkeys(name for settings in known for name in settings) if differs(name)]
    compared = [name for name in names if name.rsplit(".", 1)[-1] not in NOT_COMPARED]
    members: dict[tuple[Any, ...], list[int]] = {}
    for i, settings in enumerate(known):
        key = tuple(settings.get(name) for name in compared) if "algorithm" in settings else (i,)
        members.setdefault(key, []).append(i)
    arms = [
        {"label": _label(runs, known, arm, members.values(), compared), "runs": arm}
        | {"algorithm": runs[arm[0]].facts.get("arm") or known[arm[0]].get("algorithm")}
        | {name: known[arm[0]].get(name) for name in ("data", "learning_rate")}
        for arm in members.values()
    ]
    table = [{"name": n, "values": [settings.get(n) for settings in known]} for n in names if n != "output_dir"]
    return arms, table


def _label(runs: Sequence[Run], known: list[dict[str, str]], arm: list[int], arms: Any, names: list[str]) -> str:
    """The arm's own label; else the algorithm and what tells arms with the same apart; else the run's name."""
    mine = known[arm[0]]
    if given := runs[arm[0]].facts.get("arm"):
        rates = {settings.get("learning_rate") for settings in known}
        return f"{given} @ {mine.get('learning_rate')}" if len(rates) > 1 else str(given)
    if "algorithm" not in mine or len(runs) == 1:
        return runs[arm[0]].name
    others = [known[a[0]] for a in arms if a is not arm and known[a[0]].get("algorithm") == mine["algorithm"]]
    apart = [n for n in names if any(other.get(n) != mine.get(n) for other in others)]
    return " ".join([mine["algorithm"], *(f"{n.rsplit('.', 1)[-1]}={mine.get(n, '–')}" for n in apart[:3])])
