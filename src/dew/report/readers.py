"""Read the folder of a run: dew's own, plain TRL's, or prime-rl's token exports."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from dew.errors import ConfigError, EngineError, Problem, RecordError, not_loaded
from dew.files import read_whole, stay_inside
from dew.records import MAX_FILE, AnswerRecord, GroupRecord, Json, RunFolder, SchemaError, read_records
from dew.report.run import Run, read_sample

T = TypeVar("T")


def read_run(folder: Path, tokens: int, tokenizer: str | None = None) -> Run:
    """The run in `folder`, with groups of at most `tokens` tokens in total."""
    if not folder.is_dir():
        raise ConfigError(Problem(f"{folder}: no such folder.", remedy="Give the folder of a run, such as runs/NAME."))
    stay_inside(folder)
    if any((folder / name).exists() for name in ("run.json", "metrics.jsonl", "records")):
        return _dew_run(folder, tokens)
    if _trl_state(folder) or _trl_completions(folder):
        return _trl_run(folder, tokens)
    if _prime_steps(folder):
        return _prime_run(folder, tokens, tokenizer)
    raise ConfigError(
        Problem(
            f"{folder}: not the folder of a run. Looked for run.json or metrics.jsonl (dew), trainer_state.json or "
            "completions/*.parquet (TRL), token_exports/step_*/rank_*.jsonl (prime-rl).",
            remedy="For anything else, write the JSONL of docs/records.md and pass it with --records.",
        )
    )


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


# ── prime-rl: token_exports/step_N/rank_R.jsonl, one trained sequence per line, as token ids ────────────────

PRIME_SCHEMA = 1
PRIME_NAMES = {"entropy": "entropy", "logp": "trainer_logprobs", "advantage": "advantages", "ratio": "importance_ratio"}
"""dew's name -> prime-rl's name of a signal."""


def _prime_steps(folder: Path) -> list[Path]:
    root = folder / "token_exports" if (folder / "token_exports").is_dir() else folder
    found = [p for p in root.glob("step_*") if p.name[5:].isdigit() and any(p.glob("rank_*.jsonl"))]
    return sorted(found, key=lambda p: int(p.name[5:]))


def _prime_run(folder: Path, tokens: int, tokenizer: str | None) -> Run:
    decode = _decoder(tokenizer)
    groups, sample, notices = read_sample(_prime_steps(folder), tokens, lambda step: _prime_groups(step, decode))
    if tokenizer is None:
        notices.append("prime-rl exports token ids: pass the model's tokenizer to see text instead of ⟨ids⟩.")
    facts = {"engine": "prime-rl"}
    return Run(folder.resolve().name, "prime-rl", facts, groups=groups, sample=sample, notices=notices)


def _decoder(tokenizer: str | None) -> Callable[[int], str]:
    if tokenizer is None:
        return lambda token: f"⟨{token}⟩"
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(not_loaded("tokenizer", tokenizer, error)) from None
    return lambda token: str(loaded.decode([token]))


def _prime_groups(folder: Path, decode: Callable[[int], str]) -> list[GroupRecord]:
    """Sequences with the same prompt form a group."""
    by_prompt: dict[tuple[int, ...], list[AnswerRecord]] = {}
    for path in sorted(folder.glob("rank_*.jsonl")):
        for number, line in enumerate(read_whole(path, MAX_FILE).splitlines(), start=1):
            try:
                prompt, answer = _prime_answer(json.loads(line), decode)
            except RecordError as error:
                raise RecordError([replace(p, what=f"{path}: {p.what}") for p in error.problems]) from None
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                what = f"{path}: line {number} is not a prime-rl token export, or it is truncated."
                raise RecordError(Problem(what, remedy="Copy it again.")) from None
            by_prompt.setdefault(prompt, []).append(answer)
    step = int(folder.name[5:])
    return [
        GroupRecord(step, number, "".join(map(decode, prompt)), answers)
        for number, (prompt, answers) in enumerate(by_prompt.items())
    ]


def _prime_answer(line: Json, decode: Callable[[int], str]) -> tuple[tuple[int, ...], AnswerRecord]:
    """The prompt's ids and the answer, which starts at the first trained token."""
    if line["schema_version"] != PRIME_SCHEMA:
        raise RecordError(f"token export schema {line['schema_version']!r}; this dew reads schema {PRIME_SCHEMA}.")
    trained: list[bool] = line["loss_mask"]
    start = trained.index(True)
    reward = next((float(r) for r in line["rewards"][start:] if r is not None), 0.0)
    signals: Json = {ours: _floats(line.get(theirs), start) for ours, theirs in PRIME_NAMES.items()}
    tokens = [decode(token) for token in line["token_ids"][start:]]
    answer = AnswerRecord(tokens, correct=reward > 0.5, reward=reward, live=trained[start:], **signals)
    return tuple(line["token_ids"][:start]), answer


def _floats(values: Sequence[Any] | None, start: int) -> list[float] | None:
    if values is None or all(v is None for v in values[start:]):
        return None
    return [math.nan if v is None else float(v) for v in values[start:]]
