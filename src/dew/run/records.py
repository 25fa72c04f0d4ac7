"""Token records: the answers of some groups, with the signals and the credit of every token.

The engines write them and the report reads them, without torch. docs/records.md documents every field. NaN and
infinities become null.
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, cast

from dew.errors import Problem, RecordError, ShapeError, unreadable
from dew.files import is_plain, write_atomically

SCHEMA = 1
MAX_TOKENS = 1_000_000
"""Maximum number of tokens in one step's file, about 12 MB on disk. Groups that do not fit are omitted, but the first
is always written."""
MAX_FILE = 1 << 30
"""Maximum size of a decompressed file in bytes."""
MAX_LISTS = 4_000_000
"""Maximum number of lists and objects in one file: even empty ones take memory."""

Json = dict[str, Any]


class SchemaError(RecordError):
    """The file was written with another schema. It is not damaged, but cannot be interpreted."""


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One answer. Every list has one entry per token; None: not recorded."""

    tokens: Sequence[str]
    correct: bool
    reward: float
    """The raw reward, before any shaping."""
    extra: float = 0.0
    """The sum of what was added to it: weighted other rewards, and penalties such as the one for overlong answers."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Unweighted value of each reward function, by name; NaN if it returned none. Empty in older records."""
    truncated: bool = False
    extracted: str | None = None
    """The final answer that the verifier extracted from the text."""
    verdict: str | None = None
    """correct, wrong, timeout or unparsable."""
    guided: bool = False
    """Whether the guide wrote it, not the trained policy."""
    live: Sequence[bool] | None = None
    """False on tokens that do not train (tool output); None: all tokens train."""
    entropy: Sequence[float] | None = None
    logp: Sequence[float] | None = None
    shaped: Sequence[float] | None = None
    """r̃, the shaped token reward."""
    advantage: Sequence[float] | None = None
    """The advantage used in training."""
    grpo: Sequence[float] | None = None
    """The advantage that GRPO would have given."""
    ratio: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not all(isinstance(token, str) for token in self.tokens):
            raise ShapeError(Problem("tokens: every entry must be a string.", remedy="Decode the ids first."))
        for name in PER_TOKEN:
            values = getattr(self, name)
            if values is not None and len(values) != len(self.tokens):
                what = f"{name} has {len(values)} entries for {len(self.tokens)} tokens."
                raise ShapeError(Problem(what, remedy="Give one number per token, without padding, or None."))

    @property
    def text(self) -> str:
        return "".join(self.tokens)


SIGNALS = ("entropy", "logp", "shaped", "advantage", "grpo", "ratio")
PER_TOKEN = ("live", *SIGNALS)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    step: int
    group: int
    prompt: str
    answers: Sequence[AnswerRecord]
    gold: str | None = None
    algorithm: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)


def _number(x: float) -> float | None:
    """Round to five significant digits; None if not finite."""
    return float(f"{x:.5g}") if math.isfinite(x) else None


def _answer_to_json(answer: AnswerRecord) -> Json:
    line: Json = {f.name: getattr(answer, f.name) for f in fields(answer)}
    line |= {"reward": _number(answer.reward), "extra": _number(answer.extra)}
    if rewards := line.pop("rewards"):
        line["rewards"] = {name: _number(value) for name, value in rewards.items()}
    for name in PER_TOKEN:
        values = line.pop(name)
        if values is not None:
            line[name] = [bool(v) for v in values] if name == "live" else [_number(v) for v in values]
    return line


def _float(x: Any) -> float:
    return math.nan if x is None else float(x)


def _text(x: Any) -> str | None:
    return x if x is None or isinstance(x, str) else json.dumps(x)


def _answer_from_json(line: Json) -> AnswerRecord:
    known = {f.name: line[f.name] for f in fields(AnswerRecord) if f.name in line}  # others may add fields
    if not isinstance(known.get("tokens"), list):
        raise TypeError("tokens is not a list of strings")
    for name in PER_TOKEN:
        if known.get(name) is not None:
            known[name] = [bool(v) if name == "live" else _float(v) for v in known[name]]
    known |= {name: bool(line.get(name)) for name in ("truncated", "guided")}
    known |= {name: _float(line.get(name, 0.0)) for name in ("reward", "extra")}
    known |= {name: _text(line.get(name)) for name in ("extracted", "verdict")}
    known["rewards"] = {str(name): _float(value) for name, value in (line.get("rewards") or {}).items()}
    known["correct"] = bool(known.get("correct", known["reward"] > 0.5))
    return AnswerRecord(**known)


def _group_from_json(line: Json, number: int) -> GroupRecord:
    return GroupRecord(
        step=int(line.get("step", 0)),
        group=int(line.get("group", number)),
        prompt=_text(line.get("prompt")) or "",
        answers=[_answer_from_json(answer) for answer in line["answers"]],
        gold=_text(line.get("gold")),
        algorithm=_text(line.get("algorithm")),
        settings=dict(line.get("settings") or {}),
    )


def check_schema(content: Json, where: str = "") -> None:
    if (schema := content.get("schema", SCHEMA)) != SCHEMA:
        what = f"{where}written with records schema {schema!r}; this dew reads schema {SCHEMA}."
        remedy = "Upgrade dew (pip install -U dew-rl) or use the version that wrote the run."
        raise SchemaError(Problem(what, remedy=remedy))


def finite(x: Any) -> Any:
    """Replace NaN and infinities by None, at any depth."""
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, dict):
        return {str(k): finite(v) for k, v in x.items()}
    return [finite(v) for v in x] if isinstance(x, list | tuple) else x


def to_json(x: Any, indent: int | None = None) -> bytes:
    # ASCII escapes preserve lone surrogates and line separators in answers.
    separators = (",", ":") if indent is None else None
    text = json.dumps(finite(x), indent=indent, separators=separators, allow_nan=False, default=str)
    return text.encode("ascii") + b"\n"


def record_path(folder: Path, step: int) -> Path:
    return Path(folder) / "records" / f"step-{step:08d}.jsonl.gz"


def write_records(folder: Path, step: int, groups: Iterable[GroupRecord], max_tokens: int = MAX_TOKENS) -> int:
    """Write a step's groups into the run folder, replacing an earlier file, and return how many were written.

    Groups that would exceed `max_tokens` are omitted as a whole, except the first. Without groups, no file is written.
    """
    lines: list[bytes] = []
    for group in groups:
        if group.size <= max_tokens or not lines:
            max_tokens -= group.size
            line = {"schema": SCHEMA, **{f.name: getattr(group, f.name) for f in fields(group)}}
            answers = [_answer_to_json(answer) for answer in group.answers]
            lines.append(to_json({**line, "settings": dict(group.settings), "answers": answers}))
    path = record_path(folder, step)
    if lines:
        write_atomically(path, gzip.compress(b"".join(lines), compresslevel=6, mtime=0))
    else:
        path.unlink(missing_ok=True)
    return len(lines)


def _lines(path: Path) -> list[bytes]:
    with path.open("rb") as probe:
        compressed = probe.read(2) == b"\x1f\x8b"
    with cast(IO[bytes], gzip.open(path) if compressed else path.open("rb")) as file:
        content = file.read(MAX_FILE + 1)
    if len(content) > MAX_FILE or content.count(b"[") + content.count(b"{") > MAX_LISTS:
        what = f"{path}: more than {MAX_FILE:,} bytes or {MAX_LISTS:,} lists once decompressed."
        raise RecordError(Problem(what, remedy="Split the file, if it is not damaged."))
    return content.split(b"\n")


def read_records(path: Path) -> list[GroupRecord]:
    """Return all groups of one .jsonl or .jsonl.gz file, in order."""
    return sample_records(path)[0]


def sample_records(path: Path, size: float = math.inf) -> tuple[list[GroupRecord], int]:
    """Return evenly spaced groups of a file, about `size` bytes of JSON in total, and how many groups it has."""
    path = Path(path)
    groups: list[GroupRecord] = []
    number = 0
    if not is_plain(path):
        raise RecordError(f"{path}: a folder, a pipe or a device, not a regular file.")
    if not path.exists():
        raise RecordError(f"{path}: no such file.")
    try:
        lines = [(number, line) for number, line in enumerate(_lines(path)) if line.strip()]
        every = math.ceil(max(1.0, sum(len(line) for _, line in lines) / max(1.0, size)))
        for number, line in lines[::every]:
            if not isinstance(content := json.loads(line), dict):
                raise TypeError("not a JSON object")
            check_schema(content, f"{path}: ")
            groups.append(_group_from_json(content, number))
    except RecordError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        what = unreadable(path, error).what
        raise RecordError(Problem(what, remedy="Copy it again, or delete it: it only has this step.")) from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).split("\n", maxsplit=1)[0]
        what = f"{path}: line {number + 1} is not a token record ({reason})."
        remedy = "Fix or delete this line. docs/records.md documents the format."
        raise RecordError(Problem(what, remedy=remedy)) from None
    if not groups:
        raise RecordError(f"{path} has no groups: the run stopped before recording one, or recording was off.")
    return groups, len(lines)


def try_json(text: bytes) -> Any:
    """Parse JSON, or return None if it is not valid. Integers beyond the range of a float become None."""
    try:
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 300 else None)
    except (ValueError, RecursionError):
        return None
