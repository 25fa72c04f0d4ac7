"""`dew train --engine verl`: show the command, write what it reads, start it, watch it."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dew.cli.children import Child, Lock, run_all
from dew.cli.console import out, print_json
from dew.cli.train import claim, live
from dew.config import Run, read_run, to_yaml
from dew.engines.verl import data
from dew.engines.verl.compat import require_verl
from dew.engines.verl.launch import MAIN, Launch, check_with_verl, command, hydra_words, prepare, shell_text
from dew.engines.verl.plan import plan_of
from dew.engines.verl.words import with_words
from dew.errors import EngineError
from dew.files import write_atomically
from dew.records import RunFolder

RECIPE = "verl.yaml"
"""The recipe, as config.yaml is with TRL; the engine writes verl's whole configuration under that name."""
SCRIPT = "train.sh"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
LATEST = "latest_checkpointed_iteration.txt"
"""Where verl writes which checkpoint is whole."""


def train(
    run: Run, words: list[str], *, dry: bool, overwrite: bool, as_json: bool, allowed: Collection[str] = ()
) -> None:
    run = with_words(run, words, allowed)
    launch = prepare(run)
    checked = check_with_verl(launch)
    if dry:
        _show(launch, checked, as_json)
        return
    require_verl()
    folder = Path(launch["algorithm.dew_run.folder"])
    problems = data.prepare_data(launch, data.load_tokenizer(launch))
    claim(folder, overwrite)
    write_atomically(folder / RECIPE, to_yaml(run, ["Go on with it: dew resume THIS_FOLDER"]).encode())
    data.write_data(problems, folder)
    out.print(f"{len(problems.train):,} problems to train on, {len(problems.validation):,} to validate with.")
    _go(launch, folder)


def resume(folder: Path, allowed: Collection[str] = ()) -> None:
    """verl's own resume mode, with the data that lie in the folder."""
    run = with_words(read_run(folder / RECIPE), (), ("output_dir", *allowed))
    if RunFolder(folder).run().get("status") == "done":
        out.print(
            f"{folder} is finished. Look at it: dew report {folder}\nThe model: {merge_command(folder)}", soft_wrap=True
        )
        return
    moved = Run(**{**vars(run), "settings": {**run.settings, "output_dir": str(folder)}})
    launch = prepare(moved, resume=True)
    if not (folder / "checkpoints" / LATEST).is_file():
        raise EngineError(
            f"{folder}: verl has written no checkpoint yet. Start anew with a smaller save_steps: "
            f"dew train {folder / RECIPE} --output_dir NEW_FOLDER."
        )
    if not Path(launch["data.train_files"]).is_file():
        raise EngineError(f"{folder}: the data that the run was reading are gone ({launch['data.train_files']}).")
    require_verl()
    _go(launch, folder)


def remarks(launch: Launch, checked: bool) -> list[str]:
    """What there is to know besides the command."""
    lines = [f"{launch.algorithm}", f"{launch.batches}.", *plan_of(launch).lines()]
    lines += [f"Note: {note}." for note in launch.notes]
    if not checked:
        lines.append("verl is not installed here: it judges keys of its own when the command runs.")
    return lines


def _show(launch: Launch, checked: bool, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "command": command(launch, "python"),
                "overrides": launch.overrides,
                "batches": {**vars(launch.batches), "text": str(launch.batches)},
                "algorithm_settings": vars(launch.algorithm),
                "plan": plan_of(launch).to_dict(),
                "notes": launch.notes,
                "checked_against_verl": checked,
            }
        )
        return
    for line in remarks(launch, checked):
        out.print(f"# {line}", markup=False, soft_wrap=True)
    out.print(shell_text(command(launch, "python")), markup=False, soft_wrap=True)


def _go(launch: Launch, folder: Path) -> None:
    script = f"#!/bin/sh\n# What dew starts, to read or to run by hand.\n{shell_text(command(launch))}\n"
    write_atomically(folder / SCRIPT, script.encode())
    out.print(f"{launch.algorithm.name} on verl: {launch.batches}", soft_wrap=True)
    out.print(f"The command: {folder / SCRIPT}", soft_wrap=True)
    child = _Training(folder.name, hydra_words(launch), folder, program=(*command(launch)[:1], *MAIN))
    out.print(f"Its output: {child.log}", soft_wrap=True)
    if child.log.exists():  # of the part that went before
        child.log.replace(child.log.with_name(f"{folder.name}.before.log"))
    RunFolder(folder).write_run({"status": "running", "engine": "verl"})
    view = child.view
    view.poll()  # what an earlier part of the run has told is not told again

    def tick(_: Any) -> None:
        if view.poll() and not out.is_terminal:
            out.print(view.line(), soft_wrap=True)

    try:
        with Lock(folder) as held, live(view):
            run_all([child], 1, keep_open=[held], tick=tick)
    except KeyboardInterrupt:
        RunFolder(folder).write_run({"status": "stopped"})
        out.print(f"Stopped. Go on from verl's last checkpoint with: dew resume {folder}", soft_wrap=True)
        raise
    tick(None)
    out.print(f"Done: {folder}\nThe report: dew report {folder}\nThe model: {merge_command(folder)}", soft_wrap=True)


class _Training(Child):
    """verl's driver. It ends well or not; what it was doing stands in its log."""

    def check(self) -> None:
        assert self.process is not None
        ended_well = self.process.returncode == 0
        RunFolder(self.folder).write_run({"status": "done" if ended_well else "failed"})
        if not ended_well:
            super().check()

    def last_words(self) -> str:
        return COLOURS.sub("", super().last_words())


def merge_command(folder: Path) -> str:
    """verl keeps shards; this makes of the last ones a folder that any tool loads."""
    latest = folder / "checkpoints" / LATEST
    step = latest.read_text().strip() if latest.is_file() else "N"
    return (
        f"python -m verl.model_merger merge --backend fsdp --local_dir {folder}/checkpoints/global_step_{step}/actor "
        f"--target_dir {folder}/model"
    )
