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
from dew.engines.verl.command import MAIN, check_against_verl, command, overrides, shown
from dew.engines.verl.contract import require_verl
from dew.engines.verl.translate import Translation, translate
from dew.engines.verl.words import with_words
from dew.errors import EngineError
from dew.files import write_atomically
from dew.preflight.verl import plan_of
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
    translation = translate(run)
    checked = check_against_verl(translation)
    if dry:
        _show(translation, checked, as_json)
        return
    require_verl()
    folder = Path(translation["algorithm.dew_run.folder"])
    problems = data.data_of(run, translation, data.load_tokenizer(translation["actor_rollout_ref.model.path"]))
    claim(folder, overwrite)
    write_atomically(folder / RECIPE, to_yaml(run, ["Go on with it: dew resume THIS_FOLDER"]).encode())
    data.write(problems, folder)
    out.print(f"{len(problems.train):,} problems to train on, {len(problems.validation):,} to validate with.")
    _go(translation, folder)


def resume(folder: Path, allowed: Collection[str] = ()) -> None:
    """verl's own resume mode, with the data that lie in the folder."""
    run = with_words(read_run(folder / RECIPE), (), ("output_dir", *allowed))
    if RunFolder(folder).run().get("status") == "done":
        out.print(
            f"{folder} is finished. Look at it: dew report {folder}\nThe model: {merge_command(folder)}", soft_wrap=True
        )
        return
    moved = Run(**{**vars(run), "settings": {**run.settings, "output_dir": str(folder)}})
    translation = translate(moved, resume=True)
    if not (folder / "checkpoints" / LATEST).is_file():
        raise EngineError(
            f"{folder}: verl has written no checkpoint yet. Start anew with a smaller save_steps: "
            f"dew train {folder / RECIPE} --output_dir NEW_FOLDER."
        )
    if not Path(translation["data.train_files"]).is_file():
        raise EngineError(f"{folder}: the data that the run was reading are gone ({translation['data.train_files']}).")
    require_verl()
    _go(translation, folder)


def remarks(translation: Translation, checked: bool) -> list[str]:
    """What there is to know besides the command."""
    lines = [f"{translation.algorithm}", f"{translation.batches}.", *plan_of(translation).lines()]
    lines += [f"Note: {note}." for note in translation.notes]
    if translation.unused:
        lines.append(f"Not needed on verl: {', '.join(translation.unused)}.")
    if not checked:
        lines.append("verl is not installed here: it judges keys of its own when the command runs.")
    return lines


def _show(translation: Translation, checked: bool, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "command": command(translation, "python"),
                "overrides": translation.overrides,
                "batches": {**vars(translation.batches), "text": str(translation.batches)},
                "algorithm_settings": vars(translation.algorithm),
                "plan": plan_of(translation).to_dict(),
                "unused": translation.unused,
                "notes": translation.notes,
                "checked_against_verl": checked,
            }
        )
        return
    for line in remarks(translation, checked):
        out.print(f"# {line}", markup=False, soft_wrap=True)
    out.print(shown(command(translation, "python")), markup=False, soft_wrap=True)


def _go(translation: Translation, folder: Path) -> None:
    script = f"#!/bin/sh\n# What dew starts, to read or to run by hand.\n{shown(command(translation))}\n"
    write_atomically(folder / SCRIPT, script.encode())
    out.print(f"{translation.algorithm.name} on verl: {translation.batches}", soft_wrap=True)
    out.print(f"The command: {folder / SCRIPT}", soft_wrap=True)
    child = _Training(folder.name, overrides(translation), folder, program=(*command(translation)[:1], *MAIN))
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
