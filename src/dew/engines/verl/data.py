"""Write a run's problems in verl's format: Parquet with chat messages, the verifier's name and its gold columns.

`data_source` is the name of the verifier, and `extra_info` has every column that it reads. A prompt that is already
formatted becomes one message, with a chat template that adds nothing.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dew.compare.sampling import prompt_ids
from dew.engines.verl.config import plain, read
from dew.engines.verl.launch import Launch
from dew.errors import ConfigError, Problem, loading, unknown, unreadable
from dew.rewards import verifier
from dew.rewards.verifiers import VERIFIERS, has_verifier
from dew.run.config import held_out_rows, training_rows, verifier_of
from dew.run.models import check_model
from dew.tasks import Row

UNUSED_VALIDATION = 16
"""verl needs validation rows even if it never validates, so it gets this many training problems."""

logger = logging.getLogger("dew")


@dataclass(frozen=True)
class Data:
    train: list[Row]
    validation: list[Row]
    too_long: int
    """Training problems left out because their prompt has more tokens than data.max_prompt_length."""


def prepare_data(launch: Launch, tokenizer: Any) -> Data:
    run, limit = launch.run, int(launch["data.max_prompt_length"])
    source, rows = training_rows(run)
    judge = None if launch.own_reward else verifier_of(run)
    if judge is None and not launch.own_reward:
        what = f"The task {source.name} has no verifier."
        raise ConfigError(Problem(what, remedy="Write `verifier: math`, or name your own reward function."))
    name, columns = (judge.name, judge.columns) if judge is not None else (source.name, ())
    # What the tokenizer adds before a text (often <s>, or nothing). A chat template does not add it, so the data must.
    prefix = str(tokenizer.decode(tokenizer("")["input_ids"]))
    short = [row for row in rows if len(prompt_ids(tokenizer, row["prompt"])) <= limit]
    if dropped := len(rows) - len(short):
        logger.warning("Left out %d problems with prompts of more than %d tokens.", dropped, limit)
    launch.batches.check_rows(short, reduce="data.train_batch_size")
    held_out = short[:UNUSED_VALIDATION]
    if launch["trainer.val_before_train"] or (launch["trainer.test_freq"] or -1) > 0:
        held_out = held_out_rows(run, source)
    return Data(
        [verl_row(row, i, "train", name, columns, prefix) for i, row in enumerate(short)],
        [verl_row(row, i, "test", name, columns, prefix) for i, row in enumerate(held_out)],
        dropped,
    )


def verl_row(row: Row, index: int, split: str, verifier: str, columns: Sequence[str], prefix: str = "") -> Row:
    if missing := [column for column in columns if column not in row]:
        raise ConfigError(f"verifier {verifier!r} reads the column {missing[0]!r}; the data has {', '.join(row)}.")
    prompt, gold = row["prompt"], columns or [name for name in row if name != "prompt"]
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prefix + prompt}]
    elif all(isinstance(m["content"], str) for m in prompt):
        messages = [{"role": str(m["role"]), "content": m["content"]} for m in prompt]
    else:
        what = f"A message's content is not text in the prompt {prompt!r:.120}."
        raise ConfigError(Problem(what, remedy="Give each message's content as one text."))
    return {
        "data_source": verifier,
        "prompt": messages,
        "reward_model": {"style": "rule", "ground_truth": str(row["answer"])},
        "extra_info": {"index": index, "split": split, **{name: row[name] for name in gold}},
    }


def write_data(data: Data, folder: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    (folder / "data").mkdir(parents=True, exist_ok=True)
    try:
        for name, rows in (("train", data.train), ("val", data.validation)):
            write_table(pyarrow.Table.from_pylist(rows), folder / "data" / f"{name}.parquet")
    except pyarrow.ArrowException as error:
        what = f"The problems cannot be written to Parquet, which verl reads: {error}."
        raise ConfigError(Problem(what, remedy="Give each column of the data values of one type.")) from None


def load_tokenizer(launch: Launch) -> Any:
    from transformers import AutoTokenizer

    model = launch["actor_rollout_ref.model.path"]
    trusted = bool(launch["actor_rollout_ref.model.trust_remote_code"])
    check_model(model, model)
    with loading("model_name_or_path", model):
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trusted)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> dict[str, Any]:
    """Score an answer with the verifier named `data_source`. `score` is the reward; `acc` is raw correctness, which
    filters groups and separates O⁺ from O⁻."""
    row = {"answer": ground_truth, **(extra_info or {})}
    [verdict] = verifier(str(data_source)).verdicts([solution_str], [row])
    found = {"verdict": verdict.status, "extracted": verdict.extracted or ""}
    return {"score": verdict.reward, "acc": float(verdict.correct), **found}


def check_sources(config: Any) -> None:
    """Raise an error if a file for `compute_score` has a `data_source` without a verifier: its answers would fail."""
    if read(config, "reward.custom_reward_function.path") != f"pkg://{__name__}":
        return
    from pyarrow.parquet import ParquetFile

    given = [plain(read(config, f"data.{name}_files", [])) for name in ("train", "val")]
    files = [Path(x) for one in given for x in ([one] if isinstance(one, str) else one)]
    for file in [file for file in files if file.suffix == ".parquet" and file.is_file()]:
        try:
            table = ParquetFile(file)
            known = "data_source" in table.schema_arrow.names
            names = table.read(["data_source"])["data_source"].unique().to_pylist() if known else []
        except (OSError, ValueError) as error:
            raise ConfigError(unreadable(file, error)) from error
        for name in names:
            if not has_verifier(name):
                what, word = f"{file}: data_source={name!r} names no verifier.", str(name).rpartition("/")[2]
                raise ConfigError(unknown(what, word, VERIFIERS))
