"""Checkpoints from which a killed run resumes with identical results.

TRL and transformers save weights, optimizer, schedule and random states. dew adds, in `dew_state_RANK.pt`, the
generation that is being trained on, the position in it and in the prompts; and last of all a manifest:

    dew_manifest.json    {"schema": 1, "files": {"model.safetensors": [bytes, crc32], ...}}

A checkpoint of dew without its manifest was interrupted while it was written; one that differs from it was damaged
afterwards. CRC-32 detects accidents such as a flipped bit, not tampering.
"""

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
from transformers import TrainerState
from transformers.trainer_utils import rotate_checkpoints

from dew.engines.recorder import RESUME
from dew.errors import ConfigError, Problem, RecordError
from dew.files import read_whole, sync, write_atomically
from dew.run.folder import RunFolder
from dew.run.records import MAX_FILE, try_json

logger = logging.getLogger("dew")

STATE = "trainer_state.json"
"""Written last by transformers: a checkpoint of plain TRL that lacks it, or has half of it, is incomplete."""
OWN_STATE = "dew_state_{}.pt"
"""Written first by dew, one per process."""
MANIFEST = "dew_manifest.json"
INTERRUPTED = "the run was interrupted while writing it"
READERS = 4

# ── which checkpoint to resume from ─────────────────────────────────────────────────────────────────────────


def newest_complete(folder: str) -> str | None:
    """The newest complete checkpoint, or None.

    Moves newer ones out of the way: removes interrupted ones, and renames damaged ones to `damaged-checkpoint-120`.
    """
    found = [path for path in Path(folder).glob("checkpoint-*") if path.name.partition("-")[2].isdecimal()]
    for path in sorted(found, key=lambda path: int(path.name.partition("-")[2]), reverse=True):
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
    """Why a run cannot resume from a checkpoint; None if it can."""
    manifest = (checkpoint / MANIFEST).exists()
    if damage := find_damage(checkpoint) if manifest else INTERRUPTED * (checkpoint / OWN_STATE.format(0)).exists():
        return damage
    return None if isinstance(_read_json(checkpoint / STATE), dict) else f"{STATE} is missing or incomplete"


def _read_json(path: Path) -> Any:
    """None if it is not a file of JSON."""
    try:
        return try_json(read_whole(path, MAX_FILE))
    except (OSError, RecordError):
        return None


def check_complete(checkpoint: str) -> None:
    problem = find_problem(Path(checkpoint))
    if problem is not None:
        what = f"resume_from_checkpoint: {checkpoint} cannot be used: {problem}."
        raise ConfigError(Problem(what, remedy="Write True to resume from the newest complete checkpoint."))


def last_good(folder: str, accelerator: Any) -> str | None:
    """The newest complete checkpoint, verified by the main process for all processes."""
    found = [newest_complete(folder) if accelerator.is_main_process else None]
    return broadcast_object_list(found)[0]  # type: ignore[no-any-return]


def claim_folder(args: Any, accelerator: Any) -> str | None:
    """Refuse or clear the folder of an earlier run. `dew resume` runs a script again: then its checkpoint."""
    folder = args.output_dir
    (used,) = broadcast_object_list([RunFolder(folder).used()])
    again = os.environ.get(RESUME) == str(Path(folder).resolve())
    if used and again and (found := last_good(folder, accelerator)) is not None:
        return found
    if used and not again and not args.overwrite_output_dir:
        why = "A second one would be mixed into its metrics, records and checkpoints."
        remedy = "Choose another output_dir, train(resume_from_checkpoint=True), or set overwrite_output_dir=True."
        raise ConfigError(Problem(f"output_dir={folder!r} holds an earlier run.", why, remedy))
    if used and accelerator.is_main_process:
        RunFolder(folder).clear()
    accelerator.wait_for_everyone()
    return None


def finished(checkpoint: str, args: Any) -> TrainerState | None:
    """The state in a checkpoint of the last step; None if there are steps left."""
    state = TrainerState.load_from_json(str(Path(checkpoint) / STATE))
    if state.global_step < (args.max_steps if args.max_steps > 0 else state.max_steps):
        return None
    more_epochs = args.max_steps <= 0 and args.num_train_epochs > state.num_train_epochs
    return None if more_epochs else state


# ── manifest ────────────────────────────────────────────────────────────────────────────────────────────────


def write_manifest(folder: Path) -> None:
    """Sync every file to the disk, then list them all."""
    files = _files(folder)
    with ThreadPoolExecutor(READERS) as readers:
        checksums = list(readers.map(_checksum, files.values()))
        list(readers.map(sync, [*files.values(), *{path.parent for path in files.values()}]))
    entries = {name: (path.stat().st_size, found) for (name, path), found in zip(files.items(), checksums, strict=True)}
    write_atomically(folder / MANIFEST, json.dumps({"schema": 1, "files": entries}, indent=1).encode())
    sync(folder.parent)


def find_damage(folder: Path) -> str | None:
    """What differs from the manifest, in a few words; None where every byte is as it was written."""
    try:
        listed = _read_json(folder / MANIFEST)["files"]
        expected = {str(name): (int(size), int(checksum)) for name, (size, checksum) in listed.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} cannot be read"
    files = _files(folder)
    for name, (size, _) in expected.items():  # sizes first: they cost nothing
        if name not in files:
            return f"{name} is missing"
        if (found := files[name].stat().st_size) != size:
            return f"{name} has {found:,} bytes of {size:,}"
    with ThreadPoolExecutor(READERS) as readers:
        checksums = list(readers.map(lambda name: _checksum(files[name]), expected))
    for (name, (_, checksum)), found in zip(expected.items(), checksums, strict=True):
        if found != checksum:
            return f"{name} has changed since it was written"
    return None


def _files(folder: Path) -> dict[str, Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


@contextmanager
def sealed(trainer: Any, state: dict[str, Any]) -> Iterator[None]:
    """While transformers saves a checkpoint: dew's `state` before, the manifest after, then older ones are removed."""
    args, accelerator, run = trainer.args, trainer.accelerator, trainer._get_output_dir(trial=None)
    folder = Path(run) / f"checkpoint-{trainer.state.global_step}"
    if args.should_save:
        (folder / MANIFEST).unlink(missing_ok=True)  # if the step is saved again
    accelerator.wait_for_everyone()
    if not args.save_only_model:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / OWN_STATE.format(accelerator.process_index))
    limit, args.save_total_limit = args.save_total_limit, None
    try:
        yield
    finally:
        args.save_total_limit = limit
    accelerator.wait_for_everyone()
    if args.should_save:
        RunFolder(run).sync()
        write_manifest(folder)
        rotate_checkpoints(run, limit, trainer.state.best_model_checkpoint)  # by step: clocks may be adjusted


# ── dew's own state ─────────────────────────────────────────────────────────────────────────────────────────


def load_state(folder: str, rank: int, batches: str, device: Any) -> dict[str, Any] | None:
    """None for a checkpoint of plain TRL. The generation is moved to `device`, and `epochs` are those completed.

    A generation is saved in the micro-batches of each process: with other `batches` the run resumes without it.
    """
    own, first = (Path(folder) / OWN_STATE.format(i) for i in (rank, 0))
    path = own if own.exists() else first  # there may be more processes now
    if not path.exists():
        if (Path(folder) / MANIFEST).exists():
            logger.warning("%s has weights only (save_only_model): optimizer, schedule and prompts start anew.", folder)
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if (saved := state.get("batches", batches)) != batches:
        state |= {"generation": None, "step": 0}
        if rank == 0:
            logger.warning("%s: sampling a new generation, because batch sizes have changed: %s", folder, saved)
    state["generation"] = send_to_device(state["generation"], device)
    state["epochs"] = int(_read_json(path.with_name(STATE)).get("epoch") or 0)
    return state
