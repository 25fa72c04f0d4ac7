"""`dew train` and `dew resume` on TRL: print the plan, train, follow the run."""

import os
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.table import Table

from dew.cli.console import out, print_json, printable
from dew.cli.flags import Typed
from dew.cli.runs import RunView, live
from dew.engines.trl import launch
from dew.engines.trl.failures import disk_full
from dew.engines.trl.settings import Parsed, parse, setting_fields
from dew.errors import ConfigError, Problem
from dew.files import sweep
from dew.preflight.plan import plan
from dew.report import build
from dew.run.config import OWN_KEYS, Run, to_yaml
from dew.run.folder import RunFolder, claim, is_main_process, lock
from dew.run.permission import remember, remembered


def train(run: Run, typed: Typed, *, dry: bool, overwrite: bool, as_json: bool, untrusted: bool) -> None:
    launch.quiet()
    parsed = parse(run, typed, dry=dry, untrusted=untrusted)
    if dry:
        _print_plan(parsed, as_json)
        return
    folder = Path(parsed.args.output_dir)
    with lock(folder):
        if is_main_process:
            claim(folder, overwrite or parsed.args.overwrite_output_dir, delete=False)
            if untrusted:
                remember(parsed.run, typed, folder)
        _train(parsed, resume=False)


def resume(run: Run, folder: Path, changed: dict[str, Any], untrusted: bool) -> None:
    """Resume the run in this folder, with `changed` settings: its output_dir and perhaps max_steps."""
    launch.quiet()
    finished, max_steps = RunFolder(folder).finished(), changed.get("max_steps")
    done = max((m["step"] for m in RunFolder(folder).metrics()), default=0)
    if max_steps and max_steps <= done:
        raise ConfigError(Problem(f"{folder}: the run is at step {done} already.", remedy="Give a larger --max_steps."))
    if finished and max_steps and not any(folder.glob("checkpoint-*/trainer_state.json")):
        remedy = "Train again, with save_strategy: steps and the larger max_steps."
        raise ConfigError(Problem(f"{folder}: the run is finished and kept no checkpoint.", remedy=remedy))
    if finished and not max_steps:
        sweep(folder)
        page = folder / "report.html" if (folder / "report.html").exists() else build([folder])
        out.print(f"{folder} is finished.\nModel: {folder / 'model'}\nReport: {page}")
        return
    approved = dict.fromkeys(remembered(run, folder), "") if untrusted else {}
    parsed = parse(run, {**approved, **changed}, untrusted=untrusted)
    with lock(folder):
        _train(parsed, resume=True)


def _train(parsed: Parsed, *, resume: bool) -> None:
    args, folder = parsed.args, Path(parsed.args.output_dir)
    args.disable_tqdm = True
    out.print(f"{os.path.basename(str(args.algorithm))} on {parsed.data}: {args.batches}")
    trainer = launch.build_trainer(parsed)
    if is_main_process and not resume:  # with --overwrite: only now that the new run can start
        RunFolder(folder).clear()
    view = RunView(folder)
    try:
        with live(lambda: [view], every=max(int(args.logging_steps), 1)):
            status = launch.launch(parsed, trainer, resume=resume, say=out.print)
    except Exception as error:
        if full := disk_full(error, folder):
            raise full from None
        if any(folder.glob("checkpoint-*")):
            out.print(f"A checkpoint is kept. Resume with: dew resume {folder}")
        raise
    if not is_main_process:
        return
    if status == "stopped":
        saved = "with" if any(folder.glob("checkpoint-*")) else "without"
        out.print(f"Stopped at step {view.step} {saved} a checkpoint. Resume with: dew resume {folder}")
        return
    out.print(f"Done: {folder}\nModel: {folder / 'model'}\nReport (open in a browser): {build([folder])}")


def _print_plan(parsed: Parsed, as_json: bool) -> None:
    launch.check_outcome(parsed)
    found, settings = plan(parsed), vars(parsed.args.build_algorithm())
    if as_json:
        shown = {"algorithm_settings": settings, "batches": found["batches"], "plan": found}
        print_json({**parsed.run.to_dict(), **shown})
        return
    out.print(to_yaml(parsed.run))
    table = Table.grid(padding=(0, 2, 0, 0))
    for heading, text in found.items():
        table.add_row(heading, printable(text))
    out.print(table)


def print_keys() -> None:
    out.print(f"dew's own: {', '.join(OWN_KEYS)}\n")
    for field in sorted(setting_fields(), key=lambda field: field.name):
        text = shorten(str(field.metadata.get("help", "")), 300, placeholder=" ...")
        out.print(f"{field.name}  {text}")
