"""A run's problems as verl reads them: Parquet with chat messages, what judges the answer, and its gold columns.

prompt        messages; a prompt that is written out is one message, to which no template is added
data_source   the verifier's name: which of dew's verifiers judges the answer
reward_model  {style: rule, ground_truth: the gold answer}
extra_info    {index, split, and every column that the verifier reads}
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dew.config import Run
from dew.engines.problems import judge_of, training_rows
from dew.engines.verl.translate import Translation
from dew.errors import ConfigError
from dew.tasks import Row

UNUSED_VALIDATION = 16
"""verl wants validation rows even where it never validates; training problems stand in."""
HELD_OUT = 64
"""Held-out problems where a recipe evaluates and does not say how many."""

logger = logging.getLogger("dew")


@dataclass(frozen=True)
class Data:
    """Rows as verl reads them."""

    train: list[Row]
    validation: list[Row]
    too_long: int
    """Training problems left out because their prompt has more tokens than data.max_prompt_length."""


def data_of(run: Run, translation: Translation, tokenizer: Any) -> Data:
    """Everything that verl will read, checked for being enough."""
    source, rows = training_rows(run)
    judge = None if "reward.custom_reward_function.path" in run.verl else judge_of(run)
    name, columns = (judge.name, judge.columns) if judge is not None else (source.name, ())
    limit = int(translation["data.max_prompt_length"])
    prefix = special_prefix(tokenizer)
    short = [row for row in rows if prompt_length(tokenizer, row["prompt"], prefix) <= limit]
    if len(short) < len(rows):
        logger.warning(
            "%d problems are left out: their prompts have more than %d tokens.", len(rows) - len(short), limit
        )
    wanted = translation.batches.prompts
    if len(short) < wanted:
        raise ConfigError(
            f"{len(short)} problems are fewer than the {wanted} prompts of one step: verl would train on nothing. "
            f"Raise problems, or set data.train_batch_size to at most {max(1, len(short))}."
        )
    validates = translation["trainer.val_before_train"] or translation["trainer.test_freq"] > 0
    held_out = (
        source.rows(run.scores.problems if run.scores else HELD_OUT, split="held_out")
        if validates
        else short[:UNUSED_VALIDATION]
    )
    return Data(
        [verl_row(row, i, "train", name, columns, prefix) for i, row in enumerate(short)],
        [verl_row(row, i, "test", name, columns, prefix) for i, row in enumerate(held_out)],
        len(rows) - len(short),
    )


def verl_row(row: Row, index: int, split: str, judge: str, columns: Sequence[str], prefix: str = "") -> Row:
    missing = [column for column in columns if column not in row]
    if missing:
        raise ConfigError(f"verifier {judge!r} reads the column {missing[0]!r}, and the data have {', '.join(row)}.")
    read = columns or [name for name in row if name != "prompt"]
    return {
        "data_source": judge,
        "prompt": messages(row["prompt"], prefix),
        "reward_model": {"style": "rule", "ground_truth": str(row["answer"])},
        "extra_info": {"index": index, "split": split, **{name: row[name] for name in read}},
    }


def messages(prompt: Any, prefix: str = "") -> list[dict[str, str]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prefix + prompt}]
    return [{"role": str(m["role"]), "content": str(m["content"])} for m in prompt]


def special_prefix(tokenizer: Any) -> str:
    """What the tokenizer puts before a text (often <s>, or nothing); a chat template does not, so the data must."""
    return str(tokenizer.decode(tokenizer("")["input_ids"])) if tokenizer is not None else ""


def prompt_length(tokenizer: Any, prompt: Any, prefix: str) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prefix + prompt, add_special_tokens=False)["input_ids"])
    if tokenizer.chat_template is None:
        raise ConfigError(
            "The prompts are chat messages, and the model's tokenizer has no chat template. Take a model that was "
            "trained to chat, or another template: task_settings {template: qwen-boxed}."
        )
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def write(data: Data, folder: Path) -> None:
    """folder/data/train.parquet and val.parquet."""
    import pyarrow
    from pyarrow.parquet import write_table

    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", data.train), ("val", data.validation)):
        write_table(pyarrow.Table.from_pylist(rows), folder / "data" / f"{name}.parquet")


def load_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # the hub's many kinds of "not there"
        reason = str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(f"model_name_or_path: the tokenizer of {model!r} cannot be read ({reason}).") from None
