"""Which charts the page draws, and which metrics are in each."""

import re
from collections.abc import Sequence

from dew.run.records import Json

CHARTS = (  # title, metrics, note, whether its axis is logarithmic
    ("Reward", r"(reward|accuracy)$", "mean reward, and the share of correct answers", False),
    ("Parts of the reward", r"reward/(?!.*/std$)", "each reward function separately", False),
    ("Pass@k", r"eval/(pass|mean)@", "on held-out problems", False),
    ("Flipped tokens", r"credit/flipped_share$", "share of tokens with credit of the wrong sign", False),
    ("Entropy", r"entropy(/(correct|wrong))?$", "a slow decrease is normal; near 0 all answers are the same", False),
    ("Length", r"length/(mean|correct|wrong)$", "tokens per answer", False),
    ("Truncated answers", r"length/truncated_share$", "share that reached the length limit", False),
    ("Groups", r"groups/(sampled|kept|dropped|refilled)$", "prompts per step", False),
    ("Groups with signal", r"groups/mixed_share$", "share with correct and wrong answers", False),
    ("Concentration of credit", r"credit/top\d+_share$", "share of |credit| on the top 20% and the top token", False),
    ("Clipped tokens", r"clip/(low|high)$", "share outside the trust region", False),
    ("Ratio", r"ratio/(mean|max)$", "new policy / old policy", True),
    ("KL", r"kl/", "distance from the old policy or the reference", False),
    ("Tokens per second", r"tokens_per_second$", "of the whole loop", False),
    ("Seconds per phase", r"seconds/", "where the time goes", False),
    ("Loss", r"loss$", "not a measure of progress here", False),
    ("Gradient norm", r"grad_norm$", "0 means that nothing is learned", True),
)


def charts_of(runs: Sequence[Json]) -> list[Json]:
    """{title, names, note, log, folded} of each chart, from the columns of the runs' metrics.

    A metric that repeats an earlier one in every run, as the only part of a reward does, has no chart; one that never
    changes or belongs to no chart has a folded one.
    """
    names: list[str] = []
    for name in dict.fromkeys(["accuracy", *(name for metrics in runs for name in metrics)]):
        repeats = any(all(metrics.get(name) == metrics.get(other) for metrics in runs) for other in names)
        if name not in ("step", "time") and any(name in metrics for metrics in runs) and not repeats:
            names.append(name)
    rest = [name for name in names if _is_flat(runs, name) or not any(re.match(chart[1], name) for chart in CHARTS)]
    found = []
    for title, pattern, note, log in CHARTS:
        shown = [name for name in names if re.match(pattern, name) and name not in rest]
        found += [{"title": title, "names": shown, "note": note, "log": log, "folded": False}] if shown else []
    return found + [{"title": name, "names": [name], "note": "", "log": False, "folded": True} for name in rest]


def _is_flat(runs: Sequence[Json], name: str) -> bool:
    known = [[x for x in metrics.get(name, ()) if x is not None] for metrics in runs]
    return all(len(set(values)) < 2 for values in known) and len(known[0]) > 2
