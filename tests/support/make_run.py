"""A run that nobody trained: seeded, made-up metrics and answers in the shape of a real run's folder.

For tests and screenshots of the report. Everything it writes says "synthetic"; no number in it was measured.

    python tests/support/make_run.py FOLDER [SEED]
"""

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from dew import Rollouts, get_algorithm
from dew.compare.grid import Cell
from dew.run.folder import RunFolder
from dew.run.records import AnswerRecord, GroupRecord

SETTINGS = {"alpha1": 1.0, "alpha2": 0.1, "compare": "column", "average": "arithmetic", "pool": "group"}
SETTINGS |= {"scope": "group", "entropy_clip": None}

PEOPLE = ["A baker", "Mira", "The school", "A farmer", "Jon"]
THINGS = ["rolls", "apples", "pencils", "eggs", "stamps"]
BOXES = ["trays", "crates", "boxes", "baskets", "albums"]
# A word's second entry: how unsure the made-up policy is there. Forks are unsure, spelling is not.
OPENINGS = [
    [("Let", 1.9), ("'s", 0.02), (" think", 0.4), (" step", 0.3), (" by", 0.01), (" step", 0.01), (".", 0.1)],
    [("First", 1.7), (",", 0.05), (" we", 0.7), (" find", 0.8), (" the", 0.06), (" total", 0.3), (".", 0.2)],
    [("We", 1.4), (" need", 0.6), (" the", 0.2), (" product", 0.5), (" of", 0.02), (" both", 0.9), (".", 0.1)],
]
LINKS = [
    [(" So", 1.6), (",", 0.1)],
    [(" Therefore", 2.1), (",", 0.02)],
    [(" Then", 1.3)],
    [(" That", 1.2), (" means", 0.3)],
]
CHECKS = [
    [("\n\n", 0.5), ("Wait", 2.4), (",", 0.1), (" let", 0.5), (" me", 0.02), (" check", 0.4), (":", 0.2)],
    [("\n\n", 0.5), ("Check", 1.5), (":", 0.1)],
]


def _answer(rng: np.random.Generator, a: int, b: int, right: bool) -> tuple[list[str], list[float]]:
    """The words of one made-up solution of a·b, and the entropy at each."""
    words: list[tuple[str, float]] = []
    tens, ones = divmod(b, 10)
    slip = 0 if right else int(rng.choice([-10, -2, 1, 10, 20, 100]))
    first, second = a * tens * 10, a * ones + slip

    def say(*pieces: tuple[str, float]) -> None:
        words.extend(pieces)

    def number(n: int, doubt: float) -> None:
        digits = str(n)
        say((" ", 0.05), *[(d, doubt * (1.0 + 0.6 * i)) for i, d in enumerate(digits)])

    def line(left: int, factor: int, result: int, doubt: float) -> None:
        number(left, 0.05)
        say((" ×", 0.1))
        number(factor, 0.08)
        say((" =", 0.04))
        number(result, doubt)
        say((".", 0.15))

    say(*OPENINGS[rng.integers(len(OPENINGS))])
    say((" We", 0.9), (" split", 0.8), (" the", 0.1), (" factor", 0.4), (":", 0.2))
    line(a, tens * 10, first, 0.25)
    say(*LINKS[rng.integers(len(LINKS))])
    line(a, ones, second, 0.45 if right else 0.2)
    say(*LINKS[rng.integers(len(LINKS))], (" add", 0.7), (" the", 0.1), (" parts", 0.5), (":", 0.2))
    number(first, 0.04)
    say((" +", 0.06))
    number(second, 0.05)
    say((" =", 0.03))
    number(first + second, 0.3 if right else 0.12)
    say((".", 0.1))
    if rng.random() < 0.4:
        say(*CHECKS[rng.integers(len(CHECKS))])
        line(b, a, first + second, 0.3)
    say(("\n", 0.3), ("The", 0.4), (" answer", 0.05), (" is", 0.03), (" \\", 0.2), ("boxed", 0.01), ("{", 0.01))
    say(*[(d, 0.08) for d in str(first + second)], ("}.", 0.1))
    tokens = [word for word, _ in words]
    entropy = [float(h * rng.gamma(4.0, 0.25)) for _, h in words]
    return tokens, entropy


def credit_of(correct: Sequence[bool], entropy: Sequence[Sequence[float]], algorithm: str) -> dict[str, list]:
    """r̃ (where the algorithm has one), A and GRPO's A of each token."""
    H = [torch.tensor(row, dtype=torch.float64) for row in entropy]
    mask = pad_sequence([torch.ones_like(row) for row in H], True).bool()
    reward = torch.tensor(correct, dtype=torch.float64)
    rollouts = Rollouts(mask=mask[None], reward=reward[None], entropy=pad_sequence(H, True)[None])
    rule, grpo = get_algorithm(algorithm), get_algorithm("grpo")
    found = {"advantage": rule.advantages(rollouts), "grpo": grpo.advantages(rollouts)}
    if algorithm == "gtpo":
        found["shaped"] = rule.rewards(rollouts)
    return {name: [x[0, i, : len(row)].tolist() for i, row in enumerate(H)] for name, x in found.items()}


def make_group(
    rng: np.random.Generator, step: int, group: int, size: int, skill: float, algorithm: str = "gtpo",
    lengths: Sequence[int] = (),
) -> GroupRecord:  # fmt: skip
    """`lengths`: tokens of each answer, which then repeats its solution."""
    a, b = int(rng.integers(12, 99)), int(rng.integers(12, 99))
    who, what, where = (str(rng.choice(words)) for words in (PEOPLE, THINGS, BOXES))
    ease = float(np.clip(rng.normal(skill, 0.25), 0.02, 0.98))
    correct = [bool(rng.random() < ease) for _ in range(size)]
    texts = [_answer(rng, a, b, c) for c in correct]
    for i, length in enumerate(lengths):
        while (missing := length - len(texts[i][0])) > 0:
            more, entropy = _answer(rng, a, b, correct[i])
            texts[i] = more[-missing:] + texts[i][0], entropy[-missing:] + texts[i][1]
    credit = credit_of(correct, [entropy for _, entropy in texts], algorithm)
    answers = [
        AnswerRecord(
            tokens=tokens,
            correct=c,
            reward=float(c),
            extracted="".join(tokens).rsplit("{", 1)[1][:-2],
            verdict="correct" if c else "wrong",
            entropy=entropy,
            logp=[-h * float(rng.exponential(0.9)) for h in entropy],
            ratio=[float(np.exp(rng.normal(0, 0.03 + 0.05 * h))) for h in entropy],
            **{name: rows[i] for name, rows in credit.items()},
        )
        for i, (c, (tokens, entropy)) in enumerate(zip(correct, texts, strict=True))
    ]
    prompt = f"{who} packs {a} {where} with {b} {what} each. How many {what} are that? Answer in \\boxed{{}}."
    settings = SETTINGS if algorithm == "gtpo" else {}
    return GroupRecord(step, group, prompt, answers, str(a * b), algorithm, settings)


def metrics(
    rng: np.random.Generator, step: int, steps: int, gain: float, drift: float, luck: float
) -> dict[str, float]:
    x = step / steps
    noise = rng.normal(0, 1, 12)
    accuracy = float(np.clip(0.28 + (gain + luck) * (1 - np.exp(-3.2 * x)) + 0.03 * noise[0], 0, 1))
    entropy = float(0.32 + 0.35 * np.exp(-9 * x) + drift * x + 0.015 * noise[1])
    length = float(74 + 38 * x + 2.5 * noise[2])
    too_long = 0.27 * np.exp(-(((x - 0.62) / 0.05) ** 2))  # while the alarm below is raised
    mixed = float(np.clip(0.82 - 0.3 * x + 0.04 * noise[3], 0.05, 1))
    kept = round(64 * mixed)
    generation, scoring = 6.1 + 3 * x + 0.3 * abs(noise[4]), 0.6 + 0.05 * abs(noise[5])
    return {
        "step": step,
        "time": 1.79e9 + 12.5 * step,
        "reward": accuracy - 0.02,
        "accuracy": accuracy,
        "entropy": entropy,
        "entropy/correct": entropy * 0.86,
        "entropy/wrong": entropy * 1.17,
        "entropy/floor_share": 0.004 + 0.01 * x,
        "credit/top20_share": 0.23 + 0.02 * x + 0.004 * noise[6],
        "credit/top1_share": 0.031 + 0.003 * abs(noise[7]),
        "groups/sampled": 96,
        "groups/kept": kept,
        "groups/dropped": 96 - kept,
        "groups/refilled": 32,
        "groups/mixed_share": mixed,
        "clip/low": 0.0021 + 0.0008 * abs(noise[8]),
        "clip/high": 0.0034 + 0.0011 * abs(noise[9]),
        "ratio/mean": 1 + 0.002 * noise[10],
        "ratio/max": float(np.exp(0.4 + 0.25 * abs(noise[11]))),
        "kl/approx": 0.0008 + 0.0002 * abs(noise[0]),
        "length/mean": length,
        "length/correct": length * 0.96,
        "length/wrong": length * 1.09,
        "length/truncated_share": float(np.clip(0.02 + 0.03 * x + too_long + 0.01 * noise[2], 0, 1)),
        "seconds/generation": generation,
        "seconds/scoring": scoring,
        "seconds/update": 4.2 + 0.2 * abs(noise[6]),
        "tokens_per_second": 96 * 16 * length / (generation + scoring + 4.3),
        "loss": 0.004 * noise[7],
        "grad_norm": float(np.exp(-1.6 + 0.35 * noise[8])),
        "learning_rate": 1e-6,
    } | ({"eval/pass@1": accuracy - 0.03, "eval/pass@16": min(0.97, accuracy + 0.22)} if step % 25 == 0 else {})


def make_run(
    folder: Path, *, steps: int = 500, groups: int = 200, size: int = 16, seed: int = 0, name: str | None = None,
    algorithm: str = "gtpo",
) -> Path:  # fmt: skip
    """Write a whole synthetic run and return its folder."""
    rng = np.random.default_rng([seed, algorithm != "gtpo"])
    gain, drift = (0.47, 0.16) if algorithm == "gtpo" else (0.39, -0.12)  # of accuracy and entropy over the run
    luck = float(rng.normal(0, 0.02))
    run = RunFolder(folder)
    run.write_run(
        {
            "name": name or f"synthetic-{algorithm}-seed{seed}",
            "engine": "none (synthetic: made up for tests and screenshots)",
            "algorithm": {"name": algorithm, "settings": SETTINGS if algorithm == "gtpo" else {}},
            "model": "no model (made-up numbers)",
            "data": "synthetic products",
            "seed": seed,
            "versions": {"dew": "0.1.0", "torch": "2.13.0"},
            "machine": {"cpu": "none", "gpus": 0},
            "git_commit": None,
            "started": "2026-11-15T01:00:00Z",
            "finished": "2026-11-15T02:44:10Z",
            "status": "done",
        }
    )
    (Path(folder) / "config.yaml").write_text(f"# synthetic\nalgorithm: {algorithm}\nseed: {seed}\nsteps: 500\n")
    for step in range(1, steps + 1):
        run.append_metrics(metrics(rng, step, steps, gain, drift, luck))
    run.append_alarm(
        {
            "step": int(steps * 0.62),
            "alarm": "truncated",
            "message": "31% of the answers were cut off at the length limit for 10 steps.",
            "remedy": "Raise max_completion_length, or turn on the soft overlong punishment.",
            "value": 0.31,
            "threshold": 0.3,
        }
    )

    def score(value: float, half: float) -> dict[str, float]:
        return {"value": value, "low": value - half, "high": value + half}

    run.write_scores(
        [
            {"when": when, "task": task, "n_problems": 200, "k": 16}
            | {"scores": {"pass@1": score(v, 0.05), "pass@16": score(v + 0.24, 0.04)}}
            for task, before in (("products", 0.27), ("held-out products", 0.22))
            for when, v in (("before", before), ("after", before + gain + luck - 0.03))
        ]
    )
    recorded = -(-groups // 4)  # four groups a step, in steps spread evenly over the run
    for n in range(recorded):
        step = round((n + 1) * steps / recorded)
        skill = 0.28 + gain * step / steps
        run.write_records(
            step, [make_group(rng, step, g, size, skill, algorithm) for g in range(min(4, groups - 4 * n))]
        )
    return Path(folder)


def make_study(folder: Path, *, arms: int = 12, seeds: int = 11, generations: int = 120, tasks: int = 1) -> Path:
    """Write a synthetic study of `dew lab`: a folder of runs.

    In every second task the arms are in reverse order of accuracy, and all but the baseline train at twice the rate.
    """
    rng = np.random.default_rng(0)
    names = [f"synthetic({k})" if k else "baseline" for k in range(arms)]
    labels = ["synthetic", *(f"synthetic-{j}" for j in range(1, tasks))]
    for (j, task), (k, arm), seed in product(enumerate(labels), enumerate(names), range(seeds)):
        height = 0.55 + 0.02 * k * (-1) ** j + 0.01 * float(np.sin(seed)) + float(rng.normal(0, 0.012))
        curve = (height * (1 - np.exp(-np.arange(generations) / 40)) + rng.normal(0, 0.01, generations)).tolist()
        lines = [
            {"step": i + 1, "accuracy": x, "entropy": 1 - x, "length/mean": 20 + x, "credit/flipped_share": 0.01}
            | {"groups/mixed_share": 0.8, "grad_norm": 0.1}
            for i, x in enumerate(curve)
        ]
        for line in lines[generations // 6 - 1 :: generations // 6]:
            line |= {"eval/pass@1": line["accuracy"], "eval/pass@16": line["accuracy"] + 0.15}
        last = {"pass@1": curve[-1], "pass@16": curve[-1] + 0.15}
        scores = {"area": float(np.mean(curve)), "final": curve[-1], **last}
        cell = Cell(arm, seed, task, learning_rate=2e-4 if j % 2 and k else 1e-4)
        run = RunFolder(folder / cell.home)
        algorithm = {"name": "synthetic" if k else "baseline", "settings": {"strength": k}}
        run.write_run({**cell.facts(), "engine": "lab", "algorithm": algorithm, "status": "done"})
        (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        values = {name: {"value": x} for name, x in scores.items()}
        run.write_scores([{"when": "after", "task": task, "n_problems": 256, "k": 16, "scores": values}])
    content = {"settings": {}, "arms": names, "sources": {}}
    (folder / "grid.json").write_text(json.dumps(content))
    return folder


if __name__ == "__main__":
    print(make_run(Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
