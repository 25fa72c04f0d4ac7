"""The tiny model that comes with the package, warm-started on both tasks (see data/tiny/README.md)."""

from pathlib import Path

TINY = Path(__file__).parent / "data" / "tiny"


def model_folder(name: str) -> str:
    """What to give to `from_pretrained`: the shipped folder for "tiny", and any other name as it is."""
    return str(TINY) if name == "tiny" else name
