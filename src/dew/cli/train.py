"""`dew train` and `dew resume`, on either engine. Engines are imported only when they are used."""

import os
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dew.cli.app import app
from dew.cli.console import out, printable
from dew.cli.flags import PASS_ON, Untrusted, load_run
from dew.cli.runs import Child, RunView, followed, run_all
from dew.errors import ConfigError, EngineError, Problem, quoted
from dew.files import stay_inside, sweep, write_atomically
from dew.run.config import OWN_KEYS, Run, read_run, read_yaml, to_yaml
from dew.run.folder import VERLS_LATEST, RunFolder, claim, is_main_process, lock
from dew.run.permission import check_permission

if TYPE_CHECKING:
    from dew.algorithms import Algorithm
    from dew.engines.trl.launch import Parsed
    from dew.engines.verl.launch import Launch

VERL_CONFIG = "verl.yaml"
"""The run's config. On TRL this is config.yaml, but here that file is verl's own configuration."""


@app.command(context_settings=PASS_ON)
def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="A YAML file (any TRL GRPO config), or a recipe name.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the config and batch sizes, then exit.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run in output_dir first.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List all settings, then exit.")] = False,
    untrusted: Untrusted = False,
) -> None:
    """Train a model. Other flags are settings: `--algorithm grpo --learning_rate 1e-5`; -o is `--output_dir`.

    `--engine verl` trains on a cluster; give verl's own keys as Hydra overrides: `trainer.nnodes=8`.
    """
    if keys:
        _print_keys()
        return
    if config is None:
        raise ConfigError(Problem("No config given.", remedy="Write `dew train FILE.yaml`; see `dew recipes`."))
    run, typed = load_run(config, context.args)
    start = train_on_verl if run.engine == "verl" else train_on_trl
    start(run, typed, dry=dry_run, overwrite=overwrite, untrusted=untrusted)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The output_dir of a run that was stopped or killed.")],
    max_steps: Annotated[int | None, typer.Option("--max_steps", min=1, help="Train to this step.")] = None,
    untrusted: Untrusted = False,
) -> None:
    """Resume a run from its last complete checkpoint. A larger --max_steps extends a finished run."""
    stay_inside(folder)
    config, on_verl = folder / "config.yaml", (folder / VERL_CONFIG).is_file()
    if not on_verl and (not config.is_file() or "actor_rollout_ref" in read_yaml(config)):  # the second is verl's own
        if not folder.is_dir():
            remedy = "Give the folder of a run, such as runs/NAME."
            raise ConfigError(Problem(f"{folder}: no such folder.", remedy=remedy))
        remedy = "In Python: trainer.train(resume_from_checkpoint=True). With verl itself: trainer.resume_mode=auto."
        raise ConfigError(Problem(f"{folder} is not the output_dir of a run that `dew train` started.", remedy=remedy))
    changed: dict[str, Any] = {"output_dir": str(folder), **({"max_steps": max_steps} if max_steps else {})}
    (resume_on_verl if on_verl else resume_on_trl)(folder, changed, untrusted)


# ── TRL ─────────────────────────────────────────────────────────────────────────────────────────────────────
def train_on_trl(run: Run, typed: dict[str, str], *, dry: bool, overwrite: bool, untrusted: bool) -> None:
    from dew.engines.trl.checkpoints import check_checkpoint
    from dew.engines.trl.launch import parse, quiet

    quiet()
    parsed = parse(run, typed, dry=dry, untrusted=untrusted)
    if checkpoint := parsed.args.resume_from_checkpoint:
        check_checkpoint(str(checkpoint), cleared=parsed.args.output_dir)
    if dry:
        from dew.preflight.machine import plan

        out.print(to_yaml(parsed.run), soft_wrap=True)
        out.print("\n".join(f"{heading:12} {printable(text)}" for heading, text in plan(parsed).items()))
        return
    folder = Path(parsed.args.output_dir)
    with lock(folder):
        if is_main_process:
            claim(folder, overwrite or parsed.args.overwrite_output_dir)
        _train_on_trl(parsed, resume=False)


def resume_on_trl(folder: Path, changed: dict[str, Any], untrusted: bool) -> None:
    from dew.engines.trl.launch import parse, quiet
    from dew.report import build

    quiet()
    run, more = RunFolder(folder), changed.get("max_steps", 0)
    done = max((m["step"] for m in run.metrics()), default=0)
    if more and more <= done:
        raise ConfigError(Problem(f"{folder}: the run is already at step {done}.", remedy="Give a larger --max_steps."))
    if run.finished() and not more:
        sweep(folder)
        out.print(f"{folder} is finished.\nModel: {folder / 'model'}\nReport: {build([folder])}")
        return
    if run.finished() and not run.resumable():
        remedy = "Train again, with save_strategy: steps and the larger max_steps."
        raise ConfigError(Problem(f"{folder}: the run is finished and kept no checkpoint.", remedy=remedy))
    parsed = parse(read_run(folder / "config.yaml", changed), changed, untrusted=untrusted)
    with lock(folder):
        _train_on_trl(parsed, resume=True)


def _train_on_trl(parsed: "Parsed", *, resume: bool) -> None:
    from dew.engines.trl.checkpoints import explain_full_disk
    from dew.engines.trl.launch import build_trainer, launch
    from dew.report import build

    args, folder = parsed.args, Path(parsed.args.output_dir)
    args.disable_tqdm = True
    out.print(f"{os.path.basename(str(args.algorithm))} on {parsed.data}: {args.batches}")
    trainer = build_trainer(parsed)
    if is_main_process and not resume:  # with --overwrite, delete the old run only when the new one can start
        RunFolder(folder).clear()
    view = RunView(folder)
    try:
        with explain_full_disk(folder), followed([view], every=max(int(args.logging_steps), 1)):
            status = launch(parsed, trainer, resume=resume, say=out.print)
    except Exception:
        if any(folder.glob("checkpoint-*")):
            out.print(f"A checkpoint is kept. Resume with: dew resume {quoted(folder)}")
        raise
    if not is_main_process:
        return
    if status == "stopped":
        saved = "with" if any(folder.glob("checkpoint-*")) else "without"
        out.print(f"Stopped at step {view.step} {saved} a checkpoint. Resume with: dew resume {quoted(folder)}")
        return
    out.print(f"Done: {folder}\nModel: {folder / 'model'}\nReport (open in a browser): {build([folder])}")


def _print_keys() -> None:
    from dew.engines.trl.launch import setting_fields

    out.print(f"dew's own: {', '.join(OWN_KEYS)}\n")
    for field in sorted(setting_fields(), key=lambda field: field.name):
        text = shorten(str(field.metadata.get("help", "")), 300, placeholder=" ...")
        out.print(f"{field.name}  {text}")


# ── verl ────────────────────────────────────────────────────────────────────────────────────────────────────
def train_on_verl(run: Run, typed: dict[str, str], *, dry: bool, overwrite: bool, untrusted: bool) -> None:
    """Print the command (`dry`), or write its input files, start it and follow its progress."""
    from dew.engines.verl import data
    from dew.engines.verl.launch import check_with_verl, prepare

    check_permission(run, typed, untrusted)
    run.set_environment()
    launch = prepare(run)
    checked = check_with_verl(launch)
    if dry:
        _print_command(launch, checked)
        return
    _require_verl()
    folder = Path(launch["algorithm.dew_run.folder"])
    problems = data.prepare_data(launch, data.load_tokenizer(launch))
    with lock(folder):
        claim(folder, overwrite)
        RunFolder(folder).clear()
        write_atomically(folder / VERL_CONFIG, to_yaml(run, ["Resume with: dew resume THIS_FOLDER"]).encode())
        data.write_data(problems, folder)
        out.print(f"{len(problems.train):,} problems to train on, {len(problems.validation):,} to validate with.")
        _train_on_verl(launch, folder)


def resume_on_verl(folder: Path, changed: dict[str, Any], untrusted: bool) -> None:
    """Resume with verl's own resume mode and the data in the run's folder."""
    from dew.engines.verl.launch import prepare

    run = read_run(folder / VERL_CONFIG, changed)
    check_permission(run, changed, untrusted)
    run.set_environment()
    launch = prepare(run, resume=True)
    facts, steps = RunFolder(folder).run(), launch["trainer.total_training_steps"] or 0
    if facts.get("status") == "done" and steps <= facts.get("steps", steps):
        out.print(f"{folder} is finished.\n{_next_steps(launch, folder)}")
        return
    if not (Path(launch["trainer.default_local_dir"]) / VERLS_LATEST).is_file():
        again = f"dew train {quoted(folder / VERL_CONFIG)} --output_dir NEW_FOLDER"
        advice = f"Start again with a smaller save_steps: {again}"
        raise EngineError(Problem(f"{folder}: verl has written no checkpoint yet.", remedy=advice))
    _require_verl()
    with lock(folder):
        _train_on_verl(launch, folder)


def _require_verl() -> None:
    from dew.engines.compat import require, trl_beside_verl

    require("verl")
    if problem := trl_beside_verl():
        raise EngineError(problem)


def _print_command(launch: "Launch", checked: "Algorithm | None") -> None:
    from dew.engines.verl.launch import command, shell_text

    lines = [f"{checked or launch.algorithm}", f"{launch.batches}."]
    lines += [f"Note: {note}." for note in launch.notes]
    if not checked:
        lines.append("verl is not installed here: its own keys are checked when the command runs.")
    out.print("".join(f"# {line}\n" for line in lines) + shell_text(command(launch, "python")), soft_wrap=True)


def _train_on_verl(launch: "Launch", folder: Path) -> None:
    from dew.engines.verl.launch import command, shell_text

    script = f"#!/bin/sh\n# The command that dew runs.\n{shell_text(command(launch))}\n"
    write_atomically(folder / "train.sh", script.encode())
    child = Child(command(launch), folder)
    where = f"Command: {folder / 'train.sh'}\nLog: {child.log}"
    notes = "".join(f"Note: {note}.\n" for note in launch.notes)
    out.print(f"{launch.algorithm.name} on verl: {launch.batches}\n{notes}{where}")
    RunFolder(folder).write_run({"status": "running", "engine": "verl"})
    status, advice = "failed", f"If verl has saved a checkpoint, resume from it with: dew resume {quoted(folder)}"
    try:
        with followed([child.view]):
            run_all([child], 1, advice=advice)
        status = "done"
    except typer.Abort:
        status = "stopped"
        raise
    finally:
        RunFolder(folder).write_run({"status": status})
    out.print(f"Done: {folder}\n{_next_steps(launch, folder)}")


def _next_steps(launch: "Launch", folder: Path) -> str:
    merge = merge_command(Path(launch["trainer.default_local_dir"]), folder)
    return f"Report: dew report {quoted(folder)}\nModel: {merge}"


def merge_command(checkpoints: Path, folder: Path) -> str:
    latest = checkpoints / VERLS_LATEST
    step = latest.read_text().strip() if latest.is_file() else "N"
    shards = checkpoints / f"global_step_{step}" / "actor"
    places = f"--local_dir {quoted(shards)} --target_dir {quoted(folder / 'model')}"
    return f"python -m verl.model_merger merge --backend fsdp {places}"
