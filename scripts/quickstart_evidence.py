"""Collect what the quickstart's comparison gave over many seeds, for the last lines of `dew demo` and docs/results.md.

    dew compare tiny/countdown6 --algorithms dapo,dew --seeds 16 --first-seed 1 --out runs/quickstart-seeds
                                                                                    16 seeds; resumes
    python scripts/quickstart_evidence.py runs/quickstart-seeds                     write the file, print the tables
    python scripts/quickstart_evidence.py STUDY --rate 1e-4                         add a study of `dew lab`
    python scripts/quickstart_evidence.py                                           print the tables

The file, recipes/tiny/countdown6.json, is a list of {name, what, runs: [{arm, seed, scores}]}. `what` begins the
line on the screen. Small policies and a language model are entries of their own, in the order of ENTRIES.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from dew.cli.demo import BASELINE, DEMO_RUNS
from dew.compare import Result, compare_runs, read_result
from dew.compare.grid import runs_inside
from dew.compare.verdicts import markdown_table, signed, spread
from dew.run.folder import RunFolder

FILE = Path(__file__).parents[1] / "recipes" / "tiny" / "countdown6.json"
SCORES = {"area": "accuracy, averaged over training", "pass@1": "pass@1 after", "pass@16": "pass@16 after"}
TASK = "countdown-6"
ENTRIES = "seeds", "lab", "model"


def entry(name: str, what: str, results: list[Result]) -> dict[str, Any]:
    """The runs of both algorithms, with `{seeds}` in `what` replaced by their number."""
    kept = sorted((r for r in results if r.arm in DEMO_RUNS), key=lambda r: (r.seed, r.arm))
    runs = [{"arm": r.arm, "seed": r.seed, "scores": {s: r.scores[s] for s in SCORES if s in r.scores}} for r in kept]
    return {"name": name, "what": what.format(seeds=len({r.seed for r in kept})), "runs": runs}


def measured_in(folder: Path, rate: float) -> dict[str, Any]:
    """The runs of `dew compare`, or a study of `dew lab` at this learning rate."""
    results = [read_result(run) for run in runs_inside(folder)]
    if any(r.learning_rate for r in results):
        model = RunFolder(runs_inside(folder)[0]).run().get("warm_start", {}).get("model")
        found = [r for r in results if r.learning_rate == rate and (model or r.task == TASK)]
        if model:
            return entry("model", f"{Path(model).name} with LoRA, {found[0].task}, {{seeds}} seeds", found)
        return entry("lab", f"`dew lab`, {TASK}, numbers up to 13, {{seeds}} seeds", found)
    return entry("seeds", "The quickstart, {seeds} seeds", results)


def tables(measured: list[dict[str, Any]]) -> str:
    """Means of both algorithms and paired differences, for docs/results.md."""
    rows = []
    for one in measured:
        runs = [Result(**run) for run in one["runs"]]
        for d in compare_runs(runs, BASELINE):
            of = [spread([r.scores[d.score] for r in runs if r.arm == name]) for name in DEMO_RUNS]
            ahead = f"{sum(x > 0 for x in d.by_pair)} of {d.pairs}"
            rows.append([one["what"], SCORES[d.score], *of, signed(d), ahead])
    head = ["measurement", "score", *DEMO_RUNS, "dew − dapo [95% interval]", "seeds ahead"]
    return markdown_table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate of the runs of a study")
    arguments = parser.parse_args()
    measured = {one["name"]: one for one in (json.loads(FILE.read_text()) if FILE.exists() else [])}
    new = [measured_in(folder, arguments.rate) for folder in arguments.folders]
    measured.update({one["name"]: one for one in new})
    if new:
        FILE.write_text(json.dumps([measured[name] for name in ENTRIES if name in measured]) + "\n")
    print(tables(json.loads(FILE.read_text())))


if __name__ == "__main__":
    main()
