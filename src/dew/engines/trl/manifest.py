"""The seal of a checkpoint: what files it has, their sizes and checksums, written last.

    dew_manifest.json    {"schema": 1, "files": {"model.safetensors": [bytes, crc32], ...}}

A checkpoint without its seal was cut off while it was written; one that differs from it was damaged afterwards. Neither
the size of a file nor a loader that succeeds shows a flipped bit. CRC-32 finds accidents, not forgers.
"""

import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dew.files import sync, write_atomically

SEAL = "dew_manifest.json"
PIECE = 1 << 20
READERS = 4


def seal(folder: Path) -> None:
    """Bring every file to the disk, and then say that they are all there."""
    files = _files(folder)
    with ThreadPoolExecutor(READERS) as readers:
        facts = dict(zip(files, readers.map(_facts, files.values()), strict=True))
        list(readers.map(sync, [*files.values(), *{path.parent for path in files.values()}]))
    write_atomically(folder / SEAL, json.dumps({"schema": 1, "files": facts}, indent=1).encode())
    sync(folder.parent)


def unseal(folder: Path) -> None:
    """Before a checkpoint is written anew."""
    (folder / SEAL).unlink(missing_ok=True)


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed checkpoint, in a few words; None where every byte is as it was written."""
    try:
        expected = json.loads((folder / SEAL).read_bytes())["files"]
        sealed = {str(name): (int(size), int(checksum)) for name, (size, checksum) in expected.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return f"{SEAL} cannot be read"
    files = _files(folder)
    for name, (size, _) in sealed.items():  # sizes first: they cost nothing
        if name not in files:
            return f"{name} is missing"
        if (found := files[name].stat().st_size) != size:
            return f"{name} has {found:,} bytes of {size:,}"
    with ThreadPoolExecutor(READERS) as readers:
        checksums = readers.map(lambda name: _facts(files[name])[1], sealed)
    for (name, (_, checksum)), found in zip(sealed.items(), checksums, strict=True):
        if found != checksum:
            return f"{name} has changed since it was written"
    return None


def _files(folder: Path) -> dict[str, Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SEAL)
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _facts(path: Path) -> tuple[int, int]:
    size, checksum = 0, 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return size, checksum
