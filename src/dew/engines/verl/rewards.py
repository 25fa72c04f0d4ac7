"""dew's verifiers as verl's custom reward function.

    reward.custom_reward_function.path=pkg://dew.engines.verl.rewards
    reward.custom_reward_function.name=compute_score

`data_source` names the verifier (countdown, math, gsm8k, ...). Its gold columns come from `extra_info`; `answer` is
`reward_model.ground_truth` unless `extra_info` has one.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from dew.rewards import verifier

_verifier = cache(verifier)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> dict[str, Any]:
    """`score` is the reward; `acc`, raw correctness, filters groups and decides between O⁺ and O⁻."""
    row = {"answer": ground_truth, **(extra_info or {})}
    [verdict] = _verifier(data_source).verdicts([solution_str], [row])
    return {
        "score": verdict.reward,
        "acc": float(verdict.correct),
        "verdict": verdict.status,
        "extracted": verdict.extracted or "",
    }
