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
import re
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dew.errors import ConfigError, Problem
from dew.files import sync, write_atomically

logger = logging.getLogger("dew")

STATE = "trainer_state.json"
"""Written last by transformers: a checkpoint of plain TRL that lacks it, or has half of it, is incomplete."""
OWN_STATE = "dew_state_{}.pt"
"""Written first by dew, one per process."""
MANIFEST = "dew_manifest.json"
INTERRUPTED = "the run was interrupted while writing it"
CHUNK = 1 << 20
READERS = 4

# ── which checkpoint to resume from ─────────────────────────────────────────────────────────────────────────


def newest_complete(folder: str) -> str | None:
    """The newest complete checkpoint, or None.

    Newer ones are out of the way afterwards: interrupted ones are removed, damaged ones are renamed to
    `damaged-checkpoint-120`.
    """
    checkpoints = {
        int(match[1]): path
        for path in Path(folder).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    for step in sorted(checkpoints, reverse=True):
        path = checkpoints[step]
        problem = find_problem(path)
        if problem is None:
            return str(path)
        if problem == INTERRUPTED:
            logger.warning("Removing %s: %s. Trying the checkpoint before it.", path, problem)
        else:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            logger.warning(
                "%s is damaged: %s. Renamed it to %s. Trying the checkpoint before it.", path, problem, aside.name
            )
        shutil.rmtree(path, ignore_errors=True)
    return None


def find_problem(checkpoint: Path) -> str | None:
    """Why a run cannot resume from a checkpoint; None if it can."""
    if (checkpoint / MANIFEST).exists():
        return find_damage(checkpoint)
    if (checkpoint / OWN_STATE.format(0)).exists():
        return INTERRUPTED
    try:
        return None if isinstance(json.loads((checkpoint / STATE).read_text()), dict) else f"{STATE} is incomplete"
    except (OSError, ValueError):
        return f"{STATE} is missing or incomplete"


def check_complete(checkpoint: str) -> None:
    problem = find_problem(Path(checkpoint))
    if problem is not None:
        what = f"resume_from_checkpoint: {checkpoint} cannot be used: {problem}."
        raise ConfigError(Problem(what, remedy="Write True to resume from the newest complete checkpoint."))


def no_checkpoint(folder: str) -> ConfigError:
    remedy = "Start without resume_from_checkpoint, and set save_steps so that there is a checkpoint before a crash."
    return ConfigError(Problem(f"resume: {folder} has no complete checkpoint.", remedy=remedy))


# ── manifest ────────────────────────────────────────────────────────────────────────────────────────────────


def write_manifest(folder: Path) -> None:
    """Sync every file to the disk, then list them all."""
    files = _files(folder)
    with ThreadPoolExecutor(READERS) as readers:
        entries = dict(zip(files, readers.map(_size_and_checksum, files.values()), strict=True))
        list(readers.map(sync, [*files.values(), *{path.parent for path in files.values()}]))
    write_atomically(folder / MANIFEST, json.dumps({"schema": 1, "files": entries}, indent=1).encode())
    sync(folder.parent)


def find_damage(folder: Path) -> str | None:
    """What differs from the manifest, in a few words; None where every byte is as it was written."""
    try:
        listed = json.loads((folder / MANIFEST).read_bytes())["files"]
        expected = {str(name): (int(size), int(checksum)) for name, (size, checksum) in listed.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} cannot be read"
    files = _files(folder)
    for name, (size, _) in expected.items():  # sizes first: they cost nothing
        if name not in files:
            return f"{name} is missing"
        if (found := files[name].stat().st_size) != size:
            return f"{name} has {found:,} bytes of {size:,}"
    with ThreadPoolExecutor(READERS) as readers:
        checksums = readers.map(lambda name: _size_and_checksum(files[name])[1], expected)
    for (name, (_, checksum)), found in zip(expected.items(), checksums, strict=True):
        if found != checksum:
            return f"{name} has changed since it was written"
    return None


def _files(folder: Path) -> dict[str, Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _size_and_checksum(path: Path) -> tuple[int, int]:
    size, checksum = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return size, checksum


# ── dew's own state ─────────────────────────────────────────────────────────────────────────────────────────


def save_state(folder: str, rank: int, state: dict[str, Any]) -> None:
    os.makedirs(folder, exist_ok=True)
    torch.save(state, os.path.join(folder, OWN_STATE.format(rank)))


def load_state(folder: str, rank: int, device: Any) -> dict[str, Any] | None:
    """None for a checkpoint of plain TRL. The generation is moved to `device`."""
    path = os.path.join(folder, OWN_STATE.format(rank))
    if not os.path.exists(path):
        return None
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["generation"] is not None:
        state["generation"] = [
            {name: x.to(device) if isinstance(x, Tensor) else x for name, x in part.items()}
            for part in state["generation"]
        ]
    return state


def epochs_done(folder: str) -> int:
    return int(json.loads((Path(folder) / STATE).read_text()).get("epoch") or 0)
