"""Read the folder of a run of dew or of plain TRL, or a file of token records."""

import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from dew.errors import ConfigError, EngineError, Problem, RecordError
from dew.files import read_whole, stay_inside
from dew.records import MAX_FILE, AnswerRecord, GroupRecord, Json, RunFolder, SchemaError, read_records
from dew.report.run import Run, read_sample

T = TypeVar("T")


def read_run(folder: Path, tokens: int) -> Run:
    """The run in `folder`, with groups of at most `tokens` tokens in total."""
    if not folder.is_dir():
        raise ConfigError(Problem(f"{folder}: no such folder.", remedy="Give the folder of a run, such as runs/NAME."))
    stay_inside(folder)
    if any((folder / name).exists() for name in ("run.json", "metrics.jsonl", "records")):
        return _dew_run(folder, tokens)
    if _trl_state(folder) or _trl_completions(folder):
        return _trl_run(folder, tokens)
    what = f"{folder}: not the folder of a run."
    why = "It has no run.json or metrics.jsonl (dew), and no trainer_state.json or completions/*.parquet (TRL)."
    remedy = "For anything else, write the JSONL of docs/records.md and pass it with --records."
    raise ConfigError(Problem(what, why, remedy))


def read_records_file(path: Path, tokens: int) -> Run:
    """A single file of token records, from any trainer."""
    groups = read_records(path)
    kept, sample, _ = read_sample([path], tokens, lambda _: groups)
    algorithms = sorted({group.algorithm for group in groups if group.algorithm})
    facts = {"algorithm": {"name": ", ".join(algorithms)}} if algorithms else {}
    return Run(name=path.name, kind="records", facts=facts, groups=kept, sample=sample)


# ── dew (docs/records.md) ───────────────────────────────────────────────────────────────────────────────────

MAX_CONFIG = 200_000
"""Characters of config.yaml in the page."""


def _dew_run(folder: Path, tokens: int) -> Run:
    """The run may still be training; damaged files are reported and skipped."""
    run = RunFolder(folder)
    notices: list[str] = []

    def part(read: Callable[[], T], empty: T) -> T:
        try:
            return read()
        except SchemaError:
            raise
        except RecordError as error:
            notices.append(str(error))
            return empty

    facts: Json = part(run.run, {})
    groups, sample, unread = read_sample(run.record_files(), tokens)
    config = folder / "config.yaml"
    return Run(
        name=str(facts.get("name") or folder.resolve().name),
        kind="dew",
        facts=facts,
        config=config.read_text(errors="replace")[:MAX_CONFIG] if config.is_file() else None,
        metrics=part(run.metrics, []),
        alarms=part(run.alarms, []),
        scores=part(run.scores, []),
        groups=groups,
        sample=sample,
        notices=[*notices, *unread],
    )


# ── TRL: curves in trainer_state.json, answers in completions/*.parquet, no token signals ───────────────────
# Each answer is one "token": its text, with the advantage that TRL gave to all of it.

TRL_NAMES = {
    "completions/mean_length": "length/mean",
    "completions/max_length": "length/max",
    "completions/clipped_ratio": "length/truncated_share",
    "clip_ratio/low_mean": "clip/low",
    "clip_ratio/high_mean": "clip/high",
    "sampling/importance_sampling_ratio/mean": "ratio/mean",
    "sampling/importance_sampling_ratio/max": "ratio/max",
    "kl": "kl/ref",
}
"""TRL's name -> dew's name of a metric; others keep TRL's."""
NOT_REWARDS = {"step", "prompt", "completion", "advantage"}


def _trl_state(folder: Path) -> Path | None:
    """trainer_state.json of the folder itself or of its last checkpoint."""
    own = folder / "trainer_state.json"
    found = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda p: (len(p.parent.name), p.parent.name))
    return own if own.exists() else found[-1] if found else None


def _trl_completions(folder: Path) -> list[Path]:
    return sorted((folder / "completions").glob("*.parquet"))


def _trl_run(folder: Path, tokens: int) -> Run:
    path = _trl_state(folder)
    state: Any = {}
    if path is not None:
        try:
            state = json.loads(read_whole(path, MAX_FILE))
        except (ValueError, RecursionError):
            state = None
    if not isinstance(state, dict):
        what = f"{path}: not the JSON that TRL writes; it is truncated or damaged."
        raise RecordError(Problem(what, remedy="Copy it again."))
    groups, sample, notices = read_sample(_trl_completions(folder), tokens, _trl_groups)
    facts = {"engine": "trl", "steps": state.get("global_step"), "train_batch_size": state.get("train_batch_size")}
    metrics = _trl_metrics(state.get("log_history"))
    return Run(folder.resolve().name, "trl", facts, metrics=metrics, groups=groups, sample=sample, notices=notices)


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


def _trl_groups(path: Path) -> list[GroupRecord]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        what = f"{path} is a Parquet file, and pyarrow is not installed."
        raise EngineError(Problem(what, remedy="Run: pip install pyarrow")) from None
    try:
        table = parquet.read_table(arrow.BufferReader(read_whole(path, MAX_FILE))).to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise RecordError(f"{path}: cannot be read as Parquet ({str(error).splitlines()[0]}).") from None
    by_prompt = groupby(table, key=lambda row: _chat_text(row.get("prompt")))
    groups = []
    for number, (prompt, rows) in enumerate(by_prompt):
        members = list(rows)
        step = int(members[0].get("step") or 0)
        groups.append(GroupRecord(step, number, prompt, [_trl_answer(row) for row in members], algorithm="grpo"))
    return groups


def _trl_answer(row: Json) -> AnswerRecord:
    reward = float(sum(v for k, v in row.items() if k not in NOT_REWARDS and isinstance(v, int | float)))
    advantage = row.get("advantage")
    advantages = [float(advantage)] if isinstance(advantage, int | float) else None
    return AnswerRecord([_chat_text(row.get("completion"))], reward > 0.5, reward, advantage=advantages)


def _chat_text(x: Any) -> str:
    """Text, or the joined messages of a chat."""
    if isinstance(x, list):
        return "\n".join(_chat_text(m.get("content")) if isinstance(m, dict) else str(m) for m in x)
    return "" if x is None else str(x)
