"""Which reward decides that an answer is correct, and that the group filter looks at it alone.

A shaped or summed reward differs between any two answers. A filter on it keeps every group, those that teach
nothing too, and the policy is trained on noise.
"""

import torch

from dew.algorithms import Algorithm
from dew.engines.credit import Rows, judge
from dew.engines.trl.config import DewConfig
from dew.engines.trl.rewards import check_weights, outcome_index
from dew.preflight.answers import Answers
from dew.preflight.check import Check, failed, ok, warning
from dew.preflight.data import Data

VERDICTS = 2
"""Right and wrong."""


def find_outcome(args: DewConfig, data: Data) -> tuple[int, Check]:
    index = outcome_index(data.names, args.outcome_reward)
    check_weights(data.names, args.reward_weights, index)
    threshold = args.build_algorithm().threshold
    others = [name for i, name in enumerate(data.names) if i != index]
    added = f"; added to it, never deciding: {', '.join(others)}" if others else ""
    return index, ok("outcome", f"{data.names[index]} decides: correct above {threshold:g}{added}.", outcome=index)


def check(args: DewConfig, name: str, probes: list[float | None], answers: Answers | None) -> Check:
    """`probes`: what the deciding reward gave to correct and to empty answers."""
    algorithm = args.build_algorithm()
    if keeps_noise(algorithm):
        says = f"{algorithm.name} keeps a group whose answers are all wrong when another reward differs."
        return failed("filter", says, "Let Algorithm.signal look at the outcome reward alone.")
    given = [*probes, *(answers.outcome if answers else [])]
    values = sorted({round(value, 4) for value in given if value is not None})
    facts = {"values": values[:20], "different": len(values), "dynamic_sampling": algorithm.dynamic_sampling}
    if len(values) <= VERDICTS:
        active = "is on and looks" if algorithm.dynamic_sampling else "would look"
        return ok("filter", f"Dynamic sampling {active} at {name} alone, a verdict of right or wrong.", **facts)
    shown = ", ".join(f"{value:g}" for value in values[:4])
    says = f"{name} decides and is no verdict: it gave {len(values)} different values ({shown}, ...)"
    if answers:
        says += f", and {_varied(answers)} of {len(answers.signal)} groups look mixed by it"
    if _threshold_given(args):
        remedy = "Fine if an answer above your threshold is what you call correct."
        return warning("filter", f"{says}; correct above {algorithm.threshold:g}.", remedy, **facts)
    remedy = (
        "Name a reward that is 1 for correct and 0 for wrong as outcome_reward, and keep this one as an addition; or "
        "write algorithm_kwargs {threshold: ...}, above which an answer is correct."
    )
    return (failed if algorithm.dynamic_sampling else warning)("filter", f"{says}.", remedy, **facts)


def keeps_noise(algorithm: Algorithm) -> bool:
    """Four wrong answers that differ in what other rewards add: has the group signal? It must not."""
    rows = Rows(
        group=torch.zeros(4, dtype=torch.long),
        mask=torch.ones(4, 1, dtype=torch.bool),
        outcome=torch.zeros(4),
        extra=torch.linspace(0.0, 1.0, 4),
        entropy=torch.ones(4, 1),
        guided=torch.zeros(4, dtype=torch.bool),
    )
    return bool(judge(algorithm, rows).signal.any())


def _varied(answers: Answers) -> int:
    """Groups whose answers did not all earn the same."""
    size = answers.size
    groups = [answers.outcome[i : i + size] for i in range(0, len(answers.outcome), size)]
    return sum(len({value for value in group if value is not None}) > 1 for group in groups)


def _threshold_given(args: DewConfig) -> bool:
    return isinstance(args.algorithm_kwargs, dict) and "threshold" in args.algorithm_kwargs
