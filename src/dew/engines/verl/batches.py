"""The arithmetic of batches on verl: prompts of a step, prompts of an optimizer step, GPUs that share them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Batches:
    """What verl is told, and whether it comes out even."""

    prompts: int
    """data.train_batch_size: prompts of one generation, which is one step of verl's."""
    mini: int
    """actor_rollout_ref.actor.ppo_mini_batch_size: prompts of one optimizer step."""
    answers: int
    """actor_rollout_ref.rollout.n: G, the size of a group."""
    passes: int = 1
    """actor_rollout_ref.actor.ppo_epochs: how often a generation is trained on."""
    nodes: int = 1
    gpus_per_node: int = 1
    tensor_parallel: int = 1
    """GPUs that one sampler spans."""
    sequence_parallel: int = 1
    """GPUs that share one sequence while training."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def completions(self) -> int:
        return self.prompts * self.answers

    @property
    def optimizer_steps(self) -> int:
        """Of one step of verl's."""
        return max(1, self.prompts // self.mini) * self.passes

    def problems(self) -> list[str]:
        """What verl would stop at, or silently fill up."""
        found = []
        if self.gpus % self.tensor_parallel:
            found.append(
                f"{self.gpus} GPUs cannot be shared out to samplers of {self.tensor_parallel}: set "
                "actor_rollout_ref.rollout.tensor_model_parallel_size to a divisor."
            )
        if self.gpus % self.sequence_parallel:
            found.append(
                f"{self.gpus} GPUs cannot be shared out to sequences of {self.sequence_parallel}: set "
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size to a divisor."
            )
            return found
        if self.prompts % self.mini:
            found.append(
                f"{self.prompts} prompts a step are not a whole number of optimizer steps of {self.mini}: verl would "
                "fill the last one up with empty rows. Nearest: "
                f"data.train_batch_size={_near(self.prompts, self.mini)}."
            )
        shares = self.gpus // self.sequence_parallel
        if self.mini * self.answers % shares:
            fitting = next(m for m in range(self.mini, self.mini + shares + 1) if m * self.answers % shares == 0)
            key = (
                "data.train_batch_size" if self.mini == self.prompts else "actor_rollout_ref.actor.ppo_mini_batch_size"
            )
            found.append(
                f"{self.mini} prompts x {self.answers} answers = {self.mini * self.answers} rows of an optimizer step "
                f"cannot be shared out evenly to {shares} GPUs. Nearest above: {key}={fitting}."
            )
        return found

    def __str__(self) -> str:
        steps = self.optimizer_steps
        return (
            f"{self.prompts} prompts x {self.answers} answers = {self.completions} completions a step on {self.gpus} "
            f"GPU{'s' * (self.gpus > 1)} ({self.nodes} x {self.gpus_per_node}); {self.mini * self.answers} completions "
            f"per optimizer step, {steps} optimizer step{'s' * (steps > 1)} per step"
        )


def _near(value: int, of: int) -> str:
    low = value // of * of
    return f"{low} or {low + of}" if low else str(of)
