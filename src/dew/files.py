"""Write files atomically, and read files of untrusted origin safely: bounded, no pipes or devices, no links outside."""

import os
import shutil
import tempfile
from pathlib import Path

from dew.errors import Problem, RecordError


def write_atomically(path: Path, content: bytes) -> None:
    """Write all of `content` or nothing: readers never see a partial file, even after a power failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # must not exist: never write through an existing link
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def cache_folder(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dew" / name


def existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def try_writing(folder: Path) -> None:
    """Raise an OSError if no file can be created in the folder, or in its nearest parent that exists."""
    with tempfile.TemporaryFile(dir=existing(folder)):
        pass


def sync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # some systems cannot open a folder
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path) -> None:
    """Delete temporary files left behind by a `write_atomically` that was killed."""
    for path in [*folder.glob(".*.tmp"), *(folder / "records").glob(".*.tmp")]:
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Delete a file or a folder with its contents. A link is deleted, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def read_whole(path: Path, most: int = 1 << 30) -> bytes:
    """Read a regular file of at most `most` bytes."""
    if not is_plain(path):
        raise RecordError(f"{path} is a {'folder' if path.is_dir() else 'pipe or a device'}, not a regular file.")
    if path.stat().st_size > most:
        raise RecordError(f"{path}: more than {most:,} bytes.")
    return path.read_bytes()


def is_plain(path: Path) -> bool:
    """Whether this is a regular file (or does not exist): reading a pipe or a device may never end."""
    return path.is_file() or not path.exists()


def stay_inside(folder: Path) -> None:
    """Raise if the folder contains links to the outside: an untrusted run could expose or change other files."""
    home = Path(folder).resolve()
    for place, folders, files in os.walk(home):
        for name in (*folders, *files):
            path = Path(place) / name
            try:
                inside = not path.is_symlink() or path.resolve().is_relative_to(home)
            except (OSError, RuntimeError):  # a link to itself
                inside = False
            if not inside:
                what = f"{path}: a link that leads out of the run's folder. Nothing was read or written."
                raise RecordError(Problem(what, remedy="Replace the link by the file, or delete it."))
