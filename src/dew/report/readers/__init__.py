"""Find out whose run a folder holds, and read it."""

from pathlib import Path

from dew.errors import ConfigError
from dew.files import stay_inside
from dew.records import read_records
from dew.report.readers.dew_run import is_dew_run, read_dew_run
from dew.report.readers.prime_rl import is_prime_rl_run, read_prime_rl_run
from dew.report.readers.trl_run import is_trl_run, read_trl_run
from dew.report.run import Run, read_sample


def read_run(folder: Path, tokens: int, tokenizer: str | None = None) -> Run:
    """The run in `folder`, with groups of at most `tokens` tokens."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder. Give the folder of a run, such as runs/NAME.")
    stay_inside(folder)
    if is_dew_run(folder):
        return read_dew_run(folder, tokens)
    if is_trl_run(folder):
        return read_trl_run(folder, tokens)
    if is_prime_rl_run(folder):
        return read_prime_rl_run(folder, tokens, tokenizer)
    raise ConfigError(
        f"{folder}: holds no run that can be read. Looked for run.json or metrics.jsonl (dew), trainer_state.json or "
        "completions/*.parquet (TRL), token_exports/step_*/rank_*.jsonl (prime-rl). For anything else, write "
        "the JSONL of docs/records.md and give it with --records."
    )


def read_records_file(path: Path, tokens: int) -> Run:
    """A lone file of token records, of whatever trainer."""
    groups = read_records(path)
    kept, sample, _ = read_sample([path], tokens, lambda _: groups)
    algorithms = sorted({group.algorithm for group in groups if group.algorithm})
    facts = {"algorithm": {"name": ", ".join(algorithms)}} if algorithms else {}
    return Run(name=path.name, kind="records", facts=facts, groups=kept, sample=sample)
