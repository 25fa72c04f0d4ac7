"""How often the analysis of the benchmark's stage 3 finds a rule that is better than DAPO, and how often another one.

    python scripts/benchmark_simulation.py [STUDIES]      a table for docs/benchmark.md; 1,000 studies take some minutes

Scores of task A are drawn with known means and the noise of stage 2, and judged by the code for the real ones, after
12 and 16 seeds; a placebo is trained when the plan says so.
"""

import sys
from collections.abc import Mapping

import numpy as np
from benchmark_stages import CONTROLLED, FINALISTS, better

from dew.compare import Result
from dew.compare.verdicts import markdown_table
from dew.report import benchmark as b

RULES = (*FINALISTS[1:], "steer", "cispo", "entropy_advantage", b.CANDIDATES[0], "dppo")
"""The finalists, as they would be after the first 144 runs of stage 2."""
NOISE = 0.014
"""Standard deviation of a run's pass@1, without what runs with the same seed share."""
PLACEBOS = {rule: placebo for rule in RULES if (placebo := b.companions(rule)[1])}
SEEDS, FIRST = b.STAGES["stage3"].seeds["A"], b.STAGES["stage3"].first_seed
Gains = Mapping[str, float]
"""How much better an arm is than DAPO; 0 if it is not named."""
CASES: dict[str, Gains] = {
    "all rules equal": {},
    **{f"`dew` {gain:+.2f}, its placebo level": {"dew": gain} for gain in (0.01, 0.02, 0.03)},
    "`dew` and its placebo +0.02": {"dew": 0.02, PLACEBOS["dew"]: 0.02},
    "all rules with placebos, and these, +0.02": dict.fromkeys([*PLACEBOS, *PLACEBOS.values()], 0.02),
}


def study(random: np.random.Generator, gains: Gains) -> list[Result]:
    """Runs of all arms on all seeds. What runs with the same seed share cancels in every comparison."""
    arms = (b.BASELINE, *RULES, *PLACEBOS.values())
    scores = {arm: 0.3 + gains.get(arm, 0) + random.normal(0, NOISE, SEEDS) for arm in arms}
    return [
        Result(arm, FIRST + i, dict.fromkeys(b.SCORES, float(x)), "gsm8k", 4e-5)
        for arm, of in scores.items()
        for i, x in enumerate(of)
    ]


def wins(runs: list[Result]) -> set[str]:
    """The rules that win in the analysis of these runs."""
    planned = {PLACEBOS[rule] for rule in CONTROLLED["A"]}
    trained = [r for r in runs if r.arm not in PLACEBOS.values() or r.arm in planned]
    wanted = planned | {PLACEBOS[rule] for rule in better("A", {"stage3-A": trained}) if rule in PLACEBOS}
    found = [r for r in runs if r.arm not in PLACEBOS.values() or r.arm in wanted]
    return {row.arm for row in b.stage_rows("stage3", "A", {"stage3-A": found}) if row.verdict == "win"}


def main(studies: int) -> None:
    lines = []
    for name, gains in CASES.items():
        random = np.random.default_rng(0)
        right, wrong = [0, 0], [0, 0]
        for _ in range(studies):
            runs = study(random, gains)
            for i, seeds in enumerate((b.INTERIM[0], SEEDS)):
                found = wins([r for r in runs if r.seed < FIRST + seeds])
                true = {x for x in found if gains.get(x, 0) > gains.get(PLACEBOS.get(x, b.BASELINE), 0)}
                right[i] += bool(true)
                wrong[i] += bool(found - true)
        cells = [[f"{n / studies:.1%}" for n in of] for of in (right, wrong)]
        lines.append([name, *(cells[0] if any(right) else ["", ""]), *cells[1]])
    head = ["in truth", "found after 12 seeds", "after 16", "another wins after 12", "after 16"]
    print(markdown_table(head, lines))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
