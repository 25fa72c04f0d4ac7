"""`dew train` and `dew resume`."""

import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from dew.cli.app import app
from dew.cli.console import out, print_json
from dew.cli.watch import RunView, screen
from dew.config import Run, read_run
from dew.errors import ConfigError
from dew.files import stay_inside, sweep

Allow = Annotated[
    list[str] | None,
    typer.Option("--allow", help="Let the file do this: the name that the refusal shows. May be given several times."),
]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=PASS_ON)
def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="A YAML file: a recipe, or any GRPO file of TRL.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the resolved run and its arithmetic; stop.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Empty the run's folder first.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List every setting with its help, and stop.")] = False,
    allow: Allow = None,
    json: Annotated[bool, typer.Option("--json", help="With --dry-run: the resolved run as JSON.")] = False,
) -> None:
    """Train a model. Further flags are settings: `--algorithm grpo --learning_rate 1e-5`.

    On clusters: `--engine verl`, with verl's own keys as hydra has them: `trainer.nnodes=8`.
    """
    if keys:
        _list_keys()
        return
    if config is None:
        raise ConfigError("train: which configuration? `dew train FILE.yaml`; `dew recipes` lists some.")
    run, flags = with_own_flags(read_run(recipe_path(config)), context.args)
    if run.engine == "verl":
        from dew.cli import verl

        verl.train(run, flags, dry=dry_run, overwrite=overwrite, as_json=json, allowed=allow or ())
        return
    from dew.engines.trl import launch as trl

    trl.quiet()
    parsed = trl.parse(run, flags, dry=dry_run, allowed=allow or ())
    if dry_run:
        _show(parsed, json)
        return
    folder = Path(parsed.args.output_dir)
    claim(folder, overwrite)
    _go(parsed, resume=False)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that was stopped or killed.")], allow: Allow = None
) -> None:
    """Go on with a run from its last complete checkpoint."""
    from dew.cli import verl

    path = folder / "config.yaml"
    if not path.is_file() and not (folder / verl.RECIPE).is_file():
        raise ConfigError(f"{folder}: not a run's folder (no config.yaml). Give the output_dir of a run.")
    stay_inside(folder)
    if (folder / verl.RECIPE).is_file():
        verl.resume(folder, allow or ())
        return
    run = read_run(path)
    if "actor_rollout_ref" in run.settings:
        raise ConfigError(
            f"{folder}: verl was started here without dew train. Go on with the command that started it and "
            "trainer.resume_mode=auto."
        )
    from dew.engines.trl import launch as trl

    trl.quiet()
    if trl.finished(run, folder):
        sweep(folder)
        if not (folder / "report.html").exists():
            from dew.report import build

            build([folder])
        out.print(f"{folder} is finished: the model is in {folder / 'model'}. Look at it: dew report {folder}")
        return
    here = Run(**{**vars(run), "settings": {**run.settings, "output_dir": str(folder)}})
    _go(trl.parse(here, allowed=("output_dir", *(allow or ()))), resume=True)


def _go(parsed: Any, *, resume: bool) -> None:
    from dew.engines.trl import launch as trl
    from dew.engines.trl.failures import disk_full

    folder = Path(parsed.args.output_dir)
    parsed.args.disable_tqdm = True
    out.print(f"{parsed.args.algorithm} on {parsed.run.task or parsed.script.dataset_name}: {parsed.args.batches}")
    view = RunView(folder)
    callbacks = [] if out.is_terminal else [_lines(view)]
    try:
        with live(view):
            status = trl.launch(parsed, callbacks=callbacks, resume=resume, say=out.print)
    except Exception as error:
        full = disk_full(error, folder)
        if full is None:
            raise
        raise full from None
    if status == "stopped":
        out.print(f"Stopped at step {view.step} with a checkpoint. Go on with: dew resume {folder}")
        return
    from dew.report import build

    out.print(f"Done: {folder}\nThe model: {folder / 'model'}\nThe report, to open in a browser: {build([folder])}")


def live(view: RunView) -> AbstractContextManager[Any]:
    if not out.is_terminal:
        return nullcontext()
    from rich.live import Live

    return Live(get_renderable=lambda: screen([view]), console=out, refresh_per_second=2)


def _lines(view: RunView) -> Any:
    """Where nobody looks at a screen: one plain line per logging step."""
    from transformers import TrainerCallback

    class Lines(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            known = len(view.alarms)
            if view.poll() and state.global_step % max(int(args.logging_steps), 1) == 0:
                out.print(view.line(), soft_wrap=True)
            for alarm in view.alarms[known:]:
                out.print(f"⚠ step {alarm.get('step')}: {alarm.get('message')} {alarm.get('remedy')}", soft_wrap=True)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if view.poll():
                out.print(view.line(), soft_wrap=True)

    return Lines()


def recipe_path(config: Path) -> Path:
    """A file, or the name of a recipe that comes with dew."""
    from dew.cli.recipes import find

    return config if config.exists() else find(str(config)) or config


def with_own_flags(run: Run, flags: list[str]) -> tuple[Run, list[str]]:
    """Flags that are dew's own keys change the run; the others go to TRL's parser."""
    from dew.config import OWN_KEYS, make_run, parse_yaml

    own: dict[str, Any] = {}
    others: list[str] = []
    words = iter(flags)
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in OWN_KEYS:
            value = value or next(words, "")
            own.update(parse_yaml(f"{name}: {value}", f"--{name}"))
        else:
            others.append(word)
    return (make_run({**run.to_dict(), **own}, source=run.source), others) if own else (run, flags)


def claim(folder: Path, overwrite: bool) -> None:
    if folder.is_dir():
        sweep(folder)
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise ConfigError(
            f"output_dir: {folder} is not empty. Go on with it (dew resume {folder}), choose another folder, or add "
            "--overwrite."
        )
    if not any((folder / name).exists() for name in ("config.yaml", "verl.yaml")):
        raise ConfigError(f"output_dir: {folder} does not look like a run of dew's; it is not emptied. Choose another.")
    shutil.rmtree(folder)


def _show(parsed: Any, as_json: bool) -> None:
    from dew.config import to_yaml

    if as_json:
        resolved = {**parsed.run.to_dict(), "batches": str(parsed.args.batches)}
        print_json({**resolved, "algorithm_settings": vars(parsed.args.build_algorithm())})
        return
    out.print(to_yaml(parsed.run).rstrip())
    out.print(f"\n{parsed.args.build_algorithm()}")
    out.print(f"\n{parsed.args.batches}")


def _list_keys() -> None:
    from dataclasses import fields

    from trl import ModelConfig
    from trl.scripts.grpo import GRPOScriptArguments

    from dew.config import OWN_KEYS
    from dew.engines.trl import DewConfig

    out.print(f"dew's own: {', '.join(OWN_KEYS)}\n")
    for kind in (DewConfig, GRPOScriptArguments, ModelConfig):
        for f in sorted(fields(kind), key=lambda f: f.name):
            if f.init:
                out.print(f"{f.name}  {str(f.metadata.get('help', '')).splitlines()[0][:150]}")
