"""Stop when asked, and leave a checkpoint: Ctrl-C and SIGTERM end a run after the step at hand."""

import signal
from typing import Any

from transformers import TrainerCallback

from dew.records import RunFolder

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopAtSignal(TrainerCallback):  # type: ignore[misc]
    """The first signal asks; a second Ctrl-C interrupts at once, as it always does."""

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            RunFolder(args.output_dir).write_run({"steps": state.max_steps})
        try:
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        except ValueError:  # not the main thread: whoever started it there handles signals
            self._before = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._asked:
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: Any) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = True
