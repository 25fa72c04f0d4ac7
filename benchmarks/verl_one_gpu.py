"""Changes to verl 0.9.1 for several runs on one GPU without flash-attn: VERL_USE_EXTERNAL_MODULES=verl_one_gpu.

- Log-probabilities are computed in chunks; verl's own fallback is a loop over tokens.
- The replay buffer is asked for finished answers every 0.05 instead of 2 s.
- The socket that carries weights to vLLM lies in RAY_TMPDIR, if set. verl names it by Ray's job id, which is the same
  for runs with their own Ray, so that they would load each other's weights.
- vLLM may find less free memory after going to sleep than before: another run may have taken it.
"""

import os
from typing import Any

import torch
import wrapt

ROWS = 1024


def chunked_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows = zip(logits.flatten(0, -2).split(ROWS), labels.flatten().split(ROWS), strict=True)
    return torch.cat([-torch.nn.functional.cross_entropy(x.float(), y, reduction="none") for x, y in rows]).view(
        labels.shape
    )


def own_socket(init: Any) -> Any:
    def with_own_socket(self: Any, zmq_handle: str, *args: Any, **kwargs: Any) -> None:
        init(self, zmq_handle.replace("ipc:///tmp/", f"ipc://{os.environ.get('RAY_TMPDIR', '/tmp')}/"), *args, **kwargs)

    return with_own_socket


@wrapt.when_imported("verl.utils.torch_functional")
def _(module: Any) -> None:
    module.logprobs_from_logits_v2 = chunked_logprobs


@wrapt.when_imported("verl.trainer.ppo.v1.replay_buffer")
def _(module: Any) -> None:
    wait = module.ReplayBuffer._wait_for_next_poll

    def wait_briefly(self: Any, *args: Any) -> float:
        self.poll_interval = 0.05
        return wait(self, *args)

    module.ReplayBuffer._wait_for_next_poll = wait_briefly


@wrapt.when_imported("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer")
def _(module: Any) -> None:
    for side in (module.BucketedWeightSender, module.BucketedWeightReceiver):
        side.__init__ = own_socket(side.__init__)


@wrapt.when_imported("vllm.v1.worker.gpu_worker")
def _(module: Any) -> None:
    sleep = module.Worker.sleep

    def sleep_beside_others(self: Any, level: int = 1) -> None:
        try:
            sleep(self, level)
        except AssertionError as error:  # raised after everything is done
            if "increased after sleeping" not in str(error):
                raise

    module.Worker.sleep = sleep_beside_others
