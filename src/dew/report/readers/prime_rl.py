"""prime-rl's token exports: token_exports/step_N/rank_R.jsonl, one trained sequence per line, as token ids.

Sequences that share their prompt's ids form a group. Give a tokenizer to see words instead of ids.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dew.errors import ConfigError, RecordError
from dew.files import read_whole
from dew.records import MAX_FILE, AnswerRecord, GroupRecord, Json
from dew.report.run import Run, read_sample

SCHEMA = 1
COLUMNS = {
    "entropy": "entropy",
    "trainer_logprobs": "logp",
    "advantages": "advantage",
    "importance_ratio": "ratio",
}
"""prime-rl's columns and the signals they are here."""

Decode = Callable[[int], str]


def _step_folders(folder: Path) -> list[Path]:
    root = folder / "token_exports" if (folder / "token_exports").is_dir() else folder
    found = [p for p in root.glob("step_*") if p.name[5:].isdigit() and any(p.glob("rank_*.jsonl"))]
    return sorted(found, key=lambda p: int(p.name[5:]))


def is_prime_rl_run(folder: Path) -> bool:
    return bool(_step_folders(folder))


def read_prime_rl_run(folder: Path, tokens: int, tokenizer: str | None = None) -> Run:
    folders = _step_folders(folder)
    decode = _decoder(tokenizer)
    groups, sample, notices = read_sample(folders, tokens, lambda step_folder: _read_step(step_folder, decode))
    if tokenizer is None:
        notices.append("prime-rl exports token ids: give the model's tokenizer to see words instead of ⟨ids⟩.")
    return Run(
        name=folder.resolve().name,
        kind="prime-rl",
        facts={"engine": "prime-rl"},
        groups=groups,
        sample=sample,
        notices=notices,
    )


def _decoder(tokenizer: str | None) -> Decode:
    if tokenizer is None:
        return lambda token: f"⟨{token}⟩"
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"tokenizer {tokenizer!r} cannot be loaded ({reason}). Give a folder or a name.") from None
    return lambda token: str(loaded.decode([token]))


def _read_step(folder: Path, decode: Decode) -> list[GroupRecord]:
    by_prompt: dict[tuple[int, ...], list[AnswerRecord]] = {}
    for path in sorted(folder.glob("rank_*.jsonl")):
        for number, line in enumerate(read_whole(path, MAX_FILE).splitlines(), start=1):
            try:
                prompt, answer = _sequence(json.loads(line), decode)
            except RecordError as error:
                raise RecordError(f"{path}: {error}") from None
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise RecordError(
                    f"{path}: line {number} is not a prime-rl token export, or it is cut off. Copy it again."
                ) from None
            by_prompt.setdefault(prompt, []).append(answer)
    step = int(folder.name[5:])
    return [
        GroupRecord(step, number, "".join(map(decode, prompt)), answers)
        for number, (prompt, answers) in enumerate(by_prompt.items())
    ]


def _sequence(line: Json, decode: Decode) -> tuple[tuple[int, ...], AnswerRecord]:
    """A line's prompt ids and its answer: everything from the first trained token on."""
    if line["schema_version"] != SCHEMA:
        raise RecordError(
            f"written with token export schema {line['schema_version']!r}, and dew reads schema {SCHEMA}."
        )
    trained: list[bool] = line["loss_mask"]
    start = trained.index(True)
    reward = next((float(r) for r in line["rewards"][start:] if r is not None), 0.0)
    columns: Json = {ours: _floats(line.get(theirs), start) for theirs, ours in COLUMNS.items()}
    answer = AnswerRecord(
        tokens=[decode(token) for token in line["token_ids"][start:]],
        correct=reward > 0.5,
        reward=reward,
        live=trained[start:],
        **columns,
    )
    return tuple(line["token_ids"][:start]), answer


def _floats(values: Sequence[Any] | None, start: int) -> list[float] | None:
    if values is None or all(v is None for v in values[start:]):
        return None
    return [math.nan if v is None else float(v) for v in values[start:]]
