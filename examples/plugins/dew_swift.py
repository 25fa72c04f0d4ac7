"""dew's credit for ms-swift: `--external_plugins examples/plugins/dew_swift.py` (docs/swift.md).

The environment variable DEW_ALGORITHM names the algorithm. Its settings follow in parentheses, or are in
DEW_ALGORITHM_KWARGS as JSON.
"""

import logging
import os
from typing import Any

import torch
from swift.rlhf_trainers import GRPOTrainer
from swift.trainers import TrainerFactory
from torch import Tensor
from torch.nn.functional import pad

from dew.algorithms import DEFAULT_ALGORITHM, Algorithm, get_algorithm, split_algorithm
from dew.engines.credit import Rows, check_outcomes, differ, give_credit
from dew.errors import ConfigError, Problem
from dew.run.settings import algorithm_settings

NAMES = {"algorithm": "DEW_ALGORITHM", "outcome_reward": "it as the first of --reward_funcs"}
"""dew's names of settings -> ms-swift's."""


class DewGRPOTrainer(GRPOTrainer):
    """ms-swift's GRPOTrainer with dew's token-level credit and ms-swift's loss."""

    outcomes_checked = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.algorithm = algorithm_of(self)

    def _postprocess_batch(self, samples: list[Any], batch_encoded_inputs: list[dict[str, Any]]) -> None:
        super()._postprocess_batch(samples, batch_encoded_inputs)  # logs rewards, and ms-swift's own advantages
        if self.model.training:
            set_advantages(self, batch_encoded_inputs)


def set_advantages(trainer: Any, encoded: list[dict[str, Any]]) -> None:
    """Replace the (B, T) advantages of every batch by the algorithm's, computed on whole groups of all processes."""
    algorithm, accelerator = trainer.algorithm, trainer.accelerator
    batches = [part["grpo_batch"] for part in encoded]
    masks, signals = [_live(trainer, batch) for batch in batches], dict[str, list[Tensor]]()
    for part, batch in zip(encoded, batches, strict=True):
        if algorithm.signals:
            with torch.no_grad():
                logp, entropy = trainer._get_per_token_logps_and_entropies(
                    trainer.model, part["model_inputs"], batch, compute_entropy=True
                )
            found = {"logp": logp, "entropy": entropy}
            for name in algorithm.signals:
                signals.setdefault(name, []).append(found[name].float())
    width = max(mask.shape[1] for mask in masks)

    def gathered(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Gather the rows of all processes, each shifted to start at its first live token."""
        moved = [pad(_shift(x, mask), (0, width - x.shape[1])) for x, mask in zip(parts, masks, strict=True)]
        rows = accelerator.pad_across_processes(torch.cat(moved).float(), dim=1)
        return accelerator.gather(rows.contiguous()).to(dtype)

    parts = trainer._rewards_per_func
    outcome = parts[:, 0]
    extra = (parts * trainer.reward_weights).nansum(1) - outcome.nan_to_num()
    group = torch.arange(len(parts), device=parts.device) // trainer.num_generations
    columns = {name: gathered(x, torch.float32) for name, x in signals.items()}
    columns["mask"] = gathered([mask.float() for mask in masks], torch.bool)
    advantages = give_credit(algorithm, Rows(group=group, outcome=outcome, extra=extra, **columns)).advantages
    if not trainer.outcomes_checked and differ(outcome):
        trainer.outcomes_checked = True
        problem = None if "threshold" in _named()[1] else check_outcomes(algorithm, outcome, advantages, NAMES)
        if problem is not None and accelerator.is_main_process:
            logging.getLogger("dew").warning("%s", problem)
    local = len(advantages) // accelerator.num_processes
    advantages = advantages[accelerator.process_index * local :][:local]
    for batch, mask, found in zip(batches, masks, advantages.split([len(mask) for mask in masks]), strict=True):
        batch.advantages = _shift_back(found[:, : mask.shape[1]], mask)


def _live(trainer: Any, batch: Any) -> Tensor:
    mask: Tensor = batch.completion_mask.bool()
    return mask & ~batch.truncated_mask.bool()[:, None] if trainer.overlong_filter else mask


def _shift(x: Tensor, mask: Tensor) -> Tensor:
    """Shift each row to start at its first live token, because answers start at different columns."""
    places = torch.arange(mask.shape[1], device=mask.device) + mask.int().argmax(1, keepdim=True)
    return torch.where(places < x.shape[1], x.gather(1, places.clamp_max(x.shape[1] - 1)), 0)


def _shift_back(x: Tensor, mask: Tensor) -> Tensor:
    places = torch.arange(mask.shape[1], device=mask.device) - mask.int().argmax(1, keepdim=True)
    return torch.where((places >= 0) & mask, x.gather(1, places.clamp_min(0)), 0)


def algorithm_of(trainer: Any) -> Algorithm:
    """Return the algorithm that the environment names, or raise an error if its loss does not match ms-swift's."""
    args = trainer.args
    named, given = _named()
    settings = {"max_tokens": args.max_completion_length, "dynamic_sampling": False, **given}  # ms-swift samples
    algorithm = get_algorithm(named, **settings)
    name, loss = algorithm.name, "dapo" if algorithm.reduce == "tokens" else "grpo"
    low, high = algorithm.clip_low, algorithm.clip_high
    clipped = (trainer.epsilon_low, trainer.epsilon_high) == (low, high)
    weighted = float(trainer.reward_weights[0]) != 1
    parallel = trainer.template.sequence_parallel_size > 1 or trainer.dynamic_num_samples
    checks = (
        (not algorithm.plain_loss, f"{name} needs a loss that ms-swift lacks.", "Choose another (docs/swift.md)."),
        (trainer.loss_type != loss, f"{name} with loss_type {trainer.loss_type}.", f"Write --loss_type {loss}."),
        (not clipped, f"{name} clips at {low:g} and {high:g}.", f"Write --epsilon {low:g} --epsilon_high {high:g}."),
        (trainer.importance_sampling_level != "token", "importance_sampling_level is not token.", "Remove it."),
        (algorithm.kl_coef, "kl_coef: the loss is ms-swift's.", "Remove it; use --beta."),
        (
            trainer.kl_in_reward and trainer.beta,
            "kl_in_reward would lose the KL term: dew's credit has none.",
            "Remove it.",
        ),
        (algorithm.dynamic_sampling, "dynamic_sampling is ms-swift's.", "Set it to false; use --dynamic_sample true."),
        (trainer.use_liger_loss, "use_liger_kernel averages the advantages of an answer.", "Remove it."),
        (parallel, "Sequence parallelism and multi-turn samples mix the rows of a group.", "Turn them off."),
        (weighted, "The first reward function decides which answers are correct.", "Give it weight 1."),
    )
    if problems := [Problem(what, remedy=remedy) for wrong, what, remedy in checks if wrong]:
        raise ConfigError(problems)
    return algorithm


def _named() -> tuple[str, dict[str, Any]]:
    """Return the algorithm's name and the settings given for it."""
    given = algorithm_settings(os.environ.get("DEW_ALGORITHM_KWARGS"))
    return split_algorithm(os.environ.get("DEW_ALGORITHM", DEFAULT_ALGORITHM), given)


TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.DewGRPOTrainer"
