"""DewDPOTrainer: TRL's DPOTrainer with a weight on every token, by the reference policy's entropy.

    L = −log σ(β [Σₜ w⁺ₜ Δₜ(chosen) − Σₜ w⁻ₜ Δₜ(rejected)]),  Δ = log π/π_ref,  w: dew.credit.preference_weights

TRL computes the loss. It sums the log-probabilities that the two models return, and both are multiplied by w before.
"""

from collections import defaultdict
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from trl import DPOConfig, DPOTrainer
from trl.trainer.utils import add_fused_lm_head

from dew.credit import preference_weights
from dew.credit.preferences import weight_problems
from dew.decoding import SamplingCopy
from dew.engines.recorder import due
from dew.engines.trl.config import _setting, float32_without_bf16, number_problems
from dew.engines.trl.loss import exact_head, exact_head_supported
from dew.engines.trl.recorded import RecordedTrainer, own_config
from dew.errors import ConfigError, Problem
from dew.ops import masked_mean
from dew.run.records import AnswerRecord, GroupRecord

NOT_WEIGHTED = {
    "aot": "it sorts the policy and the reference separately",
    "sft": "it has no reference policy",
}
"""TRL's losses that are not a function of the two sums Σ w·Δ."""
IN_EVERY_LINE = ("rewards/", "entropy", "weights/")
"""Prefixes of the metrics that are on every step's own line."""


@dataclass
class DewDPOConfig(DPOConfig):  # type: ignore[misc]
    """All settings of DPOConfig, the weights, and what a run records."""

    alpha: float = _setting(0.25, "Strength of the entropy weights, 0 (plain DPO) to 1.")
    entropy_floor: float = _setting(0.01, "Entropies below this, in nats, count as this.")
    exact_head: bool = _setting(True, "Compute the reference's entropies exactly in float32; false: with TRL.")
    records_every: int = _setting(20, "Write token records at the first step and every this many; 0 disables them.")
    records_groups: int = _setting(4, "Pairs in each token record.")
    records_keep: int = _setting(400, "Maximum number of records; beyond it every second one is deleted. 0 keeps all.")
    overwrite_output_dir: bool = _setting(False, "Delete an earlier run in output_dir when training starts.")

    def __post_init__(self) -> None:
        losses = [self.loss_type] if isinstance(self.loss_type, str) else self.loss_type
        problems = weight_problems(self.alpha, self.entropy_floor) + number_problems(self)
        for loss in (loss for loss in losses if loss in NOT_WEIGHTED):
            why = f"token weights are not defined for it: {NOT_WEIGHTED[loss]}."
            problems.append(Problem(f"loss_type={loss!r}:", why, "Choose another, such as sigmoid or ipo."))
        if self.f_divergence_type != "reverse_kl":
            why = "it is a function of the answer's probability, which weighted tokens no longer give."
            problems.append(Problem(f"f_divergence_type={self.f_divergence_type!r}:", why, "Write reverse_kl."))
        if self.use_weighting:
            why = "WPO's weights are computed from the log-probabilities that dew weights."
            problems.append(Problem("use_weighting=True:", why, "Use one kind of weights."))
        if self.precompute_ref_log_probs:
            why = "TRL stores one number per answer, and the weights need the reference's entropy at every token."
            problems.append(Problem("precompute_ref_log_probs=True:", why, "Leave it out; LoRA needs no second model."))
        if problems:
            raise ConfigError(problems)
        float32_without_bf16(self)
        super().__post_init__()

    @property
    def batches(self) -> str:
        rows, n, m = self.per_device_train_batch_size, self.world_size, self.gradient_accumulation_steps
        factors = f"{rows} per device x {n} process{'es' * (n > 1)} x {m} micro-batch{'es' * (m > 1)}"
        return f"{factors} = {rows * n * m} pairs per optimizer step"

    @property
    def algorithm(self) -> str:
        return Preferences.name

    def build_algorithm(self) -> "Preferences":
        return Preferences(self.alpha, self.entropy_floor, self.beta, list(self.loss_type))

    @property
    def max_completion_length(self) -> int | None:
        """Of the answers in an evaluation, unless the run says otherwise."""
        return self.max_length


@dataclass(frozen=True)
class Preferences:
    """What a run is called, and the settings that tell it apart."""

    alpha: float
    entropy_floor: float
    beta: float
    loss_type: list[str]
    name: ClassVar[str] = "dpo"

    @property
    def label(self) -> str:
        return f"{self.name}(alpha={self.alpha:g}, beta={self.beta:g}, loss_type={'+'.join(self.loss_type)})"

    def warnings(self) -> list[str]:
        return []


class DewDPOTrainer(RecordedTrainer, DPOTrainer):  # type: ignore[misc]
    """DPOTrainer with entropy weights. Takes the arguments of DPOTrainer, and a `DewDPOConfig`."""

    _tag_names: ClassVar = [*DPOTrainer._tag_names, "dew"]

    def __init__(
        self, model: Any, ref_model: Any = None, args: DewDPOConfig | None = None, *others: Any, **settings: Any
    ):
        args = own_config(args, DewDPOConfig, model)
        super().__init__(model, ref_model, args, *others, **settings)
        if self._is_vlm:
            raise ConfigError(Problem("vision-language models are not supported.", remedy="Use TRL's DPOTrainer."))
        self.algorithm = args.build_algorithm()
        self._exact_head = args.exact_head and exact_head_supported(self._reference)
        if not self._exact_head and self.ref_model is not None:  # TRL asks it for log-probabilities only
            add_fused_lm_head(self.accelerator.unwrap_model(self.ref_model), outputs=("log_probs", "entropy"))
        self._numbers: dict[str, list[float]] = defaultdict(list)

    @property
    def _reference(self) -> Any:
        return self.model if self.ref_model is None else self.ref_model

    def sampling_model(self) -> Any:
        """The current weights, in the precision that they are sampled in."""
        policy = self.accelerator.unwrap_model(self.model)
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        return policy if self.sharded else SamplingCopy(policy, dtype).model

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """TRL's loss on weighted log-probabilities. The reference policy comes first: its entropies are the weights."""
        ids, mask = inputs["input_ids"], inputs["completion_mask"][:, 1:].bool()
        chosen = torch.arange(len(mask), device=mask.device) < len(mask) // 2
        seen: dict[str, Tensor] = {}

        def reference(**kwargs: Any) -> Any:
            output = self._reference(**kwargs)
            seen["ref_logp"], H = (x[:, -mask.shape[1] :] for x in (output.log_probs, output.entropy))
            args = self.args
            seen["weights"] = preference_weights(chosen, H, mask, alpha=args.alpha, floor=args.entropy_floor)
            output.log_probs, seen["entropy"] = seen["ref_logp"] * seen["weights"], H
            return output

        def policy(**kwargs: Any) -> Any:
            output = model(**kwargs)
            if kwargs.get("fused_lm_head"):  # else TRL wants the logits, for `compute_metrics`
                logp = output.log_probs[:, -mask.shape[1] :]
                output.log_probs, seen["logp"] = logp * seen["weights"], logp.detach()
            return output

        with exact_head() if self._exact_head else nullcontext():
            sums = self.compute_ref_log_probs(reference, inputs)
        inputs = {**inputs, **dict(zip(("ref_chosen_logps", "ref_rejected_logps"), sums, strict=True))}
        self.precompute_ref_logps = True  # as far as TRL's loss is concerned
        try:
            loss = super()._compute_loss(policy, inputs, return_outputs)
        finally:
            self.precompute_ref_logps = False
        self._report(loss[0] if return_outputs else loss, chosen, ids, mask, seen)
        return loss

    def _report(self, loss: Tensor, chosen: Tensor, ids: Tensor, mask: Tensor, seen: dict[str, Tensor]) -> None:
        """Metrics of a micro-batch, and its token record if one is due."""
        found = {"loss": loss.detach(), "weights/max": seen["weights"].amax()}
        for name, side in (("chosen", chosen), ("rejected", ~chosen)):
            found[f"entropy/{name}"] = masked_mean(seen["entropy"][side], mask[side], (-2, -1)).squeeze()
            variance = masked_mean((seen["weights"][side] - 1).square(), mask[side], (-2, -1)).squeeze()
            found[f"weights/std_{name}"] = variance.sqrt()
        means = self.accelerator.gather(torch.stack(list(found.values()))[None]).mean(0).tolist()
        numbers, metrics = dict(zip(found, means, strict=True)), self._metrics[self._mode]
        loss_value = numbers.pop("loss")
        for name, value in numbers.items():
            metrics[name].append(value)
        if not self.model.training:
            return
        first = not self._numbers
        self._numbers["loss"].append(loss_value)
        for name in (name for name in metrics if name.startswith(IN_EVERY_LINE)):
            self._numbers[name].append(metrics[name][-1])
        step, args = self.state.global_step + 1, self.args
        if first and due(step, args.records_every, 1) and self.accelerator.is_main_process:
            count = min(len(mask) // 2, args.records_groups)
            records = [self._record(step, pair, ids, mask, seen) for pair in range(count)]
            self._recorder.folder.write_records(step, records, args.records_keep)

    def _record(self, step: int, pair: int, ids: Tensor, mask: Tensor, seen: dict[str, Tensor]) -> GroupRecord:
        """A pair as a group of two answers. The advantage is ±w; it would be ±1 without weights."""
        decode, answers = self._tokenizer.decode, []
        for row, sign in ((pair, 1.0), (pair + len(mask) // 2, -1.0)):
            live = mask[row]
            logp, ref_logp, entropy, w = (
                seen[x][row][live].float() for x in ("logp", "ref_logp", "entropy", "weights")
            )
            answer = AnswerRecord(
                tokens=[decode([i]) for i in ids[row, 1:][live].tolist()],
                correct=sign > 0,
                reward=float(sign > 0),
                entropy=entropy.tolist(),
                logp=ref_logp.tolist(),
                advantage=(sign * w).tolist(),
                grpo=[sign] * len(w),
                ratio=(logp - ref_logp).exp().tolist(),
            )
            answers.append(answer)
        prompt = decode(ids[pair, : int(mask[pair].int().argmax()) + 1].tolist())
        return GroupRecord(step, pair, prompt, answers, None, self.algorithm.name, asdict(self.algorithm))

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self._recorder.put({name: sum(values) / len(values) for name, values in self._numbers.items()})
            self._numbers.clear()
        return loss

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "tokens": self._total_train_tokens}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self._total_train_tokens = state["tokens"]
