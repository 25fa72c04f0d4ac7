"""Train a real model with several algorithms and seeds, and print differences paired by seed.

    python examples/real_model_seeds.py OUT --model MODEL --choose-limit     choose token limit and prompt first
    python examples/real_model_seeds.py OUT --model MODEL --seeds 0 1 2      train and evaluate, or resume
    python examples/real_model_seeds.py OUT --model MODEL --seeds 3 4        add seeds to the same table
    python examples/real_model_seeds.py OUT --table                          print the table from OUT/counts.json
    python examples/real_model_seeds.py OUT --figure FILE.svg                plot training curves and pass@k from it

MODEL is a folder or a hub name. Arms are written as for `dew lab`: dapo, 'gtpo(alpha2=0.5)', 'dew@2e-6' (with its own
learning rate). Each run trains the recipe with several optimizer steps per generation, then answers the held-out
problems of every data set k times. All arms of a seed are finished before the next seed starts. Re-run the same command
to resume: finished runs are skipped, interrupted ones continue from their last checkpoint. The counts of a run are
written to OUT/counts.json once its seed is finished. Other flags are settings of every run, e.g. `--save_strategy steps
--save_steps 25`.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from math import ceil, log2
from pathlib import Path
from statistics import fmean
from typing import Any

from dew.cli.compare import DEW
from dew.cli.flags import recipe_file
from dew.cli.runs import Child, run_all
from dew.compare import Difference, Scores, corrected, paired
from dew.compare.grid import AREA, Cell, open_grid
from dew.compare.statistics import pass_at_k
from dew.compare.verdicts import difference_table, markdown_table, spread, table_note
from dew.engines.lab.arms import Arm, parse_arms
from dew.errors import ConfigError, DewError, Problem
from dew.files import write_atomically
from dew.run.config import read_run
from dew.run.folder import RunFolder

START = "start"
"""Name of the arm with the model before training."""
ARMS = ["dapo", "gtpo(alpha1=1.1,alpha2=0.0)", "gtpo", "dew"]
"""The second is GTPO's control, which is the same but for the entropy weights."""
CURVES = {
    "accuracy": "accuracy",
    "entropy": "entropy",
    "length": "length/mean",
    "cut_off": "length/truncated_share",
    "flipped": "credit/flipped_share",
}
"""Name in counts.json -> metric of the run."""
LIMITS = (256, 300, 400, 512, 640, 768, 1024)
CUT_OFF = 0.15
LAST = 10
"""Number of steps at the end of training that the table averages."""

Json = dict[str, Any]


# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────


def train(settings: Json, out: Path, cell: Cell, arm: Arm) -> Child | None:
    """Return the process that starts or resumes this run, or None if it is finished."""
    home = out / cell.home
    if RunFolder(home).finished():
        return None
    if any(home.glob("checkpoint-*/trainer_state.json")):
        return Child([*DEW, "resume", str(home)], home)
    shutil.rmtree(home, ignore_errors=True)
    changed = {f.name: getattr(arm.algorithm, f.name) for f in fields(arm.algorithm)}
    changed = {name: value for name, value in changed.items() if value != getattr(type(arm.algorithm), name)}
    prompts, answers = settings["prompts"], settings["group_size"]
    micro = settings.get("micro_batch", answers)
    passes = prompts * answers // micro
    flags = {
        "model_name_or_path": settings["model"],
        "output_dir": home,
        "algorithm": arm.algorithm.name,
        "algorithm_kwargs": json.dumps({"dynamic_sampling": False, **changed}),
        "learning_rate": arm.learning_rate,
        "seed": cell.seed,
        "max_steps": settings["steps"],
        "num_generations": answers,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": passes // settings["optimizer_steps"],
        "steps_per_generation": passes,
        "max_completion_length": settings["limit"],
        "task_settings": json.dumps(settings["task_settings"]),
        "scores": "false",
    }
    return Child([*DEW, "train", settings["recipe"], *_words(flags), *settings["flags"]], home)


def evaluate(settings: Json, out: Path, cell: Cell) -> list[Child]:
    """Return a process for each data set that the run, or the model before training, has not answered yet."""
    home = out / cell.home
    model = settings["model"] if cell.arm == START else str(home)
    children = []
    for name, problems in settings["sets"].items():
        flags = {
            "task": name,
            "settings": json.dumps(_task_settings(settings, name)),
            "problems": problems,
            "max-new-tokens": settings["limit"],
            "options": "{seed: 1}",
            "keep": _kept(home, name),
        }
        if not _kept(home, name).exists():
            children.append(Child([*DEW, "eval", model, "-k", str(settings["k"]), *_words(flags)], home))
    return children


def _words(flags: Json) -> list[str]:
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def _kept(home: Path, name: str) -> Path:
    return home / f"answers-{name}.json"


def _task_settings(settings: Json, name: str) -> Json:
    """Return the recipe's task settings; for another data set only the template."""
    own = settings["task_settings"]
    return own if name == settings["task"] else {key: own[key] for key in ("template",) if key in own}


def count(settings: Json, out: Path, cell: Cell) -> Json:
    """Return the entry of a run in counts.json: when its first and last files were written, the number of correct
    answers to every problem of every data set, and curves."""
    home, sets = out / cell.home, {}
    for name in settings["sets"]:
        scores = Scores.read(_kept(home, name))
        sets[name] = {
            "correct": [sum(verdict.correct for verdict in problem.verdicts) for problem in scores.problems],
            "cut_off": scores.truncated_share,
            "tokens": fmean(answer.tokens for problem in scores.problems for answer in problem.answers),
        }
    written = sorted(path.stat().st_mtime for path in home.rglob("*") if path.is_file())
    began, ended = (datetime.fromtimestamp(x, UTC).isoformat(timespec="seconds") for x in (written[0], written[-1]))
    entry = {"arm": cell.arm, "seed": cell.seed, "began": began, "ended": ended, "sets": sets}
    if cell.arm != START:
        metrics = RunFolder(home).metrics()
        entry["curves"] = {
            name: [round(float(m[key]), 5) for m in metrics if m.get(key) is not None] for name, key in CURVES.items()
        }
    return entry


def read(out: Path) -> Json:
    path = out / "counts.json"
    return json.loads(path.read_text()) if path.exists() else {"settings": {}, "choice": {}, "runs": []}


def write(out: Path, content: Json) -> None:
    write_atomically(out / "counts.json", json.dumps(content, indent=None).encode())


def run(options: argparse.Namespace, settings: Json) -> None:
    """Train and evaluate everything that is missing, seed by seed."""
    content = read(options.out)
    done = {(entry["arm"], entry["seed"]) for entry in content["runs"]}
    arms = {arm.label: arm for arm in parse_arms(options.arms, [settings["learning_rate"]], controls=False)}
    cells = [Cell(START, 0), *(Cell(label, seed) for seed in options.seeds for label in arms)]
    homes = {options.out / Cell(arm, seed).home for arm, seed in done}
    todo = open_grid(options.out, cells, settings, finished=lambda run: run.path in homes)
    print(f"{len(done)} finished, {len(todo)} to do, {options.parallel} at a time", flush=True)
    for seed in dict.fromkeys(cell.seed for cell in todo):
        of_seed = [cell for cell in todo if cell.seed == seed]
        training = [train(settings, options.out, cell, arms[cell.arm]) for cell in of_seed if cell.arm != START]
        run_all([child for child in training if child], options.parallel)
        run_all([child for cell in of_seed for child in evaluate(settings, options.out, cell)], options.parallel)
        for cell in of_seed:
            entry = count(settings, options.out, cell)
            content = {**content, "settings": settings, "runs": [*content["runs"], entry]}
            write(options.out, content)
            if options.delete_models:
                shutil.rmtree(options.out / cell.home / "model", ignore_errors=True)
            scores = {task: fmean(found["correct"]) / settings["k"] for task, found in entry["sets"].items()}
            shown = ", ".join(f"{task} {score:.3f}" for task, score in scores.items())
            print(f"{cell.arm}, seed {seed}: {shown}", flush=True)


# ── the token limit ─────────────────────────────────────────────────────────────────────────────────────────


def choose_limit(options: argparse.Namespace, settings: Json) -> Json:
    """Choose the template and the token limit on training problems, sampled once with the longest limit.

    For each template, take the smallest limit that cuts off at most 15% of the answers. Of these, choose the one with
    the most correct answers.
    """
    from dew.cli.evaluate import load_model
    from dew.compare import evaluate as score
    from dew.rewards import verifier
    from dew.tasks import task

    loaded, name, rows = load_model(settings["model"]), settings["task"], []
    for template in options.templates or [None]:
        own = {**settings["task_settings"], **({"template": template} if template else {})}
        problems = task(name, **own).rows(options.limit_problems, split="train")
        scores = score(*loaded, problems, verifier(name), k=4, max_new_tokens=max(options.limits), seed=2)
        pairs = [pair for p in scores.problems for pair in zip(p.answers, p.verdicts, strict=True)]
        for limit in sorted(options.limits):
            whole = [v for a, v in pairs if a.tokens <= limit and not a.truncated]
            rows.append(
                {
                    "task_settings": own,
                    "limit": limit,
                    "cut_off": 1 - len(whole) / len(pairs),
                    "correct": sum(v.correct for v in whole) / len(pairs),
                }
            )
    print(markdown_table(["prompt", "limit", "cut off", "correct"], [_limit_row(row) for row in rows]))
    fitting = [row for row in rows if row["cut_off"] <= CUT_OFF]
    first = {json.dumps(row["task_settings"]): row for row in reversed(fitting)}
    if not first:
        what = f"Every limit cuts off more than {CUT_OFF:.0%} of the answers."
        raise ConfigError(Problem(what, remedy="Give longer --limits or other --templates, or set --limit."))
    chosen = max(first.values(), key=lambda row: row["correct"])
    print(f"Chosen: {' | '.join(_limit_row(chosen))}")
    return {**chosen, "tried": rows}


def _limit_row(row: Json) -> list[str]:
    shown = row["task_settings"].get("template", json.dumps(row["task_settings"]))
    return [shown, str(row["limit"]), f"{row['cut_off']:.1%}", f"{row['correct']:.3f}"]


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────


def table(content: Json) -> str:
    """Return scores of every arm, paired differences, and metrics at the end of training."""
    k, runs = content["settings"]["k"], content["runs"]
    arms = _arms(runs)
    ks = [2**i for i in range(k.bit_length()) if 2**i < k] + [k]
    text = []
    for name in content["settings"]["sets"]:
        rows = []
        for arm in arms:
            found = [run["sets"][name] for run in runs if run["arm"] == arm]
            passes = [[fmean(_by_problem(one["correct"], k, j).values()) for one in found] for j in ks]
            ends = [f"{fmean(one['cut_off'] for one in found):.0%}", f"{fmean(one['tokens'] for one in found):.0f}"]
            rows.append([arm, str(len(found)), *map(spread, passes), *ends])
        head = ["arm", "seeds", *(f"pass@{j}" for j in ks), "cut off", "tokens"]
        problems = len(runs[0]["sets"][name]["correct"])
        text += [f"{name}: {problems} held-out problems, {k} answers each\n", markdown_table(head, rows)]
    trained = [arm for arm in arms if arm != START]
    pairs = [(arm, trained[0]) for arm in trained[1:]]
    controls = {arm.label: arm.control for arm in parse_arms(trained, [1e-6])} if trained else {}
    pairs += [(arm, control) for arm, control in controls.items() if control in trained and (arm, control) not in pairs]
    scores = [("", 0), *((name, j) for name in content["settings"]["sets"] for j in dict.fromkeys((1, k)))]
    found = [difference(runs, k, *pair, name, j) for pair in pairs for name, j in scores]
    if differences := corrected(found):
        text += [difference_table(differences), table_note(differences)]
    if trained:
        rows = []
        for arm in trained:
            curves = [run["curves"] for run in runs if run["arm"] == arm]
            last = [[fmean(curve[name][-LAST:]) for curve in curves if curve[name]] for name in CURVES]
            rows.append([arm, *(spread(values) if values else "" for values in last)])
        text += [f"Training, mean of the last {LAST} steps\n", markdown_table(["arm", *CURVES], rows)]
    return "\n".join(text)


def _arms(runs: Sequence[Json]) -> list[str]:
    def place(arm: str) -> int:
        return -1 if arm == START else ARMS.index(arm) if arm in ARMS else len(ARMS)

    return sorted(dict.fromkeys(run["arm"] for run in runs), key=place)


def _by_problem(correct: Sequence[int], k: int, j: int) -> dict[int, float]:
    """Return pass@j of each problem."""
    return {i: pass_at_k(k, c, j) for i, c in enumerate(correct)}


def difference(runs: Sequence[Json], k: int, arm: str, base: str, name: str, j: int) -> Difference | None:
    """Return the difference in pass@j on a data set or, without a name, in the mean accuracy in training."""
    both = [{run["seed"]: run for run in runs if run["arm"] == one} for one in (arm, base)]
    seeds = sorted(both[0].keys() & both[1].keys())
    names = {"arm": arm, "baseline": base}
    if not name:
        values = ({seed: fmean(of[seed]["curves"]["accuracy"]) for seed in seeds} for of in both)
        return paired(*values, score=AREA, **names)
    problems = [{seed: _by_problem(of[seed]["sets"][name]["correct"], k, j) for seed in seeds} for of in both]
    if len(seeds) == 1:
        return paired(*(of[seeds[0]] for of in problems), score=f"{name} pass@{j}", unit="problems", **names)
    means = ({seed: fmean(found.values()) for seed, found in of.items()} for of in problems)
    return paired(*means, score=f"{name} pass@{j}", **names)


# ── the figure ──────────────────────────────────────────────────────────────────────────────────────────────

COLOURS = ("#888888", "#2864dc", "#00917c", "#d75f00", "#8a3ffc", "#b8860b", "#d02670")
THICK = 'stroke-width="2.5"'
SMOOTH = 6
"""Every point is the mean over a sixth of a run."""
Line = list[tuple[float, float]]


def figure(content: Json) -> str:
    """Return an SVG with training curves and pass@k on every data set, thin for each seed and thick for their mean."""
    k, runs = content["settings"]["k"], content["runs"]
    arms = _arms(runs)
    of_arm = {arm: [run for run in runs if run["arm"] == arm] for arm in arms}
    panels: dict[str, dict[str, list[Line]]] = {}
    for name in ("accuracy", "entropy", "length"):
        panels[f"{name} in training, by generation"] = {
            arm: [_smooth(run["curves"][name], len(run["curves"]["accuracy"])) for run in of_arm[arm]]
            for arm in arms
            if arm != START
        }
    for name in content["settings"]["sets"]:
        panels[f"{name}: pass@k, by k"] = {arm: [_passes(run, name, k) for run in of_arm[arm]] for arm in arms}
    wide, high, left, columns = 246, 190, 52, 3
    size = f'width="{(wide + left) * columns + 12}" height="{-(-len(panels) // columns) * (high + 64) + 36}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">']
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    colours = dict(zip(arms, COLOURS * len(arms), strict=False))
    trained = [arm for arm in arms if arm != START]
    controls = {arm.control: f"{arm.label}'s control" for arm in parse_arms(trained, [1e-6])} if trained else {}
    legend = "   ".join(f'<tspan fill="{c}">{controls.get(arm, arm)}</tspan>' for arm, c in colours.items())
    note = '<tspan font-weight="normal" fill="#444">thin: each seed, thick: their mean</tspan>'
    parts.append(f'<text x="{left}" y="20" font-weight="bold" xml:space="preserve">{legend}   {note}</text>')
    for place, (title, lines) in enumerate(panels.items()):
        at, top = left + place % columns * (wide + left), 58 + place // columns * (high + 64)
        parts += _panel(title, lines, colours, (at, top, wide, high), k)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    title: str, lines: dict[str, list[Line]], colours: dict[str, str], place: tuple[int, int, int, int], k: int
) -> list[str]:
    """Return the SVG elements of one plot at `place` (left, top, width, height)."""
    at, top, wide, high = place
    points = [point for of_seeds in lines.values() for line in of_seeds for point in line]
    (x0, x1), (y0, y1) = ((min(values), max(values)) for values in zip(*points, strict=True))

    def spot(x: float, y: float) -> tuple[float, float]:
        return at + wide * (x - x0) / (x1 - x0), top + high * (y1 - y) / (y1 - y0)

    parts = [f'<text x="{at}" y="{top - 12}">{title}</text>']
    parts.append(f'<rect x="{at}" y="{top}" width="{wide}" height="{high}" fill="none" stroke="#bbb"/>')
    for value in _ticks(y0, y1):
        y = spot(x0, value)[1]
        parts.append(f'<line x1="{at}" x2="{at + wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{at - 5}" y="{y + 5:.1f}" text-anchor="end" fill="#444">{value:g}</text>')
    steps = {log2(j): j for j in (1, 2, 4, 8, 16) if j <= k} if "pass@k" in title else {x: x for x in _ticks(x0, x1)}
    for value, word in steps.items():
        x = spot(value, y0)[0]
        parts.append(f'<text x="{x:.1f}" y="{top + high + 17}" text-anchor="middle" fill="#444">{word:g}</text>')
    for arm, of_seeds in lines.items():
        mean = [(x, fmean(line[i][1] for line in of_seeds)) for i, (x, _) in enumerate(of_seeds[0])]
        for line, style in [(line, 'stroke-width="1" opacity="0.45"') for line in of_seeds] + [(mean, THICK)]:
            dots = " ".join(f"{x:.1f},{y:.1f}" for x, y in (spot(*point) for point in line))
            parts.append(f'<polyline points="{dots}" fill="none" stroke="{colours[arm]}" {style}/>')
    return parts


def _passes(run: Json, name: str, k: int) -> Line:
    """Return (log2 j, pass@j) of a run."""
    correct = run["sets"][name]["correct"]
    return [(log2(j), fmean(_by_problem(correct, k, j).values())) for j in range(1, k + 1)]


def _smooth(curve: Sequence[float], generations: int) -> Line:
    """Return (generation, mean over the sixth of the run that ends there)."""
    window, each = max(1, len(curve) // SMOOTH), generations / len(curve)
    return [((i + window) * each, fmean(curve[i : i + window])) for i in range(len(curve) - window + 1)]


def _ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers between low and high."""
    step = next(s * 10.0**e for e in range(-4, 6) for s in (1, 2, 5) if (high - low) / (s * 10.0**e) < 6)
    return [round(i * step, 6) for i in range(ceil(low / step), int(high / step) + 1)]


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", help="folder or hub name (default: the recipe's)")
    parser.add_argument("--recipe", default="gsm8k/qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--arms", nargs="+", default=ARMS, help=f"baseline first (default: {' '.join(ARMS)})")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps per run")
    parser.add_argument("--group-size", type=int, default=16, help="answers per problem")
    parser.add_argument("--prompts", type=int, default=16, help="problems per generation")
    parser.add_argument("--optimizer-steps", type=int, default=4, help="per generation; must divide --prompts")
    parser.add_argument("--micro-batch", type=int, help="answers per forward pass (default: a group)")
    parser.add_argument("--limit", type=int, help="maximum tokens per answer (default: from --choose-limit)")
    parser.add_argument("--sets", nargs="+", default=["gsm8k:1319", "math500:500"], help="held-out data, NAME:PROBLEMS")
    parser.add_argument("-k", type=int, default=8, help="answers per held-out problem")
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time")
    parser.add_argument("--delete-models", action="store_true", help="delete each model once it is evaluated")
    parser.add_argument("--choose-limit", action="store_true", help="choose token limit and prompt, then exit")
    parser.add_argument("--limits", nargs="+", type=int, default=LIMITS)
    parser.add_argument("--templates", nargs="*", default=["qwen-boxed", "chat"])
    parser.add_argument("--limit-problems", type=int, default=256, help="training problems used for --choose-limit")
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--figure", type=Path, help="only plot the curves to this file (.svg)")
    options, flags = parser.parse_known_args()
    try:
        _main(options, flags)
    except DewError as error:
        raise SystemExit(f"error: {error}") from None


def _main(options: argparse.Namespace, flags: list[str]) -> None:
    content = read(options.out)
    if (options.table or options.figure) and not content["runs"]:
        raise ConfigError(Problem(f"{options.out}: no counts.json with runs."))
    if options.figure:
        options.figure.write_text(figure(content))
        return
    if not options.table:
        recipe = read_run(recipe_file(options.recipe))
        choice = content["choice"] or {"task_settings": recipe.task_settings, "limit": None}
        settings = {
            "recipe": options.recipe,
            "model": options.model or recipe.settings["model_name_or_path"],
            "task": recipe.task,
            "task_settings": choice["task_settings"],
            "limit": options.limit or choice["limit"],
            "learning_rate": float(recipe.settings["learning_rate"]),
            "steps": options.steps,
            "optimizer_steps": options.optimizer_steps,
            "group_size": options.group_size,
            "prompts": options.prompts,
            "k": options.k,
            "sets": {name: int(n) for name, _, n in (text.partition(":") for text in options.sets)},
            "flags": flags,
        }
        if options.prompts % options.optimizer_steps:
            what = f"--prompts {options.prompts} cannot be split into {options.optimizer_steps} optimizer steps."
            raise ConfigError(Problem(what, remedy="Choose --optimizer-steps so that it divides --prompts."))
        if options.micro_batch:
            settings["micro_batch"] = options.micro_batch
            answers = options.prompts // options.optimizer_steps * options.group_size
            if answers % options.micro_batch:
                what = f"--micro-batch {options.micro_batch} does not divide the {answers} answers of a step."
                raise ConfigError(Problem(what, remedy=f"Choose a divisor of {answers}."))
        if options.choose_limit:
            open_grid(options.out, [], {})
            content["choice"] = choose_limit(options, {**settings, "task_settings": recipe.task_settings})
            write(options.out, content)
            return
        if settings["limit"] is None:
            raise ConfigError(Problem("No token limit.", remedy="Give --limit, or run with --choose-limit first."))
        run(options, settings)
    print(table(read(options.out)))


if __name__ == "__main__":
    main()
