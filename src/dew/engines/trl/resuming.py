"""A GRPOTrainer that goes on, after it was killed, as if it had not been."""

import os
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from dew.engines.trl.checkpoints import epochs_done, last_complete, load_state, save_state
from dew.engines.trl.sampling import PromptStream


class ResumingTrainer(GRPOTrainer):  # type: ignore[misc]
    """Keeps in a checkpoint what TRL forgets: the generation at hand, the place in it, the order of the prompts."""

    _stream: PromptStream | None = None
    """Where prompts come from, if not from TRL's data loader."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete(self.args.output_dir)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._sampler = super()._get_train_sampler(*args, **kwargs)
        return self._sampler

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if not self.args.save_only_model:
            folder = os.path.join(self._get_output_dir(trial=None), f"checkpoint-{self.state.global_step}")
            every = self.args.steps_per_generation * self.num_iterations
            state = {
                "step": self._step,
                "generation": self._buffered_inputs if self._step % every else None,
                "position": self._stream.position if self._stream is not None else None,
                "metrics": dict(self._metrics["train"]),
            }
            save_state(folder, self.accelerator.process_index, state)
        super()._save_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        state = load_state(checkpoint, self.accelerator.process_index) if checkpoint else None
        if checkpoint is None or state is None:
            return
        self._step = state["step"]
        self._buffered_inputs = _to(state["generation"], self.accelerator.device)
        self._metrics["train"].update(state["metrics"])
        if self._stream is not None and state["position"] is not None:
            self._stream.position = state["position"]
        for _ in range(epochs_done(checkpoint) if self.shuffle_dataset else 0):
            torch.randperm(self._sampler.num_samples, generator=self._sampler.generator)


def _to(generation: list[dict[str, Any]] | None, device: Any) -> list[dict[str, Any]] | None:
    if generation is None:
        return None
    return [{k: x.to(device) if isinstance(x, Tensor) else x for k, x in part.items()} for part in generation]
