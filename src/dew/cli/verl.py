"""`dew train --engine verl`: print the command, write what it reads, start it, follow it."""

from pathlib import Path

import typer

from dew.cli.console import out, print_json
from dew.cli.flags import Typed
from dew.cli.models import LATEST, merge_command
from dew.cli.runs import Child, live, run_all
from dew.engines.compat import require, trl_beside_verl
from dew.engines.verl import data
from dew.engines.verl.launch import MAIN, Launch, check_with_verl, command, hydra_words, prepare, shell_text
from dew.errors import EngineError, Problem
from dew.files import write_atomically
from dew.preflight.verl import plan_lines, plan_of
from dew.run.config import Run, read_run, to_yaml
from dew.run.folder import RunFolder, claim, lock
from dew.run.permission import check_permission, remember, remembered

CONFIG = "verl.yaml"
"""The run's config, as config.yaml is on TRL; verl's own configuration takes that name."""


def train(run: Run, typed: Typed, *, dry: bool, overwrite: bool, as_json: bool, untrusted: bool) -> None:
    check_permission(run, typed, untrusted)
    run.set_environment()
    launch = prepare(run)
    checked = check_with_verl(launch)
    if dry:
        _show(launch, checked, as_json)
        return
    _require_verl()
    folder = Path(launch["algorithm.dew_run.folder"])
    problems = data.prepare_data(launch, data.load_tokenizer(launch))
    with lock(folder):
        claim(folder, overwrite)
        if untrusted:
            remember(run, typed, folder)
        write_atomically(folder / CONFIG, to_yaml(run, ["Resume with: dew resume THIS_FOLDER"]).encode())
        data.write_data(problems, folder)
        out.print(f"{len(problems.train):,} problems to train on, {len(problems.validation):,} to validate with.")
        _train(launch, folder)


def resume(folder: Path, untrusted: bool = False) -> None:
    """Resume through verl's own resume mode, with the data in the run's folder."""
    run = read_run(folder / CONFIG, {"output_dir": str(folder)})
    check_permission(run, ("output_dir", *(remembered(run, folder) if untrusted else ())), untrusted)
    run.set_environment()
    launch = prepare(run, resume=True)
    facts, steps = RunFolder(folder).run(), launch["trainer.total_training_steps"] or 0
    if facts.get("status") == "done" and steps <= facts.get("steps", steps):
        out.print(f"{folder} is finished.\n{_next_steps(launch, folder)}")
        return
    if not (_checkpoints(launch) / LATEST).is_file():
        advice = f"Start again with a smaller save_steps: dew train {folder / CONFIG} --output_dir NEW_FOLDER."
        raise EngineError(Problem(f"{folder}: verl has written no checkpoint yet.", remedy=advice))
    _require_verl()
    with lock(folder):
        _train(launch, folder)


def _require_verl() -> None:
    require("verl")
    if problem := trl_beside_verl():
        raise EngineError(problem)


def _show(launch: Launch, checked: bool, as_json: bool) -> None:
    plan = plan_of(launch)
    if as_json:
        print_json(
            {
                "command": command(launch, "python"),
                "overrides": launch.overrides,
                "batches": {**vars(launch.batches), "text": str(launch.batches)},
                "algorithm_settings": vars(launch.algorithm),
                "plan": plan,
                "notes": launch.notes,
                "checked_against_verl": checked,
            }
        )
        return
    lines = [f"{launch.algorithm}", f"{launch.batches}.", *plan_lines(plan)]
    lines += [f"Note: {note}." for note in launch.notes]
    if not checked:
        lines.append("verl is not installed here: its own keys are checked when the command runs.")
    out.print("".join(f"# {line}\n" for line in lines) + shell_text(command(launch, "python")))


def _train(launch: Launch, folder: Path) -> None:
    script = f"#!/bin/sh\n# The command that dew runs.\n{shell_text(command(launch))}\n"
    write_atomically(folder / "train.sh", script.encode())
    child = Child(hydra_words(launch), folder, program=(*command(launch)[:1], *MAIN))
    where = f"Command: {folder / 'train.sh'}\nLog: {child.log}"
    notes = "".join(f"Note: {note}.\n" for note in launch.notes)
    out.print(f"{launch.algorithm.name} on verl: {launch.batches}\n{notes}{where}")
    RunFolder(folder).write_run({"status": "running", "engine": "verl"})
    status, advice = "failed", f"Resume from verl's last checkpoint with: dew resume {folder}"
    try:
        with live(lambda: [child.view]):
            run_all([child], 1, advice=advice)
        status = "done"
    except typer.Abort:
        status = "stopped"
        raise
    finally:
        RunFolder(folder).write_run({"status": status})
    out.print(f"Done: {folder}\n{_next_steps(launch, folder)}")


def _checkpoints(launch: Launch) -> Path:
    return Path(launch["trainer.default_local_dir"])


def _next_steps(launch: Launch, folder: Path) -> str:
    """How to see the report, and how to get a model."""
    return f"Report: dew report {folder}\nModel: {merge_command(_checkpoints(launch), folder)}"
