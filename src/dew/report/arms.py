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
    named = all("arm" in run.facts for run in runs)  # then an arm's name stands for the settings of its algorithm
    ignored = NOT_COMPARED | (own if named else set())
    compared = [name for name in names if name.rsplit(".", 1)[-1] not in ignored]
    members: dict[tuple[Any, ...], list[int]] = {}
    for i, settings in enumerate(known):
        name = _name(runs[i], settings)
        key = (name, *(settings.get(name) for name in compared)) if name else (i,)
        members.setdefault(key, []).append(i)
    arms = [
        {"label": _label(runs, known, arm, members.values(), compared), "runs": arm}
        | {"algorithm": _name(runs[arm[0]], known[arm[0]])}
        | {name: known[arm[0]].get(name) for name in ("data", "learning_rate")}
        for arm in members.values()
    ]
    table = [{"name": n, "values": [settings.get(n) for settings in known]} for n in names if n != "output_dir"]
    return arms, table


def _name(run: Run, settings: dict[str, str]) -> str:
    """The arm as its study calls it, else the algorithm; empty if unknown."""
    return str(run.facts.get("arm") or settings.get("algorithm") or "")


def _label(runs: Sequence[Run], known: list[dict[str, str]], arm: list[int], arms: Any, compared: list[str]) -> str:
    """The arm's name and what tells it apart from others with the same name; else the run's name."""
    mine, name = known[arm[0]], _name(runs[arm[0]], known[arm[0]])
    if not name or len(runs) == 1:
        return runs[arm[0]].name
    rates = {settings.get("learning_rate") for settings in known}
    rate = f" @ {mine.get('learning_rate')}" if len(rates) > 1 and "arm" in runs[arm[0]].facts else ""
    others = [known[a[0]] for a in arms if a is not arm and _name(runs[a[0]], known[a[0]]) == name]
    apart = [
        n for n in compared if any(x.get(n) != mine.get(n) for x in others) and not (rate and n == "learning_rate")
    ]
    return " ".join([name + rate, *(f"{n.rsplit('.', 1)[-1]}={mine.get(n, '–')}" for n in apart[:3])])
