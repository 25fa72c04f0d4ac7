"""Cost of dew's trainer modes on verl, next to verl's own GRPO. Needs verl with vLLM, and a GPU.

    python benchmarks/verl_modes.py OUT [--model FOLDER] [--recipe NAME] [--steps 20] [key=value ...]
    python benchmarks/verl_modes.py OUT --print          # the commands, without running them
    python benchmarks/verl_modes.py OUT --table          # the table alone, from what is in OUT

Each run of `RUNS` trains the same recipe for the same number of steps, one after the other. A run leaves OUT/NAME.jsonl
(verl's own metrics of every step), OUT/NAME.log and, in dew's modes, the run folder OUT/NAME. OUT/verl_modes.md
compares seconds per step, peak memory and entropy. Complete runs are not repeated. `key=value` are verl's own keys.

With --alternate all runs start at once and take turns, step by step, so that a machine that gets faster or slower does
not matter (verl_turns.py; verl_one_gpu.py lets them share a GPU).
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from math import expm1, inf, log
from pathlib import Path
from statistics import fmean, median

import verl_turns
import yaml

from dew.cli.flags import recipe_files
from dew.compare.statistics import t_test
from dew.engines.verl import data
from dew.engines.verl.config import EXTERNAL
from dew.engines.verl.launch import MAIN, Launch, check_with_verl, hydra_words, prepare
from dew.run.config import Run, flat, read_run

RUNS = {
    "verl_grpo": ("grpo", None),
    "grpo": ("grpo", "dew_sync"),
    "gtpo": ("gtpo", "dew_sync"),
    "dew": ("dew", "dew_sync"),
    "grpo_s": ("grpo_s", "dew_sync"),
    "gtpo_async": ("gtpo", "dew_colocate_async"),
    "verl_grpo_again": ("grpo", None),
}
"""Name -> algorithm and trainer mode; None is verl's own trainer, without dew. The last run shows by how much two equal
runs differ."""
BASELINE = "verl_grpo"
WARM_UP = 2
"""Steps left out of the medians: the first ones compile kernels and capture graphs."""
COLUMNS = {
    "s/step": "perf/time_per_step",
    "sampling s": "timing_s/gen",
    "old policy s": "timing_s/old_log_prob",
    "advantages s": "timing_s/adv",
    "update s": "timing_s/update_actor",
    "weights s": "timing_s/update_weights",
    "memory GB": "actor/perf/max_memory_allocated_gb",
    "entropy": "actor/entropy",
    "score": "critic/score/mean",
}
"""Column of the table -> verl's metric."""


def read(args: argparse.Namespace, name: str) -> Run:
    """The recipe with this run's algorithm and mode, without checkpoints and validation."""
    (algorithm, mode), path = RUNS[name], recipe_files().get(args.recipe, Path(args.recipe))
    own = {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in args.overrides)}
    verl = {"trainer.logger": ["console", "file"], "trainer.v1.trainer_mode": mode or "sync", "trainer.save_freq": -1}
    changed = {
        "algorithm": algorithm,
        "max_steps": args.steps,
        "output_dir": str(args.out / name),
        "scores": None,
        "verl": {**flat(read_run(path).verl), **verl, **own},
    }
    return read_run(path, changed | ({"model_name_or_path": args.model} if args.model else {}))


def command(launch: Launch, mode: str | None) -> list[str]:
    """dew's launch; without a mode, verl's own program with the same configuration less dew's keys."""
    if mode is not None:
        return [sys.executable, *MAIN, *hydra_words(launch)]
    words = [word for word in hydra_words(launch) if not word.startswith("+algorithm.dew")]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *words]


def start(args: argparse.Namespace, name: str) -> subprocess.Popen[bytes] | None:
    """Start a run; None if it is complete, or if its command is only to be printed."""
    launch = prepare(read(args, name))
    if RUNS[name][1] is not None:  # dew refuses verl's own mode
        check_with_verl(launch)
    words, log = command(launch, RUNS[name][1]), args.out / f"{name}.log"
    if args.print:
        print(f"# {name}\n{shlex.join(words)}")
        return None
    if len(lines(args.out, name)) >= args.steps:
        print(f"{name}: complete")
        return None
    data.write_data(data.prepare_data(launch, data.load_tokenizer(launch)), args.out / name)
    print(f"{name}: {launch.batches}\n  {log}", flush=True)
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(args.out / f"{name}.jsonl")}
    if args.alternate:
        modules = [word for word in (os.environ.get(EXTERNAL), "verl_one_gpu", "verl_turns") if word]
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment |= {EXTERNAL: ",".join(modules), "PYTHONPATH": os.pathsep.join(paths)}
        environment["VERL_TURNS"] = str(args.out / name)
        environment["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-")  # names of sockets have at most 107 characters
    with log.open("w") as file:
        return subprocess.Popen(words, env=environment, stdout=file, stderr=file)


def finish(args: argparse.Namespace, name: str, process: subprocess.Popen[bytes], limit: float | None) -> None:
    """Wait for the end of a run, and say so if it failed."""
    log, why = args.out / f"{name}.log", None
    try:
        if code := process.wait(limit):
            why = f"exit code {code}"
    except subprocess.TimeoutExpired:
        process.kill()  # Ray ends with its driver
        why = f"stopped after {args.limit} s"
    if why:
        print(f"{name}: {why}; the end of {log}:\n{log.read_text(errors='replace')[-2000:]}")


def train(args: argparse.Namespace) -> None:
    """All runs, one after the other or in turns."""
    if not args.alternate:
        for name in args.runs:
            if process := start(args, name):
                finish(args, name, process, args.limit)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    for signal in (*args.out.glob("*.ready"), *args.out.glob("*.go")):  # of a run that was stopped
        signal.unlink()
    runs = {name: process for name in args.runs if (process := start(args, name))}
    end = time.monotonic() + args.limit if args.limit else inf
    verl_turns.take_turns(
        args.out, {name: lambda p=p: p.poll() is not None or time.monotonic() > end for name, p in runs.items()}
    )
    for name, process in runs.items():
        finish(args, name, process, 0 if time.monotonic() > end else None)


def lines(out: Path, name: str) -> list[dict[str, float]]:
    """verl's metrics of each training step."""
    path = out / f"{name}.jsonl"
    found = [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.is_file() else []
    return [line for line in found if COLUMNS["s/step"] in line]


def table(out: Path) -> str:
    """Medians over the steps after the warm-up; memory is the maximum."""
    rows = {name: found[WARM_UP:] for name in RUNS if len(found := lines(out, name)) > WARM_UP}
    text = [f"| run | steps | {' | '.join(COLUMNS)} | time against {BASELINE} |", "|---" * (len(COLUMNS) + 3) + "|"]
    for name, found in rows.items():
        shown = " | ".join("" if (x := value(found, column)) is None else f"{x:.3f}" for column in COLUMNS)
        cost = "" if name == BASELINE or BASELINE not in rows else against([found], [rows[BASELINE]])
        text.append(f"| {name} | {len(found)} | {shown} | {cost} |")
    ours, theirs = ([rows[name] for name in rows if RUNS[name][1] == mode] for mode in ("dew_sync", None))
    if ours and theirs:
        text += ["", f"All runs in `dew_sync` against all of verl's GRPO: {against(ours, theirs)}"]
    return "\n".join(text) + "\n"


def against(ours: list[list[dict[str, float]]], theirs: list[list[dict[str, float]]]) -> str:
    """The mean ratio of step times, paired by step because a step has the same problems in every run; 95 % interval."""
    steps = min(map(len, [*ours, *theirs]))

    def logs(runs: list[list[dict[str, float]]], step: int) -> float:
        return fmean(log(run[step][COLUMNS["s/step"]]) for run in runs)

    if steps < 2:
        return ""
    interval, _ = t_test([logs(ours, step) - logs(theirs, step) for step in range(steps)])
    value, low, high = (f"{expm1(x):+.1%}" for x in (interval.value, interval.low, interval.high))
    return f"{value} [{low}, {high}]"


def value(found: list[dict[str, float]], column: str) -> float | None:
    values = [line[COLUMNS[column]] for line in found if COLUMNS[column] in line]
    return (max(values) if column == "memory GB" else median(values)) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", help="model folder or hub name; default: the recipe's")
    parser.add_argument("--recipe", default="gsm8k/qwen2.5-0.5b-instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--alternate", action="store_true", help="start all runs at once; they take turns step by step")
    parser.add_argument("--limit", type=float, help="seconds after which a run (with --alternate, all) is stopped")
    parser.add_argument("--print", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("overrides", nargs="*", help="verl's own keys, key=value")
    args = parser.parse_intermixed_args()
    args.out = args.out.absolute()
    if not args.table:
        train(args)
    if not args.print:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "verl_modes.md").write_text(text := table(args.out))
        print(text)


if __name__ == "__main__":
    main()
