"""Read prime-rl's token exports: token_exports/step_N/rank_R.jsonl, one trained sequence per line, as token ids."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dew.errors import ConfigError, Problem, RecordError, not_loaded
from dew.files import read_whole
from dew.run.records import MAX_FILE, AnswerRecord, GroupRecord, Json

SCHEMA = 1
NAMES = {"entropy": "entropy", "logp": "trainer_logprobs", "advantage": "advantages", "ratio": "importance_ratio"}
"""dew's name -> prime-rl's name of a signal."""


def exported_steps(folder: Path) -> list[Path]:
    root = folder / "token_exports" if (folder / "token_exports").is_dir() else folder
    found = [p for p in root.glob("step_*") if p.name[5:].isdigit() and any(p.glob("rank_*.jsonl"))]
    return sorted(found, key=lambda p: int(p.name[5:]))


def decoder(tokenizer: str | None) -> Callable[[int], str]:
    """Token id -> text; without a tokenizer, ⟨id⟩."""
    if tokenizer is None:
        return lambda token: f"⟨{token}⟩"
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(not_loaded("tokenizer", tokenizer, error)) from None
    return lambda token: str(loaded.decode([token]))


def read_step(folder: Path, decode: Callable[[int], str]) -> list[GroupRecord]:
    """Sequences with the same prompt form a group."""
    groups: dict[str, list[AnswerRecord]] = {}
    for path in sorted(folder.glob("rank_*.jsonl")):
        for number, line in enumerate(read_whole(path, MAX_FILE).splitlines(), start=1):
            try:
                prompt, answer = _answer(json.loads(line), decode)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                what = f"{path}: line {number} is not a token export of prime-rl (schema {SCHEMA}), or it is truncated."
                raise RecordError(Problem(what, remedy="Copy it again.")) from None
            groups.setdefault(prompt, []).append(answer)
    step = int(folder.name[5:])
    return [GroupRecord(step, number, prompt, answers) for number, (prompt, answers) in enumerate(groups.items())]


def _answer(line: Json, decode: Callable[[int], str]) -> tuple[str, AnswerRecord]:
    """The prompt, and the answer, which starts at the first trained token."""
    if line["schema_version"] != SCHEMA:
        raise ValueError
    trained: list[bool] = line["loss_mask"]
    start = trained.index(True)
    reward = next((float(r) for r in line["rewards"][start:] if r is not None), 0.0)
    signals: dict[str, Any] = {}
    for ours, theirs in NAMES.items():
        values = (line.get(theirs) or [])[start:]
        if any(v is not None for v in values):
            signals[ours] = [math.nan if v is None else float(v) for v in values]
    texts = [decode(token) for token in line["token_ids"]]
    answer = AnswerRecord(texts[start:], correct=reward > 0.5, reward=reward, live=trained[start:], **signals)
    return "".join(texts[:start]), answer
