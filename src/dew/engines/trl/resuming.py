"""A GRPOTrainer that goes on, after it was killed, as if it had not been."""

import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOTrainer

from dew.engines.trl.checkpoints import epochs_done, last_good, load_state, no_checkpoint, require_good, save_state
from dew.engines.trl.manifest import seal, unseal
from dew.engines.trl.sampling import PromptStream
from dew.records import RunFolder


class ResumingTrainer(GRPOTrainer):  # type: ignore[misc]
    """Keeps in a checkpoint what TRL forgets: the generation at hand, the place in it, the order of the prompts."""

    _stream: PromptStream | None = None
    """Where prompts come from, if not from TRL's data loader."""
    _found: str | None = None
    """The checkpoint that was looked at and is whole."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self.last_good_checkpoint()
            if resume_from_checkpoint is None:
                raise no_checkpoint(self.args.output_dir)
        elif resume_from_checkpoint and resume_from_checkpoint != self._found and self.accelerator.is_main_process:
            require_good(str(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def last_good_checkpoint(self) -> str | None:
        """The newest one that is whole. The first process looks; all go on from the one that it found."""
        found = [last_good(self.args.output_dir) if self.accelerator.is_main_process else None]
        self._found = broadcast_object_list(found)[0]
        return self._found

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._sampler = super()._get_train_sampler(*args, **kwargs)
        return self._sampler

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Everything, then the seal, and only then do older checkpoints go."""
        run = self._get_output_dir(trial=None)
        folder = os.path.join(run, f"checkpoint-{self.state.global_step}")
        if self.args.should_save:
            unseal(Path(folder))
        self.accelerator.wait_for_everyone()
        if not self.args.save_only_model:
            save_state(folder, self.accelerator.process_index, self._own_state())
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            RunFolder(run).sync()
            seal(Path(folder))
            rotate_checkpoints(run, limit, self.state.best_model_checkpoint, use_mtime=True)

    def _own_state(self) -> dict[str, Any]:
        every = self.args.steps_per_generation * self.num_iterations
        return {
            "step": self._step,
            "generation": self._buffered_inputs if self._step % every else None,
            "position": self._stream.position if self._stream is not None else None,
            "metrics": dict(self._metrics["train"]),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self._buffered_inputs = _to(state["generation"], self.accelerator.device)
        self._metrics["train"].update(state["metrics"])
        if self._stream is not None and state["position"] is not None:
            self._stream.position = state["position"]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        state = load_state(checkpoint, self.accelerator.process_index) if checkpoint else None
        if checkpoint is None or state is None:
            return
        self._restore(state)
        for _ in range(epochs_done(checkpoint) if self.shuffle_dataset else 0):
            torch.randperm(self._sampler.num_samples, generator=self._sampler.generator)


def _to(generation: list[dict[str, Any]] | None, device: Any) -> list[dict[str, Any]] | None:
    if generation is None:
        return None
    return [{k: x.to(device) if isinstance(x, Tensor) else x for k, x in part.items()} for part in generation]
