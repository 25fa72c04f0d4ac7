"""dew's credit for slime: put this folder on PYTHONPATH and set --custom-advantage-function-path dew_slime.advantages
(docs/slime.md).

slime calls the function on each data-parallel rank with that rank's rollouts. Answers to one prompt may be on different
ranks, so all answers are gathered before credit is computed on whole groups.
"""

import logging
from collections import Counter
from functools import cache
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from dew.algorithms import DEFAULT_ALGORITHM, Algorithm, get_algorithm, split_algorithm
from dew.engines.credit import Rows, check_outcomes, differ, give_credit
from dew.errors import ConfigError, EngineError, Problem
from dew.run.settings import algorithm_settings

NAMES = {"algorithm": "dew_algorithm", "outcome_reward": "--reward-key"}
"""dew's names of settings -> slime's."""


def advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Set `advantages` and `returns` in `rollout_data` to dew's credit: a list of (T,) tensors, one per answer."""
    algorithm = algorithm_of(args)
    own = _answers(algorithm, rollout_data)
    answers = _gather(own)
    size = args.n_samples_per_prompt
    counts = Counter(answer["index"] // size for answer in answers)
    if broken := [group for group, n in counts.items() if n != size]:
        what = f"{len(broken)} of {len(counts)} groups do not have {size} answers, e.g. group {broken[0]}."
        why = "Credit compares the answers of a whole group."
        remedy = "Keep whole groups in each batch: no fan-out, no filter on single answers, and no reordered indices."
        raise EngineError(Problem(what, why, remedy))
    columns = {name: pad_sequence([x[name] for x in answers], True) for name in ("mask", *algorithm.signals)}
    outcome = torch.tensor([answer["reward"] for answer in answers])
    group = torch.tensor([answer["index"] // size for answer in answers])
    credit = give_credit(algorithm, Rows(group=group, outcome=outcome, extra=torch.zeros_like(outcome), **columns))
    if not getattr(args, "dew_checked", False) and differ(outcome):
        args.dew_checked = True
        chosen = "threshold" in _named(args)[1]
        problem = None if chosen else check_outcomes(algorithm, outcome, credit.advantages, NAMES)
        if problem is not None:
            logging.getLogger("dew").warning("%s", problem)
    by_index = {answer["index"]: row for answer, row in zip(answers, credit.advantages, strict=True)}
    found = [by_index[answer["index"]][: len(answer["mask"])] for answer in own]
    devices = [x.device for x in rollout_data["loss_masks"]]
    rollout_data["advantages"] = [x.to(device) for x, device in zip(found, devices, strict=True)]
    rollout_data["returns"] = rollout_data["advantages"]


def algorithm_of(args: Any) -> Algorithm:
    """Return the algorithm (`dew_algorithm`, `dew_algorithm_kwargs` in --custom-config-path), or raise an error if
    slime's flags do not match its loss."""
    named, given = _named(args)
    settings = {"max_tokens": args.rollout_max_response_len, "dynamic_sampling": False, **given}  # slime samples
    algorithm = get_algorithm(named, **settings)
    name, per_token = algorithm.name, algorithm.reduce == "tokens"
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    clip = f"--eps-clip {algorithm.clip_low:g} --eps-clip-high {algorithm.clip_high:g}"
    loss = "tokens" if per_token else "answers"
    flag = f"{'Add' if per_token else 'Remove'} --calculate-per-token-loss."
    low, clipped = algorithm.clip_low, (args.eps_clip, high) == (algorithm.clip_low, algorithm.clip_high)
    entropy = "entropy" in algorithm.signals and not args.use_rollout_entropy
    alone = args.n_samples_per_prompt == 1  # slime's default
    estimator, filtering = args.advantage_estimator, "--dynamic-sampling-filter-path"
    checks = (
        (not algorithm.plain_loss, f"{name} needs a loss that slime lacks.", "Choose an algorithm with PPO's loss."),
        (args.calculate_per_token_loss != per_token, f"The loss of {name} is the mean over {loss}.", flag),
        (not clipped, f"{name} clips at {low:g} and {algorithm.clip_high:g}.", f"Write {clip}."),
        (estimator != "grpo", f"--advantage-estimator {estimator}: another loss.", "Write --advantage-estimator grpo."),
        (args.normalize_advantages, "--normalize-advantages would change the credit.", "Remove it."),
        (entropy, f"{name} reads the sampling policy's entropy.", "Add --use-rollout-entropy."),
        (alone, "--n-samples-per-prompt 1: answers to the same prompt are compared.", "Use at least 2."),
        (algorithm.kl_coef, "kl_coef: the loss is slime's.", "Remove it; use --use-kl-loss --kl-loss-coef."),
        (algorithm.dynamic_sampling, "dynamic_sampling: slime samples.", f"Set it to false; use {filtering}."),
    )
    if problems := [Problem(what, remedy=remedy) for wrong, what, remedy in checks if wrong]:
        raise ConfigError(problems)
    return algorithm


def _named(args: Any) -> tuple[str, dict[str, Any]]:
    """Return the algorithm's name and the settings given for it."""
    given = algorithm_settings(getattr(args, "dew_algorithm_kwargs", None))
    return split_algorithm(getattr(args, "dew_algorithm", DEFAULT_ALGORITHM), given)


def _answers(algorithm: Algorithm, data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return this rank's answers on the CPU: index, reward, (T,) mask and the signals that the algorithm needs."""
    names = {"entropy": "entropy", "logp": "log_probs"}
    if missing := [names[name] for name in algorithm.signals if data.get(names[name]) is None]:
        what = f"{algorithm.name} reads {', '.join(missing)}, which slime did not compute."
        raise EngineError(Problem(what, remedy="Add --use-rollout-entropy, and remove --use-rollout-logprobs."))
    answers = []
    for i, mask in enumerate(data["loss_masks"]):
        signals = {name: data[names[name]][i].detach().float().cpu() for name in algorithm.signals}
        if any(len(x) != len(mask) for x in signals.values()):
            what = f"An answer of {len(mask)} tokens is split over ranks (context parallelism)."
            raise EngineError(Problem(what, remedy="Train with --context-parallel-size 1."))
        reward = float(data["local_raw_reward"][i])  # `rewards` are already normalised
        index = int(data["sample_indices"][i])
        answers.append({"index": index, "reward": reward, "mask": mask.bool().cpu(), **signals})
    return answers


def _gather(own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers of all data-parallel ranks, sorted by index."""
    distributed, every = torch.distributed, [own]
    if distributed.is_available() and distributed.is_initialized():
        group = _data_parallel_group()
        every = [[] for _ in range(distributed.get_world_size(group))]
        distributed.all_gather_object(every, own, group=group)
    return sorted((answer for rank in every for answer in rank), key=lambda answer: answer["index"])


@cache
def _data_parallel_group() -> Any:
    from megatron.core import mpu

    return mpu.get_data_parallel_group()
