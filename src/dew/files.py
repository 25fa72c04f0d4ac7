"""Files that are whole and stay where they belong: written at once, read to an end, never through a stranger's link."""

import os
from pathlib import Path

from dew.errors import RecordError


def write_atomically(path: Path, content: bytes) -> None:
    """The whole of `content` or nothing: a reader never meets half a file, not even after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # made anew: never through a link that somebody left there
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Return when the disk holds the file; for a folder, when it holds the names in it."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # a folder where the system opens only files
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path) -> None:
    """Remove what `write_atomically` left behind where it was killed."""
    for path in [*folder.glob(".*.tmp"), *(folder / "records").glob(".*.tmp")]:
        path.unlink(missing_ok=True)


def read_whole(path: Path, most: int) -> bytes:
    """The bytes of a file that a stranger may have made: no pipe, no device, and not more than memory can take."""
    if not is_plain(path) or path.stat().st_size > most:
        raise RecordError(f"{path}: not a file to read whole (a pipe, a device, or more than {most:,} bytes).")
    return path.read_bytes()


def is_plain(path: Path) -> bool:
    """A file as files are: not a pipe or a device, whose reading might never end."""
    return path.is_file() or not path.exists()


def stay_inside(folder: Path) -> None:
    """Refuse a folder with links that lead out of it: a stranger's run would show, copy or change files of yours."""
    home = Path(folder).resolve()
    for place, folders, files in os.walk(home):
        for name in (*folders, *files):
            path = Path(place) / name
            if path.is_symlink() and not _ends_inside(path, home):
                raise RecordError(
                    f"{path}: a link that leads out of the run's folder. Nothing was read or written: put the file "
                    "itself there, or delete the link."
                )


def _ends_inside(path: Path, home: Path) -> bool:
    try:
        return path.resolve().is_relative_to(home)
    except (OSError, RuntimeError):  # a link to itself
        return False
