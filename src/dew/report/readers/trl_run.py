"""A plain TRL run: trainer_state.json has the curves, completions/*.parquet the answers. No token was recorded.

Each answer is then one token: its text, with the advantage that TRL gave to all of it. Advantages are GRPO's whatever
the loss; the page works them out again from the rewards and says where they differ (reward weights, another scale).
"""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from dew.errors import EngineError, RecordError
from dew.files import read_whole
from dew.records import MAX_FILE, AnswerRecord, GroupRecord, Json
from dew.report.run import Run, read_sample

NAMES = {
    "completions/mean_length": "length/mean",
    "completions/max_length": "length/max",
    "completions/clipped_ratio": "length/truncated_share",
    "clip_ratio/low_mean": "clip/low",
    "clip_ratio/high_mean": "clip/high",
    "sampling/importance_sampling_ratio/mean": "ratio/mean",
    "sampling/importance_sampling_ratio/max": "ratio/max",
    "kl": "kl/ref",
}
"""TRL's names in dew's words; others keep their own."""
NOT_REWARDS = {"step", "prompt", "completion", "advantage"}


def _state_file(folder: Path) -> Path | None:
    """The newest trainer_state.json, of the folder itself or of its last checkpoint."""
    own = folder / "trainer_state.json"
    checkpoints = sorted(
        folder.glob("checkpoint-*/trainer_state.json"), key=lambda p: (len(p.parent.name), p.parent.name)
    )
    return own if own.exists() else checkpoints[-1] if checkpoints else None


def _completion_files(folder: Path) -> list[Path]:
    return sorted((folder / "completions").glob("*.parquet"))


def is_trl_run(folder: Path) -> bool:
    return _state_file(folder) is not None or bool(_completion_files(folder))


def read_trl_run(folder: Path, tokens: int) -> Run:
    state = _read_state(_state_file(folder))
    groups, sample, notices = read_sample(_completion_files(folder), tokens, _read_completions)
    return Run(
        name=folder.resolve().name,
        kind="trl",
        facts={
            "engine": "trl",
            "steps": state.get("global_step"),
            "train_batch_size": state.get("train_batch_size"),
        },
        metrics=_metrics(state.get("log_history", [])),
        groups=groups,
        sample=sample,
        notices=notices,
    )


def _read_state(path: Path | None) -> Json:
    if path is None:
        return {}
    try:
        state = json.loads(read_whole(path, MAX_FILE))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise RecordError(f"{path}: not the JSON that TRL writes. It is cut off or damaged; copy it again.")
    return state


def _name(name: str) -> str:
    if name.startswith("rewards/") and name.endswith("/mean"):
        return "reward/" + name.removeprefix("rewards/").removesuffix("/mean")
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else NAMES.get(name, name)


def _metrics(history: Any) -> list[Json]:
    steps: dict[int, Json] = {}
    for line in history if isinstance(history, list) else []:
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            continue
        entry = steps.setdefault(line["step"], {"step": line["step"]})
        numbers = {k: v for k, v in line.items() if isinstance(v, int | float) and k not in ("step", "epoch")}
        entry.update({_name(k): v for k, v in numbers.items()})
        if "frac_reward_zero_std" in numbers:
            entry["groups/mixed_share"] = 1 - numbers["frac_reward_zero_std"]
    return [steps[step] for step in sorted(steps)]


def _text(x: Any) -> str:
    """A prompt or completion as text: TRL keeps chats as lists of messages."""
    if isinstance(x, list):
        return "\n".join(_text(m.get("content")) if isinstance(m, dict) else str(m) for m in x)
    return "" if x is None else str(x)


def _read_completions(path: Path) -> list[GroupRecord]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise EngineError(f"{path} is a Parquet file, and pyarrow is not installed. Run: pip install pyarrow") from None
    try:
        rows = parquet.read_table(arrow.BufferReader(read_whole(path, MAX_FILE))).to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise RecordError(f"{path}: cannot be read as Parquet ({str(error).splitlines()[0]}).") from None
    runs_of_prompts = groupby(rows, key=lambda row: _text(row.get("prompt")))
    return [_group(number, prompt, list(members)) for number, (prompt, members) in enumerate(runs_of_prompts)]


def _group(number: int, prompt: str, rows: list[Json]) -> GroupRecord:
    answers = []
    for row in rows:
        parts = [v for k, v in row.items() if k not in NOT_REWARDS and isinstance(v, int | float)]
        reward = float(sum(parts))
        advantage = row.get("advantage")
        answers.append(
            AnswerRecord(
                tokens=[_text(row.get("completion"))],
                correct=reward > 0.5,
                reward=reward,
                advantage=[float(advantage)] if isinstance(advantage, int | float) else None,
            )
        )
    return GroupRecord(int(rows[0].get("step") or 0), number, prompt, answers, algorithm="grpo")
