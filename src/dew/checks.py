"""Check the tensors and settings passed to credit functions and losses, with errors that name the wrong one."""

import torch
from torch import Tensor

from dew.errors import ConfigError, Problem, ShapeError

ROUNDING = 1e-3
"""Entropies down to −1e-3 are rounding errors and are clamped; lower ones are an error."""


def check_shape(name: str, x: Tensor, expected: torch.Size, meaning: str) -> None:
    check_tensors(**{name: x})
    if x.shape != expected:
        raise ShapeError(f"{name} has shape {tuple(x.shape)}, expected {tuple(expected)}: one value per {meaning}.")


def check_tensors(**values: object) -> None:
    """Lists and NumPy arrays are refused here: further on, they would fail with an error that names no argument."""
    for name, x in values.items():
        if not isinstance(x, Tensor):
            raise ShapeError(f"{name} is of type {type(x).__name__}. Pass a tensor, e.g. torch.as_tensor({name}).")


def check_bool(name: str, x: Tensor, advice: str) -> None:
    check_tensors(**{name: x})
    if x.dtype != torch.bool:
        raise ShapeError(f"{name} has dtype {x.dtype}, expected torch.bool: {advice}.")


def check_by_token(mask: Tensor, **values: Tensor) -> Tensor:
    """The token mask as bool (integers 0 and 1 mean False and True); `values` must have its shape (*P, G, T)."""
    check_tensors(mask=mask, **values)
    if mask.dtype != torch.bool and not mask.is_floating_point() and bool(((mask == 0) | (mask == 1)).all()):
        mask = mask.bool()
    check_bool("mask", mask, "True on tokens that the policy sampled and that train; write mask.bool()")
    for name, x in values.items():
        if x.shape != mask.shape:
            shapes = f"{name} has shape {tuple(x.shape)} and mask {tuple(mask.shape)}"
            raise ShapeError(f"{shapes}: both need one value per token (*P, G, T).")
    return mask


def check_start(mask: Tensor) -> None:
    """Raise if all answers end in the last column and those of a group start in different ones: left padding."""
    live, started = mask.any(-1, keepdim=True), mask.cumsum(-1) > 0
    if (live & (started != started.any(-2, keepdim=True))).any() and mask[..., -1:].any(-1, keepdim=True).equal(live):
        what = "The answers are padded on the left, but tokens are compared by position, counted from the left."
        raise ShapeError(Problem(what, remedy="Pad on the right, so that the answers of a group start together."))


def check_answers(correct: Tensor, present: Tensor | None) -> Tensor:
    """The `present` mask of a group of answers: all True by default."""
    check_verdicts(correct)
    return check_present(correct, present)


def check_verdicts(correct: Tensor) -> None:
    check_bool("correct", correct, "pass the verdicts, e.g. reward > 0.5")


def check_present(values: Tensor, present: Tensor | None) -> Tensor:
    """`present`, or all True: one flag per answer of `values` (*P, G), which must be finite where it is True."""
    check_tensors(reward=values)
    if values.ndim == 0:
        raise ShapeError("a group needs an axis of answers: got a single number, expected shape (*P, G).")
    if values.ndim == 1 and len(values) > 64:  # probably a whole batch
        what = f"{len(values)} answers without a group axis: that is one group of {len(values)}."
        remedy = "Reshape to (P, G, T), or group rows with Rollouts.from_rows; for one such group, pass x[None]."
        raise ShapeError(Problem(what, "Answers are compared within the group of their prompt.", remedy))
    if present is None:
        if values.ndim > 1 and values.shape[-1] == 1 and len(values) > 1:
            what = f"reward has shape {tuple(values.shape)}: groups of one answer, with no other to compare it with."
            remedy = "For one group, pass x.squeeze(-1). For groups of one, pass present=torch.ones_like(x).bool()."
            raise ShapeError(Problem(what, remedy=remedy))
        present = torch.ones_like(values, dtype=torch.bool)
    check_bool("present", present, "True where the group has an answer")
    check_shape("present", present, values.shape, "answer (*P, G)")
    check_finite("reward", values, present)
    return present


def check_finite(name: str, values: Tensor, counted: Tensor) -> None:
    bad = counted & ~values.isfinite()
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        what = f"{name} is {values[where].item():g} at {where} ({int(bad.sum())} such values in all)."
        raise ShapeError(Problem(what, remedy="Correct the reward, or leave the answer out of its group."))


def check_tokens(correct: Tensor, entropy: Tensor, mask: Tensor) -> Tensor:
    """Check verdicts (*P, G), entropies and mask (*P, G, T); live entropies must be finite and not negative."""
    check_tensors(correct=correct)
    check_answers(correct, torch.ones_like(correct, dtype=torch.bool))
    mask = check_live_entropy(entropy, mask)
    check_shape("correct", correct, mask.shape[:-1], "answer (*P, G)")
    return mask


def check_live_entropy(entropy: Tensor, mask: Tensor) -> Tensor:
    mask = check_by_token(mask, entropy=entropy)
    if not entropy.is_floating_point():
        raise ShapeError(f"entropy has dtype {entropy.dtype}, expected a float: nats per token.")
    bad = mask & ~((entropy >= -ROUNDING) & (entropy < float("inf")))  # NaN fails both comparisons
    if not bad.any():
        return mask
    where = tuple(bad.nonzero()[0].tolist())
    value = entropy[where].item()
    cause = "look for inf or NaN in the logits, or mask the token out"
    if value < 0:
        cause = "an entropy is never negative; log-probabilities may have been passed instead"
    raise ShapeError(f"entropy is {value:g} at live token {where} ({int(bad.sum())} such tokens in all): {cause}.")


def check_logp(logp: Tensor | None, mask: Tensor) -> None:
    if logp is not None and (bad := mask & (logp > 0.1)).any():  # in half precision, rounding can give less
        where = tuple(bad.nonzero()[0].tolist())
        what = f"logp is {logp[where].item():g} at live token {where} ({int(bad.sum())} such tokens in all)"
        raise ShapeError(f"{what}: a log-probability is never positive; take it from logits.log_softmax(-1).")


def unmet(*conditions: tuple[bool, str]) -> list[str]:
    """The texts of the conditions that do not hold."""
    return [text for holds, text in conditions if not holds]


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not known. Choose one of: {', '.join(choices)}.")
