"""Whether a run's folder can be made and written to."""

import tempfile
from pathlib import Path

from dew.preflight.check import Check, failed, ok, warning
from dew.preflight.machine import existing


def check_folder(folder: Path) -> Check:
    there = existing(folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        says = f"output_dir={str(folder)!r}: nothing can be written in {there} ({error.strerror})."
        return failed("folder", says, "Name another output_dir, or ask for the right to write there.")
    if folder.is_dir() and any(folder.iterdir()):
        says = f"output_dir={str(folder)!r} is not empty, so `dew train` would refuse it."
        return warning("folder", says, f"dew resume {folder}, another output_dir, or --overwrite.")
    return ok("folder", f"output_dir={str(folder)!r} can be written.")
