"""The arithmetic of batches: completions per generation, prompts in it, optimizer steps from it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Batches:
    """The five numbers that a user sets, and what follows from them."""

    per_device: int
    """per_device_train_batch_size: completions of one micro-batch on one process."""
    processes: int
    accumulation: int
    """gradient_accumulation_steps: micro-batches in one optimizer step."""
    micro_batches: int
    """steps_per_generation: micro-batches that are sampled at once."""
    answers: int
    """num_generations: G, the size of a group."""

    @property
    def completions(self) -> int:
        """Sampled at once, on all processes together."""
        return self.per_device * self.processes * self.micro_batches

    @property
    def fits(self) -> bool:
        return self.completions % self.answers == 0

    def __str__(self) -> str:
        sampled = (
            f"{self.per_device} per device x {self.processes} process{'es' * (self.processes > 1)} x "
            f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)} = {self.completions} completions "
            f"at once"
        )
        if not self.fits:
            return f"{sampled}, which is not a whole number of groups of {self.answers}"
        steps = self.micro_batches / self.accumulation
        return (
            f"{sampled} = {self.completions // self.answers} prompts x {self.answers} answers; "
            f"{self.per_device * self.processes * self.accumulation} completions per optimizer step, "
            f"{steps:g} optimizer step{'s' * (steps != 1)} per generation"
        )

    def nearest(self) -> list[str]:
        """Settings that fit, each by changing a single number as little as possible."""
        together = self.micro_batches == self.accumulation
        found = []
        for field, setting in (
            ("per_device", "per_device_train_batch_size"),
            ("micro_batches", "gradient_accumulation_steps" if together else "steps_per_generation"),
            ("answers", "num_generations"),
        ):
            value = getattr(self, field)
            low = 2 if field == "answers" else 1
            for distance in range(1, max(self.answers, self.completions) + 1):
                tries = [v for v in (value - distance, value + distance) if v >= low]
                fitting = [v for v in tries if self._with(field, v, together).fits]
                if fitting:
                    found.append(f"{setting}={' or '.join(map(str, fitting))}")
                    break
        return found

    def _with(self, field: str, value: int, together: bool) -> "Batches":
        both = {"accumulation": value} if together and field == "micro_batches" else {}
        return replace(self, **{field: value}, **both)
