"""A GRPOTrainer that samples with captured steps on a GPU, where vLLM is not asked for."""

import logging
from typing import Any

import torch
from trl import GRPOTrainer

from dew.decoding import Decoder, Draw, SamplingCopy, refusal

logger = logging.getLogger("dew")


class SamplingTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's other ways to sample stay: vLLM, continuous batching, tools, images, and generate for the rest."""

    _decoder: Decoder | None = None
    _copy: SamplingCopy | None = None
    _captures: bool | None = None

    def _generate_single_turn(self, prompt_ids: list[list[int]], *others: Any, **kwargs: Any) -> Any:
        if self._captures is None:
            self._captures = self._ready()
        if not self._captures or (others and others[0] is not None):  # images
            return super()._generate_single_turn(prompt_ids, *others, **kwargs)
        self.sampling_model()
        assert self._decoder is not None
        try:
            return self._decoder.answers(prompt_ids, self.max_completion_length), None
        except RuntimeError as error:
            logger.warning("captured sampling failed (%s); generate samples from here on.", str(error).split("\n")[0])
            self._captures, self._decoder, self._copy = False, None, None
            return super()._generate_single_turn(prompt_ids, *others, **kwargs)

    def sampling_model(self) -> Any:
        """The weights as they are now, in the precision that they sample in."""
        if self._captures is None:
            self._captures = self._ready()
        return self._copy.refresh() if self._copy is not None else self.accelerator.unwrap_model(self.model)

    def _ready(self) -> bool:
        reason = _otherwise(self) or refusal(self.accelerator.unwrap_model(self.model))
        if reason is not None:
            logger.info("generate samples: %s.", reason)
            return False
        args = self.args
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        self._copy = SamplingCopy(self.accelerator.unwrap_model(self.model), dtype)
        draw = Draw(
            temperature=self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
        )
        self._decoder = Decoder(self._copy.model, draw, ends=self.eos_token_ids, pad=self._tokenizer.pad_token_id)
        logger.info("captured one-token steps sample, in %s.", next(self._copy.model.parameters()).dtype)
        return True


def _otherwise(trainer: Any) -> str | None:
    """What asks for another way to sample."""
    args = trainer.args
    reasons = (
        (not args.captured_sampling, "captured_sampling is off"),
        (trainer.use_vllm, "vLLM is asked for"),
        (trainer.accelerator.device.type != "cuda", "there is no GPU"),
        (trainer.use_transformers_continuous_batching, "continuous batching is asked for"),
        (bool(args.generation_kwargs) or args.cache_implementation is not None, "generation settings of your own"),
        (trainer.repetition_penalty not in (None, 1.0), "repetition_penalty is set"),
        (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled, "the weights are sharded"),
    )
    return next((reason for found, reason in reasons if found), None)
