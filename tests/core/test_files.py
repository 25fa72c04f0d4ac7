"""Atomic writes. Links and pipes are tested in security/test_files.py."""

import os
from pathlib import Path

import pytest

from dew.files import write_atomically


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_file_is_replaced_whole_or_not_at_all(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_atomically(path, b"before")
    done = []

    def fail(*_: object, **__: object) -> None:
        done.append(path.read_bytes())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, moment, fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"after, and longer")
    monkeypatch.undo()
    assert done == [b"before"] and path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_names_reach_the_disk_after_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync of the file before the rename, of the folder after it: a power failure leaves the old or the new file."""
    order: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("rename"), replace(a, b)))
    write_atomically(tmp_path / "run.json", b"x")
    assert order[0].endswith(".tmp") and order[1:] == ["rename", str(tmp_path)]
