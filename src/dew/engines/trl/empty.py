"""Answers without a single token, which a rollout function may give and TRL cannot pad."""

import functools
from collections.abc import Callable
from typing import Any

Rollout = Callable[..., dict[str, Any]]


def never_empty(rollout: Rollout, end: int) -> Rollout:
    """The same function; an empty answer is the token `end`, masked as if a tool had written it: it trains nothing."""

    @functools.wraps(rollout)
    def filled(*args: Any, **kwargs: Any) -> dict[str, Any]:
        output = dict(rollout(*args, **kwargs))
        answers = output.get("completion_ids")
        if answers is None:  # TRL says what is missing
            return output
        masks = output.get("env_mask") or [[1] * len(ids) for ids in answers]
        output["env_mask"] = [mask if ids else [0] for ids, mask in zip(answers, masks, strict=True)]
        output["completion_ids"] = [ids or [end] for ids in answers]
        if output.get("logprobs") is not None:
            output["logprobs"] = [x if ids else [0.0] for ids, x in zip(answers, output["logprobs"], strict=True)]
        return output

    return filled
