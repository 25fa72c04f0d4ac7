"""`dew train`, `dew resume` and `dew export`."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer

from dew.cli.app import app
from dew.cli.console import out
from dew.cli.flags import PASS_ON, Untrusted, check_settings, load_run
from dew.cli.models import no_model
from dew.errors import ConfigError, Problem
from dew.files import stay_inside
from dew.run.config import read_run, read_yaml
from dew.run.folder import RunFolder, make_folder


@app.command(context_settings=PASS_ON)
def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="A YAML file (any TRL GRPO config), or a recipe name.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print config, batch sizes, memory and time, then exit.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run in output_dir first.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List all settings, then exit.")] = False,
    untrusted: Untrusted = False,
    json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
) -> None:
    """Train a model. Further flags are settings: `--algorithm grpo --learning_rate 1e-5`; -o is `--output_dir`.

    `--engine verl` trains on a cluster; write verl's own keys as hydra does: `trainer.nnodes=8`.
    """
    if keys:
        from dew.cli import trl

        trl.print_keys()
        return
    if config is None:
        raise ConfigError(Problem("No config given.", remedy="Write `dew train FILE.yaml`; see `dew recipes`."))
    run, typed = load_run(config, context.args)
    check_settings(run, typed)
    if run.engine == "verl":
        from dew.cli.verl import train as start
    else:
        from dew.cli.trl import train as start
    start(run, typed, dry=dry_run, overwrite=overwrite, as_json=json, untrusted=untrusted)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The output_dir of a run that was stopped or killed.")],
    max_steps: Annotated[int | None, typer.Option("--max_steps", min=1, help="Train to this step (TRL only).")] = None,
    untrusted: Untrusted = False,
) -> None:
    """Resume a run from its last complete checkpoint. A larger --max_steps extends a finished run."""
    config, on_verl = folder / "config.yaml", (folder / "verl.yaml").is_file()
    from_python = not config.is_file() and not on_verl
    if from_python and not (folder / "run.json").is_file():
        raise ConfigError(Problem(f"{folder} is not the folder of a run.", remedy="Give the output_dir of a run."))
    stay_inside(folder)
    if max_steps and (from_python or on_verl):
        remedy = "Change it in the script." if from_python else f"Change it in {folder / 'verl.yaml'}, then resume."
        raise ConfigError(Problem(f"{folder}: --max_steps is for TRL runs that `dew train` started.", remedy=remedy))
    if from_python:
        _resume_script(folder, untrusted)
        return
    if on_verl:
        from dew.cli import verl

        verl.resume(folder, untrusted)
        return
    if "actor_rollout_ref" in read_yaml(config):
        advice = "Resume with the command that started it and trainer.resume_mode=auto."
        raise ConfigError(Problem(f"{folder}: this run was started with verl itself, not `dew train`.", remedy=advice))
    changed: dict[str, Any] = {"output_dir": str(folder), **({"max_steps": max_steps} if max_steps else {})}
    run = read_run(config, changed)
    from dew.cli import trl

    trl.resume(run, folder, changed, untrusted)


def _resume_script(folder: Path, untrusted: bool) -> None:
    """Run the Python script that started this run again; its trainer then resumes."""
    from dew.engines.recorder import RESUME

    facts = RunFolder(folder).run()
    if facts.get("status") == "done":
        out.print(f"{folder} is finished.\nModel: {RunFolder(folder).model() or 'none saved'}")
        return
    command, processes = facts.get("command"), (facts.get("machine") or {}).get("processes", 1)
    by_hand = "Resume it there: trainer.train(resume_from_checkpoint=True)."
    if not isinstance(command, list) or processes != 1 or untrusted:
        how = "a notebook" if not command else f"a script ({' '.join(map(str, command[1:]))})"
        many = f" on {processes} processes" * (processes != 1)
        raise ConfigError(Problem(f"{folder}: this run was started from {how}{many}.", remedy=by_hand))
    words = [str(word) for word in command]
    out.print(f"Running again: {' '.join(words)}")
    environment = {**os.environ, RESUME: str(folder.resolve())}
    try:
        code = subprocess.run(words, cwd=facts.get("cwd"), env=environment, check=False).returncode
    except OSError as error:
        raise ConfigError(Problem(f"{folder}: its script cannot be run ({error}).", remedy=by_hand)) from None
    raise typer.Exit(code)


NOT_MODEL = (
    "training_args.bin", "optimizer.*", "scheduler.pt", "scaler.pt", "rng_state*", "trainer_state.json", "dew_*",
    "run.json", "config.yaml", "scores.json", "answers-*.json", "*.jsonl", "report.*", ".*",
)  # fmt: skip
"""Files of a run or a checkpoint that are not part of the model."""


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    to: Annotated[Path, typer.Argument(help="A new or empty folder.")],
) -> None:
    """Export a run's final model, or its newest checkpoint.

    The folder loads with `from_pretrained`; LoRA weights are merged.
    """
    source = RunFolder(run).model()
    if source is None:
        raise ConfigError(no_model(run))
    stay_inside(source)
    make_folder(to)
    if any(to.iterdir()):
        raise ConfigError(Problem(f"{to} is not empty.", remedy="Choose a new folder."))
    from dew.cli.models import load_lora, load_model

    if (source / "adapter_config.json").is_file():
        from transformers import AutoTokenizer

        load_lora(source).save_pretrained(str(to))
        AutoTokenizer.from_pretrained(str(source), trust_remote_code=False).save_pretrained(str(to))
    else:
        for file in source.iterdir():
            if file.is_file() and not any(map(file.match, NOT_MODEL)):
                shutil.copy2(file, to)
    model, tokenizer = load_model(str(to))
    ids = tokenizer("1", return_tensors="pt").to(model.device)
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=8, do_sample=False)[0])
    out.print(f"{to}: loads and generates, e.g. {text!r}")
