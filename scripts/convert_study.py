"""Convert a study.json of dew 0.2 into the run folders that `dew lab`, `dew report` and `load_study` read.

    python scripts/convert_study.py runs/old/study.json runs/new
    python scripts/convert_study.py runs/old/study.json new.tar.gz    the same as an archive, always the same bytes

Algorithms are not loaded: rules that no longer exist keep their names and settings.
"""

import gzip
import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from dew.compare.grid import Cell, open_grid
from dew.engines.lab.study import write_run

NAMES = {"flipped": "credit/flipped_share", "signal": "groups/mixed_share", "gradient": "grad_norm"}
NAMES |= {"length": "length/mean", "brier": "value/brier"}
NAMES |= {f"auc_{third}": f"value/auc_{third}" for third in ("first", "middle", "last")}
"""Curve -> the metric's name in docs/metrics.md."""


def convert(old: dict[str, Any], folder: Path) -> None:
    settings = old["settings"]
    runs = {
        Cell(run["arm"], run["seed"], run["task"], run["learning_rate"], run["source"], run["control"]): run
        for run in sorted(old["runs"], key=lambda run: old["arms"].index(run["arm"]))
    }
    open_grid(folder, list(runs), settings)
    for cell, run in runs.items():
        facts = {
            "settings": settings,
            "versions": {name: version for name, version in old["versions"].items() if name != "device"},
            "machine": {"gpu": old["versions"].get("device")},
            "algorithm": {"name": run["algorithm"], "settings": run["algorithm_settings"]},
            "warm_start": {"digest": run["warm_start"], **old["tasks"][run["task"]]},
        }
        facts["warm_start"].pop("warm_start", None)
        scores = {name.replace("@k", f"@{settings['eval_k']}"): value for name, value in run["scores"].items()}
        write_run(folder, cell, facts, list(_metrics(run, settings)), scores=scores)


def _metrics(run: dict[str, Any], settings: dict[str, Any]) -> Any:
    """The curves, whose values may be means over several generations, and the evaluations, by generation."""
    lines: dict[int, dict[str, Any]] = {}
    for name, curve in run["curves"].items():
        for i, value in enumerate(curve, start=1):
            lines.setdefault(i * settings["generations"] // len(curve), {})[NAMES.get(name, name)] = value
    for entry in run["evaluations"]:
        passes = {f"eval/pass@{settings['eval_k']}": entry["pass@k"], "eval/pass@1": entry["pass@1"]}
        lines.setdefault(entry["generation"], {}).update(passes)
    return ({"step": step, **lines[step]} for step in sorted(lines))


def archive(folder: Path) -> bytes:
    """A .tar.gz of the files in a folder, without times and owners."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size = path.stat().st_size
            tar.addfile(entry, io.BytesIO(path.read_bytes()))
    return gzip.compress(content.getvalue(), mtime=0)


def main() -> None:
    old, to = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    if not to.name.endswith(".tar.gz"):
        convert(old, to)
        return
    with tempfile.TemporaryDirectory() as folder:
        convert(old, Path(folder))
        to.write_bytes(archive(Path(folder)))


if __name__ == "__main__":
    main()
