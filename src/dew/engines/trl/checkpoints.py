"""Checkpoints from which a killed run resumes with identical results.

TRL and transformers save weights, optimizer, schedule and random states. dew adds the current generation, the position
in it and in the prompts (`dew_state_RANK.pt`) and, last, a manifest with the size and CRC-32 of every file. A
checkpoint of dew without a manifest is incomplete: the run was interrupted while writing it.
"""

import errno
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, send_to_device
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState
from transformers.trainer_utils import rotate_checkpoints

from dew.algorithms import Algorithm, source_digest
from dew.decoding import replaced
from dew.errors import ConfigError, DewError, EngineError, Problem, RecordError, quoted
from dew.files import read_whole, sync, write_atomically
from dew.run.folder import MODEL_FILES, STATE, RunFolder
from dew.run.records import try_json

logger = logging.getLogger("dew")

OWN_STATE = "dew_state_{}.pt"
MANIFEST = "dew_manifest.json"
INTERRUPTED = "the run was interrupted while writing it"
READERS = 4


def newest_complete(folder: str) -> str | None:
    """Return the newest complete checkpoint. Newer ones are deleted if incomplete, or renamed to `damaged-...`."""
    for path in RunFolder(folder).checkpoints().values():
        problem = find_problem(path)
        if problem is None:
            return str(path)
        if problem == INTERRUPTED:
            logger.warning("Removing %s: %s.", path, problem)
            shutil.rmtree(path, ignore_errors=True)
        else:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            logger.warning("%s is damaged: %s. Renamed it to %s.", path, problem, aside.name)
    return None


def find_problem(checkpoint: Path) -> str | None:
    """Return why a run cannot resume from this checkpoint, or None if it can."""
    manifest = (checkpoint / MANIFEST).exists()
    if damage := find_damage(checkpoint) if manifest else INTERRUPTED * (checkpoint / OWN_STATE.format(0)).exists():
        return damage
    return None if isinstance(_read_json(checkpoint / STATE), dict) else f"{STATE} is missing or incomplete"


def _read_json(path: Path) -> Any:
    """Return the content of a JSON file, or None if there is no such file or it is not valid JSON."""
    try:
        return try_json(read_whole(path))
    except (OSError, RecordError):
        return None


def last_good(folder: str, accelerator: Any) -> str | None:
    found = [newest_complete(folder) if accelerator.is_main_process else None]
    return broadcast_object_list(found)[0]  # type: ignore[no-any-return]


def claim_folder(args: Any, accelerator: Any) -> None:
    """Raise an error if output_dir holds an earlier run, or clear it if `overwrite_output_dir` is set."""
    folder = args.output_dir
    (used,) = broadcast_object_list([RunFolder(folder).used()])
    if used and not args.overwrite_output_dir:
        remedy = "Choose another output_dir, train(resume_from_checkpoint=True), or set overwrite_output_dir=True."
        raise ConfigError(Problem(f"output_dir={folder!r} holds an earlier run.", remedy=remedy))
    if used and accelerator.is_main_process:
        RunFolder(folder).clear()
    accelerator.wait_for_everyone()


def check_checkpoint(checkpoint: str, cleared: str | None = None) -> None:
    """Raise an error if this is not a checkpoint, or if it is in a folder that will be `cleared`."""
    if not (Path(checkpoint) / STATE).exists():
        what = f"resume_from_checkpoint={checkpoint!r} is not a checkpoint."
        raise ConfigError(Problem(what, f"It has no {STATE}.", "Give a folder such as RUN/checkpoint-100."))
    if cleared and Path(cleared).resolve() in Path(checkpoint).resolve().parents:
        what = f"resume_from_checkpoint={checkpoint!r} is in output_dir, which a new run clears."
        remedy = f"Resume the run (dew resume {quoted(cleared)}), or choose another output_dir."
        raise ConfigError(Problem(what, remedy=remedy))


def finished(checkpoint: str, args: Any, adapter: bool) -> TrainerState | None:
    """Return the state in this checkpoint if its run is finished, or None if there are steps left. `adapter`: whether
    the model to resume has one."""
    saved = [name for name in MODEL_FILES if (Path(checkpoint) / name).exists()]
    check_checkpoint(checkpoint)
    if saved and (MODEL_FILES[1] in saved) != adapter:  # FSDP and DeepSpeed may save neither
        what = f"{checkpoint} is of a run {'without' if adapter else 'with'} an adapter."
        raise ConfigError(Problem(what, remedy="Resume with the peft_config (use_peft) of that run."))
    state = TrainerState.load_from_json(str(Path(checkpoint) / STATE))
    if state.global_step < (args.max_steps if args.max_steps > 0 else state.max_steps):
        return None
    more_epochs = args.max_steps <= 0 and args.num_train_epochs > state.num_train_epochs
    return None if more_epochs else state


def write_manifest(folder: Path) -> None:
    """Sync every file to disk, then write the manifest."""
    files = _checksums(folder)
    with ThreadPoolExecutor(READERS) as readers:
        list(readers.map(sync, {path for name in files for path in (folder / name, (folder / name).parent)}))
    write_atomically(folder / MANIFEST, json.dumps({"schema": 1, "files": files}, indent=1).encode())
    sync(folder.parent)


def find_damage(folder: Path) -> str | None:
    """Return what differs from the manifest, or None if every file is unchanged."""
    try:
        expected = dict(_read_json(folder / MANIFEST)["files"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} cannot be read"
    found = _checksums(folder)
    changed = [name for name in expected if found.get(name) != expected[name]]
    return f"{changed[0]} is missing or has changed since it was written" if changed else None


def _checksums(folder: Path) -> dict[str, list[int]]:
    """Return {file name: [size in bytes, CRC-32]}."""

    def checksum(path: Path) -> list[int]:
        value = 0
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                value = zlib.crc32(chunk, value)
        return [path.stat().st_size, value]

    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    names = [path.relative_to(folder).as_posix() for path in paths]
    with ThreadPoolExecutor(READERS) as readers:
        return dict(zip(names, readers.map(checksum, paths), strict=True))


@contextmanager
def sealed(trainer: Any, state: dict[str, Any]) -> Iterator[None]:
    """Wrap the saving of a checkpoint: write dew's `state` before it, then the manifest, and remove old checkpoints."""
    args, accelerator, run = trainer.args, trainer.accelerator, trainer._get_output_dir(trial=None)
    folder = Path(run) / f"checkpoint-{trainer.state.global_step}"
    if args.should_save:
        (folder / MANIFEST).unlink(missing_ok=True)  # if the step is saved again
    accelerator.wait_for_everyone()
    if not args.save_only_model:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / OWN_STATE.format(accelerator.process_index))
    with replaced([(args, "save_total_limit", None)]):
        yield
    accelerator.wait_for_everyone()
    if args.should_save:
        RunFolder(run).sync()
        write_manifest(folder)
        # By step, because clocks may change.
        rotate_checkpoints(run, args.save_total_limit, trainer.state.best_model_checkpoint)


def described(algorithm: Algorithm) -> str:
    """Its label and, of a rule in a user's file, which may be edited before the run resumes, a digest of the code."""
    return algorithm.label + (f", code {source_digest(type(algorithm))}" if algorithm.written else "")


def load_state(folder: str, rank: int, batches: str, algorithm: str, device: Any) -> dict[str, Any] | None:
    """Return dew's state, or None if TRL wrote the checkpoint. Its generation is dropped if `batches` differ, or
    `algorithm`, of which it has the advantages."""
    own, first = (Path(folder) / OWN_STATE.format(i) for i in (rank, 0))
    path = own if own.exists() else first  # there may be more processes now
    if not path.exists():
        if (Path(folder) / MANIFEST).exists():
            logger.warning("%s has weights only (save_only_model): optimizer, schedule and prompts are reset.", folder)
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    saved = state.get("batches", batches)
    if saved != batches or state.get("algorithm", algorithm) != algorithm:
        state |= {"generation": None, "step": 0}
    if saved != batches:
        logger.warning("%s: sampling a new generation, because batch sizes have changed. They were: %s.", folder, saved)
    state["generation"] = send_to_device(state["generation"], device)
    state["epochs"] = int(_read_json(path.with_name(STATE)).get("epoch") or 0)
    return state


def use_own_settings(trainer: Any, own: list[dict[str, Any]], state: dict[str, Any]) -> None:
    """Use the trainer's `own` settings of the optimizer, its learning rate and its number of steps: optimizer and
    schedule have just been loaded with those of the run that wrote the checkpoint and dew's `state` in it."""
    schedule, groups, label = trainer.lr_scheduler, trainer.optimizer.param_groups, trainer.described
    new, old = trainer.args.learning_rate, state.get("learning_rate")
    for group, settings in zip(groups, own, strict=True):
        if settings.keys() - group.keys():
            what = f"optim={trainer.args.optim.value}: the checkpoint has the state of another optimizer."
            remedy = "Write the optim of that run, or start a new run with the checkpoint as its model."
            raise ConfigError(Problem(what, remedy=remedy))
        group.update({name: settings[name] for name in ("weight_decay", "betas", "eps") if name in settings})
    if (before := state.get("algorithm", label)) != label:
        logger.warning("algorithm: %s from now on; the checkpoint was trained with %s.", label, before)
    scale = new / old if old else 1.0
    if scale != 1:
        logger.info("learning_rate: %g from now on; the checkpoint was trained with %g.", new, old)
        for group in groups:  # other schedules, such as reduce_lr_on_plateau, go on from these
            group["lr"] *= scale
    if isinstance(schedule, LambdaLR):
        schedule.base_lrs = [rate * scale for rate in schedule.base_lrs]
        rates = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        schedule._last_lr = [rate * share(schedule.last_epoch) for rate, share in rates]
        for group, rate in zip(groups, schedule._last_lr, strict=True):
            group["lr"] = rate


FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


@contextmanager
def explain_full_disk(folder: Path | str) -> Iterator[None]:
    """Raise an error for the user if the disk is full. torch only reports a failed write, so check free space too."""
    try:
        yield
    except Exception as error:
        full = any(text in str(error) for text in FULL)
        if not full and isinstance(error, OSError | RuntimeError) and Path(folder).is_dir():
            full = shutil.disk_usage(folder).free < 1 << 20
        if isinstance(error, DewError) or not full:
            raise
        limits = "save_total_limit and records_every limit its size."
        remedy = f"Free some space, then run: dew resume {quoted(folder)}. {limits}"
        raise EngineError(Problem(f"{folder}: the disk is full, and the run stopped.", remedy=remedy)) from error
