"""Collect what the quickstart's comparison gave over many seeds, for the last lines of `dew demo` and docs/results.md.

    dew demo                                                                        seed 0, the quickstart itself
    dew compare tiny/countdown6 --algorithms dapo,dew --seeds 16 --first-seed 1 --out runs/quickstart-seeds
                                                                                    16 further seeds; resumes
    python scripts/quickstart_evidence.py runs/demo runs/quickstart-seeds           write the file, print the tables
    python scripts/quickstart_evidence.py --study STUDY.json --rate 1e-4            add a study of `dew lab`
    python scripts/quickstart_evidence.py                                           print the tables

The file, recipes/tiny/countdown6.json, is a list of {name, what, runs: [{algorithm, seed, scores}]}. `what` begins the
line on the screen. An entry replaces an earlier one of the same name.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from dew.compare.comparison import Result

from dew.cli.console import signed
from dew.cli.runs import DEMO_RUNS
from dew.compare import compare_runs, read_result

FILE = Path(__file__).parents[1] / "recipes" / "tiny" / "countdown6.json"
SCORES = {"area": "accuracy, averaged over training", "pass@1": "pass@1 after", "pass@16": "pass@16 after"}
TASK = "countdown-6"
BASELINE, RULE = DEMO_RUNS


def from_comparison(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "compare.json").read_text())["runs"]
    runs = [r for r in found if r["algorithm"] in DEMO_RUNS]
    return entry("seeds", f"{len({r['seed'] for r in runs})} further pairs of runs", runs)


def from_demo(folder: Path) -> dict[str, Any]:
    results = [read_result(folder / name, name, 0) for name in DEMO_RUNS]
    runs = [{"algorithm": r.algorithm, "seed": 0, "scores": {s: r[s] for s in r.problems}} for r in results]
    return entry("quickstart", "The quickstart", runs)


def from_study(path: Path, rate: float) -> dict[str, Any]:
    """The runs of both algorithms, with their default settings and this learning rate, on the quickstart's task."""
    found = [r for r in json.loads(path.read_text())["runs"] if r["task"] == TASK and r["learning_rate"] == rate]
    runs = [{**r, "algorithm": r["arm"]} for r in found if r["arm"] in DEMO_RUNS]
    seeds = {r["seed"] for r in runs}
    return entry("lab", f"`dew lab`, {TASK}, numbers up to 13, {len(seeds)} seeds", runs)


def entry(name: str, what: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    kept = [
        {
            "algorithm": r["algorithm"],
            "seed": r["seed"],
            "scores": {s: r["scores"][s] for s in SCORES if s in r["scores"]},
        }
        for r in sorted(runs, key=lambda r: (r["seed"], r["algorithm"]))
    ]
    return {"name": name, "what": what, "runs": kept}


def tables(measured: list[dict[str, Any]]) -> str:
    """Means of both algorithms and paired differences, for docs/results.md."""
    lines = [
        "| measurement | score | dapo | dew | dew − dapo [95 % interval] | seeds ahead |",
        "|---|---|---|---|---|---|",
    ]
    for one in measured:
        runs = [Result(r["algorithm"], r["seed"], 0, {s: {"": x} for s, x in r["scores"].items()}) for r in one["runs"]]
        for found in compare_runs(runs, BASELINE).differences:
            of = [[r[found.score] for r in runs if r.algorithm == name] for name in DEMO_RUNS]
            interval = signed(found.difference) if len(found.seeds) > 1 else f"{found.difference.value:+.3f}"
            ahead = f"{sum(x > 0 for x in found.by_seed)} of {len(found.seeds)}"
            cells = [one["what"], SCORES[found.score], *map(spread, of), interval, ahead]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    return f"{mean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--study", type=Path)
    parser.add_argument("--rate", type=float, default=1e-4)
    arguments = parser.parse_args()
    measured = {one["name"]: one for one in (json.loads(FILE.read_text()) if FILE.exists() else [])}
    new = [
        from_comparison(folder) if (folder / "compare.json").exists() else from_demo(folder)
        for folder in arguments.folders
    ]
    if arguments.study:
        new.append(from_study(arguments.study, arguments.rate))
    measured.update({one["name"]: one for one in new})
    if new:
        FILE.write_text(json.dumps(list(measured.values()), indent=1) + "\n")
    print(tables(list(measured.values())))


if __name__ == "__main__":
    main()
