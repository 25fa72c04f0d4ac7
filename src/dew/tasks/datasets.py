"""Tasks: problems with a fixed split into training and held-out ones. Here are data sets, by name or path, and the
templates that turn problems into prompts. Generated tasks are in games.py.

    task("gsm8k")     task("dapo17k", template="qwen-boxed", without=["math500", "amc23"])
    task("problems.parquet", problem="question", answer="gold")     task("chats.jsonl", prompt="messages")

A named data set is looked up at `path`, then in the folder DEW_DATA (`gsm8k/train.jsonl.gz`), then on the hub.
"""

import os
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, Protocol

from dew.errors import ConfigError, Problem, unknown
from dew.tasks.rows import (
    SUFFIXES,
    Read,
    Row,
    columns,
    last_message,
    log,
    read_rows,
    row_key,
    split_files,
    without_overlap,
)

Split = Literal["train", "held_out"]
HELD_OUT_SHARE = 1 / 8


class Task(Protocol):
    """Problems with gold answers. The verifier of the same name (`dew.rewards.verifier`) scores answers."""

    @property
    def name(self) -> str: ...

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        """Return n distinct problems, which depend only on the arguments. A smaller n gives a prefix."""
        ...


def split_of(key: Hashable) -> Split:
    """Return the split of a problem by a hash of its key, independent of any seed."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return "held_out" if int.from_bytes(digest) < HELD_OUT_SHARE * 2**64 else "train"


def check_split(split: Split) -> Split:
    if split not in ("train", "held_out"):
        raise ConfigError(f"split={split!r}: a task has the splits 'train' and 'held_out'.")
    return split


# ── templates ───────────────────────────────────────────────────────────────────────────────────────────────
STEP_BY_STEP = r"Please reason step by step, and put your final answer within \boxed{}."
TEMPLATES = {
    "chat": f"{{problem}}\n{STEP_BY_STEP}",  # as a user message, for the model's own chat template
    # Qwen2.5-Math's prompt with its special tokens, for base models that may lack a chat template.
    "qwen-boxed": f"<|im_start|>system\n{STEP_BY_STEP}<|im_end|>\n"
    "<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n",
    # DeepSeek-R1-Zero's prompt, verbatim (arXiv 2501.12948, Table 1).
    "r1": "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
    "assistant first thinks about the reasoning process in the mind and then provides the user with the answer. The "
    "reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, "
    "i.e., <think> reasoning process here </think> <answer> answer here </answer>. User: {problem} Assistant:",
    "plain": "{problem}",
    # TinyZero's instruction for countdown (examples/data_preprocess/countdown.py), as a user message
    "tinyzero": "{problem} Show your work in <think> </think> tags. And return the final answer in <answer> </answer> "
    "tags, for example <answer> (1 + 2) / 3 </answer>.",
}
CHATS = ("chat", "tinyzero")
"""Templates for a user message, to which the model's own chat template is applied."""


def render(template: str, problem: str) -> Any:
    """Return the prompt: text, or a list of chat messages. `template`: a name, or a text that contains `{problem}`."""
    text = template if "{problem}" in template else TEMPLATES.get(template)
    if text is None:
        also = "Or write your own template, with {problem} in it."
        raise ConfigError(unknown(f"Unknown template {template!r}.", template, TEMPLATES, also))
    prompt = text.replace("{problem}", problem)
    return [{"role": "user", "content": prompt}] if template in CHATS else prompt


# ── rows of named data sets: from a local copy (problem, answer) or with the hub's own columns ──────────────
def _first(raw: Row, *names: str) -> Any:
    for name in names:
        if raw.get(name) is not None:
            return last_message(raw[name])
    raise ValueError(f"none of the columns {', '.join(names)}; there are {', '.join(raw) or 'none'}")


def _plain(raw: Row) -> Row:
    problem, answer = ("problem", "question", "Problem", "prompt"), ("answer", "Answer", "solution")
    return {"problem": _first(raw, *problem), "answer": _first(raw, *answer)}


def _gsm8k(raw: Row) -> Row:
    """On the hub, the answer is a worked solution that ends in `#### 72`."""
    row = _plain(raw)
    return {**row, "answer": str(row["answer"]).rpartition("####")[2].strip().replace(",", "")}


def _math(raw: Row) -> Row:
    """On the hub, there is only a worked solution, with the answer in its last box."""
    return _plain({**raw, "answer": raw.get("answer") or _last_box(str(_first(raw, "solution")))})


def _tinyzero(raw: Row) -> Row:
    numbers, target = [int(n) for n in _first(raw, "numbers", "nums")], _first(raw, "target", "answer")
    problem = raw.get("problem") or (
        f"Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic "
        "operations (+, -, *, /) and each number can only be used once."
    )
    return {"problem": problem, "answer": str(target), "numbers": numbers}


def _last_box(solution: str) -> str:
    start = max(solution.rfind(r"\boxed{"), solution.rfind(r"\fbox{"))
    if start < 0:
        raise ValueError("no \\boxed answer in the solution")
    depth = 0
    for brace in re.compile(r"[{}]").finditer(solution, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return solution[solution.index("{", start) + 1 : brace.start()]
    raise ValueError("the last box of the solution is not closed")


# ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Dataset:
    """A task with problems from a file, a folder or the hub: one of `PRESETS`, or built by `custom`."""

    name: str
    source: str | Path
    read: Read
    train: str | None = "train"
    held_out: str | None = "test"
    """Test split. If None or equal to `train`, an eighth of the training problems, selected by a hash, is held out."""
    tested_on: str | None = None
    """Another data set whose test problems are used instead. It is also in `without`."""
    config: str | None = None
    template: str | None = "chat"
    """Turns problems into prompts; None: the rows have ready-made prompts."""
    without: Sequence[str] = ()
    """Data sets or files whose test problems are removed from training."""
    built_in: bool = False
    """Whether the verifier of the same name scores the answers, which it does not for a file called math.jsonl."""

    @property
    def column(self) -> str:
        return "problem" if self.template else "prompt"

    def problems(self, split: Split) -> list[Row]:
        """Return the rows of a split, without applying `without` or the template."""
        if split == "held_out" and self.tested_on:
            return named(self.tested_on).problems("held_out")
        wanted = self.held_out if split == "held_out" and self.held_out else self.train
        if wanted is None:
            raise ConfigError(f"{self.name} is for evaluation only: it has no training problems.")
        rows = read_rows(self.source, self.read, split=wanted, config=self.config, column=self.column)
        if self.held_out not in (None, self.train):
            return rows
        kept = [row for row in rows if split_of(row_key(row, "problem") if self.template else row["prompt"]) == split]
        if not kept:
            what = f"{self.name}: too few problems ({len(rows)}) to hold out an eighth, selected by a hash."
            raise ConfigError(Problem(what, remedy="Add problems, or give a folder with a train and a test file."))
        return kept

    def rows(self, n: int, *, split: Split = "train", seed: int = 0) -> list[Row]:
        """Return n problems, or all if there are fewer, in an order that depends only on the seed."""
        rows = self.problems(check_split(split))
        if split == "train" and self.without:
            others = (named(x).problems("held_out") if x in PRESETS else read_rows(x, columns()) for x in self.without)
            rows, dropped = without_overlap(rows, *others)
            log.info("%s: %d problems of %s removed from training", self.name, dropped, ", ".join(self.without))

        def position(row: Row) -> bytes:  # a hash, so that adding or removing a row does not move the others
            return blake2b(f"{seed}:{row_key(row, self.column)}".encode(), digest_size=16).digest()

        rows = sorted(rows, key=position)[: max(0, n)]
        if self.template is None:
            return rows
        return [{"prompt": render(self.template, row["problem"]), **row} for row in rows]


def named(
    name: str, *, path: str | Path | None = None, template: str | None = None, held_out: str | None = None,
    without: Sequence[str] = (),
) -> Dataset:  # fmt: skip
    """Return one of `PRESETS`, optionally from a local `path` or with another template.

    `held_out="train"`: hold out an eighth of the training problems instead of the test split, to tune settings on.
    """
    preset, data = PRESETS[name], os.environ.get("DEW_DATA")
    folder = Path(data).expanduser() / name.removesuffix("-tinyzero") if data else None
    local = path or (folder if folder and folder.is_dir() else None)
    template = template or preset.template or "chat"
    render(template, "")  # raises if it is unknown
    changed = replace(preset, template=template, without=tuple(dict.fromkeys([*without, *preset.without])))
    if local is not None:
        one_file = Path(local).expanduser().is_file() and preset.train is not None and preset.tested_on is None
        changed = replace(changed, source=local, held_out=None if one_file else "test")
    if held_out is None:
        return changed
    if held_out != preset.train:
        remedy = "Write train to hold out an eighth of the training problems."
        remedy = remedy if preset.train else "Remove it: the data set has no training problems."
        raise ConfigError(Problem(f"{name}: held_out={held_out!r}.", remedy=remedy))
    return replace(changed, held_out=held_out, tested_on=None)


def custom(
    path: str, *, problem: str = "problem", answer: str = "answer", prompt: str | None = None,
    keep: Sequence[str] = (), train: str = "train", held_out: str | None = None, config: str | None = None,
    template: str | None = None, without: Sequence[str] = (),
) -> Dataset:  # fmt: skip
    """Return a task from a file, a folder or a hub data set. A column name may have dots: `extra.gold`.

    `template` (default: chat) turns the column `problem` into a prompt; `keep` names other columns that rewards need.
    Alternatively, `prompt` names a column of complete prompts (text or chat messages), and all columns are kept.
    `held_out`: the test split (default: "test" in a folder, else an eighth of the training problems).
    """
    if prompt and template:
        what = f"template={template!r} applies to `problem`, but prompt={prompt!r} needs none."
        raise ConfigError(Problem(what, remedy="Set one of the two."))
    folder = Path(path).expanduser()
    if held_out and os.path.isfile(folder):
        what = f"held_out={held_out!r}: {path} is one file, without splits."
        remedy = "Remove held_out to hold out an eighth of its problems, or give a folder with a file per split."
        raise ConfigError(Problem(what, remedy=remedy))
    if held_out is None and os.path.isdir(folder) and split_files(folder, "test"):
        held_out = "test"
    template = template or (None if prompt else "chat")
    render(template or "chat", "")  # raises if it is unknown
    name = Path(path).name
    name = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
    read = columns(problem, answer, keep, prompt)
    return Dataset(name, path, read, train=train, held_out=held_out, config=config, template=template, without=without)


_SETS = (
    Dataset("gsm8k", "openai/gsm8k", _gsm8k, config="main"),
    Dataset("math", "DigitalLearningGmbH/MATH-lighteval", _math),
    Dataset("math500", "HuggingFaceH4/MATH-500", _plain, train=None),
    Dataset("aime24", "HuggingFaceH4/aime_2024", _plain, train=None, held_out="train"),
    Dataset("aime25", "math-ai/aime25", _plain, train=None),
    Dataset("amc23", "math-ai/amc23", _plain, train=None),
    Dataset(
        "dapo17k", "open-r1/DAPO-Math-17k-Processed", _plain, config="all", tested_on="math500", without=("math500",)
    ),
    Dataset("countdown-tinyzero", "Jiayi-Pan/Countdown-Tasks-3to4", _tinyzero, held_out=None, template="r1"),
)
PRESETS = {preset.name: replace(preset, built_in=True) for preset in _SETS}
"""Named data sets as on the hub. Local copies have the splits `train` and `test`."""
